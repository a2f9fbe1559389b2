"""The proposers on a batch made by hand: what they say at each step, and what never stops them."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from batches import COPYABLE, MAX_MODEL_LEN, Batch, vllm_config

from vllm_drafter.custom_class import CustomClassProposer
from vllm_drafter.proposer import (
    InputBatchProposer,
    SlotMappingsProposer,
    TokensPerStepProposer,
)
from vllm_drafter.settings import SettingError

SHAPES = {
    "0.11.1": (InputBatchProposer, lambda p, k, batch, sampled: p.propose(batch, sampled)),
    "0.15": (
        SlotMappingsProposer,
        lambda p, k, batch, sampled: p.propose(batch, sampled, slot_mappings=None),
    ),
    "0.24": (
        TokensPerStepProposer,
        lambda p, k, batch, sampled: p.propose(k, batch, sampled, slot_mappings=None),
    ),
}


@pytest.fixture(params=SHAPES)
def propose(request):
    """A function that asks a new proposer for drafts as that release's runner does."""
    shape, call = SHAPES[request.param]
    proposer = shape(vllm_config())

    def propose(batch, sampled, k=8):
        return call(proposer, k, batch, sampled)

    propose.proposer = proposer
    return propose


@pytest.fixture
def proposer():
    return TokensPerStepProposer(vllm_config())


def assert_copies(draft, sampled):
    """The draft continues the text that the prompt held."""
    at = COPYABLE.index(sampled[-1]) + 1
    assert draft
    assert draft == COPYABLE[at : at + len(draft)]


def test_a_request_that_repeats_its_prompt_gets_the_rest_of_it(propose):
    batch = Batch()
    batch.add("a", [*COPYABLE, 1, 2, 3])
    sampled = batch.sample({"a": COPYABLE[:3]})
    [draft] = propose(batch, sampled)
    assert draft[:7] == COPYABLE[3:]


def test_drafts_are_lists_of_python_ints_one_for_each_row(propose):
    batch = Batch()
    for name in ("a", "b", "c"):
        batch.add(name, [*COPYABLE, 1, 2, 3])
    drafts = propose(batch, batch.sample({"a": COPYABLE[:3], "c": COPYABLE[:5]}))
    assert len(drafts) == 3
    assert all(type(draft) is list for draft in drafts)
    assert all(type(token) is int for draft in drafts for token in draft)


def test_a_partial_prefill_gets_no_draft_and_is_not_started(propose):
    batch = Batch()
    batch.add("prefilling", [*COPYABLE, *COPYABLE])
    assert propose(batch, batch.sample({})) == [[]]
    assert not propose.proposer.loop.not_running(set())


def test_sampled_ids_may_be_arrays(propose):
    batch = Batch()
    batch.add("a", [*COPYABLE, 1, 2, 3])
    batch.add("b", [5])
    sampled = [np.asarray(ids, dtype=np.int64) for ids in batch.sample({"a": COPYABLE[:3]})]
    first, second = propose(batch, sampled)
    assert first[:7] == COPYABLE[3:]
    assert second == []


def test_a_step_can_ask_for_fewer_tokens_than_configured(proposer):
    batch = Batch()
    batch.add("a", [*COPYABLE, 1, 2, 3])
    assert proposer.propose(2, batch, batch.sample({"a": COPYABLE[:3]})) == [COPYABLE[3:5]]


def test_a_step_that_asks_for_none_still_teaches_the_drafter(proposer):
    batch = Batch()
    batch.add("first", [1, 2, 3])
    assert proposer.propose(0, batch, batch.sample({"first": COPYABLE})) == [[]]
    batch.remove("first")
    batch.add("second", [4, 5, 6])
    [draft] = proposer.propose(8, batch, batch.sample({"second": COPYABLE[:3]}))
    assert_copies(draft, COPYABLE[:3])


