"""`rollout-replay`: how long each sequence of a request gets, and that nothing else changes."""

from __future__ import annotations

import pytest

LENGTHS = [5, 31, 17, 1]
SAMPLED = {"n": 4, "temperature": 1.0, "seed": 20241104}


@pytest.fixture(scope="session")
def answers(run, tiny):
    """In one engine: as vLLM answers, then the same with lengths, in several ways."""
    engine = {"model": tiny, "dtype": "float32"}
    lengths = {"output_lengths": LENGTHS}
    # A stop token that the long answer is sure to meet is taken from it by the test of stopping.
    requests = [
        {**SAMPLED, "max_tokens": max(LENGTHS), "ignore_eos": True},
        {**SAMPLED, "extra_args": lengths},
        {**SAMPLED, "max_tokens": 3, "extra_args": lengths},
        {**SAMPLED, "extra_args": lengths, "stop_token_ids": list(range(0, 49152, 2))},
        {"n": 4, "temperature": 1.0, "extra_args": lengths},
        {"n": 1, "temperature": 0.0, "extra_args": {"output_lengths": [23]}},
        {**SAMPLED, "max_tokens": 7, "ignore_eos": True},
    ]
    found = run("rollouts", "rollout-replay", engine=engine, requests=requests)["answers"]
    names = ("plain", "lengths", "short maximum", "stops", "no seed", "single", "after")
    return dict(zip(names, found, strict=True))


def lengths_of(sequences: list[list[int]]) -> list[int]:
    return [len(sequence) for sequence in sequences]


def test_each_sequence_gets_its_own_length(answers):
    assert lengths_of(answers["plain"]) == [31, 31, 31, 31]
    assert lengths_of(answers["lengths"]) == LENGTHS


def test_what_is_sampled_is_what_would_have_been_sampled(answers):
    for sequence, whole in zip(answers["lengths"], answers["plain"], strict=True):
        assert sequence == whole[: len(sequence)]


@pytest.mark.parametrize("request_name", ["short maximum", "stops", "no seed"])
def test_neither_a_maximum_nor_a_stop_token_nor_a_shared_object_changes_a_length(
    answers, request_name
):
    assert lengths_of(answers[request_name]) == LENGTHS


def test_stop_tokens_are_sampled_like_any_other(answers):
    assert answers["stops"] == answers["lengths"]


def test_a_single_sequence_gets_its_length_too(answers):
    assert lengths_of(answers["single"]) == [23]


def test_a_request_without_lengths_is_left_alone(answers):
    assert lengths_of(answers["after"]) == [7] * 4


@pytest.fixture(scope="session")
def refused(run, tiny):
    """Wrong arguments for both patches that read some, in one engine."""
    requests = [
        {"n": 2, "extra_args": {"output_lengths": [4]}},
        {"n": 2, "extra_args": {"output_lengths": [4, 0]}},
        {"n": 2, "extra_args": {"output_lengths": [4, 5000]}},
        {"extra_args": {"output_lengths": "17"}},
        {"extra_args": {"priority": "high"}},
    ]
    patches = "rollout-replay,priority-scheduler"
    engine = {"model": tiny, "dtype": "float32"}
    return run("refusals", patches, engine=engine, requests=requests)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (0, "gives 1 lengths for n=2 sequences"),
        (1, "a length in 'output_lengths' is a positive integer, not 0"),
        (2, "asks for 5000 tokens, but after this prompt there is room for 1021"),
        (3, "is a list of lengths, not '17'"),
        (4, "'priority' is an integer, higher for more urgent, not 'high'"),
    ],
)
def test_a_wrong_argument_is_the_answer_to_its_request(refused, place, message):
    assert message in refused["messages"][place]


def test_the_engine_goes_on_after_wrong_arguments(refused):
    assert refused["after"] == 3
