"""The input batch of the installed vLLM, filled through its own API, and the runner's own call.

Constructors differ from release to release, so arguments are passed by the names that the installed
one has. Imports vLLM; must not know how drafts are found.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

MAX_MODEL_LEN = 256
VOCABULARY = 1000


def call_by_name(function: Callable[..., Any], known: dict[str, Any]) -> Any:
    """Call with those of the known arguments that the function has; TypeError if one is missing."""
    parameters = inspect.signature(function).parameters
    return function(**{name: value for name, value in known.items() if name in parameters})


class RealBatch:
    """An InputBatch, and what the runner does to it between two drafts."""

    def __init__(self, max_num_reqs: int = 8) -> None:
        self.batch = call_by_name(
            InputBatch,
            {
                "max_num_reqs": max_num_reqs,
                "max_model_len": MAX_MODEL_LEN,
                "max_num_batched_tokens": 1024,
                "device": torch.device("cpu"),
                "pin_memory": False,
                "vocab_size": VOCABULARY,
                "block_sizes": [16],
                "kernel_block_sizes": [16],
                "max_num_blocks_per_req": [MAX_MODEL_LEN // 16],
                "is_spec_decode": True,
            },
        )
        self.requests: dict[str, CachedRequestState] = {}

    def add(self, request_id: str, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        """Add a new request, or a resumed one with the output that it had."""
        request = call_by_name(
            CachedRequestState,
            {
                "req_id": request_id,
                "prompt_token_ids": list(prompt),
                "mm_features": [],
                "sampling_params": SamplingParams(temperature=0.0),
                "pooling_params": None,
                "generator": None,
                "block_ids": ([0],),
                "num_computed_tokens": 0,
                "output_token_ids": list(output),
            },
        )
        self.requests[request_id] = request
        self.batch.add_request(request)
        self._tidy()

    def remove(self, *request_ids: str) -> None:
        for request_id in request_ids:
            assert self.batch.remove_request(request_id) is not None
        self._tidy()

    def swap(self, first: str, second: str) -> None:
        where = self.batch.req_id_to_index
        self.batch.swap_states(where[first], where[second])
        self.batch.refresh_metadata()

    def _tidy(self) -> None:
        self.batch.condense()
        self.batch.refresh_metadata()

    @property
    def order(self) -> list[str]:
        return list(self.batch.req_ids)

    def sample(self, sampled: dict[str, Sequence[int]]) -> list[list[int]]:
        """Take over newly sampled ids, as the runner does before it asks for drafts."""
        for request_id, tokens in sampled.items():
            row = self.batch.req_id_to_index[request_id]
            start = int(self.batch.num_tokens_no_spec[row])
            self.batch.token_ids_cpu[row, start : start + len(tokens)] = tokens
            self.batch.num_tokens_no_spec[row] = start + len(tokens)
            self.requests[request_id].output_token_ids.extend(tokens)
        return [list(sampled.get(request_id, ())) for request_id in self.batch.req_ids]


class _Config:
    """A speculative config of one method: every `use_...()` question of the runner is a no."""

    def __init__(self, method: str) -> None:
        self.method = method

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("use_", "uses_")):
            return lambda: False
        raise AttributeError(name)


def ask_as_the_runner(
    drafter: object, real: RealBatch, sampled: list[list[int]], k: int, method: str = "suffix"
) -> Any:
    """Run the installed runner's own `propose_draft_token_ids` with this drafter and batch."""
    runner = SimpleNamespace(
        speculative_config=_Config(method), drafter=drafter, input_batch=real.batch
    )
    scheduled = SimpleNamespace(
        total_num_scheduled_tokens=sum(map(len, sampled)), num_spec_tokens_to_schedule=k
    )
    function = gpu_model_runner.GPUModelRunner.propose_draft_token_ids
    given = {"scheduler_output": scheduled, "sampled_token_ids": sampled}
    rest = [name for name in inspect.signature(function).parameters if name != "self"]
    return function(runner, **{name: given.get(name) for name in rest})