def test_no_draft_goes_beyond_the_models_length(proposer):
    prompt = [*COPYABLE, *range(100, 100 + MAX_MODEL_LEN - len(COPYABLE) - 6)]
    batch = Batch()
    batch.add("a", prompt)
    [draft] = proposer.propose(8, batch, batch.sample({"a": COPYABLE[:3]}))
    room = MAX_MODEL_LEN - 1 - (len(prompt) + 3)
    assert draft == COPYABLE[3 : 3 + room]
    [draft] = proposer.propose(8, batch, batch.sample({"a": COPYABLE[3:6]}))
    assert draft == []
    assert proposer.loop.faults == 0


def test_what_lies_beyond_a_rows_length_is_not_read(proposer):
    batch = Batch()
    batch.add("a", [*COPYABLE, 1, 2, 3])
    for at in range(0, 8, 2):
        sampled = batch.sample({"a": COPYABLE[at : at + 2]})
        batch.scribble()
        [draft] = proposer.propose(8, batch, sampled)
        if at >= 2:
            assert_copies(draft[: 10 - at - 2], COPYABLE[at : at + 2])
            assert 7 not in draft
    assert proposer.loop.faults == 0


def test_drafts_follow_their_requests_when_rows_are_swapped(proposer):
    other = [31, 32, 33, 34, 35, 36, 37, 38]
    batch = Batch()
    batch.add("a", [*COPYABLE, 1, 2, 3])
    batch.add("b", [*other, 4, 5, 6])
    proposer.propose(8, batch, batch.sample({"a": COPYABLE[:2], "b": other[:2]}))
    batch.swap("a", "b")
    assert batch.req_ids == ["b", "a"]
    b, a = proposer.propose(3, batch, batch.sample({"a": COPYABLE[2:4], "b": other[2:4]}))
    assert a == COPYABLE[4:7]
    assert b == other[4:7]


def test_drafts_follow_their_requests_when_rows_are_condensed(proposer):
    other = [31, 32, 33, 34, 35, 36, 37, 38]
    batch = Batch()
    batch.add("gone", [1, 2, 3, 4, 5, 6])
    batch.add("b", [*other, 4, 5, 6])
    batch.add("a", [*COPYABLE, 1, 2, 3])
    proposer.propose(8, batch, batch.sample({"gone": [9], "a": COPYABLE[:2], "b": other[:2]}))
    batch.remove("gone")
    assert batch.req_ids == ["a", "b"]
    a, b = proposer.propose(3, batch, batch.sample({"a": COPYABLE[2:4], "b": other[2:4]}))
    assert a == COPYABLE[4:7]
    assert b == other[4:7]


def test_a_request_that_is_gone_leaves_its_answer_as_a_source(proposer):
    batch = Batch()
    batch.add("first", [1, 2, 3])
    proposer.propose(8, batch, batch.sample({"first": COPYABLE}))
    batch.remove("first")
    batch.add("second", [4, 5, 6])
    [draft] = proposer.propose(8, batch, batch.sample({"second": COPYABLE[:4]}))
    assert_copies(draft, COPYABLE[:4])
    assert proposer.loop.not_running(set()) == {"second"}


def test_a_preempted_request_comes_back_with_all_it_had(proposer):
    batch = Batch()
    batch.add("a", [1, 2, 3])
    batch.add("b", [4, 5, 6])
    proposer.propose(8, batch, batch.sample({"a": [*COPYABLE, 7], "b": [9]}))
    batch.remove("a")
    proposer.propose(8, batch, batch.sample({"b": [8]}))
    assert "a" not in proposer.loop.not_running(set())
    batch.add("a", [1, 2, 3], [*COPYABLE, 7])
    # its context is computed again over several steps, during which nothing is sampled
    assert proposer.propose(8, batch, batch.sample({"b": [7]}))[1] == []
    _, draft = proposer.propose(8, batch, batch.sample({"a": COPYABLE[:3], "b": [6]}))
    assert_copies(draft[:7], COPYABLE[:3])
    assert proposer.loop.faults == 0


