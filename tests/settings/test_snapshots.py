"""A snapshot on the real engine: what a restarted engine knows of the answers of before."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engines import (
    SUFFIX,
    TWO_CORES,
    EngineResult,
    model_path,
    run_engine,
    start_engine,
    start_server,
)
from prompts import EDITS, GREEDY

from drafter_core import SuffixDrafter


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


# --- several workers, one file --------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_workers(folder: Path) -> tuple[EngineResult, EngineResult]:
    """The same with two tensor-parallel workers, one after the other."""
    engine = {
        "model": model_path("DRAFTER_MODEL_TP", "tiny-llama"),
        "speculative_config": SUFFIX,
        "tensor_parallel_size": 2,
    }
    sampling = {**GREEDY, "max_tokens": 48, "ignore_eos": True}
    run = {"name": "greedy", "prompts": EDITS[:4], "sampling": sampling}
    path = str(folder / "cache-of-two")
    first, second = (
        run_engine(folder / name, engine, [run], VLLM_DRAFTER_SNAPSHOT=path, **TWO_CORES)
        for name in ("two-first", "two-second")
    )
    return first, second


def test_of_two_workers_both_load_the_file_and_one_saves_it(two_workers):
    first, second = two_workers
    assert first.log.count("the cache starts empty") == 2
    assert second.log.count("loaded 4 responses") == 2
    for engine in two_workers:
        assert engine.log.count("vllm-drafter: saved ") == 1
        assert "another process writes" not in engine.log
        assert "was not written" not in engine.log


def test_two_restarted_workers_answer_the_same_in_fewer_steps(two_workers):
    first, second = two_workers
    assert second.tokens("greedy") == first.tokens("greedy")
    assert second.runs["greedy"]["steps"] < first.runs["greedy"]["steps"]


# --- servers, which vLLM ends by killing its workers ----------------------------------------------


def serve_and_stop(folder: Path, name: str, *arguments: str, wait: int, **changes: str) -> str:
    """The log of a server that answered, and was stopped when it had saved `wait` answers."""
    path = folder / f"cache-of-{name}"
    server = start_server(
        folder / name,
        model_path("DRAFTER_MODEL_TP", "tiny-llama"),
        *("--dtype", "float32", "--speculative-config", json.dumps(SUFFIX)),
        *arguments,
        VLLM_DRAFTER_SNAPSHOT=str(path),
        **changes,
    )
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda prompt: _ask(server.url, prompt), EDITS))
        server.wait_until_idle()
        until = time.monotonic() + 30
        while saved(path) < wait and time.monotonic() < until:
            time.sleep(0.1)
    finally:
        server.stop()
    return server.log.read_text()


def saved(path: Path) -> int:
    return SuffixDrafter().load(path) if path.exists() else 0


@pytest.fixture(scope="module")
def two_replicas(folder: Path) -> str:
    """Two replicas that are given the same file."""
    return serve_and_stop(folder, "replicas", "--data-parallel-size", "2", wait=1, **TWO_CORES)


def _ask(url: str, prompt: str) -> None:
    body = {"model": "model", "prompt": prompt, "max_tokens": 32}
    body |= {"temperature": 0.0, "ignore_eos": True}
    asked = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(asked, timeout=300).read()


def test_of_two_replicas_one_saves_its_answers_and_the_other_says_that_it_does_not(
    two_replicas, folder
):
    assert two_replicas.count("another process writes") == 1
    assert "was not written" not in two_replicas
    assert 0 < saved(folder / "cache-of-replicas") < len(EDITS)


def test_a_server_that_is_idle_has_saved_all_answers_before_it_is_stopped(folder):
    log = serve_and_stop(folder, "idle", wait=len(EDITS))
    assert "was not written" not in log
    assert saved(folder / "cache-of-idle") == len(EDITS)


def test_a_server_with_time_to_shut_down_saves_at_its_end(folder):
    # No save while it serves: what is there was saved at the end.
    log = serve_and_stop(
        folder,
        "ended",
        *("--shutdown-timeout", "20"),
        wait=0,
        VLLM_DRAFTER_SNAPSHOT_MINUTES="0",
    )
    assert f"saved {len(EDITS)} responses" in log
    assert saved(folder / "cache-of-ended") == len(EDITS)
