"""What the comparison with arctic-inference calls a success, and how it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from demo.compare import (
    BASELINE,
    ORDER,
    OURS,
    cost_of,
    faults,
    make_report,
    page_row,
    rounds_of,
    spread,
    write_row,
)
from demo.engines import PEER_KIND, Engine, Job

DRAFTERS = {
    BASELINE: None,
    OURS: "vllm_drafter.proposer.TokensPerStepProposer",
    PEER_KIND: "vllm.v1.spec_decode.suffix_decoding.SuffixDecodingProposer",
}


def report(version: str = "0.32.0", **changes: dict[str, Any]) -> dict[str, Any]:
    """The report of three engines, in which `changes` holds what a kind's rounds are instead."""
    groups = rounds_of(["a", "b"], 2)
    job = Job(Path("model"), groups, [], 16, 8, 1.0, pause=1.0)
    engines = {}
    for kind in ORDER:
        answers = {
            "tokens": [[1, 2, 3]],
            "output_tokens": 100,
            "forward_passes": 100 if kind == BASELINE else 50,
            "engine_steps": 25 if kind == BASELINE else 13,
            "prompt_tokens": 40,
            "drafted": 0 if kind == BASELINE else 80,
            "accepted": 0 if kind == BASELINE else 50,
            "seconds": 4.0 if kind == BASELINE else 2.0,
            "processor_seconds": 3.0 if kind == BASELINE else 1.0,
            **{key: value for key, value in changes.get(kind, {}).items() if key != "drafter"},
        }
        drafter = changes.get(kind, {}).get("drafter", DRAFTERS[kind])
        witness = {"arctic_imported": kind == PEER_KIND, "drafter": drafter}
        result = {
            "groups": {name: dict(answers) for name in groups},
            "dtype": "float32",
            "witnesses": [witness],
        }
        engines[kind] = Engine(kind, 1, Path(), result=result)
    return {**make_report(engines, job), "vllm_version": version}


@pytest.fixture(autouse=True)
def vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.32.0")


def test_equal_engines_are_a_success() -> None:
    assert faults(report(), 0.02) == []


def test_an_output_that_differs_is_named() -> None:
    [first] = faults(report(suffix={"tokens": [[1, 2, 4]]}), 0.02)
    assert "4 outputs of vllm-drafter differ" in first
    assert "first 1, prompt 0" in first


def test_fewer_tokens_per_pass_than_arctic_are_a_fault() -> None:
    found = faults(report(suffix={"forward_passes": 51}), 0.02)
    assert [text.partition(":")[0] for text in found] == ["first", "again"]
    assert "tokens per forward pass, arctic 2.000" in found[0]


def test_slower_than_arctic_is_a_fault_beyond_the_tolerance() -> None:
    assert faults(report(suffix={"seconds": 2.03}), 0.02) == []
    assert len(faults(report(suffix={"seconds": 2.1}), 0.02)) == 2


def test_other_load_changes_speeds_but_not_those_by_processor_time() -> None:
    part = report(suffix={"seconds": 3.0})["first"]
    assert part[f"speed_over_{PEER_KIND}"]["median"] == pytest.approx(2 / 3)
    assert part[f"processor_speed_over_{PEER_KIND}"]["median"] == 1
    part = report(suffix={"processor_seconds": 1.5})["first"]
    assert part[f"processor_speed_over_{PEER_KIND}"]["rounds"] == pytest.approx([2 / 3, 2 / 3])


def test_an_engine_that_drafted_with_anothers_drafter_is_a_fault() -> None:
    [found] = faults(report(arctic={"drafter": DRAFTERS[OURS]}), 0.02)
    assert "arctic's engine drafted with" in found
    [found] = faults(report(suffix={"drafter": None}), 0.02)
    assert "our engine drafted with nothing" in found


def test_the_cost_of_a_step_and_of_a_token_is_found_from_what_the_rounds_took() -> None:
    def group(steps: int, passes: int, drafted: int, prompt_ms: float) -> dict[str, Any]:
        work = {"engine_steps": steps, "forward_passes": passes, "drafted": drafted}
        took = steps * 0.1 + (passes + drafted) * 0.005 + 40 * prompt_ms / 1000
        return {**work, "prompt_tokens": 40, "processor_seconds": took}

    found = cost_of(
        {
            BASELINE: {"first 1": group(25, 100, 0, 3), "again 1": group(25, 100, 0, 1)},
            OURS: {"first 1": group(14, 50, 90, 3), "again 1": group(5, 20, 90, 1)},
            PEER_KIND: {"first 1": group(15, 54, 70, 3), "again 1": group(7, 28, 80, 1)},
        }
    )
    assert found == pytest.approx({"step_ms": 100, "token_ms": 5, "verify_tokens": 20})


def test_no_accepted_token_is_a_fault() -> None:
    assert "no draft token of ours was accepted" in faults(report(suffix={"accepted": 0}), 0)[0]


def test_every_round_has_prompts_of_every_kind_and_all_are_asked_twice() -> None:
    texts = [f"{kind} {number}" for kind in ("edit", "extract", "open") for number in range(8)]
    rounds = rounds_of(spread(texts, 12), 3)
    assert list(rounds) == [f"{part} {n}" for part in ("first", "again") for n in (1, 2, 3)]
    for number in (1, 2, 3):
        assert {text.split()[0] for text in rounds[f"first {number}"]} == {
            "edit",
            "extract",
            "open",
        }
        assert rounds[f"first {number}"] == rounds[f"again {number}"]
    assert len({text for texts in rounds.values() for text in texts}) == 12


def test_a_release_has_one_row_in_the_page_newest_first(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: nox -s compare -->\n| vLLM |\n| --- |\n"
                    "<!-- end of table -->\nafter\n")  # fmt: skip
    for version in ("0.9.0", "0.32.0", "0.10.0", "0.32.0"):
        write_row(page, report(version))
    lines = page.read_text().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("| 0")] == [
        "0.32.0",
        "0.10.0",
        "0.9.0",
    ]
    assert (lines[0], lines[-1]) == ("before", "after")


def test_the_row_says_both_figures_and_the_range_of_the_rounds() -> None:
    row = page_row(report())
    assert "| 2.00 / 2.00 | 1.00 (1.00 to 1.00) | 2.00 (2.00 to 2.00) | 100 / 100 |" in row
    assert row.endswith("| yes |")
