"""What the plugin's settings change on the real engine: the route and what is shared."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import SUFFIX, EngineResult, model_path, run_engine
from prompts import ALL, GREEDY

PROMPTS = ALL[:6]
FIRST = {"name": "first", "prompts": PROMPTS, "sampling": GREEDY}
AGAIN = {**FIRST, "name": "again"}


def run(folder: Path, speculation: dict[str, str] | None = SUFFIX, **changes: str) -> EngineResult:
    engine = {"model": model_path("DRAFTER_MODEL", "smollm2-135m"), "max_num_seqs": 8}
    if speculation is not None:
        engine["speculative_config"] = speculation
    return run_engine(folder, engine, [FIRST, AGAIN], **changes)


def accepted(result: EngineResult, name: str) -> int:
    return int(result.runs[name]["counters"]["accepted_tokens"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def plain(folder: Path) -> EngineResult:
    return run(folder / "plain", None)


@pytest.fixture(scope="module")
def everything_shared(folder: Path) -> EngineResult:
    return run(folder / "global")


@pytest.fixture(scope="module")
def nothing_shared(folder: Path) -> EngineResult:
    return run(folder / "none", VLLM_DRAFTER_SHARING="none")


@pytest.fixture(scope="module")
def shim(folder: Path) -> EngineResult:
    return run(folder / "shim", VLLM_DRAFTER_ROUTE="shim")


def test_by_default_what_was_answered_is_drafted_for_the_same_question(
    everything_shared: EngineResult,
) -> None:
    assert accepted(everything_shared, "again") > accepted(everything_shared, "first")


def test_with_nothing_shared_the_same_question_gains_nothing(nothing_shared: EngineResult) -> None:
    first, again = accepted(nothing_shared, "first"), accepted(nothing_shared, "again")
    assert first > 0
    # Not one token of another request, but how probable drafts are is learned from all of them.
    assert abs(again - first) <= 0.05 * first


def test_with_the_shim_vllms_own_proposer_drafts_with_ours(shim: EngineResult) -> None:
    assert accepted(shim, "first") > 0
    assert accepted(shim, "again") > accepted(shim, "first")
    registered = [stamp for stamp in shim.stamps if stamp["event"] == "registered"]
    assert {stamp["role"] for stamp in registered} == {"front end", "EngineCore", "worker"}
    assert all(stamp["route"] == "shim" and stamp["patched"] == [] for stamp in registered)
    assert shim.proposers == [("worker", 0, "SuffixDecodingCache")]


@pytest.mark.parametrize("setting", ["everything_shared", "nothing_shared", "shim"])
def test_the_outputs_are_those_without_speculation(
    plain: EngineResult, setting: str, request: pytest.FixtureRequest
) -> None:
    result: EngineResult = request.getfixturevalue(setting)
    assert result.tokens("first") == plain.tokens("first")
    assert result.tokens("again") == plain.tokens("again")
