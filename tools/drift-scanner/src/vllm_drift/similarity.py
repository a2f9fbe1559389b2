"""Where did a definition go? Found by its name and by how alike the bodies are.

Knows a resolver for each release and normalised bodies; no surface and no verdict.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_drift.findings import Location
from vllm_drift.model import ModuleModel
from vllm_drift.resolve import Resolver

__all__ = ["Candidate", "find_moved", "find_named", "short_diff", "similarity"]

ALIKE = 0.6
"""Bodies at least this alike, of another name, count as the same thing."""
ALIKE_NAMED = 0.3
"""Bodies at least this alike, of the same name, count as the same thing."""
_SUBSTANCE = 60
"""A normalised body shorter than this (`raise NotImplementedError`, `return False`) is like many
others: it tells nothing of where a definition of another name came from.
"""
_FILES = 12
"""How many files are searched for a body at most, those that share the most words first."""
_DUNDER = re.compile(r"__\w+__\Z")


@dataclass(frozen=True)
class Candidate:
    """Where a definition may have gone."""

    module: str
    qualname: str
    location: Location
    alike: float | None
    """How alike the bodies are, 0 to 1; None where there is no old body to compare with."""

    @property
    def target(self) -> str:
        """`module:qualified.name`."""
        return f"{self.module}:{self.qualname}"

    def __str__(self) -> str:
        how = "" if self.alike is None else f", {self.alike:.0%} alike"
        return f"{self.target} ({self.location}{how})"


def similarity(first: str, second: str) -> float:
    """How alike two normalised bodies are, 0 to 1: by lines, and by words where lines are few."""
    if first == second:
        return 1.0
    lines, others = first.splitlines(), second.splitlines()
    if min(len(lines), len(others)) <= 4:
        lines, others = re.findall(r"\w+|[^\w\s]", first), re.findall(r"\w+|[^\w\s]", second)
    matcher = difflib.SequenceMatcher(None, lines, others, autojunk=False)
    if matcher.real_quick_ratio() < ALIKE_NAMED or matcher.quick_ratio() < ALIKE_NAMED:
        return 0.0
    return matcher.ratio()


def find_named(resolver: Resolver, module: str, qualname: str, *, kind: str) -> list[Candidate]:
    """Definitions of the same name in other places of a release. `kind`: `function` or `class`."""
    last = qualname.rpartition(".")[2]
    if _DUNDER.match(last):
        # `__init__` is everywhere; look for the class that had it.
        owner = qualname.rpartition(".")[0]
        return (
            [
                Candidate(c.module, f"{c.qualname}.{last}", c.location, None)
                for c in find_named(resolver, module, owner, kind="class")
                if resolver.resolve(c.module, f"{c.qualname}.{last}").found
            ]
            if owner
            else []
        )
    keyword = "class" if kind == "class" else "def"
    found = []
    for dotted in resolver.tree.files_containing(f"{keyword} {last}"):
        model = resolver.model(dotted)
        if model is None:
            continue
        for name, line in _definitions(model, kind):
            if name.rpartition(".")[2] == last and (dotted, name) != (module, qualname):
                found.append(Candidate(dotted, name, Location(model.path, line), None))
    return found


def find_moved(
    old: Resolver, new: Resolver, module: str, qualname: str, *, kind: str
) -> Candidate | None:
    """Where in the new release the old release's definition went, or None if nowhere that can be
    told.

    `module` and `qualname` name the definition in the old release, where it stands there.
    """
    source = old.model(module)
    body = source.normal_body(qualname) if source is not None else None
    if body is None:
        return None
    named = [_rated(new, c, body) for c in find_named(new, module, qualname, kind=kind)]
    # One that was there before, under that very name, is not where this one went.
    named = [c for c in named if not _existed(old, c)]
    best = max(named, key=lambda c: c.alike or 0.0, default=None)
    if best is not None and (best.alike or 0.0) >= ALIKE_NAMED:
        return best
    if len(body) < _SUBSTANCE:
        return None
    renamed = [
        candidate
        for dotted in _likely_files(new, module, body)
        for candidate in _unknown_names(old, new, dotted, kind)
    ]
    rated = [_rated(new, c, body) for c in renamed]
    best = max(rated, key=lambda c: c.alike or 0.0, default=None)
    return best if best is not None and (best.alike or 0.0) >= ALIKE else None


def _rated(resolver: Resolver, candidate: Candidate, body: str) -> Candidate:
    model = resolver.model(candidate.module)
    other = model.normal_body(candidate.qualname) if model is not None else None
    alike = 0.0 if other is None else similarity(body, other)
    return Candidate(candidate.module, candidate.qualname, candidate.location, alike)


def _existed(old: Resolver, candidate: Candidate) -> bool:
    model = old.model(candidate.module)
    return model is not None and candidate.qualname in model.names()


def _definitions(model: ModuleModel, kind: str) -> Iterator[tuple[str, int]]:
    for name in model.names():
        for segment_kind, line in model.places(name):
            if segment_kind == kind:
                yield name, line


def _unknown_names(old: Resolver, new: Resolver, dotted: str, kind: str) -> Iterator[Candidate]:
    """Definitions of a module that the old release does not have under that name."""
    model, before = new.model(dotted), old.model(dotted)
    if model is None:
        return
    known = set(before.names()) if before is not None else set()
    for name, line in _definitions(model, kind):
        if name not in known:
            yield Candidate(dotted, name, Location(model.path, line), None)


def _likely_files(new: Resolver, module: str, body: str) -> list[str]:
    """The module itself, and those that share the body's most telling words."""
    words = [w for w, _ in Counter(re.findall(r"\b[A-Za-z_]\w{11,}\b", body)).most_common()]
    telling = sorted(words, key=len, reverse=True)[:3]
    found = [module] if new.model(module) is not None else []
    if telling:
        found += [m for m in new.tree.files_containing(*telling) if m != module]
    return found[:_FILES]


def short_diff(old: str, new: str, old_name: str, new_name: str, *, limit: int = 40) -> str:
    """A unified diff of two normalised bodies with one line of context, at most `limit` lines."""
    lines = list(
        difflib.unified_diff(
            old.splitlines(), new.splitlines(), old_name, new_name, n=1, lineterm=""
        )
    )
    if len(lines) > limit:
        more = len(lines) - limit
        lines = [*lines[:limit], f"... and {more} more lines"]
    return "\n".join(lines)
