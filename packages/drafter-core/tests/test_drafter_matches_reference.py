"""The compiled drafter drafts what the obviously right one drafts, whatever happens to it."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafter_core import SuffixDrafter


def _reference() -> ModuleType:
    path = Path(__file__).parent / "reference.py"
    spec = importlib.util.spec_from_file_location("drafter_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reference = _reference()


def check_history(
    depth: int, limit: int, operations: list[tuple], spec: tuple[int, float, float, float]
) -> int:
    """Run the operations on both drafters, compare every draft; return how many were not empty."""
    fast = SuffixDrafter(depth, limit)
    slow = reference.ReferenceDrafter(depth, limit)
    drafted = 0
    for name, request_id, tokens in operations:
        active = request_id in slow.local
        if name == "start" and not active:
            fast.start_request(request_id, tokens)
            slow.start_request(request_id, tokens)
        elif name == "append" and active:
            fast.append(request_id, tokens)
            slow.append(request_id, tokens)
        elif name == "stop" and active:
            fast.stop_request(request_id)
            slow.stop_request(request_id)
        elif name == "evict" and request_id in slow.responses:
            fast.evict_cached_response(request_id)
            slow.evict_cached_response(request_id)
        assert list(fast.cached_requests) == list(slow.responses)
        assert list(fast.active_requests) == list(slow.local)
        for active_id in slow.local:
            draft = fast.draft(active_id, *spec)
            expected = slow.draft(active_id, *spec)
            assert (draft.token_ids, draft.probs, draft.score, draft.match_length) == expected
            drafted += len(expected[0]) > 0
    return drafted


TOKENS = {
    "two letters": st.integers(0, 1),
    "five letters": st.integers(0, 4),
    "sparse ids": st.sampled_from([0, 1, 7, 128_000, 2**31 - 2]),
}
SPECS = st.tuples(
    st.integers(0, 30),
    st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]),
    st.sampled_from([-1.0, 0.0, 0.5, 3.0]),
    st.sampled_from([0.0, 0.1, 0.4, 1.0]),
)


@pytest.mark.parametrize("alphabet", list(TOKENS))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_histories_give_the_reference_drafts(alphabet: str, data: st.DataObject) -> None:
    tokens = st.lists(TOKENS[alphabet], max_size=12)
    ids = st.integers(0, 3)
    names = st.sampled_from(["start", "append", "append", "append", "stop", "evict"])
    operations = data.draw(st.lists(st.tuples(names, ids, tokens), max_size=30))
    depth = data.draw(st.integers(1, 8))
    limit = data.draw(st.sampled_from([-1, 0, 1, 2, 3]))
    check_history(depth, limit, operations, data.draw(SPECS))


def random_operations(rng: random.Random, alphabet: int, count: int) -> list[tuple]:
    operations = []
    for _ in range(count):
        name = rng.choice(["start", "append", "append", "append", "stop", "evict"])
        length = rng.choice([0, 1, 3, 20])
        text = [rng.randrange(alphabet) for _ in range(length)]
        if rng.random() < 0.3:
            text = text[:3] * 8
        operations.append((name, rng.randrange(5), text))
    return operations


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("alphabet", [1, 2, 3, 40])
def test_long_histories_with_repeats_and_eviction_give_the_reference_drafts(
    seed: int, alphabet: int
) -> None:
    rng = random.Random(f"{seed} {alphabet}")
    operations = random_operations(rng, alphabet, 80)
    drafted = check_history(
        rng.choice([2, 5, 24]), rng.choice([-1, 2, 3]), operations, (8, 2.0, 0.0, 0.1)
    )
    assert drafted > 0 or alphabet == 40


def test_a_state_with_hundreds_of_successors_keeps_the_most_frequent_first() -> None:
    """Wide states keep their edges in hash tables that grow, shrink and lose entries."""
    rng = random.Random(5)
    operations: list[tuple] = [("start", "watcher", [])]
    for i in range(12):
        text = [token for _ in range(60) for token in (7, min(int(rng.expovariate(0.02)), 150))]
        operations += [("start", i, []), ("append", i, text), ("stop", i, [])]
    operations += [("append", "watcher", [7])]
    operations += [("evict", i, []) for i in rng.sample(range(12), 12)]
    assert check_history(3, -1, operations, (2, 2.0, 0.0, 0.0)) > 10


def test_a_batch_step_drafts_what_single_calls_draft() -> None:
    rng = random.Random(1)
    batch, single = SuffixDrafter(12, 3), SuffixDrafter(12, 3)
    token_ids = np.zeros((8, 400), np.int32)
    num_tokens = np.zeros(8, np.int32)
    rows = np.array([5, 0, 3, 7], np.int64)
    for i, row in enumerate(rows):
        prompt = [rng.randrange(4) for _ in range(rng.randrange(30))]
        batch.start_request(i, prompt)
        single.start_request(i, prompt)
        token_ids[row, : len(prompt)] = prompt
        num_tokens[row] = len(prompt)
    handles = np.array([batch.handle(i) for i in range(4)], np.int64)
    for _ in range(40):
        for row in rows:
            new = [rng.randrange(4) for _ in range(rng.randrange(6))]
            token_ids[row, num_tokens[row] : num_tokens[row] + len(new)] = new
            num_tokens[row] += len(new)
        limits = np.array([rng.randrange(9) for _ in rows], np.int32)
        drafts = batch.step(handles, rows, token_ids, num_tokens, limits, 2.0)
        lists = drafts.tolist()
        for i, row in enumerate(rows):
            single.append(i, token_ids[row, single.tokens_fed(i) : num_tokens[row]])
            expected = single.draft(i, int(limits[i]), 2.0)
            if limits[i] > 0:
                assert lists[i] == expected.token_ids
                assert drafts.scores[i] == np.float32(expected.score)
                assert drafts.match_lengths[i] == expected.match_length
            else:
                assert lists[i] == []
    assert set(drafts.status.tolist()) == {0}
