"""The structure keeps its invariants through any sequence of operations."""

from __future__ import annotations

import importlib.util
import random
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from drafter_core import CapacityExhausted, SuffixDrafter
from drafter_core import _kernels as k
from drafter_core import drafter as module


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


def play(
    drafter: SuffixDrafter, given: dict[int, list[int]], name: str, request: int, text: list[int]
) -> None:
    """Do an operation where it is allowed; `given` is what the requests that run were given."""
    if name == "start" and request not in drafter.active_requests:
        drafter.start_request(request, text)
        given[request] = list(text)
    elif name == "append" and request in drafter.active_requests:
        drafter.append(request, text)
        given[request] += text
    elif name == "stop" and request in drafter.active_requests:
        drafter.stop_request(request)
        del given[request]
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
    running: dict[int, list[int]] = {}
    for operation in operations:
        play(drafter, running, *operation)
        check_integrity(drafter, running)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_invariants_hold_in_long_histories_with_wide_states(seed: int, exact: bool) -> None:
    rng = random.Random(seed)
    drafter = SuffixDrafter(rng.choice([1, 2, 3, 6, 24]), rng.choice([-1, 2, 4]), exact=exact)
    alphabet = rng.choice([1, 2, 3, 40, 300])
    running: dict[int, list[int]] = {}
    for _ in range(60):
        length = rng.choice([0, 1, 2, 5, 200])
        text = [min(int(rng.expovariate(4 / alphabet)), alphabet) for _ in range(length)]
        if rng.random() < 0.3:
            text = text[:3] * 5
        play(drafter, running, rng.choice(NAMES), rng.randrange(5), text)
        check_integrity(drafter, running)


def _place_of(drafter: SuffixDrafter, table: str, tree: int) -> tuple[NDArray[Any], Any]:
    """The array and the place of what is to be made wrong."""
    trees, states = drafter._tables.trees, drafter._tables.states
    root = trees[tree, k.R_ROOT]
    return {
        "a count": (states, (states[root, k.DST], k.COUNT)),
        "where a request goes on": (trees, (1, k.R_STATE)),
        "where its response goes on": (trees, (1, k.R_GSTATE)),
        "a text": (drafter._tables.texts, 0),
        "the length of a text": (drafter._tables.sequences, (0, k.Q_LEN)),
        "the free text chunks": (drafter._tables.header, k.G_TFREE),
    }[table]


@pytest.mark.parametrize(
    ("table", "tree"),
    [
        ("a count", 0),
        ("a count", 1),
        ("where a request goes on", 1),
        ("where its response goes on", 0),
        ("a text", 0),
        ("the length of a text", 0),
        ("the free text chunks", 0),
    ],
)
def test_what_is_wrong_is_found(table: str, tree: int) -> None:
    drafter = SuffixDrafter(4)
    drafter.start_request("a", [1, 2, 3])
    drafter.append("a", [4, 5, 4, 6])
    texts = {"a": [1, 2, 3, 4, 5, 4, 6]}
    check_integrity(drafter, texts)
    array, place = _place_of(drafter, table, tree)
    array[place] += 1
    with pytest.raises(AssertionError):
        check_integrity(drafter, texts)


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


# -- too little memory


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch, exact: bool) -> SuffixDrafter:
    """A drafter whose tables are small and cannot grow."""
    reserve = module.reserve

    def small(rows: int, columns: int, dtype, minimum: int = 1024):
        return reserve(1 << 14 if rows >= 1 << 20 else rows, columns, dtype, minimum)

    def refuse(array: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(module, "reserve", small)
        drafter = SuffixDrafter(6, exact=exact)
    monkeypatch.setattr(module, "_doubled", refuse)
    return drafter


def fill(drafter: SuffixDrafter, responses: int) -> SuffixDrafter:
    rng = random.Random(2)
    for request in range(responses):
        drafter.start_request(request, [1, 2])
        drafter.append(request, [rng.randrange(9) for _ in range(100)])
        drafter.stop_request(request)
    return drafter


@pytest.mark.parametrize("exact", [False, True])
def test_a_snapshot_that_memory_does_not_suffice_for_changes_nothing(
    tmp_path: Path, scarce: SuffixDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(SuffixDrafter(6), 400).save(tmp_path / "large")
    fill(SuffixDrafter(6), 20).save(tmp_path / "small")
    scarce.load(tmp_path / "small")
    cached, before = list(scarce.cached_requests), scarce.stats()
    for _ in range(3):
        with pytest.raises(CapacityExhausted, match="max_cached_requests"):
            scarce.load(tmp_path / "large")
        after = scarce.stats()
        assert list(scarce.cached_requests) == cached
        assert after.cached_tokens == before.cached_tokens
        assert after.evicted_responses == 0
        check_integrity(scarce)
    monkeypatch.undo()  # there is memory again
    assert scarce.load(tmp_path / "small") == 20
    check_integrity(scarce)
    assert scarce.start_request("next", [1]) == 1, "a handle was lost"


@pytest.mark.parametrize("exact", [False, True])
def test_a_prompt_that_memory_does_not_suffice_for_starts_nothing(
    scarce: SuffixDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    long = [rng.randrange(9) for _ in range(20_000)]
    for _ in range(3):
        with pytest.raises(CapacityExhausted, match="max_cached_requests"):
            scarce.start_request("long", long)
        assert not scarce.active_requests
        assert not scarce.cached_requests
        check_integrity(scarce)
    monkeypatch.undo()  # there is memory again
    assert scarce.start_request("long", long) == 1, "a handle was lost"
    scarce.append("long", [1, 2, 3])
    assert scarce.cached_response("long")[-3:].tolist() == [1, 2, 3]
    check_integrity(scarce)


def test_long_responses_do_not_pile_up_while_they_leave() -> None:
    rng = random.Random(5)
    drafter = SuffixDrafter(4, 2)
    held = []
    for request in range(40):
        drafter.start_request(request, [])
        drafter.append(request, [rng.randrange(50) for _ in range(5_000)])  # one call for all
        drafter.stop_request(request)
        held.append(drafter.stats().cached_tokens)
    assert max(held[20:]) == max(held[10:20])
    assert max(held) <= 20_000
    check_integrity(drafter)
