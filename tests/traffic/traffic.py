"""Runs the same traffic without speculation and with our drafter, and says where they differ."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import SUFFIX, environment

HERE = Path(__file__).parent
RUN_SECONDS = 900
MENDED = str(HERE.parent / "mended")
"""On PYTHONPATH, it mends what vLLM's CPU build gets wrong at a temperature."""

TABLE = pytest.StashKey[list[str]]()
"""What is printed when all tests are through: the rows of docs/traffic.md."""
HEAD = (
    "| phase | tokens as without | preempted, without and with | steps, without and with "
    "| drafted, accepted |"
)

Request = dict[str, Any]


@dataclass(frozen=True)
class Phase:
    """What came of one phase of one engine."""

    samples: dict[str, list[dict[str, Any]]]
    counters: dict[str, int]
    steps: int

    @property
    def accepted(self) -> int:
        return self.counters.get("vllm:spec_decode_num_accepted_tokens", 0)

    @property
    def drafted(self) -> int:
        return self.counters.get("vllm:spec_decode_num_draft_tokens", 0)

    @property
    def preemptions(self) -> int:
        return self.counters.get("vllm:num_preemptions", 0)

    def told(self, *names: str) -> dict[str, list[list[Any]]]:
        """For each request these of each of its samples."""
        return {
            key: [[sample[name] for name in names] for sample in samples]
            for key, samples in self.samples.items()
        }


@dataclass(frozen=True)
class Pair:
    """The same engine twice: without speculation, and with our drafter."""

    plain: dict[str, Phase]
    drafting: dict[str, Phase]
    log: str

    def row(self, name: str, requests: Sequence[Request]) -> str:
        """The row of docs/traffic.md about a phase, in which these requests were asked.

        Those that are aborted end where the step ends that brings them to their length, which is a
        longer one with drafts: they are compared up to where the shorter answer ends.
        """
        plain, drafting = self.plain[name], self.drafting[name]
        expected, found = plain.told("token_ids"), drafting.told("token_ids")
        aborted = {request["key"] for request in requests if "abort_after" in request}
        same = sum(
            up_to_there(expected[key], found[key])
            if key in aborted
            else expected[key] == found[key]
            for key in expected
        )
        where = ", the aborted up to there" if aborted else ""
        return (
            f"| {name} | {same:,} of {len(expected):,}{where} "
            f"| {plain.preemptions:,}, {drafting.preemptions:,} "
            f"| {plain.steps:,}, {drafting.steps:,} "
            f"| {drafting.drafted:,}, {drafting.accepted:,} |"
        )

    def check(self, phase: str, *names: str, but: Sequence[str] = ()) -> None:
        """AssertionError unless every sample is the same with drafts, and some were accepted.

        What is said to the requests of the keys `but` may differ.
        """
        expected = self.plain[phase].told("token_ids", "finish_reason", "stop_reason", *names)
        found = self.drafting[phase].told("token_ids", "finish_reason", "stop_reason", *names)
        differ = [key for key in expected if found[key] != expected[key] and key not in but]
        assert not differ, "\n".join(
            f"{key}: without speculation {expected[key]}\nwith drafts {found[key]}"
            for key in differ[:5]
        )
        assert all(all(sample[0] for sample in samples) for samples in found.values())
        assert self.drafting[phase].accepted > 0
        assert self.plain[phase].accepted == 0


def up_to_there(plain: list[list[list[int]]], drafting: list[list[list[int]]]) -> bool:
    """Whether the samples of a request begin the same, and none of them is empty.

    Both: for each sample a list of one item, its token ids.
    """
    return len(plain) == len(drafting) and all(
        min(len(one), len(other)) > 0
        and all(token == same for token, same in zip(one, other, strict=False))
        for [one], [other] in zip(plain, drafting, strict=True)
    )


def run_pair(
    folder: Path,
    engine: Mapping[str, Any],
    phases: Mapping[str, Sequence[Request]],
    **changes: str,
) -> Pair:
    """Run the phases on both engines, one after the other; `changes` are environment variables."""
    plain, _ = run_traffic(folder / "plain", engine, phases, **changes)
    drafting, log = run_traffic(
        folder / "drafting", {**engine, "speculative_config": SUFFIX}, phases, **changes
    )
    return Pair(plain, drafting, log)


def run_traffic(
    folder: Path,
    engine: Mapping[str, Any],
    phases: Mapping[str, Sequence[Request]],
    **changes: str,
) -> tuple[dict[str, Phase], str]:
    """Run the phases on one engine; AssertionError with the end of its log if that fails.

    `changes` are environment variables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job, result, log = folder / "job.json", folder / "result.json", folder / "log.txt"
    defaults = {"enforce_eager": True, "max_model_len": 2048, "dtype": "float32"}
    told = [{"name": name, "requests": list(requests)} for name, requests in phases.items()]
    job.write_text(json.dumps({"engine": {**defaults, **engine}, "phases": told}))
    command = [sys.executable, str(HERE / "drive_traffic.py"), str(job), str(result)]
    # The ids that we give are those that the drafter sees.
    env = environment(
        folder / "stamps.jsonl",
        VLLM_DISABLE_REQUEST_ID_RANDOMIZATION="1",
        VLLM_DRAFTER_LOG_SECONDS="1",
        **changes,
    )
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(RUN_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, log.read_text()[-6000:]
    found = json.loads(result.read_text())
    return {
        name: Phase(phase["samples"], phase["counters"], phase["steps"])
        for name, phase in found.items()
    }, log.read_text()
