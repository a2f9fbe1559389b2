"""Hold one release against a surface: one finding or more for every symbol that applies to it.

Knows which checker is for which kind of symbol. Must not know where source comes from, nor how
findings are printed.
"""

from __future__ import annotations

from collections.abc import Callable
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
from vllm_drift.findings import Finding
from vllm_drift.judging import Context, Outcome, PluginSource, View
from vllm_drift.tree import SourceTree

__all__ = ["judge", "scan_surface"]

_JUDGES: dict[type[Symbol], Callable[[Any, Context], list[Outcome]]] = {
    FromImport: uses.judge_from_import,
    ReplacedClass: uses.judge_replaced_class,
    ConstructorCall: uses.judge_constructor_call,
    MethodCall: uses.judge_method_call,
    Attributes: definitions.judge_attributes,
    FunctionShape: definitions.judge_function,
    ClassShape: definitions.judge_class,
    Constant: definitions.judge_constant,
    CallSites: uses.judge_call_sites,
    Anchor: uses.judge_anchor,
    EntryPointGroup: definitions.judge_group,
}


def judge(symbol: Symbol, context: Context) -> list[Outcome]:
    """Hold one symbol of the context's newer release against its declaration."""
    return _JUDGES[type(symbol)](symbol, context)


def scan_surface(
    surface: Surface,
    tree: SourceTree,
    *,
    cache: Cache | None = None,
    plugin: SourceTree | None = None,
) -> list[Finding]:
    """Return the findings of one release, at least one for each symbol that applies to it.

    The symbols are those for the tree's version; all of them where it does not know its version.
    `plugin` is the plugin's own source, if it is at hand. Never raises for what the source holds.
    """
    view = View(tree, cache)
    applying = surface.for_version(str(tree.version)) if tree.version is not None else surface
    context = Context(
        surface,
        view,
        plugin=PluginSource(plugin, cache) if plugin is not None else None,
        symbols=tuple(applying),
    )
    findings = [
        outcome.finding(symbol, tree.label)
        for symbol in applying
        for outcome in judge(symbol, context)
    ]
    view.resolver.save()
    return findings
