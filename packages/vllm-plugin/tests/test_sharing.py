"""Whose answers a request is drafted from: VLLM_DRAFTER_SHARING."""

from __future__ import annotations

import pytest
from batches import COPYABLE, Batch, vllm_config

from vllm_drafter import proposer as proposers
from vllm_drafter.custom_class import CustomClassProposer
from vllm_drafter.proposer import TokensPerStepProposer
from vllm_drafter.settings import SettingError


@pytest.fixture
def sharing(monkeypatch):
    """Builds a proposer with a sharing."""

    def build(value):
        monkeypatch.setenv("VLLM_DRAFTER_SHARING", value)
        return TokensPerStepProposer(vllm_config())

    return build


def answer(proposer, request_id, said, lora=0):
    """A request that says something, and is gone; the drafts that it was given at the end."""
    batch = Batch()
    batch.add(request_id, [1, 2, 3], lora=lora)
    [draft] = proposer.propose(8, batch, batch.sample({request_id: said}))
    return draft


def test_by_default_everyones_answers_are_shared(sharing):
    proposer = sharing("global")
    answer(proposer, "first", COPYABLE, lora=1)
    assert answer(proposer, "second", COPYABLE[:4], lora=2) == COPYABLE[4:]


def test_with_none_a_request_sees_no_answer_but_its_own(sharing):
    proposer = sharing("none")
    answer(proposer, "first", COPYABLE)
    assert answer(proposer, "second", COPYABLE[:4]) == []
    assert answer(proposer, "third", [*COPYABLE, *COPYABLE[:4]])[:6] == COPYABLE[4:]


def test_with_none_two_running_requests_do_not_see_each_other(sharing):
    proposer = sharing("none")
    batch = Batch()
    batch.add("a", [1, 2, 3])
    batch.add("b", [4, 5, 6])
    assert proposer.propose(8, batch, batch.sample({"a": COPYABLE, "b": COPYABLE[:4]}))[1] == []
    assert proposer.propose(8, batch, batch.sample({"a": [9], "b": COPYABLE[4:6]}))[1] == []


def test_with_none_nothing_is_kept(sharing):
    proposer = sharing("none")
    answer(proposer, "first", COPYABLE)
    assert proposer.loop.sizes().cached_tokens == 0


def test_with_lora_answers_stay_with_their_adapter(sharing):
    proposer = sharing("lora")
    answer(proposer, "first", COPYABLE, lora=1)
    assert answer(proposer, "other", COPYABLE[:4], lora=2) == []
    assert answer(proposer, "base", COPYABLE[:4]) == []
    assert answer(proposer, "same", COPYABLE[:4], lora=1) == COPYABLE[4:]


def test_an_adapter_that_comes_while_serving_prepares_no_kernels(sharing, caplog):
    with caplog.at_level("INFO", logger="vllm"):
        proposer = sharing("lora")
        assert caplog.text.count("preparing the drafter's kernels") == 1
        answer(proposer, "first", COPYABLE, lora=1)
    assert len(proposer.loop.siblings) == 1
    assert caplog.text.count("preparing the drafter's kernels") == 1


def test_with_lora_each_row_of_a_mixed_batch_gets_its_own_draft(sharing):
    proposer = sharing("lora")
    other = [value + 100 for value in COPYABLE]
    batch = Batch()
    batch.add("a", [*COPYABLE, 1], lora=1)
    batch.add("b", [*other, 2], lora=2)
    batch.add("c", [*COPYABLE, 3], lora=1)
    drafts = proposer.propose(6, batch, batch.sample({"a": COPYABLE[:4], "b": other[:4], "c": []}))
    assert drafts == [COPYABLE[4:], other[4:], []]
    batch.swap("a", "b")
    batch.remove("c")
    drafts = proposer.propose(2, batch, batch.sample({"a": COPYABLE[4:6], "b": other[4:6]}))
    assert drafts == [other[6:8], COPYABLE[6:8]]


def test_with_lora_the_requests_that_are_gone_are_ended_for_every_adapter(sharing):
    proposer = sharing("lora")
    answer(proposer, "first", COPYABLE, lora=1)
    answer(proposer, "second", COPYABLE, lora=2)
    assert proposer.loop.sizes().active_requests == 1
    assert proposer.loop.sizes().cached_requests == 2


def test_the_adapter_that_was_not_used_for_longest_is_forgotten(sharing, monkeypatch):
    monkeypatch.setattr(proposers, "MAX_ADAPTERS", 3)
    proposer = sharing("lora")
    answer(proposer, "first", COPYABLE, lora=1)
    for adapter in (2, 1, 3):
        answer(proposer, f"with {adapter}", COPYABLE, lora=adapter)
    assert answer(proposer, "again 1", COPYABLE[:4], lora=1) == COPYABLE[4:]
    assert len(proposer.loop.siblings) == 2
    assert answer(proposer, "again 2", COPYABLE[:4], lora=2) == []


def test_faults_of_an_adapters_requests_are_counted(sharing):
    proposer = sharing("lora")
    answer(proposer, "first", [*COPYABLE, -5], lora=1)
    assert proposer.loop.faults == 1


def test_a_tenant_that_vllm_does_not_tell_is_refused_and_why(monkeypatch):
    monkeypatch.setenv("VLLM_DRAFTER_SHARING", "tenant")
    with pytest.raises(SettingError, match=r"global, lora or none.*cache_salt"):
        TokensPerStepProposer(vllm_config())


def test_the_custom_class_keeps_to_none(monkeypatch):
    monkeypatch.setenv("VLLM_DRAFTER_SHARING", "none")
    assert CustomClassProposer(vllm_config()).settings.max_cached_requests == 0


def test_the_custom_class_cannot_tell_adapters_apart(monkeypatch):
    monkeypatch.setenv("VLLM_DRAFTER_SHARING", "lora")
    with pytest.raises(SettingError, match="expected global or none with the custom class"):
        CustomClassProposer(vllm_config())
