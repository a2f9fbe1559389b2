"""Reads logged prompts and responses from JSON lines.

One line is one JSON object, in one of these forms; text needs a tokenizer, token ids do not:

    {"prompt": "text" or [ids], "response": "text" or [ids]}
    {"prompt_token_ids": [ids], "response_token_ids": [ids]}
    {"messages": [{"role": ..., "content": ...}, ...]}       every assistant message is a response
    {"messages": [...], "response": "text" or [ids]}         the response to the whole conversation

A line that cannot be used becomes a `Skipped` with the reason; reading goes on. Knows files and
text; must not know the drafter.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Skipped", "TextTokenizer", "TraceRequest", "read_traces"]

MAX_TOKEN_ID = 2**31 - 2
MAX_REASON = 300


class TextTokenizer(Protocol):
    """What text needs to become token ids."""

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, without special tokens added around it."""
        ...

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt that asks for the next assistant message after these messages."""
        ...


@dataclass(frozen=True)
class TraceRequest:
    """One request: int32 [n] token ids of prompt and response, and the line it came from."""

    line: int
    prompt: NDArray[np.int32]
    response: NDArray[np.int32]


@dataclass(frozen=True)
class Skipped:
    """A line (counted from 1) or a part of it that is not used, and why."""

    line: int
    reason: str


class _Unusable(Exception):
    """Why a line cannot be used."""


def read_traces(
    lines: Iterable[str], tokenizer: TextTokenizer | None = None
) -> Iterator[TraceRequest | Skipped]:
    """Turn JSON lines into requests, in order.

    Args:
        lines: the lines of a file, with or without line ends. Blank lines are passed over, and so
            is a byte order mark. A file is opened with `errors="surrogateescape"`: then one bad
            byte costs its own line only.
        tokenizer: for lines with text; without it these are skipped.
    """
    for number, marked in enumerate(lines, 1):
        line = marked.removeprefix("\ufeff")
        if not line.strip():
            continue
        try:
            found = list(_requests(number, _parse(line), tokenizer))
        except _Unusable as error:
            yield Skipped(number, _plain(str(error)))
        else:
            yield from found


def _parse(line: str) -> dict[str, Any]:
    if (at := _surrogate(line)) is not None:
        found = f"byte 0x{ord(line[at]) & 0xFF:02x}, character {at + 1}"
        raise _Unusable(f"not UTF-8 ({found}); save the file as UTF-8")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _Unusable(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise _Unusable(f"a JSON object is expected, not {_kind(value)}")
    return value


def _requests(
    number: int, line: dict[str, Any], tokenizer: TextTokenizer | None
) -> Iterator[TraceRequest]:
    response = _first(line, "response_token_ids", "response")
    if "messages" in line:
        yield from _conversation(number, line["messages"], response, tokenizer)
        return
    if response is None:
        raise _Unusable('there is no "response", "response_token_ids" or "messages"')
    prompt = _first(line, "prompt_token_ids", "prompt")
    yield _request(number, [] if prompt is None else prompt, response, tokenizer)


def _conversation(
    number: int, messages: Any, response: Any, tokenizer: TextTokenizer | None
) -> Iterator[TraceRequest]:
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise _Unusable('"messages" is a list of objects with "role" and "content"')
    turns = [{**message, "content": _text(message)} for message in messages]
    if tokenizer is None:
        raise _Unusable("it holds messages, and no tokenizer was given (--tokenizer)")
    if response is not None:
        yield _request(number, _rendered(tokenizer, turns), response, tokenizer)
        return
    answers = [at for at, turn in enumerate(turns) if turn.get("role") == "assistant"]
    answers = [at for at in answers if turns[at]["content"]]
    if not answers:
        raise _Unusable("no message of the assistant has text")
    for at in answers:
        prompt = _rendered(tokenizer, turns[:at])
        yield _request(number, prompt, turns[at]["content"], tokenizer)


def _rendered(tokenizer: TextTokenizer, turns: list[dict[str, Any]]) -> str:
    try:
        return tokenizer.render(turns)
    except Exception as error:  # noqa: BLE001 - a chat template may raise anything
        raise _Unusable(f"the chat template refused the messages ({error})") from None


def _text(message: dict[str, Any]) -> str:
    """The text of a message whose content is a string, null or a list of typed parts."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = []
        for part in content:
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                kind = part.get("type") if isinstance(part, dict) else _kind(part)
                raise _Unusable(f"a message holds {reprlib.repr(kind)}; only text can be replayed")
            texts.append(text)
        return "".join(texts)
    raise _Unusable(f"the content of a message is {_kind(content)}, not text")


def _request(
    number: int, prompt: Any, response: Any, tokenizer: TextTokenizer | None
) -> TraceRequest:
    ids = _token_ids("prompt", prompt, tokenizer), _token_ids("response", response, tokenizer)
    if not len(ids[1]):
        raise _Unusable("the response is empty")
    return TraceRequest(number, *ids)


def _token_ids(name: str, value: Any, tokenizer: TextTokenizer | None) -> NDArray[np.int32]:
    if isinstance(value, str):
        if tokenizer is None:
            raise _Unusable(f"the {name} is text, and no tokenizer was given (--tokenizer)")
        if (at := _surrogate(value)) is not None:
            found = f"the lone surrogate {value[at]!r}, character {at + 1}"
            raise _Unusable(f"the {name} is no text that can be encoded ({found})")
        try:
            return np.array(tokenizer.encode(value), np.int32)
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
            raise _Unusable(f"the tokenizer refused the {name} ({error})") from None
    if not isinstance(value, list):
        raise _Unusable(f"the {name} is {_kind(value)}; text or a list of token ids is expected")
    for token in value:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise _Unusable(
                f"the {name} holds {reprlib.repr(token)}; token ids are integers from 0 to "
                f"{MAX_TOKEN_ID}"
            )
    return np.array(value, np.int32)


def _first(line: dict[str, Any], *names: str) -> Any:
    return next((line[name] for name in names if line.get(name) is not None), None)


def _surrogate(text: str) -> int | None:
    """Where the text holds half of a surrogate pair, which no encoding can express."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _plain(reason: str) -> str:
    """The reason in one line that any terminal can show: what it quotes may be long or binary."""
    short = reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + "…"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in short)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")
