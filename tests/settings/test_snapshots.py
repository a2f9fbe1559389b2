"""A snapshot on the real engine: what a restarted engine knows of the answers of before."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import SUFFIX, EngineResult, model_path, run_engine, start_engine
from prompts import EDITS, GREEDY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("snapshots")


def serve(folder: Path, name: str, model: str) -> EngineResult:
    # The engine's ends are what this is about, so the answers are short.
    run = {"name": "greedy", "prompts": EDITS[:4], "sampling": {**GREEDY, "max_tokens": 48}}
    engine = {"model": model, "speculative_config": SUFFIX}
    return run_engine(folder / name, engine, [run], VLLM_DRAFTER_SNAPSHOT=str(folder / "cache"))


@pytest.fixture(scope="module")
def engines(folder: Path) -> tuple[EngineResult, EngineResult]:
    """An engine that starts without a file, and one that is started after it has ended."""
    model = model_path("DRAFTER_MODEL", "smollm2-135m")
    return serve(folder, "first", model), serve(folder, "second", model)


def test_the_worker_saves_what_it_has_when_the_engine_ends(engines, folder):
    assert (folder / "cache").is_file()
    assert "saved 4 responses" in engines[0].log


def test_a_restarted_engine_loads_it_and_needs_fewer_steps_for_the_same_answers(engines):
    first, second = engines
    assert "loaded 4 responses" in second.log
    assert second.tokens("greedy") == first.tokens("greedy")
    assert second.runs["greedy"]["steps"] < first.runs["greedy"]["steps"]
    accepted = [engine.runs["greedy"]["counters"]["accepted_tokens"] for engine in engines]
    assert accepted[1] > accepted[0]


def test_a_damaged_file_stops_the_start_and_is_named(engines, folder):
    damaged = folder / "damaged"
    damaged.write_bytes((folder / "cache").read_bytes()[:-5])
    engine = {"model": model_path("DRAFTER_MODEL", "smollm2-135m"), "speculative_config": SUFFIX}
    done, result = start_engine(folder / "refused", engine, [], VLLM_DRAFTER_SNAPSHOT=str(damaged))
    assert done.returncode != 0
    assert not result.exists()
    assert "VLLM_DRAFTER_SNAPSHOT" in done.stdout
    assert str(damaged) in done.stdout
    assert "truncated" in done.stdout
