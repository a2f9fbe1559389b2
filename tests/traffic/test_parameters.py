"""What requests may ask for beside plain text: each of it says the same with drafts."""

from __future__ import annotations

import json

import pytest
from prompts import COPIES, EDITS, EXTRACTS, chat
from traffic import Pair, Request, run_pair

GREEDY = {"temperature": 0.0, "max_tokens": 40}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "town": {"enum": ["Arden", "Birk", "Colm", "Dunmore"]},
        "friends": {
            "type": "array",
            "minItems": 2,
            "maxItems": 3,
            "items": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}},
                      "required": ["name"], "additionalProperties": False},
        },
    },
    "required": ["name", "age", "town", "friends"],
    "additionalProperties": False,
}  # fmt: skip


def ask(prompts: list[str], **sampling: object) -> list[Request]:
    return [
        {"key": f"{place}", "prompt": prompt, "sampling": {**GREEDY, **sampling}}
        for place, prompt in enumerate(prompts)
    ]


PEOPLE = [
    chat(f"Describe a {who} as JSON with name, age, town and friends.")
    for who in ("teacher", "sailor")
]
# No logit_bias and no min_p: vLLM refuses them with speculation. No temperature, hence no n: what
# vLLM's CPU build accepts at one is wrong, whoever drafts (docs/traffic.md).
PHASES = {
    "plain": ask([*COPIES, *EDITS]),
    "stop strings": ask([*COPIES, *EDITS], stop=["day", "beans", " twice", "return", "the even"]),
    "stop strings kept": ask(COPIES, stop=["day", "beans"], include_stop_str_in_output=True),
    "stop token ids": ask([*COPIES, EDITS[0]], stop_token_ids=[253, 284, 30]),
    "at least": ask([*EXTRACTS, "The", "1, 2, 3, 1, 2, 3, 1,"], min_tokens=30, stop=["the"]),
    "logprobs": ask([*COPIES[:2], *EXTRACTS[:2]], logprobs=3),
    "schema": ask(PEOPLE, json=SCHEMA, max_tokens=120),
    "schema and none": [
        *ask(PEOPLE, json=SCHEMA, max_tokens=120),
        *[{**request, "key": f"free {request['key']}"} for request in ask(COPIES)],
    ],
    "penalties": ask(COPIES, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.1),
    "bad words": ask(COPIES, bad_words=["noon", "crane", " beans"]),
}


@pytest.fixture(scope="module")
def pair(folder, smollm) -> Pair:
    engine = {"model": smollm, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    return run_pair(folder / "parameters", engine, PHASES)


def texts(pair: Pair, phase: str) -> list[str]:
    return [
        sample["text"] for samples in pair.drafting[phase].samples.values() for sample in samples
    ]


@pytest.mark.parametrize(
    "phase",
    ["plain", "stop token ids", "penalties", "bad words", "schema and none"],
)
def test_tokens_are_those_without_speculation(pair, phase):
    pair.check(phase, "text")


def test_a_stop_string_ends_the_text_where_it_would_have_ended(pair):
    pair.check("stop strings", "text")
    reasons = [s[0]["stop_reason"] for s in pair.drafting["stop strings"].samples.values()]
    assert {"day", "beans"} <= set(reasons)


def test_a_stop_string_can_be_kept(pair):
    pair.check("stop strings kept", "text")
    assert any(text.endswith("day") for text in texts(pair, "stop strings kept"))


def test_at_least_so_many_tokens_before_a_stop(pair):
    pair.check("at least", "text")
    samples = pair.drafting["at least"].samples.values()
    assert all(len(sample[0]["token_ids"]) >= 30 for sample in samples)


def test_logprobs_are_those_without_speculation(pair):
    pair.check("logprobs")
    for key, [plain] in pair.plain["logprobs"].samples.items():
        [drafting] = pair.drafting["logprobs"].samples[key]
        assert len(drafting["logprobs"]) == len(drafting["token_ids"])
        assert drafting["logprobs"] == pytest.approx(plain["logprobs"], abs=1e-3)
        assert [step[0] for step in drafting["top"]] == [step[0] for step in plain["top"]]


def test_a_json_schema_is_kept_to_and_says_the_same(pair):
    pair.check("schema", "text")
    finished = [s[0] for s in pair.drafting["schema"].samples.values()
                if s[0]["finish_reason"] == "stop"]  # fmt: skip
    assert finished
    for sample in finished:
        assert json.loads(sample["text"])["town"] in ("Arden", "Birk", "Colm", "Dunmore")


def test_nothing_went_wrong_while_drafting(pair):
    assert "a fault while drafting" not in pair.log
