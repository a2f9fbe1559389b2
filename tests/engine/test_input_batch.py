"""The proposers on the real InputBatch, asked by the real runner's own call.

What a batch goes through is what vLLM does to it: rows condensed and swapped, requests removed and
added again, ids used again.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

vllm = pytest.importorskip("vllm")

from vllm.plugins import load_general_plugins  # noqa: E402

load_general_plugins()

from batch import MAX_MODEL_LEN, Batch  # noqa: E402
from runner_call import ask_as_the_runner  # noqa: E402
from vllm.config import SpeculativeConfig  # noqa: E402
from vllm.v1.worker import gpu_model_runner  # noqa: E402

import vllm_drafter  # noqa: E402

TEXT = list(range(11, 31))
OTHER = list(range(51, 71))
K = 6


@pytest.fixture(scope="module")
def config():
    speculative = SpeculativeConfig(method="suffix", suffix_decoding_max_spec_factor=4.0)
    return SimpleNamespace(
        speculative_config=speculative,
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
        device_config=SimpleNamespace(device_type="cpu"),
    )


@pytest.fixture(params=["suffix", "custom_class"])
def propose(request, config):
    """Asks a new proposer as the runner does, for `method="suffix"` and for the custom class."""
    build = {
        "suffix": lambda: gpu_model_runner.SuffixDecodingProposer(config),
        "custom_class": lambda: vllm_drafter.CustomClassProposer(config),
    }[request.param]
    if request.param == "custom_class" and not hasattr(gpu_model_runner, "create_custom_proposer"):
        pytest.skip("this vLLM has no custom_class")
    drafter = build()

    def propose(real, sampled, k=K):
        drafts = ask_as_the_runner(drafter, real, real.sample(sampled), k, request.param)
        assert type(drafts) is list
        assert len(drafts) == len(real.order)
        assert all(type(draft) is list for draft in drafts)
        assert all(type(token) is int for draft in drafts for token in draft)
        assert drafter.loop.faults == 0
        return dict(zip(real.order, drafts, strict=True))

    propose.drafter = drafter
    propose.method = request.param
    return propose


def continues(draft, text, at):
    """Whether a draft is what the text has from `at` on, and after its end whatever it likes."""
    return len(draft) > 0 and draft[: len(text) - at] == text[at : at + len(draft)]


def test_the_runners_name_of_the_proposer_is_our_class():
    assert gpu_model_runner.SuffixDecodingProposer.__module__ == "vllm_drafter.proposer"


def test_a_prompt_that_is_repeated_is_drafted(propose):
    real = Batch()
    real.add("a", [*TEXT, 1, 2, 3])
    assert propose(real, {"a": TEXT[:4]})["a"][:K] == TEXT[4 : 4 + K]


def test_a_partial_prefill_gets_an_empty_draft(propose):
    real = Batch()
    real.add("prefilling", TEXT)
    real.add("a", [*TEXT, 1, 2, 3])
    drafts = propose(real, {"a": TEXT[:4]})
    assert drafts["prefilling"] == []
    assert continues(drafts["a"], TEXT, 4)


def test_drafts_stay_with_their_requests_when_rows_are_swapped(propose):
    real = Batch()
    real.add("a", [*TEXT, 1, 2, 3])
    real.add("b", [*OTHER, 4, 5, 6])
    propose(real, {"a": TEXT[:2], "b": OTHER[:2]})
    real.swap("a", "b")
    assert real.order == ["b", "a"]
    drafts = propose(real, {"a": TEXT[2:4], "b": OTHER[2:4]})
    assert continues(drafts["a"], TEXT, 4)
    assert continues(drafts["b"], OTHER, 4)


def test_drafts_stay_with_their_requests_when_rows_are_condensed(propose):
    real = Batch()
    for name in ("first", "a", "second", "b"):
        real.add(name, [*(OTHER if name == "b" else TEXT), 1, 2, 3])
    propose(real, {"first": [9], "a": TEXT[:2], "second": [8], "b": OTHER[:2]})
    real.remove("first", "second")
    assert set(real.order) == {"a", "b"}
    assert real.order != ["a", "b"]
    drafts = propose(real, {"a": TEXT[2:4], "b": OTHER[2:4]})
    assert continues(drafts["a"], TEXT, 4)
    assert continues(drafts["b"], OTHER, 4)


def test_a_preempted_request_is_drafted_for_when_it_is_back(propose):
    real = Batch()
    real.add("a", [*TEXT, 1, 2, 3])
    real.add("b", [*OTHER, 4, 5, 6])
    propose(real, {"a": TEXT[:2], "b": OTHER[:2]})
    real.remove("a")
    propose(real, {"b": OTHER[2:4]})
    real.add("a", [*TEXT, 1, 2, 3], TEXT[:2])
    assert propose(real, {"b": OTHER[4:6]})["a"] == []
    drafts = propose(real, {"a": TEXT[2:4], "b": OTHER[6:8]})
    assert continues(drafts["a"], TEXT, 4)
    assert continues(drafts["b"], OTHER, 8)


def test_an_id_that_is_used_again_at_once_is_another_request(propose):
    real = Batch()
    real.add("a", [*OTHER, 4, 5, 6])
    propose(real, {"a": OTHER[:4]})
    real.remove("a")
    real.add("a", [*TEXT, 1, 2, 3])
    assert continues(propose(real, {"a": TEXT[:4]})["a"], TEXT, 4)


def test_what_a_request_generated_helps_those_after_it(propose):
    real = Batch()
    real.add("a", [1, 2, 3])
    propose(real, {"a": TEXT})
    real.remove("a")
    real.add("b", [4, 5, 6])
    assert continues(propose(real, {"b": TEXT[:4]})["b"], TEXT, 4)


def test_rejected_drafts_left_in_the_row_are_not_read(propose):
    real = Batch()
    real.add("a", [*TEXT, 1, 2, 3])
    for at in range(0, 12, 3):
        row = real.input_batch.req_id_to_index["a"]
        length = int(real.input_batch.num_tokens_no_spec[row])
        real.input_batch.token_ids_cpu[row, length : length + K] = 999
        assert continues(propose(real, {"a": TEXT[at : at + 3]})["a"], TEXT, at + 3)


def test_many_requests_come_and_go_and_each_keeps_its_own_text(propose):
    """Twelve requests over eight rows, each repeating its own prompt, two tokens a step."""
    real = Batch()
    texts = {f"r{place}": list(range(100 + 30 * place, 116 + 30 * place)) for place in range(12)}
    waiting, at, seen = list(texts), {}, 0
    while waiting or at:
        while waiting and len(at) < 8:
            name = waiting.pop(0)
            real.add(name, [*texts[name], 1])
            at[name] = 0
        if len(at) > 2:
            real.swap(real.order[0], real.order[-1])
        drafts = propose(real, {name: texts[name][place : place + 2] for name, place in at.items()})
        for name in list(at):
            at[name] += 2
            if 2 < at[name] < 16:
                assert continues(drafts[name], texts[name], at[name])
                seen += 1
            if at[name] >= 16 - 2 * (int(name[1:]) % 3):
                real.remove(name)
                del at[name]
    assert seen > 40


def test_the_scheduler_can_ask_for_fewer_tokens(propose):
    if propose.method == "custom_class":
        pytest.skip("the custom class is not told")
    real = Batch()
    real.add("a", [*TEXT, 1, 2, 3])
    sampled = {"a": TEXT[:4]}
    if "num_speculative_tokens" not in propose.drafter.propose.__code__.co_varnames:
        pytest.skip("this vLLM gives no number per step")
    assert propose(real, sampled, k=2)["a"] == TEXT[4:6]
    assert propose(real, {"a": TEXT[4:6]}, k=0)["a"] == []
    assert propose(real, {"a": TEXT[6:8]}, k=3)["a"] == TEXT[8:11]


def test_no_draft_reaches_beyond_the_models_length(propose):
    real = Batch()
    prompt = [*TEXT, *range(300, 300 + MAX_MODEL_LEN - len(TEXT) - 6)]
    real.add("a", prompt)
    draft = propose(real, {"a": TEXT[:3]})["a"]
    assert len(prompt) + 3 + len(draft) <= MAX_MODEL_LEN - 1
    assert propose(real, {"a": TEXT[3:6]})["a"] == []