def test_a_resumed_request_counts_once_as_a_source(proposer):
    batch = Batch()
    batch.add("a", [1, 2, 3])
    proposer.propose(8, batch, batch.sample({"a": COPYABLE}))
    batch.remove("a")
    proposer.propose(8, batch, [])
    batch.add("a", [1, 2, 3], COPYABLE)
    proposer.propose(8, batch, batch.sample({"a": [50]}))
    prompt = 3  # its end is kept with the response
    assert proposer.loop._drafter.stats().cached_tokens == prompt + len(COPYABLE) + 1


def test_an_id_used_again_in_the_next_step_is_a_new_request(proposer):
    batch = Batch()
    batch.add("a", [1, 2, 3, 4, 5])
    proposer.propose(8, batch, batch.sample({"a": [6, 7, 8]}))
    batch.remove("a")
    batch.add("a", [*COPYABLE, 41])
    [draft] = proposer.propose(8, batch, batch.sample({"a": COPYABLE[:3]}))
    assert draft[:7] == COPYABLE[3:]
    assert proposer.loop.faults == 0


def test_an_id_used_again_with_a_prompt_of_the_same_length_is_a_new_request(proposer):
    batch = Batch()
    batch.add("a", list(range(50, 63)))
    proposer.propose(8, batch, batch.sample({"a": [6, 7, 8]}))
    batch.remove("a")
    batch.add("a", [*COPYABLE, 1, 2, 3])
    [draft] = proposer.propose(8, batch, batch.sample({"a": COPYABLE[:3]}))
    assert draft[:7] == COPYABLE[3:]
    assert proposer.loop.faults == 0


def test_a_request_whose_last_tokens_were_taken_back_starts_over(proposer):
    batch = Batch()
    batch.add("a", [*COPYABLE, 1, 2, 3])
    proposer.propose(8, batch, batch.sample({"a": [50, 51, 52]}))
    batch.num_tokens_no_spec[0] -= 2
    [draft] = proposer.propose(8, batch, batch.sample({"a": COPYABLE[:3]}))
    assert draft[:7] == COPYABLE[3:]
    assert proposer.loop.faults == 0


def test_the_samples_of_one_prompt_are_requests_of_their_own(proposer):
    batch = Batch()
    prompt = [*COPYABLE, 1, 2, 3]
    batch.add("0_parent", prompt)
    batch.add("1_parent", prompt)
    first, second = proposer.propose(
        3, batch, batch.sample({"0_parent": COPYABLE[:2], "1_parent": COPYABLE[4:6]})
    )
    assert first == COPYABLE[2:5]
    assert second == COPYABLE[6:9]


def test_a_prompt_given_as_embeddings_gets_no_draft(proposer):
    batch = Batch()
    batch.add("a", [*COPYABLE, 1, 2, 3])
    batch.add("b", [*COPYABLE, 1, 2, 3])
    batch.req_prompt_embeds[0] = object()
    a, b = proposer.propose(3, batch, batch.sample({"a": COPYABLE[:2], "b": COPYABLE[:2]}))
    assert a == []
    assert b == COPYABLE[2:5]


def test_requests_that_old_releases_cannot_verify_get_no_draft():
    proposer = InputBatchProposer(vllm_config())
    batch = Batch()
    batch.add("penalised", [*COPYABLE, 1, 2, 3])
    batch.add("plain", [*COPYABLE, 1, 2, 3])
    batch.spec_decode_unsupported_reqs = {"penalised"}
    penalised, plain = proposer.propose(
        batch, batch.sample({"penalised": COPYABLE[:2], "plain": COPYABLE[:2]})
    )
    assert penalised == []
    assert plain[:8] == COPYABLE[2:]


def test_the_settings_of_vllm_are_honoured():
    batch = Batch()
    batch.add("a", [*COPYABLE, 1, 2, 3])
    sampled = batch.sample({"a": COPYABLE[:3]})
    # The depth is that of the trees: a text that is copied is drafted beyond it.
    shallow = TokensPerStepProposer(vllm_config(max_tree_depth=5))
    assert shallow.loop.settings.max_tree_depth == 5
    assert shallow.propose(8, batch, sampled) == [[*COPYABLE[3:], 1]]
    assert TokensPerStepProposer(vllm_config(max_spec_factor=1.0)).propose(8, batch, sampled) == [
        COPYABLE[3:6]
    ]
    assert TokensPerStepProposer(vllm_config(max_spec_factor=0.0)).propose(8, batch, sampled) == [
        []
    ]


