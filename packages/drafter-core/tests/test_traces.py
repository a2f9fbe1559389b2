"""Logged requests are read from JSON lines; what cannot be used is skipped with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from drafter_core.traces import Skipped, TraceRequest, read_traces


class Letters:
    """A tokenizer for tests: a letter is its code point."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def render(self, messages: list[dict[str, Any]]) -> str:
        if any(message.get("role") == "alien" for message in messages):
            raise ValueError("roles are user and assistant")
        return "".join(f"<{message['content']}>" for message in messages)


def read(*lines: Any, tokenizer: Letters | None = None) -> list[TraceRequest | Skipped]:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return list(read_traces(texts, tokenizer))


def request(line: Any, tokenizer: Letters | None = None) -> tuple[list[int], list[int]]:
    (found,) = read(line, tokenizer=tokenizer)
    assert isinstance(found, TraceRequest), found
    return found.prompt.tolist(), found.response.tolist()


def reason(line: Any, tokenizer: Letters | None = None) -> str:
    (found,) = read(line, tokenizer=tokenizer)
    assert isinstance(found, Skipped), found
    return found.reason


def text(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_token_ids_need_no_tokenizer() -> None:
    assert request({"prompt": [1, 2], "response": [3]}) == ([1, 2], [3])
    assert request({"prompt_token_ids": [1, 2], "response_token_ids": [3]}) == ([1, 2], [3])


def test_token_ids_win_over_text_of_the_same_request() -> None:
    line = {"prompt": "ab", "prompt_token_ids": [1], "response": "c", "response_token_ids": [2]}
    assert request(line, Letters()) == ([1], [2])


def test_text_is_encoded() -> None:
    assert request({"prompt": "a", "response": "bc"}, Letters()) == ([97], [98, 99])


def test_a_prompt_may_be_missing() -> None:
    assert request({"response": [5, 6]}) == ([], [5, 6])


def test_every_assistant_message_is_a_response_to_what_came_before() -> None:
    messages = [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"},
        {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"},
    ]  # fmt: skip
    found = read({"messages": messages}, tokenizer=Letters())
    pairs = [(text(one.prompt.tolist()), text(one.response.tolist())) for one in found]
    assert pairs == [("<q>", "a"), ("<q><a><r>", "b")]


def test_messages_with_a_response_are_its_prompt() -> None:
    line = {"messages": [{"role": "user", "content": "q"}], "response": "a"}
    prompt, response = request(line, Letters())
    assert (text(prompt), text(response)) == ("<q>", "a")


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    line = {"messages": [{"role": "user", "content": parts}], "response": "c"}
    assert text(request(line, Letters())[0]) == "<ab>"


def test_an_assistant_message_without_text_is_no_response() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": []}
    messages = [{"role": "user", "content": "q"}, called]
    assert "no message of the assistant has text" in reason({"messages": messages}, Letters())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ([1], "a JSON object is expected, not a list"),
        ({"prompt": [1]}, 'there is no "response"'),
        ({"prompt": [1], "response": []}, "the response is empty"),
        ({"prompt": [1], "response": 7}, "the response is a number"),
        ({"prompt": {}, "response": [7]}, "the prompt is an object"),
        ({"prompt": [1], "response": [1, -1]}, "the response holds -1"),
        ({"prompt": [2**31 - 1], "response": [1]}, "the prompt holds 2147483647"),
        ({"prompt": [1], "response": [1.5]}, "the response holds 1.5"),
        ({"prompt": [1], "response": [True]}, "the response holds True"),
        ({"prompt": [1, [2, [3]]], "response": [1]}, "the prompt holds [2, [3]]"),
        ({"prompt": "text", "response": [1]}, "the prompt is text, and no tokenizer"),
        ({"messages": [{"role": "user", "content": "q"}]}, "no tokenizer was given"),
    ],
)
def test_a_line_that_cannot_be_used_says_why(line: Any, expected: str) -> None:
    assert expected in reason(line)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("text", '"messages" is a list'),
        (["text"], '"messages" is a list'),
        ([{"role": "user", "content": 5}], "content of a message is a number"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "holds 'image_url'"),
        ([{"role": "alien", "content": "x"}, {"role": "assistant", "content": "y"}],
         "chat template refused"),
    ],
)  # fmt: skip
def test_a_conversation_that_cannot_be_used_says_why(messages: Any, expected: str) -> None:
    assert expected in reason({"messages": messages}, Letters())


def test_half_a_surrogate_pair_is_no_text() -> None:
    line = '{"prompt": "a \\ud800 b", "response": "a b"}'
    assert "the prompt is no text that can be encoded" in reason(line, Letters())
    assert r"lone surrogate '\ud800', character 3" in reason(line, Letters())
    messages = '{"messages": [{"role": "user", "content": "\\udfff"}], "response": "a"}'
    assert "lone surrogate" in reason(messages, Letters())


def test_a_pair_of_surrogates_is_one_character() -> None:
    line = '{"prompt": "\\ud83d\\ude00", "response": "a"}'
    assert request(line, Letters()) == ([0x1F600], [97])


def test_text_that_the_tokenizer_refuses_is_skipped() -> None:
    class Refusing(Letters):
        def encode(self, text: str) -> list[int]:
            raise RuntimeError("no token for it")

    line = {"prompt": [1], "response": "a"}
    assert reason(line, Refusing()) == "the tokenizer refused the response (no token for it)"


def test_a_byte_that_is_no_utf_8_costs_its_own_line_only() -> None:
    data = b'{"response": [1]}\n{"prompt": "\xe9", "response": [2]}\n{"response": [3]}'
    found = list(read_traces(data.decode(errors="surrogateescape").splitlines()))
    assert [(type(one).__name__, one.line) for one in found] == [
        ("TraceRequest", 1), ("Skipped", 2), ("TraceRequest", 3),
    ]  # fmt: skip
    assert isinstance(found[1], Skipped)
    assert "not UTF-8 (byte 0xe9, character 13)" in found[1].reason


def test_a_byte_order_mark_is_passed_over() -> None:
    assert request('\ufeff{"response": [1]}') == ([], [1])
    assert read("\ufeff") == []


@pytest.mark.parametrize("token", [[[0] * 1_000_000], "x" * 1_000_000, [[[[[[[[[[1]]]]]]]]]]])
def test_a_reason_is_short_whatever_it_quotes(token: Any) -> None:
    assert len(reason({"response": [token]})) < 400
    role = {"role": "x" * 1_000_000, "content": [{"type": token}]}
    assert len(reason({"messages": [role], "response": [1]}, Letters())) < 400


def test_a_reason_quotes_nothing_that_a_terminal_would_obey() -> None:
    class Strict(Letters):
        def render(self, messages: list[dict[str, Any]]) -> str:
            raise ValueError(messages[0]["content"])

    line = {"messages": [{"role": "user", "content": "\x1b[31m\n\ud800 µ"}], "response": [1]}
    assert r"(\x1b[31m\n\ud800 µ)" in reason(line, Strict())


def test_reading_goes_on_behind_a_bad_line_and_lines_keep_their_numbers() -> None:
    found = read({"response": [1]}, "", "oops", {"response": [2]})
    assert [(type(one).__name__, one.line) for one in found] == [
        ("TraceRequest", 1), ("Skipped", 3), ("TraceRequest", 4),
    ]  # fmt: skip
