"""What the printed row of a phase counts as the same; no engine runs here."""

from __future__ import annotations

from traffic import Pair, Phase

WHOLE, ABORTED = {"key": "whole"}, {"key": "aborted", "abort_after": 3}


def row(plain, drafting):
    """The row of a phase in which one request was let through and one aborted."""
    phases = [
        {"phase": Phase({key: [{"token_ids": ids}] for key, ids in answers.items()}, {}, 1)}
        for answers in (plain, drafting)
    ]
    return Pair(*phases, log="").row("phase", [WHOLE, ABORTED])


def test_an_aborted_request_is_compared_up_to_where_the_shorter_answer_ends():
    found = row({"whole": [1], "aborted": [1, 2, 3]}, {"whole": [1], "aborted": [1, 2, 3, 4]})
    assert found.startswith("| phase | 2 of 2, the aborted up to there |")


def test_an_aborted_request_that_says_something_else_up_to_there_is_not_the_same():
    found = row({"whole": [1], "aborted": [1, 2, 3]}, {"whole": [1], "aborted": [1, 9, 3, 4]})
    assert found.startswith("| phase | 1 of 2, the aborted up to there |")


def test_an_aborted_request_that_was_not_answered_is_not_the_same():
    found = row({"whole": [1], "aborted": [1, 2, 3]}, {"whole": [1], "aborted": []})
    assert found.startswith("| phase | 1 of 2, the aborted up to there |")


def test_a_request_that_was_not_aborted_is_compared_to_its_end():
    found = row({"whole": [1], "aborted": [1]}, {"whole": [1, 2], "aborted": [1]})
    assert found.startswith("| phase | 1 of 2, the aborted up to there |")
