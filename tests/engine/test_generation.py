"""The main claim, on a real model: what comes out is what would have come out, in fewer steps."""

from __future__ import annotations

from prompts import ALL, SAMPLED


def test_at_least_24_prompts_of_mixed_lengths_were_compared(plain):
    assert len(plain.tokens("greedy")) == len(ALL) >= 24
    assert all(len(tokens[0]) > 0 for tokens in plain.tokens("greedy").values())


def test_greedy_outputs_are_those_without_speculation(plain, drafting):
    assert drafting.tokens("greedy") == plain.tokens("greedy")
    assert drafting.runs["greedy"]["finish_reasons"] == plain.runs["greedy"]["finish_reasons"]


def test_drafts_are_accepted_and_save_steps(plain, drafting):
    assert plain.runs["greedy"]["counters"]["draft_tokens"] == 0
    assert drafting.runs["greedy"]["counters"]["accepted_tokens"] > 0
    assert drafting.runs["greedy"]["steps"] < plain.runs["greedy"]["steps"]


def test_request_ids_can_be_used_again_and_the_answers_of_before_help(plain, drafting):
    assert drafting.tokens("again") == plain.tokens("greedy")
    again, first = (drafting.runs[run]["counters"] for run in ("again", "greedy"))
    assert again["accepted_tokens"] > 2 * first["accepted_tokens"]


def test_aborted_requests_leave_the_others_as_they_were(plain, drafting):
    expected = plain.tokens("greedy")
    found = drafting.tokens("aborted")
    cut = {"0", "7", "13"}
    assert {place: found[place] for place in found.keys() - cut} == {
        place: expected[place] for place in expected.keys() - cut
    }
    for place in cut & found.keys():
        length = len(found[place][0])
        assert found[place][0] == expected[place][0][:length]
        assert length < len(expected[place][0])


def test_drafts_are_accepted_at_temperature_0_8_and_every_request_is_answered(drafting):
    run = drafting.runs["sampled"]
    assert len(run["token_ids"]) == len(SAMPLED)
    assert all(len(tokens) > 0 for [tokens] in run["token_ids"].values())
    assert all(reason in ("stop", "length") for [reason] in run["finish_reasons"].values())
    assert run["counters"]["accepted_tokens"] > 0


def test_several_samples_of_one_prompt_are_drafted_for(drafting):
    run = drafting.runs["several"]
    assert [len(samples) for samples in run["token_ids"].values()] == [3, 3]
    assert all(len(tokens) > 0 for samples in run["token_ids"].values() for tokens in samples)
    assert run["counters"]["draft_tokens"] > 0


def test_three_processes_registered_and_the_proposer_lives_in_the_worker(drafting):
    assert drafting.registered == {"front end": 1, "EngineCore": 1, "worker": 1}
    assert drafting.proposers == [("worker", 0, "TokensPerStepProposer")]
    assert len({stamp["pid"] for stamp in drafting.stamps}) == 3


def test_every_process_says_so_in_the_log(drafting):
    assert drafting.log.count("vllm-drafter 0.1.0 registered: pid") == 3


def test_without_suffix_decoding_no_proposer_is_built(plain):
    assert plain.registered == {"front end": 1, "EngineCore": 1, "worker": 1}
    assert plain.proposers == []


def test_a_process_that_does_not_draft_does_not_load_the_drafter(drafting):
    assert drafting.imported == ["vllm_drafter"]


def test_nothing_went_wrong_while_drafting(drafting):
    assert "a fault while drafting" not in drafting.log
