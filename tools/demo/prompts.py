"""The demo's prompts: real ones, with something to copy and without.

A suffix drafter wins where an answer repeats what was seen before, and must not cost much where it
does not. So there are both, and the demo prints them apart. All were written for the demo and stay
as they are, code and text to copy from in texts/: what two versions drafted can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["GROUPS", "Prompt", "all_prompts", "warm_up"]

GROUPS = {
    "edit": "edit this code: the answer repeats most of the prompt",
    "extract": "extract from this text: the answer repeats parts of the prompt",
    "open": "open questions: nothing to copy",
}

TEXTS = Path(__file__).with_name("texts")


@dataclass(frozen=True)
class Prompt:
    """One user message."""

    group: str
    """A key of GROUPS."""
    source: str
    """The file that holds its text, for the report."""
    text: str


def all_prompts() -> list[Prompt]:
    """Return the prompts of every group, eight each, group by group."""
    return [*_edits(), *_extracts(), *_open_questions()]


def warm_up() -> list[str]:
    """Return messages that bring the engine up to speed, unlike any of the prompts."""
    return [
        "Count from one to forty, one number a line.",
        "Repeat the word banana twenty times.",
        "Write the alphabet three times, one letter a line.",
        "List the months of the year, then list them again.",
    ]


def _edits() -> list[Prompt]:
    prompts = []
    for path in sorted(TEXTS.glob("edit/*.txt")):
        text = (
            f"Here is a Python function:\n\n```python\n{path.read_text().strip()}\n```\n\nRename "
            f"the function to `{path.stem}_checked` and reply with the complete function, "
            "otherwise unchanged."
        )
        prompts.append(Prompt("edit", path.name, text))
    return prompts


def _extracts() -> list[Prompt]:
    tasks = (
        "Copy out the first two sentences of this text, word for word.",
        "Repeat this text with every comma replaced by a semicolon.",
        "Turn this text into a list with one sentence per bullet point, keeping the words as "
        "they are.",
        "Correct any spelling mistakes in this text and reply with the whole text.",
    )
    prompts = []
    for number, path in enumerate(sorted(TEXTS.glob("extract/*.txt"))):
        text = f"{tasks[number % len(tasks)]}\n\nText:\n{path.read_text().strip()}"
        prompts.append(Prompt("extract", path.name, text))
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