def test_unlikely_tokens_are_left_out():
    batch = Batch()
    # 5 6 has come four times, and was followed by 1, 2 or 3 once each
    batch.add("a", [5, 6, 1, 5, 6, 2, 5, 6, 3, 8, 5])
    sampled = batch.sample({"a": [6]})
    some = TokensPerStepProposer(vllm_config(min_token_prob=0.2)).propose(8, batch, sampled)
    none = TokensPerStepProposer(vllm_config(min_token_prob=0.8)).propose(8, batch, sampled)
    assert some[0][:1] in ([1], [2], [3])
    assert none == [[]]


@pytest.fixture(params=["suffix", "custom_class"])
def first_draft(request):
    """The first draft for a prompt and what was sampled, by vLLM's settings."""

    def draft(prompt, sampled, **suffix_decoding):
        batch = Batch()
        batch.add("a", prompt)
        config = vllm_config(**suffix_decoding)
        if request.param == "suffix":
            drafts = TokensPerStepProposer(config).propose(8, batch, batch.sample({"a": sampled}))
        else:
            drafts = CustomClassProposer(config).propose(
                batch.sample({"a": sampled}), batch.num_tokens_no_spec, batch.token_ids_cpu
            )
        return drafts[0]

    return draft


def test_the_depth_is_how_long_a_match_can_be(first_draft):
    # After 1 7 8 9 came 50, after 7 8 9 alone more often 60.
    prompt = [1, 7, 8, 9, 50, 2, 7, 8, 9, 60, 3, 7, 8, 9, 60, 4, 7, 8, 9, 60, 1]
    assert first_draft(prompt, [7, 8, 9], max_tree_depth=24)[0] == 50
    assert first_draft(prompt, [7, 8, 9], max_tree_depth=3)[0] == 60


def test_the_probability_is_how_unlikely_a_draft_may_get(first_draft):
    prompt = [5, 6, 1, 5, 6, 2, 5, 6, 3, 8, 5]
    assert first_draft(prompt, [6], min_token_prob=0.2)
    assert first_draft(prompt, [6], min_token_prob=0.8) == []


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tree_depth", 0, "a number from 1 to 4096"),
        ("max_tree_depth", 4097, "a number from 1 to 4096"),
        ("max_cached_requests", -1, "0 or more"),
        ("max_spec_factor", -0.5, "0 or more"),
        ("min_token_prob", 1.5, "a number from 0 to 1"),
        ("min_token_prob", float("nan"), "a number from 0 to 1"),
    ],
)
@pytest.mark.parametrize("shape", [TokensPerStepProposer, CustomClassProposer])
def test_a_setting_of_vllm_that_cannot_be_is_named_with_what_can(shape, name, value, expected):
    with pytest.raises(SettingError) as caught:
        shape(vllm_config(**{name: value}))
    assert str(caught.value).startswith(f"suffix_decoding_{name}={value}: expected {expected}. ")
    assert "--speculative-config" in str(caught.value)
    assert "NUMBA" not in str(caught.value)


def test_the_deepest_tree_is_built(first_draft):
    assert first_draft([*COPYABLE, 1, 2, 3], COPYABLE[:3], max_tree_depth=4096)[:7] == COPYABLE[3:]


def test_a_full_step_drafts_less_for_each_request(monkeypatch):
    def drafted(verify_tokens: str) -> int:
        monkeypatch.setenv("VLLM_DRAFTER_VERIFY_TOKENS", verify_tokens)
        proposer = TokensPerStepProposer(vllm_config())
        batch = Batch()
        for i in range(8):
            batch.add(f"{i}", [*COPYABLE, 1, 2, 3, i + 50])
        drafts = proposer.propose(8, batch, batch.sample({name: [11] for name in batch.req_ids}))
        return sum(map(len, drafts))

    assert drafted("0") > drafted("1")


