"""A tokenizer from a directory or file on this machine, for text in traces.

Reads the `tokenizer.json` of the Hugging Face library `tokenizers` and, where there is one beside
it, the chat template. Downloads nothing. Must not know the drafter.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["FileTokenizer", "TokenizerError"]

EXTRA = "pip install 'drafter-core[simulate]'"
WAY_OUT = (
    "Take the file from the model again; or name a copy of tokenizer.json in a directory of its "
    "own: then a conversation is one paragraph per message"
)


class TokenizerError(ValueError):
    """There is no tokenizer that can be read, where one was named."""


class FileTokenizer:
    """Encodes text and renders conversations.

    Args:
        place: a `tokenizer.json`, or a directory with one.

    Raises:
        TokenizerError: nothing readable is there, a file beside it is wrong, or a library that
            it needs is missing.
    """

    def __init__(self, place: Path) -> None:
        path = place / "tokenizer.json" if place.is_dir() else place
        if not path.is_file():
            raise TokenizerError(
                f"{path} does not exist. Name a tokenizer.json, or the directory of a model that "
                "has one; where it has other files only, transformers writes one: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(OTHER_DIR)"
            )
        try:
            tokenizers = import_module("tokenizers")
        except ModuleNotFoundError:
            raise TokenizerError(f"text needs the library tokenizers: {EXTRA}") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise TokenizerError(
                f"{path} is not a tokenizer.json that the library tokenizers can read ({error})"
            ) from error
        self._template = _chat_template(path.parent)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations are rendered as the model's own template says."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, without special tokens added around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The conversation as a prompt: by the chat template, else one paragraph per message."""
        if self._template is not None:
            return self._template(messages)
        turns = [f"{message.get('role', 'user')}: {message['content']}" for message in messages]
        return "\n\n".join([*turns, "assistant: "])


def _chat_template(directory: Path) -> Callable[[list[dict[str, Any]]], str] | None:
    """The template of `chat_template.jinja` or `tokenizer_config.json`, compiled; else None."""
    config_path = directory / "tokenizer_config.json"
    config = _config(config_path) if config_path.is_file() else {}
    path = directory / "chat_template.jinja"
    if path.is_file():
        source: str | None = _text(path)
    else:
        path, source = config_path, _template_in(config, config_path)
    if source is None:
        return None
    try:
        from drafter_core.chat_template import compile_template
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("drafter_core"):
            raise
        raise TokenizerError(f"the chat template needs the library jinja2: {EXTRA}") from None
    special = _special_tokens(config, config_path)
    try:
        return compile_template(source, special)
    except Exception as error:
        line = getattr(error, "lineno", None)
        where = f"line {line} of the chat template" if line else "the chat template"
        raise TokenizerError(f"{path}: {where} is wrong ({error}). {WAY_OUT}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read as UTF-8 text ({error}). {WAY_OUT}") from None


def _config(path: Path) -> dict[str, Any]:
    text = _text(path)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON ({error}). {WAY_OUT}") from None
    if not isinstance(config, dict):
        raise _wrong(path, "the file", config, "an object")
    return config


def _template_in(config: dict[str, Any], path: Path) -> str | None:
    """The source of the template in the configuration, where there is one."""
    source = config.get("chat_template")
    if source is None or isinstance(source, str):
        return source
    if not isinstance(source, list):
        raise _wrong(path, "chat_template", source, "text, or a list of named templates")
    for entry in source:
        if not isinstance(entry, dict) or not isinstance(entry.get("template"), str):
            raise _wrong(path, "chat_template", source, 'a list of {"name": …, "template": …}')
    named: dict[Any, str] = {str(entry.get("name")): entry["template"] for entry in source}
    if "default" not in named:
        raise _wrong(path, "chat_template", sorted(named), 'templates, one of them named "default"')
    return named["default"]


def _special_tokens(config: dict[str, Any], path: Path) -> dict[str, str]:
    """The texts that a template may use by name, such as `bos_token`."""
    special = {}
    for name, token in config.items():
        if not name.endswith("_token"):
            continue
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            special[name] = text
        elif isinstance(token, dict):
            raise _wrong(path, name, token, 'text, or an object with text in "content"')
    return special


def _wrong(path: Path, name: str, found: Any, expected: str) -> TokenizerError:
    return TokenizerError(
        f"{path}: {name} is {reprlib.repr(found)}, and {expected} is expected. {WAY_OUT}"
    )
