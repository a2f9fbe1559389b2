"""Cut a module's text into its statements without parsing it.

A parser reads a 300 kB module in seconds; finding where its statements begin takes hundredths. The
analysis therefore cuts first and parses only the pieces that can matter. This module knows strings,
comments, brackets and indentation, and nothing of what a statement means. It must not import a
parser: whoever parses a piece notices when a cut was wrong, and falls back to the whole module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Segment", "UncertainCut", "cut", "joined", "masked", "walk"]

_LEXEME = re.compile(
    r"""
      \#[^\n]*                                                    # a comment
    | (?:\"\"\"(?:[^\\"]|\\.|\"(?!\"\"))*\"\"\")                  # strings: three quotes first
    | (?:'''(?:[^\\']|\\.|'(?!''))*''')
    | "(?:[^\\"\n]|\\.)*"
    | '(?:[^\\'\n]|\\.)*'
    | \\\n                                                        # a continued line
    | [\[\](){}\n]
    """,
    re.VERBOSE | re.DOTALL,
)
_OPENING, _CLOSING = frozenset("[({"), frozenset("])}")
_HEAD = re.compile(
    r"[ \t\f]*(?:(?P<decorator>@)|(?:async[ \t]+)?(?P<word>def|class)[ \t]+(?P<name>\w+))?"
)
_CONTINUES = re.compile(r"[ \t]*(?:else|elif|except|finally)\b")
_ONE_LINE_SUITE = re.compile(r":[ \t]*(?:#[^\n]*)?$")


class UncertainCut(ValueError):
    """The brackets of a text do not match as far as can be told without a parser."""


@dataclass(frozen=True)
class Segment:
    """One statement of a module body, decorators included, over whole lines; or of a class body,
    where adjacent statements that define nothing are one segment.

    Lines count from 1; `end` is the first line after it. Blank lines and comments between two
    statements belong to the earlier one.
    """

    kind: str
    """`function`, `class` or `other` (every other statement, compound ones with all their parts).
    """
    name: str
    """The name that a `def` or `class` gives, qualified within the module; empty for `other`."""
    start: int
    end: int
    line: int
    """The line of the `def` or `class` keyword, below its decorators; `start` for `other`."""
    body: int
    """For a `def` or `class`: the line of the first statement inside; `end` for one-liners and for
    everything else.
    """
    members: tuple[Segment, ...] = ()


def cut(text: str) -> tuple[Segment, ...]:
    """Cut a module's text into the segments of its body; classes are cut into their members.

    Statements nested in `if`, `try`, functions and so on are not cut. A text that is not Python
    gives segments that do not parse, or UncertainCut.
    """
    lines = text.split("\n")
    starts = _logical_lines(text)
    return _cut_block(lines, starts, 0, len(starts), len(lines) + 1, "")


def masked(text: str) -> str:
    """The text with everything inside strings and comments blanked out, line by line as before."""

    def blank(match: re.Match[str]) -> str:
        lexeme = match.group()
        if lexeme[0] not in "#\"'":
            return lexeme
        return re.sub(r"[^\n]", " ", lexeme)

    return _LEXEME.sub(blank, text)


def walk(segments: tuple[Segment, ...]) -> Iterator[Segment]:
    """Yield the segments and, after each class, its members."""
    for segment in segments:
        yield segment
        yield from walk(segment.members)


def _logical_lines(text: str) -> list[int]:
    """The numbers of the lines on which a statement starts, from 1."""
    found = []
    line, depth, fresh = 1, 0, True
    position = 0
    for match in _LEXEME.finditer(text):
        lexeme = match.group()
        first = lexeme[0]
        if fresh and (first not in "#\n" or text[position : match.start()].strip()):
            found.append(line)
            fresh = False
        if first == "\n":
            if depth == 0:
                fresh = True
                position = match.end()
            line += 1
        elif first in _OPENING:
            depth += 1
        elif first in _CLOSING:
            depth -= 1
            if depth < 0:
                raise UncertainCut(f"line {line}: a bracket closes that was not opened")
        elif first == "#":
            position = match.end()
        else:
            line += lexeme.count("\n")
    if fresh and text[position:].strip():
        found.append(line)
    if depth:
        raise UncertainCut(f"{depth} brackets are open at the end")
    return found


def _cut_block(
    lines: list[str], starts: list[int], first: int, stop: int, end_line: int, prefix: str
) -> tuple[Segment, ...]:
    """Cut the statements whose logical lines are `starts[first:stop]`, which share an
    indentation.
    """
    if first == stop:
        return ()
    indent = _indent(lines[starts[first] - 1])
    heads = [
        i
        for i in range(first, stop)
        if _indent(lines[starts[i] - 1]) <= indent and not _CONTINUES.match(lines[starts[i] - 1])
    ]
    segments = []
    at = 0
    while at < len(heads):
        begin = at
        while at + 1 < len(heads) and _head(lines, starts[heads[at]])[0] == "decorator":
            at += 1
        word, name = _head(lines, starts[heads[at]])
        after = heads[at + 1] if at + 1 < len(heads) else stop
        end = starts[after] if after < stop else end_line
        start, line = starts[heads[begin]], starts[heads[at]]
        qualified = f"{prefix}{name}" if word in ("def", "class") else ""
        members: tuple[Segment, ...] = ()
        body = end
        if word and after > heads[at] + 1:
            body = starts[heads[at] + 1]
        if word == "class" and body < end:
            members = _cut_block(lines, starts, heads[at] + 1, after, end, f"{qualified}.")
        kind = {"def": "function", "class": "class"}.get(word, "other")
        segments.append(Segment(kind, qualified, start, end, line, body, members))
        at += 1
    return joined(segments) if prefix else tuple(segments)


def joined(segments: list[Segment]) -> tuple[Segment, ...]:
    """Join adjacent `other` segments: a class body's fields are asked for together."""
    result: list[Segment] = []
    for segment in segments:
        if result and segment.kind == result[-1].kind == "other":
            first = result.pop()
            segment = Segment("other", "", first.start, segment.end, first.line, segment.body)
        result.append(segment)
    return tuple(result)


def _indent(line: str) -> int:
    expanded = line.expandtabs(8)
    return len(expanded) - len(expanded.lstrip())


def _head(lines: list[str], number: int) -> tuple[str, str]:
    """What kind of statement starts on a line: `decorator`, `def`, `class` or nothing, and the
    name.
    """
    match = _HEAD.match(lines[number - 1])
    if match is None:
        return "", ""
    if match["decorator"]:
        return "decorator", ""
    return match["word"] or "", match["name"] or ""
