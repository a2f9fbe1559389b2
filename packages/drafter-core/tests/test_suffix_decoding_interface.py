"""The drop-in cache takes the peer's arguments, has its defaults and raises its exceptions.

`nox -s parity` compares the members of both with the peer installed.
"""

from __future__ import annotations

import inspect
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from drafter_core.suffix_decoding import SuffixDecodingCache, SuffixDecodingDraft


@pytest.fixture
def cache() -> SuffixDecodingCache:
    cache = SuffixDecodingCache(max_tree_depth=8, max_cached_requests=2)
    cache.start_request("a", [1, 2, 3, 1, 2])
    return cache


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("__init__", {"max_tree_depth": 64, "max_cached_requests": -1}),
        ("start_request", {"req_id": None, "prompt_token_ids": None}),
        ("stop_request", {"req_id": None}),
        ("add_active_response", {"req_id": None, "token_ids": None}),
        ("evict_cached_response", {"req_id": None}),
        (
            "speculate",
            {
                "req_id": None, "context": None, "max_spec_tokens": None, "max_spec_factor": 1.0,
                "max_spec_offset": 0.0, "min_token_prob": 0.1, "use_tree_spec": False,
            },
        ),
    ],
)  # fmt: skip
def test_methods_have_the_names_and_defaults_of_the_peer(
    method: str, parameters: dict[str, Any]
) -> None:
    found = inspect.signature(getattr(SuffixDecodingCache, method)).parameters.values()
    names = {p.name: None if p.default is p.empty else p.default for p in found}
    del names["self"]
    assert names == parameters


def test_settings_are_given_back(cache: SuffixDecodingCache) -> None:
    assert (cache.max_tree_depth, cache.max_cached_requests) == (8, 2)


def test_a_draft_without_tokens_is_the_default_draft() -> None:
    assert SuffixDecodingDraft() == SuffixDecodingDraft([], [], [], 0.0, 0)


def test_settings_without_effect_are_taken_as_the_peer_takes_them() -> None:
    for depth in (1, 0, -3):
        cache = SuffixDecodingCache(depth, -7)
        cache.start_request("a", [1, 1, 1])
        assert cache.speculate("a", [1, 1, 1], 4) == SuffixDecodingDraft()
        assert (cache.max_tree_depth, cache.max_cached_requests) == (depth, -7)


def test_too_many_cached_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="max_cached_requests"):
        SuffixDecodingCache(8, 2**31)


@pytest.mark.parametrize("depth", ["8", 3.5, None])
def test_a_depth_that_is_no_int_is_a_type_error(depth: Any) -> None:
    with pytest.raises(TypeError):
        SuffixDecodingCache(depth)


