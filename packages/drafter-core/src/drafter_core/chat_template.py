"""Compiles a chat template as the Hugging Face library transformers understands it, in a sandbox.

What transformers adds to Jinja is here too: `raise_exception`, `strftime_now`, a `tojson` that
escapes nothing, loop controls, and the tag `generation`. Needs jinja2; must not know files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["compile_template"]


class _Generation(Extension):
    """`{% generation %}` marks what the model said, for training; the text is the same."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def compile_template(
    source: str, special_tokens: dict[str, str]
) -> Callable[[list[dict[str, Any]]], str]:
    """A function that renders messages, followed by what asks for the assistant's next one.

    Args:
        source: the template.
        special_tokens: text by name, such as `bos_token`.

    Raises:
        jinja2.TemplateError: the source is no template. Others where Python cannot compile it.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    environment.filters["tojson"] = _json
    template = environment.from_string(source)

    def render(messages: list[dict[str, Any]]) -> str:
        # A template may ask whether `tools` is none: absent would not be the same.
        return template.render(
            messages=messages, add_generation_prompt=True, tools=None, documents=None,
            **special_tokens,
        )  # fmt: skip

    return render


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
