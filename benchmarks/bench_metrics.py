"""What metrics cost a draft step, noted and not noted in turn.

    python benchmarks/bench_metrics.py [--steps 4000]

Between two steps memory is swept, as the model's forward pass does, so that a step finds the caches
as it does in an engine; without that a step takes a fraction of the time. Every other step is
noted. In each step the calls that note are clocked, whether they do or not: `noting_percent` is by
how much longer they take where they do, as a share of a step without notes. (Whole steps do not
tell: those with notes differ less from those without than two runs do.) Notes are added up once a
second by a thread, while the engine computes; `publishing_percent` is the share of a draft step
that it would take if it never overlapped with anything, where a second has 500 steps. Medians over
all steps of one run. Prints JSON, one object for each number of requests.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_drafter import proposer as proposers
from vllm_drafter.metrics import Publisher, _Files
from vllm_drafter.stamps import Role

STEPS_A_SECOND = 500
SWEPT = 32 * 2**20
"""Bytes."""
PHRASE = 64
LENGTH = 8192
WORKER = Role("worker", 0)


class Traffic:
    """Requests that copy one text, four tokens a step, and start over at the model's length."""

    def __init__(self, requests: int) -> None:
        self.memory = np.zeros(SWEPT // 8)
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
            device_config=SimpleNamespace(device_type="cuda"),
        )
        self.proposer = proposers.TokensPerStepProposer(config)

    def step(self) -> float:
        """Take a step; returns the seconds that drafting took."""
        filled = self.batch.num_tokens_no_spec
        if filled[0] + 4 >= LENGTH:
            filled[:] = 2 * PHRASE
            self.proposer.loop.retire(self.names)
            self._step()
        return self._step()

    def _step(self) -> float:
        filled = self.batch.num_tokens_no_spec
        begin = int(filled[0])
        sampled = [
            row[begin : begin + 4].tolist() for row in self.batch.token_ids_cpu[: len(self.names)]
        ]
        filled += 4
        self.memory += 1
        started = time.perf_counter()
        self.proposer.propose(16, self.batch, sampled)
        return time.perf_counter() - started


class Clock:
    """The seconds that some functions have taken since they were last asked for."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def around(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return the same function, clocked."""

        def clocked(*arguments: Any) -> None:
            started = time.perf_counter()
            function(*arguments)
            self._seconds += time.perf_counter() - started

        return clocked

    def take(self) -> float:
        """Return them, and begin at zero."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def measure(requests: int, steps: int, folder: Path) -> dict[str, float]:
    """Return the figures for one number of requests."""
    traffic = Traffic(requests)
    activity: Any = traffic.proposer.loop.activity
    publisher = Publisher(traffic.proposer.loop, WORKER, _Files(folder, WORKER), 0)
    clock = Clock()
    activity.note_drafts = clock.around(activity.note_drafts)
    activity.note_step = clock.around(activity.note_step)
    took: dict[bool, list[float]] = {True: [], False: []}
    noting: dict[bool, list[float]] = {True: [], False: []}
    publishing = []
    for place in range(steps):
        activity.on = place % 2 == 1
        took[activity.on].append(traffic.step())
        noting[activity.on].append(clock.take())
        if place % (2 * STEPS_A_SECOND) == 2 * STEPS_A_SECOND - 1:
            started = time.thread_time()
            publisher.publish()
            publishing.append((time.thread_time() - started) / STEPS_A_SECOND)
    step = statistics.median(took[False])
    seconds = statistics.median(noting[True]) - statistics.median(noting[False])
    shares = [part / step * 100 for part in (seconds, statistics.median(publishing))]
    return {
        "requests": requests,
        "draft_step_us": round(step * 1e6, 1),
        "noting_percent": round(shares[0], 2),
        "publishing_percent": round(shares[1], 2),
        "both_percent": round(sum(shares), 2),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000, help="of each number of requests")
    options = parser.parse_args()
    # Here nobody publishes but the benchmark.
    proposers.publish = lambda *_: None
    for requests in (1, 8, 64):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(requests, options.steps, Path(folder))
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
