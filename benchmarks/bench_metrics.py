"""What metrics cost a draft step: the same proposer, with its notes switched on and off in turn.

    python benchmarks/bench_metrics.py [--rounds 60]

Between two steps memory is swept, as the model's forward pass does, so that a step finds the caches
as it does in an engine: `swept`. Without that a step takes a fraction of the time.
A ratio is the median over pairs of neighbouring blocks of steps, one with notes and one without.
Times are those of the processor, not of the clock. Notes are added up once a second by a thread,
while the engine computes; that is measured apart, as the share of a draft step that it would take
if it never overlapped with anything. Reports JSON, one object for each batch size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_drafter import proposer as proposers
from vllm_drafter.metrics import Publisher, _Files
from vllm_drafter.stamps import Role

STEPS = 20
"""Steps in a block."""
SWEPT = 32 * 2**20
"""Bytes."""
PHRASE = 64
LENGTH = 8192
WORKER = Role("worker", 0)


class Traffic:
    """Requests that copy one text, four tokens a step, and start over at the model's length."""

    def __init__(self, requests: int, swept: bool) -> None:
        self.memory = np.zeros(SWEPT // 8) if swept else None
        rng = np.random.default_rng(20241104)
        self.text = rng.integers(0, 30_000, PHRASE).astype(np.int32)
        self.names = [f"request-{place}" for place in range(requests)]
        self.batch: Any = SimpleNamespace(
            req_ids=self.names,
            req_id_to_index={name: row for row, name in enumerate(self.names)},
            token_ids_cpu=np.tile(self.text, (requests, LENGTH // PHRASE)),
            num_tokens_no_spec=np.full(requests, 2 * PHRASE, dtype=np.int32),
            num_prompt_tokens=np.full(requests, PHRASE, dtype=np.int32),
            req_prompt_embeds={},
        )
        config: Any = SimpleNamespace(
            speculative_config=SimpleNamespace(
                num_speculative_tokens=16,
                suffix_decoding_max_tree_depth=24,
                suffix_decoding_max_cached_requests=1000,
                suffix_decoding_max_spec_factor=1.0,
                suffix_decoding_min_token_prob=0.1,
            ),
            model_config=SimpleNamespace(max_model_len=LENGTH),
        )
        self.proposer = proposers.TokensPerStepProposer(config)

    def steps(self) -> float:
        """Take a block of steps; returns the seconds that drafting took."""
        filled = self.batch.num_tokens_no_spec
        if filled[0] + 4 * STEPS >= LENGTH:
            filled[:] = 2 * PHRASE
            self.proposer.loop.retire(self.names)
            self._step()
        return sum(self._step() for _ in range(STEPS))

    def _step(self) -> float:
        filled = self.batch.num_tokens_no_spec
        begin = int(filled[0])
        sampled = [
            row[begin : begin + 4].tolist() for row in self.batch.token_ids_cpu[: len(self.names)]
        ]
        filled += 4
        if self.memory is not None:
            self.memory += 1
        started = time.thread_time()
        self.proposer.propose(16, self.batch, sampled)
        return time.thread_time() - started


def measure(requests: int, swept: bool, rounds: int, folder: Path) -> dict[str, float]:
    """Return the figures for one batch size."""
    traffic = Traffic(requests, swept)
    loop = traffic.proposer.loop
    publisher = Publisher(loop, WORKER, _Files(folder, WORKER), 0)
    for _ in range(10):
        traffic.steps()
    publisher.publish()
    ratios, times, publishing = [], [], []
    for place in range(rounds):
        took = {}
        for noting in (True, False) if place % 2 else (False, True):
            loop.activity.on = noting
            took[noting] = traffic.steps()
        ratios.append(took[True] / took[False])
        times.append(took[False] / STEPS)
        if place % 25 == 24:  # after 500 steps with notes
            started = time.thread_time()
            publisher.publish()
            publishing.append((time.thread_time() - started) / (25 * STEPS))
    step = statistics.median(times)
    return {
        "requests": requests,
        "swept": swept,
        "draft_step_us": round(step * 1e6, 1),
        "noting_percent": round((statistics.median(ratios) - 1) * 100, 2),
        "publishing_percent": round(statistics.median(publishing) / step * 100, 2),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="pairs of blocks per batch size")
    options = parser.parse_args()
    # Here nobody publishes but the benchmark.
    proposers.publish = lambda *_: None
    for swept in (True, False):
        for requests in (1, 8, 64):
            with tempfile.TemporaryDirectory() as folder:
                found = measure(requests, swept, options.rounds, Path(folder))
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
