"""Engines that several tests look at. Each is started once; a start takes up to a minute."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from engines import SUFFIX, EngineResult, model_path, run_engine
from prompts import ALL, EDITS, GREEDY, SAMPLED, arrivals

# What is true only of a release whose sessions run with tests/mended (pins.toml).
collect_ignore = [] if importlib.util.find_spec("mended_sampler") else ["test_mended.py"]


@pytest.fixture(scope="session")
def smollm() -> str:
    """A real model; its attention heads cannot be split over two workers."""
    return model_path("DRAFTER_MODEL", "smollm2-135m")


@pytest.fixture(scope="session")
def tiny() -> str:
    """A model of random weights that two workers can share."""
    return model_path("DRAFTER_MODEL_TP", "tiny-llama")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


def greedy_run(name: str = "greedy") -> dict[str, object]:
    return {"name": name, "prompts": ALL, "arrivals": arrivals(len(ALL)), "sampling": GREEDY}


# Eight requests at a time and 256 tokens a step: requests wait, and long prompts come in parts.
CROWDED = {"max_num_seqs": 8, "max_num_batched_tokens": 256}


@pytest.fixture(scope="session")
def plain(folder: Path, smollm: str) -> EngineResult:
    """The prompts without speculation."""
    return run_engine(folder / "plain", {"model": smollm, **CROWDED}, [greedy_run()])


@pytest.fixture(scope="session")
def drafting(folder: Path, smollm: str) -> EngineResult:
    """The prompts with our drafter, and then more of them on the same, by then taught, engine."""
    aborted = greedy_run("aborted")
    aborted["abort"] = {"0": 4, "7": 9, "13": 1}
    # The engine's seed, and none of each request: on a CPU, vLLM 0.32 ends with an error when a
    # request with a seed of its own is prefilled in parts ("CPU Generator does not use offset").
    sampled = {"temperature": 0.8, "max_tokens": 48}
    return run_engine(
        folder / "drafting",
        {"model": smollm, **CROWDED, "seed": 20241104, "speculative_config": SUFFIX},
        [
            greedy_run(),
            {**greedy_run("again"), "ids": "greedy"},
            aborted,
            {"name": "sampled", "prompts": SAMPLED, "sampling": sampled},
            {"name": "several", "prompts": EDITS[:2], "sampling": {**sampled, "n": 3}},
        ],
    )
