"""The demo's prompts: real ones, with something to copy and without.

A suffix drafter wins where an answer repeats what was seen before, and must not cost much where it
does not. So there are both, and the demo prints them apart. The text to copy from is this
repository's own code and documentation as it is when the demo runs.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

__all__ = ["GROUPS", "Prompt", "all_prompts", "warm_up"]

GROUPS = {
    "edit": "edit this code: the answer repeats most of the prompt",
    "extract": "extract from this text: the answer repeats parts of the prompt",
    "open": "open questions: nothing to copy",
}

PER_GROUP = 8

Item = TypeVar("Item")


@dataclass(frozen=True)
class Prompt:
    """One user message."""

    group: str
    """A key of GROUPS."""
    source: str
    """Where its text comes from, for the report."""
    text: str


def all_prompts(root: Path) -> list[Prompt]:
    """Return the prompts of every group, PER_GROUP each, group by group.

    Args:
        root: the repository.

    Raises:
        ValueError: the repository does not hold enough code or text of the right size.
    """
    return [*_edits(root), *_extracts(root), *_open_questions()]


def warm_up() -> list[str]:
    """Return messages that bring the engine up to speed, unlike any of the prompts."""
    return [
        "Count from one to forty, one number a line.",
        "Repeat the word banana twenty times.",
        "Write the alphabet three times, one letter a line.",
        "List the months of the year, then list them again.",
    ]


def _edits(root: Path) -> list[Prompt]:
    functions = []
    for path in sorted(root.glob("packages/*/src/**/*.py")) + sorted(root.glob("tools/**/*.py")):
        functions += [(path, name, code) for name, code in _functions(path.read_text())]
    prompts = []
    for path, name, code in _spread(
        functions, "functions of 12 to 30 lines in packages/ and tools/"
    ):
        text = (
            f"Here is a Python function:\n\n```python\n{code}\n```\n\nRename the function to "
            f"`{name.strip('_')}_checked` and reply with the complete function, otherwise "
            "unchanged."
        )
        prompts.append(Prompt("edit", f"{path.relative_to(root).as_posix()}:{name}", text))
    return prompts


def _functions(source: str) -> list[tuple[str, str]]:
    """Return name and text of the top-level functions that a small model can keep in view."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            code = ast.get_source_segment(source, node) or ""
            if 12 <= code.count("\n") + 1 <= 30:
                found.append((node.name, code))
    return found


def _extracts(root: Path) -> list[Prompt]:
    passages = []
    for path in [root / "README.md", *sorted(root.glob("docs/*.md"))]:
        passages += [(path, block) for block in path.read_text().split("\n\n")]
    for path in sorted(root.glob("*/*/src/**/*.py")):
        summary = ast.get_docstring(ast.parse(path.read_text())) or ""
        passages.append((path, summary.replace("\n\n", "\n")))
    prose = [(path, text) for path, text in passages if text[:1].isalpha() and len(text) >= 200]
    tasks = (
        "Copy out the first two sentences of this text, word for word.",
        "Repeat this text with every comma replaced by a semicolon.",
        "Turn this text into a list with one sentence per bullet point, keeping the words as "
        "they are.",
        "Correct any spelling mistakes in this text and reply with the whole text.",
    )
    prompts = []
    chosen = _spread(prose, "paragraphs of prose in README.md, docs/ and modules")
    for i, (path, passage) in enumerate(chosen):
        text = f"{tasks[i % len(tasks)]}\n\nText:\n{passage[:1200]}"
        prompts.append(Prompt("extract", path.relative_to(root).as_posix(), text))
    return prompts


def _open_questions() -> list[Prompt]:
    questions = (
        "Why do leaves change colour in autumn?",
        "Give three reasons why a small team might prefer a monolith to microservices.",
        "Write a short story about a lighthouse keeper who finds a message in a bottle.",
        "How would you explain recursion to a ten-year-old?",
        "What should I look at when I buy a second-hand bicycle?",
        "Compare trains and planes for a journey of five hundred kilometres.",
        "Write a polite email that asks a neighbour to turn the music down at night.",
        "What makes bread rise, and what can go wrong?",
    )
    return [Prompt("open", "written for the demo", question) for question in questions]


def _spread(items: list[Item], what: str) -> list[Item]:
    """Return PER_GROUP items, evenly spread over the list."""
    if len(items) < PER_GROUP:
        raise ValueError(f"the demo needs {PER_GROUP} {what} and found {len(items)}")
    return [items[i * len(items) // PER_GROUP] for i in range(PER_GROUP)]