def test_starting_an_active_request_is_an_error(cache: SuffixDecodingCache) -> None:
    with pytest.raises(ValueError, match="'a' is already active"):
        cache.start_request("a", [1])


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("stop_request", ()), ("add_active_response", ([1],)), ("speculate", ([1],))],
)
def test_a_request_that_is_not_active_is_an_error(
    cache: SuffixDecodingCache, method: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(ValueError, match="'b' is not active"):
        getattr(cache, method)("b", *arguments)


def test_evicting_what_is_not_cached_is_an_error(cache: SuffixDecodingCache) -> None:
    with pytest.raises(ValueError, match="'b' is not cached"):
        cache.evict_cached_response("b")


def test_an_active_request_may_be_evicted_and_stays_active(cache: SuffixDecodingCache) -> None:
    cache.evict_cached_response("a")
    assert list(cache.active_requests) == ["a"]
    assert list(cache.cached_requests) == []


def test_the_oldest_response_is_evicted_first(cache: SuffixDecodingCache) -> None:
    for name in ("b", "c"):
        cache.start_request(name, [])
    assert list(cache.cached_requests) == ["b", "c"]
    assert list(cache.active_requests) == ["a", "b", "c"]


def test_without_a_cache_nothing_is_cached() -> None:
    cache = SuffixDecodingCache(8, 0)
    cache.start_request("a", [])
    cache.add_active_response("a", [1, 2, 3])
    assert list(cache.cached_requests) == []
    with pytest.raises(ValueError, match="not cached"):
        cache.evict_cached_response("a")


@pytest.mark.parametrize(
    ("array", "complaint"),
    [
        (np.array([1, 2]), "int32"),
        (np.array([1, 2], np.uint32), "int32"),
        (np.array([1, 2], ">i4"), "int32"),
        (np.array([[1, 2]], np.int32), "dimension"),
        (np.array(1, np.int32), "dimension"),
        (np.arange(8, dtype=np.int32)[::2], "contiguous"),
    ],
)
def test_arrays_are_contiguous_int32_of_one_dimension(
    cache: SuffixDecodingCache, array: Any, complaint: str
) -> None:
    for call in (
        lambda: cache.start_request("new", array),
        lambda: cache.add_active_response("a", array),
        lambda: cache.speculate("a", array),
    ):
        with pytest.raises(ValueError, match=complaint):
            call()
    assert list(cache.active_requests) == ["a"]


@pytest.mark.parametrize("tokens", ["ab", b"ab", 5, ["a"], [1.0], iter([1, 2]), None])
def test_what_is_no_sequence_of_ints_is_a_type_error(
    cache: SuffixDecodingCache, tokens: Any
) -> None:
    with pytest.raises(TypeError):
        cache.add_active_response("a", tokens)


@pytest.mark.parametrize("tokens", [(1, 2), range(3), [np.int64(3)], [True], []])
def test_any_sequence_of_ints_is_taken(cache: SuffixDecodingCache, tokens: Any) -> None:
    cache.add_active_response("a", tokens)


@pytest.mark.parametrize("token", [-1, 2**31 - 1, 2**31, 2**70])
def test_ids_that_are_no_token_ids_change_nothing(cache: SuffixDecodingCache, token: int) -> None:
    error = TypeError if token >= 2**31 else ValueError  # the peer takes int32s
    with pytest.raises(error, match="token id"):
        cache.start_request("new", [1, token])
    with pytest.raises(error, match="token id"):
        cache.add_active_response("a", [1, token])
    assert list(cache.active_requests) == ["a"]
    assert list(cache.cached_requests) == ["a"]


def test_a_request_id_that_cannot_be_hashed_is_a_type_error(cache: SuffixDecodingCache) -> None:
    with pytest.raises(TypeError):
        cache.start_request(["a"], [1])


def test_without_a_limit_the_depth_limits_the_draft(cache: SuffixDecodingCache) -> None:
    assert cache.speculate("a", [1, 2], max_spec_factor=9.0).token_ids == [3, 1, 2]
    assert cache.speculate("a", [1, 2], 1, 9.0).token_ids == [3]


def test_a_limit_that_is_no_int_is_a_type_error(cache: SuffixDecodingCache) -> None:
    with pytest.raises(TypeError):
        cache.speculate("a", [1, 2], 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [{"use_tree_spec": "x"}, {"use_tree_spec": 1}, {"min_token_prob": "x"},
     {"max_spec_factor": "1"}, {"max_spec_factor": None}, {"max_spec_offset": [1.0]},
     {"min_token_prob": np.ones(2)}, {"max_spec_factor": 10**400}, {"max_spec_tokens": 2**31},
     {"context": [2**31]}, {"context": [-(2**31) - 1]}],
)  # fmt: skip
def test_arguments_that_are_type_errors_to_the_peer_are_so_here(
    cache: SuffixDecodingCache, wrong: dict[str, Any]
) -> None:
    with pytest.raises(TypeError):
        cache.speculate(**{"req_id": "a", "context": [1, 2], **wrong})


@pytest.mark.parametrize("number", [1, True, np.float32(1), np.array(1.0), Fraction(1), Decimal(1)])
def test_whatever_has_a_float_is_a_number(cache: SuffixDecodingCache, number: Any) -> None:
    assert cache.speculate("a", [1, 2], 8, number) == cache.speculate("a", [1, 2], 8, 1.0)


def test_limits_are_whole_numbers() -> None:
    with pytest.raises(TypeError):
        SuffixDecodingCache(8, 2.5)
