"""The drafter in a process of its own, without an engine: whether its memory grows.

    python soak_alone.py out.json

Eight requests at a time are drafted for, of lengths as in the soak, each from phrases that come
again; metrics are published to files and to the log, as in a worker. After every thousand requests
the memory of the process is written down.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil

REQUESTS, EVERY = 20_000, 1_000
ROWS, MAX_MODEL_LEN = 8, 2048
CACHED = 100
TOKENS = 24
"""Most tokens in a draft."""


class Traffic:
    """Eight rows of requests that come and go."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(20241104)
        self.phrases = [
            self.rng.integers(0, 49_000, self.rng.integers(5, 30)).astype(np.int32)
            for _ in range(400)
        ]
        self.requests = 0
        self.tokens = 0
        self.ends = [0] * ROWS
        self.texts = [np.zeros(0, np.int32)] * ROWS
        self.batch = SimpleNamespace(
            req_ids=[""] * ROWS,
            req_id_to_index={},
            token_ids_cpu=np.zeros((ROWS, MAX_MODEL_LEN), np.int32),
            num_tokens_no_spec=np.zeros(ROWS, np.int32),
            num_prompt_tokens=np.zeros(ROWS, np.int64),
            req_prompt_embeds={},
        )

    def _text(self, length: int) -> Any:
        places = self.rng.integers(0, len(self.phrases), length // 5 + 1)
        return np.concatenate([self.phrases[place] for place in places])[:length]

    def _arrive(self, row: int) -> None:
        self.requests += 1
        prompt, response = int(self.rng.integers(2, 400)), int(self.rng.integers(1, 120))
        self.texts[row] = self._text(prompt + response)
        self.ends[row] = prompt + response
        self.batch.req_ids[row] = f"request-{self.requests}"
        self.batch.req_id_to_index = {name: r for r, name in enumerate(self.batch.req_ids)}
        self.batch.token_ids_cpu[row, :prompt] = self.texts[row][:prompt]
        self.batch.num_tokens_no_spec[row] = self.batch.num_prompt_tokens[row] = prompt

    def sample(self) -> list[list[int]]:
        """Give each row one to four tokens more; rows that were done hold other requests."""
        filled = self.batch.num_tokens_no_spec
        sampled = []
        for row in range(ROWS):
            if filled[row] >= self.ends[row]:
                self._arrive(row)
            begin = int(filled[row])
            new = self.texts[row][begin : begin + int(self.rng.integers(1, 5))]
            self.batch.token_ids_cpu[row, begin : begin + len(new)] = new
            filled[row] += len(new)
            self.tokens += len(new)
            sampled.append(new.tolist())
        return sampled


def measure() -> list[dict[str, float]]:
    """What there was after every thousand requests."""
    from vllm_drafter.proposer import TokensPerStepProposer

    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=TOKENS,
            suffix_decoding_max_tree_depth=24,
            suffix_decoding_max_cached_requests=CACHED,
            suffix_decoding_max_spec_factor=1.0,
            suffix_decoding_min_token_prob=0.1,
        ),
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
        device_config=SimpleNamespace(device_type="cuda"),
    )
    proposer = TokensPerStepProposer(config)
    traffic = Traffic()
    process = psutil.Process()
    samples: list[dict[str, float]] = []
    while traffic.requests < REQUESTS:
        proposer.propose(TOKENS, traffic.batch, traffic.sample())
        if traffic.requests >= EVERY * (len(samples) + 1):
            samples.append(
                {
                    "requests": traffic.requests,
                    "tokens": traffic.tokens,
                    "rss": process.memory_info().rss,
                    "drafter": proposer.loop.sizes().memory_bytes,
                    "faults": proposer.loop.faults,
                }
            )
            print(json.dumps(samples[-1]), flush=True)
    return samples


def main(out: Path) -> int:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DRAFTER_METRICS_DIR"] = folder
        os.environ["VLLM_DRAFTER_LOG_SECONDS"] = "5"
        samples = measure()
    out.write_text(json.dumps(samples))
    return 1 if samples[-1]["faults"] else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
