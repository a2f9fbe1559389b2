"""A real `InputBatch` of any release, filled as that release's runner fills it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

MAX_MODEL_LEN = 256


def _call(target: Any, values: dict[str, Any]) -> Any:
    """Call with the values that this release's signature has, and its defaults for the rest."""
    accepted = inspect.signature(target).parameters
    return target(**{name: value for name, value in values.items() if name in accepted})


class Batch:
    """An `InputBatch` and the states of its requests, through its own methods only.

    The one thing that the runner does to the batch by hand is done by hand here too: writing the
    sampled ids into `token_ids_cpu` behind the request's tokens.
    """

    def __init__(self, *, rows: int = 8, num_speculative_tokens: int = 24) -> None:
        self.states: dict[str, CachedRequestState] = {}
        self.input_batch: InputBatch = _call(
            InputBatch,
            {
                "max_num_reqs": rows,
                "max_model_len": MAX_MODEL_LEN,
                "max_num_batched_tokens": 512,
                "device": torch.device("cpu"),
                "pin_memory": False,
                "vocab_size": 1000,
                "block_sizes": [16],
                "kernel_block_sizes": [16],
                "max_num_blocks_per_req": [MAX_MODEL_LEN // 16],
                "is_spec_decode": True,
                "num_spec_tokens": num_speculative_tokens,
                "num_speculative_tokens": num_speculative_tokens,
            },
        )

    def add(
        self, req_id: str, prompt: list[int], output: list[int] | None = None, lora: int = 0
    ) -> None:
        """A new request, or (with its output so far) one that was preempted and is resumed.

        lora: the id of the adapter that it is for; 0: none.
        """
        state = _call(
            CachedRequestState,
            {
                "req_id": req_id,
                "prompt_token_ids": list(prompt),
                "mm_features": [],
                "sampling_params": SamplingParams(temperature=0.0),
                "generator": None,
                "pooling_params": None,
                "block_ids": ([1, 2, 3],),
                "num_computed_tokens": 0,
                "output_token_ids": list(output or []),
                "lora_request": LoRARequest(f"adapter {lora}", lora, "unused") if lora else None,
            },
        )
        self.states[req_id] = state
        self.input_batch.add_request(state)
        self.input_batch.refresh_metadata()

    def remove(self, *req_ids: str) -> None:
        """Requests leave the batch, and the rows are condensed."""
        for req_id in req_ids:
            assert self.input_batch.remove_request(req_id) is not None
            del self.states[req_id]
        self.input_batch.condense()
        self.input_batch.refresh_metadata()

    def swap(self, first: str, second: str) -> None:
        """Two requests change rows."""
        index = self.input_batch.req_id_to_index
        self.input_batch.swap_states(index[first], index[second])
        self.input_batch.refresh_metadata()

    def sample(self, sampled: dict[str, list[int]]) -> list[list[int]]:
        """Write what each request sampled, as the runner does after a step; returns it by row."""
        batch = self.input_batch
        by_row: list[list[int]] = []
        for row, req_id in enumerate(batch.req_ids):
            ids = sampled.get(req_id, [])
            start = int(batch.num_tokens_no_spec[row])
            batch.token_ids_cpu[row, start : start + len(ids)] = ids
            batch.num_tokens_no_spec[row] = start + len(ids)
            if hasattr(
                batch, "num_tokens"
            ):  # earlier releases count the tokens with and without drafts
                batch.num_tokens[row] = start + len(ids)
            self.states[req_id].output_token_ids.extend(ids)
            by_row.append(list(ids))
        return by_row

    @property
    def order(self) -> list[str]:
        """The requests, row by row."""
        return list(self.input_batch.req_ids)
