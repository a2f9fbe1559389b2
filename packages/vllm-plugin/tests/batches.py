"""A batch as the model runner keeps it, made by hand, and a text that is worth drafting from."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

MAX_MODEL_LEN = 256

# Each sentence of it comes twice, so whoever has seen it can draft it.
COPYABLE = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


class Batch:
    """The attributes of vLLM's InputBatch that the proposers read, and what the runner does to
    them.

    Rows are filled the way the runner fills them: a request takes the first free row, the last row
    moves into the hole that a removed one leaves, and what a row held before stays beyond its
    length.
    """

    def __init__(self, max_num_reqs: int = 8, max_model_len: int = MAX_MODEL_LEN) -> None:
        self.token_ids_cpu = np.zeros((max_num_reqs, max_model_len), dtype=np.int32)
        self.num_tokens_no_spec = np.zeros(max_num_reqs, dtype=np.int32)
        self.num_prompt_tokens = np.zeros(max_num_reqs, dtype=np.int32)
        self.request_lora_mapping = np.zeros(max_num_reqs, dtype=np.int64)
        self.req_ids: list[str] = []
        self.req_id_to_index: dict[str, int] = {}
        self.req_prompt_embeds: dict[int, Any] = {}

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        lora: int = 0,
    ) -> None:
        row = len(self.req_ids)
        tokens = [*prompt, *output]
        self.req_ids.append(request_id)
        self.req_id_to_index[request_id] = row
        self.token_ids_cpu[row, : len(tokens)] = tokens
        self.num_tokens_no_spec[row] = len(tokens)
        self.num_prompt_tokens[row] = len(prompt)
        self.request_lora_mapping[row] = lora

    def remove(self, request_id: str) -> None:
        hole, last = self.req_id_to_index.pop(request_id), len(self.req_ids) - 1
        if hole != last:
            self._copy(last, hole)
            self.req_ids[hole] = self.req_ids[last]
            self.req_id_to_index[self.req_ids[hole]] = hole
        self.req_ids.pop()

    def swap(self, first: str, second: str) -> None:
        a, b = self.req_id_to_index[first], self.req_id_to_index[second]
        for array in self._arrays():
            array[[a, b]] = array[[b, a]]
        self.req_ids[a], self.req_ids[b] = second, first
        self.req_id_to_index[first], self.req_id_to_index[second] = b, a

    def _copy(self, source: int, target: int) -> None:
        for array in self._arrays():
            array[target] = array[source]

    def _arrays(self) -> tuple[Any, ...]:
        return (
            self.token_ids_cpu,
            self.num_tokens_no_spec,
            self.num_prompt_tokens,
            self.request_lora_mapping,
        )

    def sample(self, sampled: dict[str, Sequence[int]]) -> list[list[int]]:
        """Write newly sampled ids into the rows; returns them row by row, as the runner does."""
        for request_id, tokens in sampled.items():
            row = self.req_id_to_index[request_id]
            start = self.num_tokens_no_spec[row]
            self.token_ids_cpu[row, start : start + len(tokens)] = tokens
            self.num_tokens_no_spec[row] = start + len(tokens)
        return [list(sampled.get(request_id, ())) for request_id in self.req_ids]

    def scribble(self) -> None:
        """Fill what lies beyond each row's length, where the runner leaves rejected drafts."""
        for row, length in enumerate(self.num_tokens_no_spec):
            self.token_ids_cpu[row, length:] = 7


def vllm_config(
    num_speculative_tokens: int = 8,
    max_model_len: int = MAX_MODEL_LEN,
    device_type: str = "cuda",
    **suffix_decoding: Any,
) -> Any:
    """What the proposers read of a VllmConfig; keywords without their `suffix_decoding_`."""
    settings = {
        "max_tree_depth": 24,
        "max_cached_requests": 1000,
        "max_spec_factor": 4.0,
        "min_token_prob": 0.1,
        **suffix_decoding,
    }
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=num_speculative_tokens,
            **{f"suffix_decoding_{name}": value for name, value in settings.items()},
        ),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        device_config=SimpleNamespace(device_type=device_type),
    )
