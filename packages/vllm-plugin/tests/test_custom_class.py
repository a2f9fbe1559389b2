"""The custom class gets rows and no request ids: it has to know a request by its tokens."""

from __future__ import annotations

import numpy as np
import pytest
from batches import COPYABLE, Batch, vllm_config
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_drafter
from vllm_drafter.custom_class import CustomClassProposer, RowTracker

OTHER = [31, 32, 33, 34, 35, 36, 37, 38, 39, 40]


@pytest.fixture
def proposer():
    return CustomClassProposer(vllm_config(num_speculative_tokens=3))


def propose(proposer, batch, sampled):
    """Ask as vLLM's runner does."""
    drafts = proposer.propose(
        batch.sample(sampled), batch.num_tokens_no_spec, batch.token_ids_cpu, slot_mappings=None
    )
    return dict(zip(batch.req_ids, drafts, strict=True))


def test_the_class_is_found_by_the_path_that_vllm_is_given():
    assert vllm_drafter.CustomClassProposer is CustomClassProposer


def test_a_name_that_the_package_does_not_have_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Nonsense"):
        vllm_drafter.Nonsense


def test_rows_are_recognised_after_they_were_swapped(proposer):
    batch = Batch()
    batch.add("a", [*COPYABLE, 1, 2, 3])
    batch.add("b", [*OTHER, 4, 5, 6])
    propose(proposer, batch, {"a": COPYABLE[:2], "b": OTHER[:2]})
    batch.swap("a", "b")
    assert propose(proposer, batch, {"a": COPYABLE[2:4], "b": OTHER[2:4]}) == {
        "a": COPYABLE[4:7],
        "b": OTHER[4:7],
    }
    assert proposer.loop.not_running(set()) == {0, 1}


def test_rows_are_recognised_after_they_were_condensed(proposer):
    batch = Batch()
    batch.add("gone", [7, 8, 9])
    batch.add("b", [*OTHER, 4, 5, 6])
    batch.add("a", [*COPYABLE, 1, 2, 3])
    propose(proposer, batch, {"gone": [9], "a": COPYABLE[:2], "b": OTHER[:2]})
    batch.remove("gone")
    assert batch.req_ids == ["a", "b"]
    assert propose(proposer, batch, {"a": COPYABLE[2:4], "b": OTHER[2:4]}) == {
        "a": COPYABLE[4:7],
        "b": OTHER[4:7],
    }
    assert proposer.loop.not_running(set()) == {1, 2}


def test_requests_of_the_same_content_share_nothing_once_they_differ(proposer):
    batch = Batch()
    batch.add("a", [*COPYABLE, *OTHER])
    batch.add("b", [*COPYABLE, *OTHER])
    propose(proposer, batch, {"a": [50], "b": [50]})
    batch.swap("a", "b")
    drafts = propose(proposer, batch, {"a": COPYABLE[:2], "b": OTHER[:2]})
    assert drafts == {"a": COPYABLE[2:5], "b": OTHER[2:5]}


def test_a_partial_prefill_is_not_followed(proposer):
    batch = Batch()
    batch.add("prefilling", [*COPYABLE, *COPYABLE])
    assert propose(proposer, batch, {}) == {"prefilling": []}
    assert not proposer.loop.not_running(set())


def test_what_a_request_generated_helps_those_after_it(proposer):
    batch = Batch()
    batch.add("a", [1, 2, 3])
    propose(proposer, batch, {"a": COPYABLE})
    batch.remove("a")
    batch.add("b", [4, 5, 6])
    assert propose(proposer, batch, {"b": COPYABLE[:4]}) == {"b": COPYABLE[4:7]}


def test_a_fault_is_counted_and_costs_nothing_else(proposer):
    assert proposer.propose([[1], [2]], None, None) == [[], []]
    assert proposer.loop.faults == 1


def test_turned_off_it_proposes_nothing(monkeypatch):
    monkeypatch.setenv("VLLM_DRAFTER", "0")
    proposer = CustomClassProposer(vllm_config(max_tree_depth=0))
    batch = Batch()
    batch.add("a", [*COPYABLE, 1, 2, 3])
    assert propose(proposer, batch, {"a": COPYABLE[:3]}) == {"a": []}


def test_the_runner_may_ask_it_to_load_its_model(proposer):
    assert proposer.load_model(object()) is None


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whatever_moves_a_row_is_taken_for_a_request_of_its_own_content(data):
    """Requests come, go, pause and move; few different tokens, so that contents often agree."""
    token = st.integers(0, 1)
    batch, tracker = Batch(max_num_reqs=6, max_model_len=64), RowTracker()
    texts: dict[int, list[int]] = {}
    count = 0
    for _ in range(data.draw(st.integers(1, 12))):
        for name in list(batch.req_ids):
            if data.draw(st.integers(0, 5)) == 0:
                batch.remove(name)
        while len(batch.req_ids) < 6 and data.draw(st.booleans()):
            batch.add(f"r{count}", data.draw(st.lists(token, min_size=1, max_size=4)))
            count += 1
        if len(batch.req_ids) > 1 and data.draw(st.booleans()):
            batch.swap(batch.req_ids[0], batch.req_ids[-1])
        before = [batch.token_ids_cpu[r, : batch.num_tokens_no_spec[r]].tolist() for r in range(6)]
        sampled = batch.sample(
            {
                name: data.draw(st.lists(token, min_size=1, max_size=2))
                for name in batch.req_ids
                if data.draw(st.integers(0, 4)) > 0
            }
        )
        rows = [row for row, tokens in enumerate(sampled) if tokens]
        new = [len(sampled[row]) for row in rows]
        keys, prompts, gone = tracker.follow(
            rows, new, batch.num_tokens_no_spec, batch.token_ids_cpu
        )
        assert len(set(keys)) == len(rows) == len(prompts)
        assert not set(gone) & set(keys)
        # a known key goes on from exactly what it had, and every known key that can go on does
        for key, row in zip(keys, rows, strict=True):
            assert texts.get(key, before[row]) == before[row]
        unmatched = [before[row] for key, row in zip(keys, rows, strict=True) if key not in texts]
        assert not [text for key, text in texts.items() if key in gone and text in unmatched]
        assert set(gone) == texts.keys() - set(keys)
        texts = {
            key: batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]].tolist()
            for key, row in zip(keys, rows, strict=True)
        }


def test_long_requests_are_followed_from_step_to_step():
    tokens = np.arange(5000, dtype=np.int32).reshape(1, -1)
    tracker = RowTracker()
    first, _, _ = tracker.follow([0], [1], np.array([3], np.int32), tokens)
    for before, length in ((3, 4), (4, 260), (260, 300), (300, 4000)):
        new = length - before
        keys, prompts, gone = tracker.follow([0], [new], np.array([length], np.int32), tokens)
        assert (keys, prompts, gone) == (first, [2], [])
