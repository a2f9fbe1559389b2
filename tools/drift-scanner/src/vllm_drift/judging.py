"""What the checkers share: a release to look at, what is known of the plugin, and an outcome.

Knows the resolver and the surface's symbols; nothing of any one kind of symbol.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from drafter_compat.surface import FunctionShape, MethodCall, Surface, Symbol
from vllm_drift.cache import Cache
from vllm_drift.facts import Class, Function, walk_functions
from vllm_drift.findings import DEFAULT_SEVERITY, Finding, Location, Severity, Verdict
from vllm_drift.model import FactStore, ModuleModel
from vllm_drift.resolve import Resolution, Resolver
from vllm_drift.shapes import Change
from vllm_drift.similarity import find_moved, find_named, short_diff
from vllm_drift.tree import SourceTree

__all__ = ["Context", "Outcome", "PluginSource", "View", "lost", "of_changes", "worst"]


@dataclass(frozen=True)
class Outcome:
    """One thing to say about a symbol, before it becomes a finding."""

    verdict: Verdict
    message: str
    old: Location | None = None
    new: Location | None = None
    detail: str = ""
    severity: Severity | None = None
    """None for the verdict's usual severity."""
    target: str = ""
    preexisting: bool = False
    """Wrong at the older release already, and still."""

    @property
    def effective_severity(self) -> Severity:
        """The severity, the usual one filled in."""
        return self.severity if self.severity is not None else DEFAULT_SEVERITY[self.verdict]

    @property
    def is_fine(self) -> bool:
        """Whether there is nothing to do."""
        return self.effective_severity is Severity.INFO

    def finding(self, symbol: Symbol, release: str) -> Finding:
        """The finding that says this of a symbol; what the plugin copes without is information."""
        severity, message = self.effective_severity, self.message
        if symbol.optional and severity is not Severity.INFO:
            severity, message = Severity.INFO, f"{message} (optional: the plugin copes without it)"
        return Finding(
            symbol=symbol.id,
            kind=symbol.kind,
            verdict=self.verdict,
            severity=severity,
            message=message,
            old=self.old,
            new=self.new,
            detail=self.detail,
            release=release,
            target=self.target,
            preexisting=self.preexisting,
        )


_STORES: dict[str, FactStore] = {}


def fact_store(cache: Cache | None) -> FactStore:
    """The facts of this process, one store for each cache directory: releases share most pieces."""
    key = repr(cache.directory) if cache is not None else ""
    if key not in _STORES:
        _STORES[key] = FactStore(cache)
    return _STORES[key]


def forget_facts() -> None:
    """Let go of the facts that this process keeps in memory; they are read or parsed again."""
    _STORES.clear()


class View:
    """One release, as the checkers look at it."""

    def __init__(self, tree: SourceTree, cache: Cache | None = None) -> None:
        self.tree = tree
        self.resolver = Resolver(tree, fact_store(cache))

    @property
    def label(self) -> str:
        """What the release is called."""
        return self.tree.label

    def model(self, module: str) -> ModuleModel | None:
        """The model of a module, or None."""
        return self.resolver.model(module)

    def resolve(self, module: str, name: str) -> Resolution:
        """Where a dotted name of a module leads."""
        return self.resolver.resolve(module, name)

    def function(self, module: str, name: str) -> tuple[ModuleModel, Function] | None:
        """The function that a dotted name leads to, with the module that defines it."""
        found = self.resolve(module, name)
        if not found.found or found.kind != "function":
            return None
        model = self.model(found.module)
        function = model.function(found.qualname) if model is not None else None
        return None if model is None or function is None else (model, function)

    def header(self, module: str, name: str) -> tuple[ModuleModel, Function] | None:
        """As `function`, where only signature, kind and decorators are needed."""
        found = self.resolve(module, name)
        if not found.found or found.kind != "function":
            return None
        model = self.model(found.module)
        function = model.header(found.qualname) if model is not None else None
        return None if model is None or function is None else (model, function)

    def same_text(self, other: View, module: str, name: str) -> bool:
        """Whether a name leads to the very same definition, to the letter, in another release."""
        here, there = self.resolve(module, name), other.resolve(module, name)
        if not here.found or not there.found or here.target != there.target or not here.qualname:
            return False
        mine, theirs = self.model(here.module), other.model(there.module)
        if mine is None or theirs is None:
            return False
        places = mine.places(here.qualname), theirs.places(here.qualname)
        if len(places[0]) != 1 or len(places[1]) != 1:
            return False
        return mine.text_of(here.qualname) == theirs.text_of(here.qualname)

    def only_sometimes(self, module: str, name: str) -> bool:
        """Whether a module imports a name under `if` or `try` only, with nothing in the other
        branch.
        """
        model = self.model(module)
        bindings = model.bindings(name.partition(".")[0]) if model is not None else ()
        runtime = [b for b in bindings if b.at_runtime]
        return len(runtime) == 1 and runtime[0].kind == "import" and bool(runtime[0].condition)

    def cls(self, module: str, name: str) -> tuple[ModuleModel, Class] | None:
        """The class that a dotted name leads to, with the module that defines it."""
        found = self.resolve(module, name)
        if not found.found or found.kind != "class":
            return None
        model = self.model(found.module)
        cls = model.class_(found.qualname) if model is not None else None
        return None if model is None or cls is None else (model, cls)

    def nearest(self, module: str, name: str = "") -> Location | None:
        """The place where somebody would look for a name that is not there: its class, its module,
        or the package that should hold the module.
        """
        owner = name.rpartition(".")[0]
        if owner:
            found = self.resolve(module, owner)
            if found.found:
                return found.location
        while module:
            here = self.resolver.where(module)
            if here is not None:
                return here
            module = module.rpartition(".")[0]
        return None