@pytest.mark.parametrize(
    ("device_type", "given", "taken"),
    [("cuda", "auto", 256), ("cpu", "auto", 24), ("cpu", "256", 256), ("cpu", "0", None)],
)
def test_a_verified_token_costs_more_on_a_cpu_unless_a_setting_says_otherwise(
    monkeypatch, device_type, given, taken
):
    monkeypatch.setenv("VLLM_DRAFTER_VERIFY_TOKENS", given)
    proposer = TokensPerStepProposer(vllm_config(device_type=device_type))
    assert proposer.settings.verify_tokens == taken


def test_without_a_cache_of_responses_only_the_request_itself_is_drafted_from():
    proposer = TokensPerStepProposer(vllm_config(max_cached_requests=0))
    batch = Batch()
    batch.add("first", [1, 2, 3])
    proposer.propose(8, batch, batch.sample({"first": COPYABLE}))
    batch.remove("first")
    batch.add("second", [4, 5, 6])
    assert proposer.propose(8, batch, batch.sample({"second": COPYABLE[:3]})) == [[]]


def test_the_runner_may_ask_any_drafter_to_load_its_model(proposer):
    assert proposer.load_model(object()) is None


# --- faults -------------------------------------------------------------------


def test_a_bad_token_costs_its_request_the_drafts_and_no_other(proposer, caplog):
    batch = Batch()
    batch.add("bad", [1, -5, 3])
    batch.add("good", [*COPYABLE, 1, 2, 3])
    with caplog.at_level(logging.ERROR):
        bad, good = proposer.propose(3, batch, batch.sample({"bad": [4], "good": COPYABLE[:2]}))
    assert bad == []
    assert good == COPYABLE[2:5]
    assert proposer.loop.faults == 1


def test_a_fault_is_logged_once_with_its_traceback_and_then_counted(proposer, caplog):
    batch = Batch()
    for name in ("a", "b", "c"):
        batch.add(name, [1, -5, 3])
    with caplog.at_level(logging.ERROR, logger="vllm"):
        proposer.propose(3, batch, batch.sample({"a": [4], "b": [4], "c": [4]}))
        proposer.propose(3, batch, batch.sample({"a": [4], "b": [4], "c": [4]}))
    logged = [record for record in caplog.records if "fault" in record.getMessage()]
    assert len(logged) == 1
    assert logged[0].exc_info
    assert proposer.loop.faults == 3


def test_a_request_without_drafts_gets_them_again_when_its_id_is_used_again(proposer):
    batch = Batch()
    batch.add("a", [1, -5, 3])
    proposer.propose(3, batch, batch.sample({"a": [4]}))
    batch.remove("a")
    proposer.propose(3, batch, [])
    batch.add("a", [*COPYABLE, 1, 2, 3])
    assert proposer.propose(3, batch, batch.sample({"a": COPYABLE[:2]})) == [COPYABLE[2:5]]


class Looked(dict):
    """Requests, and how often one was looked up."""

    lookups = 0

    def get(self, key, default=None):
        self.lookups += 1
        return super().get(key, default)


def test_requests_that_go_on_together_are_looked_up_once(proposer):
    batch = Batch()
    for name in ("a", "b"):
        batch.add(name, [*COPYABLE, 1, 2, 3])
    proposer.propose(3, batch, batch.sample({"a": COPYABLE[:2], "b": COPYABLE[:3]}))
    known = proposer.loop._requests = Looked(proposer.loop._requests)
    drafts = proposer.propose(3, batch, batch.sample({"a": COPYABLE[2:4], "b": COPYABLE[3:5]}))
    assert drafts == [COPYABLE[4:7], COPYABLE[5:8]]
    assert known.lookups == 0
    batch.swap("a", "b")
    drafts = proposer.propose(3, batch, batch.sample({"a": COPYABLE[4:5], "b": COPYABLE[5:6]}))
    assert drafts == [COPYABLE[6:9], COPYABLE[5:8]]
    assert known.lookups == 2
    batch.remove("b")
    batch.add("b", [*COPYABLE, 4, 5, 6])
    [again, other] = proposer.propose(
        3, batch, batch.sample({"a": COPYABLE[5:6], "b": COPYABLE[:2]})
    )
    assert sorted([again, other]) == sorted([COPYABLE[6:9], COPYABLE[2:5]])


