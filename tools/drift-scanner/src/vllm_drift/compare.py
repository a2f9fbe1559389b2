"""Hold two releases against each other: what a bump from one to the other breaks for a plugin.

Knows which checker is for which kind of symbol. Must not know where source comes from, nor how
findings are printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from drafter_compat.surface import (
    Anchor,
    Attributes,
    CallSites,
    ClassShape,
    Constant,
    ConstructorCall,
    EntryPointGroup,
    FromImport,
    FunctionShape,
    MethodCall,
    ReplacedClass,
    Surface,
    Symbol,
)
from vllm_drift import check_definitions as definitions
from vllm_drift import check_uses as uses
from vllm_drift.cache import Cache
from vllm_drift.findings import Finding, Severity, Verdict
from vllm_drift.judging import Context, Outcome, PluginSource, View
from vllm_drift.scan import judge
from vllm_drift.tree import SourceTree

__all__ = ["compare_surface"]

_COMPARERS: dict[type[Symbol], Callable[[Any, Context], list[Outcome]]] = {
    FromImport: uses.compare_from_import,
    ReplacedClass: uses.compare_replaced_class,
    ConstructorCall: uses.compare_constructor_call,
    MethodCall: uses.compare_method_call,
    Attributes: definitions.compare_attributes,
    FunctionShape: definitions.compare_function,
    ClassShape: definitions.compare_class,
    Constant: definitions.compare_constant,
    CallSites: uses.compare_call_sites,
    Anchor: uses.compare_anchor,
    EntryPointGroup: definitions.compare_group,
}


def compare_surface(
    surface: Surface,
    old_tree: SourceTree,
    new_tree: SourceTree,
    *,
    plugin: SourceTree | None = None,
    cache: Cache | None = None,
) -> list[Finding]:
    """Return what changed between two releases for every symbol that applies to either.

    What was already wrong at the older release, and still is, is `preexisting`. A change that the
    surface declares (the same `id` with another shape for the newer version) is information: the
    plugin is ready for it. `plugin` is the plugin's own source, if it is at hand; it lets the
    comparison see patches that upstream made redundant and demands that the plugin meets already.
    """
    old, new = View(old_tree, cache), View(new_tree, cache)
    source = PluginSource(plugin, cache) if plugin is not None else None
    before, after = _symbols(surface, old_tree), _symbols(surface, new_tree)
    context = Context(surface, new, old, source, tuple(after.values()))
    at_old = Context(surface, old, None, source, tuple(before.values()))
    findings = []
    for ident in dict.fromkeys((*before, *after)):
        pair = before.get(ident), after.get(ident)
        for outcome, symbol, preexisting in _outcomes(*pair, context, at_old):
            finding = outcome.finding(symbol, new_tree.label)
            already = preexisting or finding.preexisting
            findings.append(dataclasses.replace(finding, preexisting=already))
    for view in (old, new):
        view.resolver.save()
    return findings


def _symbols(surface: Surface, tree: SourceTree) -> dict[str, Symbol]:
    applying = surface.for_version(str(tree.version)) if tree.version is not None else surface
    return {symbol.id: symbol for symbol in applying}


def _outcomes(
    before: Symbol | None, after: Symbol | None, context: Context, at_old: Context
) -> Iterator[tuple[Outcome, Symbol, bool]]:
    """What to say of one id: outcomes with the symbol, and whether it was wrong already."""
    symbol = after or before
    assert symbol is not None
    if after is None:
        # The plugin does not rely on it any more in the newer release.
        return
    subject = before if before is not None and type(before) is type(after) else after
    changes = _COMPARERS[type(subject)](subject, context)
    wrong_now = [o for o in judge(after, context) if not o.is_fine]
    handled = before is not None and before != after and not wrong_now
    problems = [o for o in judge(before, at_old) if not o.is_fine] if before is not None else []
    said = False
    for outcome in changes:
        said = True
        yield _handled(outcome, after) if handled else outcome, symbol, False
    if not problems:
        return
    verdicts = {(o.verdict, o.target) for o in wrong_now}
    for problem in problems:
        if (problem.verdict, problem.target) in verdicts and not _said(changes, problem):
            said = True
            old = dataclasses.replace(problem, old=problem.new, new=None)
            yield old, symbol, True
    if not said and wrong_now:
        # Wrong in both releases, each in its own way, and nothing comparable in between.
        for problem in wrong_now:
            yield problem, symbol, True


def _handled(outcome: Outcome, symbol: Symbol) -> Outcome:
    """A change that the surface is ready for."""
    if outcome.is_fine and outcome.verdict is not Verdict.UNCHANGED:
        return outcome
    if outcome.verdict is Verdict.UNCHANGED:
        return outcome
    return dataclasses.replace(
        outcome,
        severity=Severity.INFO,
        message=f"{outcome.message}. The surface declares this shape for {symbol.versions}",
    )


def _said(changes: list[Outcome], problem: Outcome) -> bool:
    return any(c.verdict is problem.verdict and c.target == problem.target for c in changes)
