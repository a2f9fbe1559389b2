"""The drop-in cache drafts what the peer drafts, as far as the tests' reference states it."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafter_core.suffix_decoding import SuffixDecodingCache


def _reference() -> ModuleType:
    path = Path(__file__).parent / "reference_peer.py"
    spec = importlib.util.spec_from_file_location("drafter_reference_peer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


ReferenceCache = _reference().ReferenceCache
FIELDS = ("token_ids", "parents", "probs", "score", "match_len")


class Both:
    """The drop-in cache and the reference, given the same operations."""

    def __init__(self, depth: int = 8, cached: int = -1) -> None:
        self.ours = SuffixDecodingCache(depth, cached)
        self.reference = ReferenceCache(depth, cached)

    def do(self, operation: str, *arguments: Any) -> bool:
        """Run on both; the exceptions and the lists of requests must agree."""
        outcomes = []
        for cache in (self.ours, self.reference):
            try:
                getattr(cache, operation)(*arguments)
                outcomes.append("")
            except ValueError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        assert list(self.ours.active_requests) == list(self.reference.active_requests)
        assert list(self.ours.cached_requests) == list(self.reference.cached_requests)
        return not outcomes[0]

    def draft(self, *arguments: Any) -> Any:
        """Draft with both; every field must agree exactly."""
        found = self.ours.speculate(*arguments)
        wanted = self.reference.speculate(*arguments)
        for name in FIELDS:
            assert getattr(found, name) == getattr(wanted, name), (name, found, wanted)
        return found


def run_randomly(seed: int, operations: int) -> int:
    """Random operations on both; return how many drafts were not empty."""
    draw = random.Random(seed)
    both = Both(draw.choice([1, 2, 3, 5, 12, 24]), draw.choice([-1, 0, 1, 2, 4]))
    alphabet = draw.choice([1, 2, 3, 8, 40_000])
    contexts: dict[int, list[int]] = {}
    drafted = 0

    def some(most: int) -> list[int]:
        motif = [draw.randrange(alphabet) for _ in range(draw.randint(1, 6))]
        length = draw.randint(0, most)
        if draw.random() < 0.5:
            return (motif * length)[:length]
        return [draw.randrange(alphabet) for _ in range(length)]

    for _ in range(operations):
        request = draw.randrange(4)
        kind = draw.random()
        if kind < 0.1:
            prompt = some(20)
            if both.do("start_request", request, prompt):
                contexts[request] = prompt
        elif kind < 0.14:
            if both.do("stop_request", request):
                del contexts[request]
        elif kind < 0.18:
            both.do("evict_cached_response", request)
        elif kind < 0.5:
            tokens = some(12)
            if both.do("add_active_response", request, tokens):
                contexts[request] += tokens
        elif contexts:
            request = draw.choice(list(contexts))
            context = contexts[request] if draw.random() < 0.7 else some(12)
            draft = both.draft(
                request, context, draw.choice([-1, 0, 1, 4, 16]),
                draw.choice([0.0, 0.3, 1.0, 2.0, 4.0]), draw.choice([0.0, 1.0, -1.0, 1.999999]),
                draw.choice([0.0, 0.1, 1 / 3, 0.5, 1.0, float("nan")]), draw.random() < 0.5,
            )  # fmt: skip
            drafted += bool(draft.token_ids)
    return drafted


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_history_drafts_alike(seed: int) -> None:
    run_randomly(seed, 150)


def test_the_random_histories_do_draft() -> None:
    assert sum(run_randomly(seed, 150) for seed in range(20)) > 200


def test_a_match_is_shorter_than_the_context() -> None:
    both = Both()
    both.do("start_request", "a", [1, 2, 3, 1, 2])
    assert both.draft("a", [2], 8).token_ids == []
    assert both.draft("a", [1, 2], 8).token_ids == [3]


def test_of_two_continuations_that_occur_equally_often_the_older_is_drafted() -> None:
    both = Both()
    both.do("start_request", "a", [1, 2, 9, 1, 3, 9])
    assert both.draft("a", [9, 1], 1).token_ids == [2]


def test_a_continuation_that_catches_up_without_leading_comes_after_its_equals() -> None:
    both = Both(4)
    for name, token in enumerate([2, 3, 2, 4, 4]):
        both.do("start_request", name, [])
        both.do("add_active_response", name, [1, token])
    both.do("start_request", "new", [])
    assert both.draft("new", [9, 1], 1).token_ids == [2]
    both.do("evict_cached_response", 0)
    assert both.draft("new", [9, 1], 1).token_ids == [4]


def test_a_leader_that_catches_up_leads_its_equals_until_it_is_evicted() -> None:
    both = Both(4)
    for name, token in enumerate([2, 2, 3, 3]):
        both.do("start_request", name, [])
        both.do("add_active_response", name, [1, token])
    both.do("start_request", "new", [])
    assert both.draft("new", [9, 1], 1).token_ids == [3]
    both.do("evict_cached_response", 2)
    assert both.draft("new", [9, 1], 1).token_ids == [2]


def test_a_tree_draft_branches_where_the_text_did() -> None:
    both = Both()
    for name, text in enumerate([[1, 2, 5], [1, 3, 6], [1, 4, 7]]):
        both.do("start_request", name, [])
        both.do("add_active_response", name, text)
    both.do("start_request", "new", [])
    draft = both.draft("new", [9, 1], 6, 8.0, 0.0, 0.1, True)
    assert sorted(draft.token_ids) == [2, 3, 4, 5, 6, 7]
    assert draft.parents.count(-1) == 3


def test_long_repeats_draft_up_to_the_depth() -> None:
    both = Both(24)
    both.do("start_request", "a", [7] * 300)
    draft = both.draft("a", [7] * 300, 64, 4.0)
    assert set(draft.token_ids) == {7}
    assert len(draft.token_ids) + draft.match_len == 24


def test_a_request_id_is_used_again_after_its_response_was_cached() -> None:
    both = Both()
    for text in ([1, 2, 3], [4, 5, 6]):
        both.do("start_request", "same", [])
        both.do("add_active_response", "same", text)
        both.do("stop_request", "same")
    both.do("start_request", "other", [])
    assert both.draft("other", [9, 4], 4).token_ids == [5]
    assert both.draft("other", [9, 1], 4).token_ids == []


def test_an_evicted_request_that_runs_on_drafts_from_its_own_text_only() -> None:
    both = Both()
    both.do("start_request", "a", [])
    both.do("add_active_response", "a", [1, 2, 3])
    both.do("evict_cached_response", "a")
    both.do("add_active_response", "a", [1, 2, 3])
    both.do("start_request", "b", [])
    assert both.draft("a", [9, 1], 4).token_ids == [2]
    assert both.draft("b", [9, 1], 4).token_ids == []


@pytest.mark.parametrize("use_tree_spec", [False, True])
def test_an_array_as_context_drafts_what_the_list_does(use_tree_spec: bool) -> None:
    cache = SuffixDecodingCache(8)
    cache.start_request("a", np.array([1, 2, 3, 1, 2], np.int32))
    cache.add_active_response("a", np.array([3, 1], np.int32))
    settings = (8, 2.0, 0.0, 0.1, use_tree_spec)
    as_list = cache.speculate("a", [2, 3, 1], *settings)
    assert as_list.token_ids
    assert cache.speculate("a", np.array([2, 3, 1], np.int32), *settings) == as_list
