"""Runs jobs on real engines, each in a process of its own with the patches of its choice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import ROOT, environment, model_path

sys.path.insert(0, str(ROOT / "tools"))  # the demo's prompts
sys.path.insert(0, str(Path(__file__).parent))

JOBS = Path(__file__).with_name("jobs.py")
SECONDS = 420

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def tiny() -> str:
    """A model of random bfloat16 weights that two workers can share."""
    return model_path("DRAFTER_MODEL_TP", "tiny-llama")


@pytest.fixture(scope="session")
def smollm() -> str:
    """A real model."""
    return model_path("DRAFTER_MODEL", "smollm2-135m")


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """start(job, patches, **arguments) -> the process that has ended, and its result's path."""

    def start(
        job: str, patches: str, *, env: dict[str, str] | None = None, **arguments: Any
    ) -> tuple[subprocess.CompletedProcess[str], Path]:
        folder = tmp_path_factory.mktemp(job)
        given, result = folder / "arguments.json", folder / "result.json"
        given.write_text(json.dumps(arguments))
        done = subprocess.run(
            [sys.executable, str(JOBS), job, str(given), str(result)],
            env=environment(
                VLLM_PATCHES=patches,
                # Functions of the job run in the worker.
                VLLM_ALLOW_INSECURE_SERIALIZATION="1",
                **(env or {}),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        (folder / "log.txt").write_text(done.stdout)
        return done, result

    return start


@pytest.fixture(scope="session")
def run(start: Callable[..., Any]) -> Run:
    """run(job, patches, **arguments) -> its result; AssertionError with the end of its log."""

    def run(job: str, patches: str, **arguments: Any) -> dict[str, Any]:
        done, result = start(job, patches, **arguments)
        assert done.returncode == 0, done.stdout[-6000:]
        found: dict[str, Any] = json.loads(result.read_text())
        return found

    return run
