"""What `nox -s processes` takes for wrong in a layout of workers; seen things are made up here."""

from __future__ import annotations

from typing import Any

import pytest
from processes import DIFFERENT, IDENTICAL, OF_ITS_OWN, OURS, VLLM_S, Layout, unexpected

PAIR = Layout(
    "a pair", {}, {"front end": 1, "EngineCore": 1, "worker": 2}, ("worker 0", "worker 1")
)
AS_EXPECTED = {
    "registered": {"EngineCore": 1, "front end": 1, "worker": 2},
    "proposers": ["worker 0", "worker 1"],
    "accepted": 7,
    "outcome": IDENTICAL,
    "error": "",
}
REFUSED = Layout("refused", {}, {"front end": 1}, fails_with="cannot do that")
AS_REFUSED = {
    "registered": {"front end": 1},
    "proposers": [],
    "accepted": 0,
    "outcome": VLLM_S,
    "error": "ValueError: this platform cannot do that",
}


@pytest.mark.parametrize("outcome", [IDENTICAL, OF_ITS_OWN])
def test_a_layout_as_expected_is_not_complained_of(outcome: str) -> None:
    assert unexpected(PAIR, {**AS_EXPECTED, "outcome": outcome}) == []


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"registered": {"front end": 1, "EngineCore": 1, "worker": 1}}, "registered: expected"),
        ({"registered": {**AS_EXPECTED["registered"], "unknown": 1}}, "'unknown': 1"),
        ({"proposers": ["worker 0"]}, "proposers: expected"),
        ({"proposers": ["worker 0", "worker 0", "worker 1"]}, "proposers: expected"),
        ({"proposers": []}, "found []"),
        ({"accepted": 0}, "accepted: expected draft tokens"),
        ({"outcome": DIFFERENT}, "found 'DIFFERENT'"),
        ({"outcome": VLLM_S, "accepted": 3}, "expected identical outputs"),
    ],
)
def test_a_layout_that_is_not_as_expected_is_named(seen: dict[str, Any], words: str) -> None:
    [sentence] = unexpected(PAIR, {**AS_EXPECTED, **seen})
    assert words in sentence


def test_a_layout_that_vllm_refuses_is_as_expected_with_this_error() -> None:
    assert unexpected(REFUSED, AS_REFUSED) == []


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"error": "ValueError: out of memory"}, "'cannot do that' in it"),
        ({"outcome": OURS}, "found 'FAILS WITH US'"),
        ({"registered": {}}, "registered: expected"),
    ],
)
def test_another_failure_than_the_expected_one_is_named(seen: dict[str, Any], words: str) -> None:
    [sentence] = unexpected(REFUSED, {**AS_REFUSED, **seen})
    assert words in sentence


def test_a_layout_that_vllm_no_longer_refuses_is_named() -> None:
    seen = {**AS_REFUSED, "outcome": IDENTICAL, "accepted": 5, "error": ""}
    outcome, error = unexpected(REFUSED, seen)
    assert "found 'identical'" in outcome
    assert "found ''" in error