class PluginSource:
    """A plugin's own source, for what depends on what the plugin has already."""

    def __init__(self, tree: SourceTree, cache: Cache | None = None) -> None:
        self.resolver = Resolver(tree, fact_store(cache))
        self.tree = tree

    def functions_named(self, name: str) -> Iterator[tuple[ModuleModel, str]]:
        """Yield the functions and methods whose name is `name` or ends in it (`_patched_name`), as
        (module, qualified name).
        """
        ending = f"_{name.lstrip('_')}"
        for dotted in self.tree.files_containing(name):
            model = self.resolver.model(dotted)
            if model is None:
                continue
            known = model.names()
            for qualname in known:
                last = qualname.rpartition(".")[2]
                fits = last == name or last.endswith(ending)
                if fits and any(kind == "function" for kind, _ in model.places(qualname)):
                    yield model, qualname
            if model.text.count(f"def {name}(") > sum(q.rpartition(".")[2] == name for q in known):
                for function in walk_functions(tuple(model.functions_mentioning(f"def {name}("))):
                    if "<locals>" in function.qualname and function.name == name:
                        yield model, function.qualname

    def classes_with(self, method: str) -> Iterator[tuple[ModuleModel, str]]:
        """Yield the classes that define a method, as (module, qualified name)."""
        for model, qualname in self.functions_named(method):
            owner, _, last = qualname.rpartition(".")
            if last == method and owner and not owner.endswith("<locals>"):
                yield model, owner

    def replacements_of(self, name: str, methods: set[str]) -> Iterator[tuple[ModuleModel, str]]:
        """Yield the classes that may stand for the package's class `name`: of that name, derived
        from it, or with all the methods that are called on it.
        """
        for dotted in self.tree.files_containing("class "):
            model = self.resolver.model(dotted)
            if model is None:
                continue
            for qualname in model.names():
                if all(kind != "class" for kind, _ in model.places(qualname)):
                    continue
                header = model.class_header(qualname)
                derived = header is not None and any(
                    b.rpartition(".")[2] == name for b in header.bases
                )
                fits = bool(methods) and methods <= set(model.members(qualname))
                if derived or fits or qualname.rpartition(".")[2] == name:
                    yield model, qualname


@dataclass
class Context:
    """What a comparison or a scan is about, besides the symbol."""

    surface: Surface
    new: View
    old: View | None = None
    plugin: PluginSource | None = None
    symbols: Sequence[Symbol] = field(default_factory=tuple)
    """The symbols that apply to the new release."""

    @cached_property
    def known_methods(self) -> dict[str, set[str]]:
        """The methods that the surface says are called, by the class that it names for them."""
        known: dict[str, set[str]] = {}
        for symbol in self.symbols:
            if isinstance(symbol, MethodCall):
                known.setdefault(symbol.name or "", set()).add(symbol.method)
        return known


_PATCHED = re.compile(
    r"\b(?:patch\w*|replac\w+|rebind\w*|rebound|wrap\w*|overrid\w+|in place of|swap\w*)\b",
    re.IGNORECASE,
)


def is_patched(symbol: Symbol) -> bool:
    """Whether the plugin puts something of its own in the symbol's place: as its keys say, or,
    where they say nothing about use, as its `why` does.
    """
    if isinstance(symbol, FunctionShape) and (symbol.replacement is not None or symbol.rebound):
        return True
    return _PATCHED.search(symbol.why) is not None


