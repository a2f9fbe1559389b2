"""`hybrid-drafting` on real prompts: the better of two drafts, and the same text.

The demo's prompts: code to edit, text to extract from, open questions. Everything is answered
greedily by a real model, without speculation, with each method alone, and with both.
"""

from __future__ import annotations

import pytest
from demo.prompts import all_prompts
from transformers import AutoTokenizer

BATCH = 8
TOKENS = 96
DRAFT = 8
NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
SUFFIX = {"method": "suffix"}


@pytest.fixture(scope="session")
def prompts(smollm) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    messages = [[{"role": "user", "content": prompt.text}] for prompt in all_prompts()]
    texts = [
        tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        for message in messages
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@pytest.fixture(scope="session")
def drafted(run, smollm, prompts):
    """The prompts under each method, each on an engine of its own."""

    def answer(patches: str, method: dict | None) -> dict:
        engine = {"model": smollm, "dtype": "float32"}
        if method is not None:
            engine["speculative_config"] = {**method, "num_speculative_tokens": DRAFT}
        found = run(
            "drafts", patches, engine=engine, rounds=[prompts], max_tokens=TOKENS, batch=BATCH
        )
        return {**found["rounds"][0], "taken": found["taken"]}

    return {
        "none": answer("none", None),
        "ngram": answer("none", NGRAM),
        "suffix": answer("none", SUFFIX),
        "hybrid": answer("hybrid-drafting", NGRAM),
    }


def tokens_per_pass(run: dict) -> float:
    return sum(map(len, run["tokens"])) / run["passes"]


@pytest.mark.parametrize("method", ["ngram", "suffix", "hybrid"])
def test_the_output_is_that_without_speculation(drafted, method, record_property):
    record_property("tokens per forward pass", round(tokens_per_pass(drafted[method]), 3))
    record_property("seconds", round(drafted[method]["seconds"], 1))
    record_property("drafts taken", drafted[method]["taken"])
    assert drafted[method]["tokens"] == drafted["none"]["tokens"]


def test_it_gives_as_many_tokens_per_forward_pass_as_the_better_of_the_two(drafted):
    alone = max(tokens_per_pass(drafted[method]) for method in ("ngram", "suffix"))
    assert tokens_per_pass(drafted["none"]) == 1.0 < alone
    assert tokens_per_pass(drafted["hybrid"]) >= alone


def test_drafts_of_both_methods_were_taken(drafted):
    assert min(drafted["hybrid"]["taken"].values()) > 0


def test_a_draft_model_is_a_method_like_any_other(run, smollm, prompts, drafted):
    method = {
        "method": "draft_model",
        "model": smollm,
        "num_speculative_tokens": 2,
    }
    engine = {
        "model": smollm,
        "dtype": "float32",
        "speculative_config": method,
        "async_scheduling": False,
    }
    some = slice(0, len(prompts), 4)
    found = run(
        "drafts",
        "hybrid-drafting",
        engine=engine,
        rounds=[prompts[some]],
        max_tokens=32,
        batch=BATCH,
    )
    expected = [tokens[:32] for tokens in drafted["none"]["tokens"][some]]
    assert found["rounds"][0]["tokens"] == expected
    assert min(found["taken"].values()) > 0


@pytest.mark.parametrize(
    ("method", "message"),
    [(SUFFIX, "it does not work with method 'suffix'")],
)
def test_what_leaves_nothing_to_choose_stops_the_start(start, smollm, method, message):
    engine = {"model": smollm, "dtype": "float32"}
    engine["speculative_config"] = {**method, "num_speculative_tokens": DRAFT}
    done, _ = start(
        "drafts", "hybrid-drafting", engine=engine, rounds=[], max_tokens=1, batch=BATCH
    )
    assert done.returncode != 0
    assert message in done.stdout
