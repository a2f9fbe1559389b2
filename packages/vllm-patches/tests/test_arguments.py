"""What a request may say in its extra arguments, and what the answer to anything else is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_patches.priority import read_priority
from vllm_patches.rollout import read_output_lengths


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (None, None),
        ({}, None),
        ({"priority": 3}, 3),
        ({"priority": -2}, -2),
        ({"priority": 5.0}, 5),
    ],
)
def test_a_priority_is_an_integer(given, read) -> None:
    assert read_priority(given) == read


@pytest.mark.parametrize("value", ["3", 1.5, True, [1]])
def test_another_priority_is_refused(value) -> None:
    with pytest.raises(ValueError, match="an integer, higher for more urgent"):
        read_priority({"priority": value})


def params(n: int, lengths: object) -> SimpleNamespace:
    return SimpleNamespace(n=n, extra_args={"output_lengths": lengths})


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (SimpleNamespace(n=2, extra_args=None), None),
        (SimpleNamespace(), None),  # of a pooling request
        (params(2, [3, 4]), [3, 4]),
        (params(2, (3.0, 4)), [3, 4]),
    ],
)
def test_output_lengths_are_one_for_each_sequence(given, read) -> None:
    assert read_output_lengths(given) == read


@pytest.mark.parametrize(
    ("n", "lengths", "message"),
    [
        (2, [3], "gives 1 lengths for n=2"),
        (1, [0], "a positive integer, not 0"),
        (1, [True], "a positive integer, not True"),
        (1, [2.5], "a positive integer, not 2.5"),
        (1, 7, "is a list of lengths, not 7"),
        (1, "7", "is a list of lengths, not '7'"),
    ],
)
def test_other_output_lengths_are_refused(n, lengths, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_output_lengths(params(n, lengths))
