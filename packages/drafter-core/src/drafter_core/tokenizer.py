"""A tokenizer from a directory or file on this machine, for text in traces.

Reads the `tokenizer.json` of the Hugging Face library `tokenizers` and, where there is one beside
it, the chat template. Downloads nothing. Must not know the drafter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["FileTokenizer", "TokenizerError"]

EXTRA = "pip install 'drafter-core[simulate]'"


class TokenizerError(ValueError):
    """There is no tokenizer that can be read, where one was named."""


class FileTokenizer:
    """Encodes text and renders conversations.

    Args:
        place: a `tokenizer.json`, or a directory with one.

    Raises:
        TokenizerError: nothing readable is there, or the library `tokenizers` is missing.
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
    config: dict[str, Any] = {}
    config_path = directory / "tokenizer_config.json"
    if config_path.is_file():
        try:
            config = json.loads(config_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise TokenizerError(f"{config_path} is not JSON ({error})") from error
    template_path = directory / "chat_template.jinja"
    if template_path.is_file():
        source: Any = template_path.read_text(encoding="utf-8")
    else:
        source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    return _compiled(source, config)


def _compiled(source: str, config: dict[str, Any]) -> Callable[[list[dict[str, Any]]], str]:
    try:
        sandbox = import_module("jinja2.sandbox")
    except ModuleNotFoundError:
        raise TokenizerError(f"the chat template needs the library jinja2: {EXTRA}") from None

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    template = environment.from_string(source)
    special = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in config.items()
        if name.endswith("_token") and isinstance(token, (str, dict))
    }

    def render(messages: list[dict[str, Any]]) -> str:
        text: str = template.render(messages=messages, add_generation_prompt=True, **special)
        return text

    return render
