"""What the demo calls a success, and how it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from demo.engines import KINDS, Engine
from demo.prompts import GROUPS, Prompt
from demo.report import differences, faults, figures

PROMPTS = [Prompt(group, f"{group} {i}", "text") for group in GROUPS for i in range(2)]


def engine(kind: str = "baseline", number: int = 1, seconds: float = 2.0, **group: Any) -> Engine:
    """An engine that answered two prompts per group with the same tokens."""
    answers = {
        "tokens": [[1, 2, 3], [4, 5]],
        "output_tokens": 5,
        "forward_passes": 5,
        "drafted": 0,
        "accepted": 0,
        "seconds": seconds,
        **group,
    }
    groups = {name: dict(answers) for name in GROUPS}
    return Engine(kind, number, Path(), result={"groups": groups})


def both(**suffix: Any) -> dict[str, list[Engine]]:
    return {"baseline": [engine()], "suffix": [engine("suffix", **suffix)]}


def good_report(**changes: Any) -> dict[str, Any]:
    return {
        "identical": True,
        "differences": [],
        "suffix": {"accepted": 7},
        "processes": [{"pid": 1, "role": "front end"}, {"pid": 2, "role": "worker"}],
        "arctic_installed": False,
        "arctic_imported": False,
        "drafters": ["vllm_drafter.proposer.SuffixProposer"],
        **changes,
    }


def test_equal_outputs_have_no_differences() -> None:
    assert differences(both(), PROMPTS) == []


def test_a_difference_names_prompt_and_first_token_that_differs() -> None:
    found = differences(both(tokens=[[1, 2, 3], [4, 6]]), PROMPTS)
    assert [(entry["prompt"], entry["from_token"]) for entry in found] == [
        (f"{group} 1", 1) for group in GROUPS
    ]


def test_an_output_that_stops_early_is_a_difference() -> None:
    found = differences(both(tokens=[[1, 2], [4, 5]]), PROMPTS)
    assert {entry["from_token"] for entry in found} == {2}


def test_every_round_is_compared_with_the_first_baseline() -> None:
    engines = both()
    engines["baseline"].append(engine(number=2, tokens=[[9], [9]]))
    assert {(e["kind"], e["round"]) for e in differences(engines, PROMPTS)} == {("baseline", 2)}


def test_seconds_are_the_median_of_the_rounds() -> None:
    rounds = [engine(seconds=seconds) for seconds in (10.0, 1.0, 2.0)]
    assert figures(rounds, ["open"])["seconds"] == 2.0


def test_tokens_per_forward_pass_counts_every_pass_that_gave_tokens() -> None:
    row = figures([engine(output_tokens=30, forward_passes=12)], list(GROUPS))
    assert row["tokens_per_forward_pass"] == 2.5


def test_without_drafts_there_is_no_acceptance_rate() -> None:
    assert figures([engine()], list(GROUPS))["acceptance_rate"] is None


def test_a_good_report_has_no_faults() -> None:
    assert faults(good_report()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"suffix": {"accepted": 0}}, "no draft token was accepted"),
        ({"processes": [{"pid": 1, "role": "front end"}]}, "1 processes registered"),
        ({"arctic_installed": True}, "arctic_inference is installed"),
        ({"arctic_imported": True}, "arctic_inference was imported"),
        ({"drafters": ["vllm.v1.spec_decode.suffix_decoding.SuffixDecodingProposer"]}, "with ours"),
        ({"drafters": []}, "drafts with nothing"),
    ],
)
def test_each_broken_promise_is_a_fault(changes: dict[str, Any], words: str) -> None:
    (fault,) = faults(good_report(**changes))
    assert words in fault


def test_outputs_that_differ_are_a_fault_that_names_one() -> None:
    entry = {"kind": "suffix", "round": 1, "group": "edit", "prompt": "a.py:f", "from_token": 3}
    (fault,) = faults(good_report(identical=False, differences=[entry]))
    assert "a.py:f" in fault
    assert "token 3" in fault


def test_the_two_kinds_of_engine_differ_in_speculation_and_our_switch_only() -> None:
    assert KINDS["baseline"]["speculative_config"] is None
    assert KINDS["baseline"]["environment"] == {"VLLM_DRAFTER": "0"}
    assert KINDS["suffix"]["speculative_config"] == {"method": "suffix"}