class Broken:
    """A drafter whose step fails, always or for one handle."""

    def __init__(self, drafter, error, handle=None):
        self._drafter, self._error, self._handle = drafter, error, handle

    def __getattr__(self, name):
        return getattr(self._drafter, name)

    def step(self, handles, *args, **kwargs):
        if self._handle is None or self._handle in handles.tolist():
            raise self._error
        return self._drafter.step(handles, *args, **kwargs)


def test_a_request_that_breaks_the_whole_step_is_found_and_the_others_go_on(proposer):
    batch = Batch()
    batch.add("breaks", [1, 2, 3])
    batch.add("good", [*COPYABLE, 1, 2, 3])
    proposer.propose(3, batch, batch.sample({"breaks": [4], "good": COPYABLE[:2]}))
    drafter = proposer.loop._drafter
    proposer.loop._drafter = Broken(drafter, RuntimeError("boom"), drafter.handle("breaks"))
    breaks, good = proposer.propose(3, batch, batch.sample({"breaks": [5], "good": COPYABLE[2:4]}))
    assert breaks == []
    assert good == COPYABLE[4:7]
    proposer.loop._drafter = drafter
    breaks, good = proposer.propose(3, batch, batch.sample({"breaks": [6], "good": COPYABLE[4:6]}))
    assert breaks == []
    assert good == COPYABLE[6:9]
    assert proposer.loop.faults == 2


def test_a_drafter_that_contradicts_itself_is_replaced(proposer):
    from drafter_core import CorruptState

    batch = Batch()
    batch.add("a", [*COPYABLE, 1, 2, 3])
    proposer.propose(3, batch, batch.sample({"a": COPYABLE[:2]}))
    proposer.loop._drafter = Broken(proposer.loop._drafter, CorruptState("broken"))
    assert proposer.propose(3, batch, batch.sample({"a": COPYABLE[2:4]})) == [[]]
    assert proposer.propose(3, batch, batch.sample({"a": COPYABLE[4:6]})) == [COPYABLE[6:9]]


def test_a_drafter_that_goes_on_contradicting_itself_is_given_up(proposer, monkeypatch):
    from drafter_core import CorruptState

    batch = Batch()
    batch.add("a", [*COPYABLE, 1, 2, 3])
    for _ in range(6):
        if proposer.loop._drafter is not None:
            proposer.loop._drafter = Broken(proposer.loop._drafter, CorruptState("broken"))
        assert proposer.propose(3, batch, batch.sample({"a": [9]})) == [[]]
    assert proposer.loop._drafter is None
    batch.remove("a")
    assert proposer.propose(3, batch, []) == []


def test_a_batch_of_another_shape_is_a_fault_and_not_an_error(proposer):
    assert proposer.propose(3, object(), [[1], [2]]) == [[], []]
    assert proposer.loop.faults == 1


def test_kernels_that_cannot_be_loaded_stop_the_start_with_the_way_out(monkeypatch):
    from vllm_drafter.loop import DraftLoop

    def fail(self):
        raise RuntimeError("LLVM bitcode parsing error")

    monkeypatch.setattr(DraftLoop, "_try_out", fail)
    with pytest.raises(RuntimeError, match=r"LLVM bitcode.*NUMBA_CACHE_DIR"):
        TokensPerStepProposer(vllm_config())


def test_a_step_without_arrays_is_a_fault_and_not_an_error(proposer):
    assert proposer.loop.step(["a", "b"], np.array([0, 1]), [1, 1], None, None, 3) == [[], []]
    assert proposer.loop.faults == 1
