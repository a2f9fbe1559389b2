"""The structure keeps its invariants through any sequence of operations."""

from __future__ import annotations

import importlib.util
import random
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafter_core import SuffixDrafter


def _integrity() -> ModuleType:
    path = Path(__file__).parent / "integrity.py"
    spec = importlib.util.spec_from_file_location("drafter_integrity", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


check_integrity = _integrity().check_integrity


def play(drafter: SuffixDrafter, name: str, request: int, text: list[int]) -> None:
    """Do an operation where it is allowed."""
    if name == "start" and request not in drafter.active_requests:
        drafter.start_request(request, text)
    elif name == "append" and request in drafter.active_requests:
        drafter.append(request, text)
    elif name == "stop" and request in drafter.active_requests:
        drafter.stop_request(request)
    elif name == "evict" and request in drafter.cached_requests:
        drafter.evict_cached_response(request)


NAMES = ["start", "append", "append", "append", "stop", "evict"]


@pytest.mark.parametrize("exact", [False, True])
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_invariants_hold_after_every_operation(exact: bool, data: st.DataObject) -> None:
    text = st.lists(st.integers(0, 3), max_size=10)
    operations = data.draw(
        st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3), text), max_size=25)
    )
    depth = data.draw(st.integers(1, 6))
    limit = data.draw(st.sampled_from([-1, 0, 1, 3]))
    drafter = SuffixDrafter(depth, limit, exact=exact)
    for operation in operations:
        play(drafter, *operation)
        check_integrity(drafter)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_invariants_hold_in_long_histories_with_wide_states(seed: int, exact: bool) -> None:
    rng = random.Random(seed)
    drafter = SuffixDrafter(rng.choice([1, 2, 3, 6, 24]), rng.choice([-1, 2, 4]), exact=exact)
    alphabet = rng.choice([1, 2, 3, 40, 300])
    for _ in range(60):
        length = rng.choice([0, 1, 2, 5, 200])
        text = [min(int(rng.expovariate(4 / alphabet)), alphabet) for _ in range(length)]
        if rng.random() < 0.3:
            text = text[:3] * 5
        play(drafter, rng.choice(NAMES), rng.randrange(5), text)
        check_integrity(drafter)


@pytest.mark.parametrize("exact", [False, True])
def test_an_emptied_cache_gives_all_its_states_back(exact: bool) -> None:
    rng = random.Random(3)
    drafter = SuffixDrafter(8, exact=exact)
    for request in range(30):
        drafter.start_request(request, [1, 2, 3])
        drafter.append(request, [rng.randrange(5) for _ in range(100)])
        drafter.stop_request(request)
    for request in rng.sample(range(30), 30):
        drafter.evict_cached_response(request)
    assert check_integrity(drafter) == 1
    assert drafter.stats().cached_tokens == 0


def test_no_draft_holds_an_id_that_was_not_given() -> None:
    rng = random.Random(9)
    drafter = SuffixDrafter(6, 2)
    given_ids: set[int] = set()
    for request in range(40):
        ids = [rng.randrange(2**31 - 1) for _ in range(4)]
        given_ids.update(ids)
        drafter.start_request(request, [rng.choice(ids) for _ in range(20)])
        for _ in range(5):
            drafter.append(request, [rng.choice(ids) for _ in range(7)])
            draft = drafter.draft(request, 8, 2.0, 0.0, 0.0)
            assert given_ids.issuperset(draft.token_ids)
        drafter.stop_request(request)


@pytest.mark.parametrize("asked", [False, True])
def test_a_long_response_leaves_the_cache_in_parts_and_completely(asked: bool) -> None:
    rng = random.Random(4)
    drafter = SuffixDrafter(5, 2 if asked else 1)
    drafter.start_request("long", [])
    drafter.append("long", [rng.randrange(6) for _ in range(10_000)])
    drafter.stop_request("long")
    if asked:
        drafter.evict_cached_response("long")
    drafter.start_request("next", [])
    assert list(drafter.cached_requests) == ["next"]
    sizes = [drafter.stats().cached_tokens]
    while sizes[-1] > 0:
        drafter.append("next", [])
        check_integrity(drafter)
        sizes.append(drafter.stats().cached_tokens)
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) > 5
    assert max(a - b for a, b in pairwise(sizes)) <= 1024
    assert drafter.stats().global_states == 1