def is_rebound(symbol: FunctionShape) -> bool:
    """Whether the plugin assigns to the function's name in its module, so that only what reads the
    name there sees the replacement.
    """
    if symbol.rebound:
        return True
    declared = symbol.replacement is not None or bool(symbol.calls)
    return "." not in symbol.name and not declared and is_patched(symbol)


def worst(changes: Iterable[Change]) -> Severity:
    """The highest severity among changes; INFO for none."""
    return max((c.severity for c in changes), key=lambda s: s.rank, default=Severity.INFO)


def of_changes(
    what: str,
    changes: Sequence[Change],
    old: Location | None,
    new: Location | None,
    *,
    verdict: Verdict = Verdict.CHANGED_SHAPE,
    target: str = "",
    detail: str = "",
) -> Outcome:
    """The outcome of some changes of one thing: `verdict` where one of them breaks, else
    compatible.
    """
    severity = worst(changes)
    text = "; ".join(c.text for c in sorted(changes, key=lambda c: -c.severity.rank))
    return Outcome(
        verdict if severity is not Severity.INFO else Verdict.COMPATIBLE,
        f"{what}: {text}",
        old,
        new,
        detail,
        severity,
        target,
    )


def lost(
    view: View,
    old: View | None,
    module: str,
    name: str,
    *,
    kind: str,
) -> Outcome:
    """What to say where a definition cannot be found any more: moved, removed, or cannot tell."""
    found = view.resolve(module, name)
    target = f"{module}:{name}"
    before = old.resolve(module, name) if old is not None else None
    was = before.location if before is not None and before.found else None
    dropped = _dropped_from_class(view, before, found)
    if found.status == "unknown" and not dropped:
        return Outcome(
            Verdict.CANNOT_TELL,
            f"{target} cannot be followed in {view.label}: {found.reason}",
            was,
            found.location or view.nearest(module, name),
            target=target,
        )
    if found.status == "outside":
        return Outcome(
            Verdict.MOVED,
            f"{target} comes from another package now: {found.target}",
            was,
            found.location,
            target=target,
        )
    word = "class" if kind == "class" else "function"
    if old is not None and before is not None and before.found:
        candidate = find_moved(
            old.resolver, view.resolver, before.module, before.qualname, kind=kind
        )
        if candidate is not None:
            return Outcome(
                Verdict.MOVED,
                f"{target} is gone; it is {candidate} now",
                was,
                candidate.location,
                target=target,
            )
        hint = ""
    else:
        named = find_named(view.resolver, module, name, kind=kind)
        same = [c for c in named if c.qualname == name]
        if len(same) == 1:
            return Outcome(
                Verdict.MOVED,
                f"{target} does not exist; a {word} of that name is {same[0]}",
                None,
                same[0].location,
                target=target,
            )
        shown = ", ".join(str(c) for c in named[:3])
        hint = f"; a {word} called {name.rpartition('.')[2]} is in {shown}" if named else ""
    return Outcome(
        Verdict.REMOVED,
        f"{target} does not exist in {view.label}: {found.reason}{hint}",
        was,
        view.nearest(module, name),
        severity=Severity.WARNING if dropped else None,
        target=target,
    )


def _dropped_from_class(view: View, before: Resolution | None, found: Resolution) -> bool:
    """Whether a class that defined a method itself does not any more, while a base that source does
    not show may still have it.
    """
    if found.status != "unknown" or before is None or not before.found:
        return False
    owner = before.qualname.rpartition(".")[0]
    return (
        bool(owner) and found.module == before.module and view.resolve(before.module, owner).found
    )


def body_outcome(
    what: str, old: tuple[ModuleModel, str], new: tuple[ModuleModel, str], target: str
) -> Outcome | None:
    """Information that the body of a function or class differs, or None if it does not."""
    before, after = old[0].normal_body(old[1]), new[0].normal_body(new[1])
    if before is None or after is None or before == after:
        return None
    places = [_place(*old), _place(*new)]
    diff = short_diff(before, after, str(places[0]), str(places[1]))
    added = sum(line.startswith("+") and not line.startswith("+++") for line in diff.splitlines())
    dropped = sum(line.startswith("-") and not line.startswith("---") for line in diff.splitlines())
    return Outcome(
        Verdict.BODY_CHANGED,
        f"the body of {what} changed (+{added} -{dropped} normalised lines shown)",
        places[0],
        places[1],
        detail=diff,
        target=target,
    )


def _place(model: ModuleModel, qualname: str) -> Location:
    places = model.places(qualname)
    if len(places) == 1:
        return Location(model.path, places[0][1])
    function = model.function(qualname)
    if function is not None:
        return Location(model.path, function.line)
    cls = model.class_(qualname)
    return Location(model.path, cls.line if cls is not None else 1)
