"""Checkers for how vLLM uses what a plugin replaces: imports, calls, tests, call sites, anchors.

This is what a check of names alone misses. Each checker has two functions, as in
`check_definitions`: `judge_*` for one release, `compare_*` for two.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

from drafter_compat.surface import (
    Anchor,
    CallSites,
    ConstructorCall,
    FromImport,
    MethodCall,
    ReplacedClass,
    Symbol,
)
from vllm_drift import normal
from vllm_drift.collect import NotParsed, parse_signature
from vllm_drift.facts import AttributeUse, Call, Function, Import
from vllm_drift.findings import Location, Severity, Verdict
from vllm_drift.infer_by_use import texts_put_for
from vllm_drift.judging import Context, Outcome, View, body_outcome, lost, of_changes
from vllm_drift.model import Binding, ModuleModel
from vllm_drift.resolve import preferred
from vllm_drift.shapes import CallShape, binding_problem, call_changes

__all__ = [
    "compare_anchor",
    "compare_call_sites",
    "compare_constructor_call",
    "compare_from_import",
    "compare_method_call",
    "compare_replaced_class",
    "judge_anchor",
    "judge_call_sites",
    "judge_constructor_call",
    "judge_from_import",
    "judge_method_call",
    "judge_replaced_class",
]


# names bound in a module, and where they are read
# ---------------------------------------------------


@dataclass(frozen=True)
class _Use:
    """How one function gets at a name: from its module's namespace, or by an import of its own."""

    function: str
    line: int
    own_import: str = ""
    """The module that the function itself imports the name from; empty where it reads the
    module's.
    """


@dataclass(frozen=True)
class _Bound:
    """How a module comes by a name, and who reads it there."""

    model: ModuleModel
    binding: Binding | None
    """The binding of the module body that holds at run time, or None."""
    source: str
    """The module that it is imported from, or the module itself where it is defined there."""
    typing_only: Binding | None
    """A binding that only a type checker sees, where there is no other."""
    uses: dict[str, _Use]
    """The functions of the module that use the name, by qualified name."""
    sometimes: bool = False
    """Bound under `if` or `try` only, once, so that it may be missing at run time."""

    @property
    def here(self) -> Location:
        """Where the name is bound, or the module's first line."""
        binding = self.binding or self.typing_only
        return Location(self.model.path, binding.line if binding is not None else 1)


def _bound(view: View, module: str, name: str) -> _Bound | None:
    """How a module comes by a name; None where there is no such module."""
    model = view.model(module)
    if model is None:
        return None
    bindings = model.bindings(name)
    runtime = [b for b in bindings if b.at_runtime]
    binding = next(iter(preferred(tuple(runtime))), None)
    source = module
    if binding is not None and isinstance(binding.fact, Import):
        source = model.imported_from(binding.fact)
    if binding is None:
        star = _from_star(view, model, name)
        if star is not None:
            binding, source = Binding("import", name, star.line, star.condition, star), ""
            source = model.imported_from(star)
    typing_only = next((b for b in bindings if not b.at_runtime), None) if binding is None else None
    uses = {}
    for function in model.functions_mentioning(name):
        use = _use(model, function, name)
        if use is not None:
            uses[function.qualname] = use
    sometimes = binding is not None and bool(binding.condition) and len(runtime) == 1
    return _Bound(model, binding, source, typing_only, uses, sometimes)


def _from_star(view: View, model: ModuleModel, name: str) -> Import | None:
    for star in model.star_imports():
        target = model.imported_from(star)
        if view.resolver.exports(target, name) and view.resolve(target, name).found:
            return star
    return None


def _use(model: ModuleModel, function: Function, name: str) -> _Use | None:
    """How a function uses a name, or None if it does not."""
    for fact in function.imports:
        if fact.bound == name:
            return _Use(function.qualname, fact.line, model.imported_from(fact))
    for inner in function.nested:
        use = _use(model, inner, name)
        if use is not None and use.own_import:
            return _Use(function.qualname, use.line, use.own_import)
    for read in function.reads:
        if read.name == name:
            return _Use(function.qualname, read.line)
    return None


def _readers_elsewhere(view: View, name: str, but: str) -> Iterator[tuple[str, _Use]]:
    """Functions of other modules that read the name from their own module's namespace."""
    for dotted in view.tree.files_containing(name):
        if dotted == but:
            continue
        bound = _bound(view, dotted, name)
        if bound is not None:
            for use in bound.uses.values():
                yield dotted, use


def _qualified_use(view: View, function: Function, model: ModuleModel, name: str) -> int | None:
    """The line where a function reads `something.name` instead of the plain name, or None."""
    for use in function.attributes:
        if use.name == name and not use.store:
            found = view.resolve(model.dotted, use.value) if "(" not in use.value else None
            local = any(i.bound == use.value.partition(".")[0] for i in function.imports)
            if local or (found is not None and found.found and found.kind == "module"):
                return use.line
    return None


# from-imports -------------------------------------------------------------------------------------


def judge_from_import(symbol: FromImport, context: Context) -> list[Outcome]:
    """Hold one release against: `module` from-imports `name` from `source`, `read_in` read it."""
    view = context.new
    target = f"{symbol.module}:{symbol.name}"
    bound = _bound(view, symbol.module, symbol.name)
    if bound is None:
        return [lost(view, None, symbol.module, symbol.name, kind="function")]
    own = [bound.uses[f] for f in symbol.read_in if f in bound.uses and bound.uses[f].own_import]
    lazy = bool(symbol.read_in) and len(own) == len(symbol.read_in)
    if not lazy:
        problem = _binding_problem(view, None, symbol.module, symbol.name, bound)
        if problem is not None:
            return [problem]
    outcomes = []
    for name in symbol.read_in:
        problem = _reading_problem(view, None, symbol, name, bound, lazy=lazy)
        if problem is not None:
            outcomes.append(problem)
    if not outcomes and not lazy and bound.source != symbol.source:
        outcomes.append(_other_source(view, symbol, bound, None))
    if not outcomes and not view.resolve(symbol.source, symbol.name).found:
        outcomes.append(lost(view, None, symbol.source, symbol.name, kind="function"))
    return outcomes or [
        Outcome(Verdict.UNCHANGED, f"{target} is as declared", None, bound.here, target=target)
    ]


def compare_from_import(symbol: FromImport, context: Context) -> list[Outcome]:
    """Hold a from-import and the functions that read it against each other in two releases."""
    old, new = context.old, context.new
    assert old is not None
    target = f"{symbol.module}:{symbol.name}"
    before, after = _bound(old, symbol.module, symbol.name), _bound(new, symbol.module, symbol.name)
    had = before is not None and (before.binding is not None or bool(before.uses))
    has = after is not None and (after.binding is not None or bool(after.uses))
    if not had and not has:
        return []
    if not had:
        assert after is not None
        return [_appeared(target, after.here, old)]
    assert before is not None
    if after is None:
        return [lost(new, old, symbol.module, symbol.name, kind="function")]
    was = before.here
    outcomes: list[Outcome] = []
    if before.binding is not None:
        problem = _binding_problem(new, was, symbol.module, symbol.name, after)
        if problem is not None and not _had_problem(old, symbol, before, problem):
            return [problem]
    for name in symbol.read_in:
        use = before.uses.get(name)
        if use is None:
            continue
        lazy = bool(use.own_import)
        place = Location(before.model.path, use.line)
        problem = _reading_problem(new, place, symbol, name, after, lazy=lazy)
        if problem is not None:
            outcomes.append(problem)
    if not outcomes and before.binding is not None and before.source != after.source:
        outcomes.append(_other_source(new, symbol, after, was))
    outcomes += _now_conditional(target, before, after)
    return outcomes or [
        Outcome(Verdict.UNCHANGED, f"{target} is unchanged", was, after.here, target=target)
    ]


def _appeared(target: str, now: Location | None, old: View) -> Outcome:
    return Outcome(
        Verdict.COMPATIBLE,
        f"{target} is new: {old.label} does not have it",
        None,
        now,
        target=target,
    )


def _binding_problem(
    view: View, was: Location | None, module: str, name: str, bound: _Bound
) -> Outcome | None:
    """What is wrong with the module's binding of the name, or None."""
    target = f"{module}:{name}"
    path = bound.model.path
    if bound.model.broken is not None:
        return Outcome(
            Verdict.CANNOT_TELL,
            f"{path} cannot be parsed: {bound.model.broken}",
            was,
            Location(path, 1),
            target=target,
        )
    if bound.binding is not None:
        if bound.binding.kind in ("class", "function"):
            return None  # defined here: whoever imports it later gets what is put in its place
        if bound.uses or _read_at_module_level(bound.model, name):
            return None
        for dotted, use in _readers_elsewhere(view, name, module):
            other = view.model(dotted)
            if other is not None and view.resolve(dotted, name).found:
                return Outcome(
                    Verdict.INEFFECTIVE,
                    f"{module} still binds {name}, but no function there reads it any more: it "
                    "is read "
                    f"in {dotted}:{use.function} ({other.path}:{use.line}), so rebinding "
                    f"{target} has no effect",
                    was,
                    bound.here,
                    target=target,
                )
        return Outcome(
            Verdict.INEFFECTIVE,
            f"{module} still binds {name}, but nothing in {view.label} reads it there",
            was,
            bound.here,
            target=target,
        )
    if bound.typing_only is not None:
        return Outcome(
            Verdict.INEFFECTIVE,
            f"{module} imports {name} for type checkers only (under TYPE_CHECKING): at run time "
            "nothing "
            f"reads {target}",
            was,
            bound.here,
            target=target,
        )
    lazy = next((u for u in bound.uses.values() if u.own_import), None)
    if lazy is not None:
        return Outcome(
            Verdict.INEFFECTIVE,
            f"{module} does not import {name} at module level any more: {lazy.function} imports "
            "it itself "
            f"from {lazy.own_import}, so rebinding {target} has no effect",
            was,
            Location(path, lazy.line),
            target=target,
        )
    for function in bound.model.functions_mentioning(name):
        line = _qualified_use(view, function, bound.model, name)
        if line is not None:
            return Outcome(
                Verdict.INEFFECTIVE,
                f"{module} does not import the name {name} any more: {function.qualname} reads "
                "it as an "
                f"attribute of another module, so rebinding {target} has no effect",
                was,
                Location(path, line),
                target=target,
            )
    found = view.resolve(module, name)
    if found.status == "unknown":
        return Outcome(
            Verdict.CANNOT_TELL,
            f"{target} cannot be followed in {view.label}: {found.reason}",
            was,
            Location(path, 1),
            target=target,
        )
    return Outcome(
        Verdict.REMOVED,
        f"{module} does not import {name}{_where_else(view, module, name)}",
        was,
        Location(path, 1),
        target=target,
    )


def _had_problem(
    old: View, symbol: FromImport | ReplacedClass, before: _Bound, problem: Outcome
) -> bool:
    """Whether the older release has the same problem already."""
    known = _binding_problem(old, None, symbol.module, symbol.name, before)
    return known is not None and known.verdict is problem.verdict


def _where_else(view: View, module: str, name: str) -> str:
    for dotted, use in _readers_elsewhere(view, name, module):
        if not use.own_import:
            model = view.model(dotted)
            assert model is not None
            return f"; {dotted}:{use.function} reads it ({model.path}:{use.line})"
    return ""


def _read_at_module_level(model: ModuleModel, name: str) -> bool:
    """Whether code outside functions reads the name: a base class, a default, a table."""
    for block in model.blocks_mentioning(name):
        if any(r.name == name for r in block.reads):
            return True
        if any(name in base for cls in block.classes for base in cls.bases):
            return True
    return False


def _reading_problem(
    view: View,
    was: Location | None,
    symbol: FromImport,
    function: str,
    bound: _Bound,
    *,
    lazy: bool,
) -> Outcome | None:
    """What is wrong with how one function reads the name, or None. `lazy`: it imported it
    itself.
    """
    target = f"{symbol.module}:{symbol.name}"
    model = bound.model
    use = bound.uses.get(function)
    if use is not None and use.own_import:
        if lazy and use.own_import == symbol.source:
            return None
        if lazy:
            return Outcome(
                Verdict.MOVED,
                f"{function} imports {symbol.name} from {use.own_import} now, not from "
                f"{symbol.source}",
                was,
                Location(model.path, use.line),
                target=target,
            )
        return Outcome(
            Verdict.INEFFECTIVE,
            f"{function} imports {symbol.name} itself from {use.own_import}: what is bound to "
            f"{target} "
            f"does not matter to it",
            was,
            Location(model.path, use.line),
            target=target,
        )
    if use is not None:
        return None
    found = view.resolve(symbol.module, function)
    others = [u for u in bound.uses.values() if not u.own_import]
    if found.found and found.module != symbol.module:
        other = _bound(view, found.module, symbol.name)
        there = other.uses.get(found.qualname) if other is not None else None
        if other is not None and there is not None:
            return Outcome(
                Verdict.INEFFECTIVE,
                f"{function} is defined in {found.module} now and reads {symbol.name} there: "
                "rebinding "
                f"{target} has no effect on it",
                was,
                Location(other.model.path, there.line),
                target=target,
            )
    if others:
        return Outcome(
            Verdict.MOVED,
            f"{function} does not read {symbol.name} any more; {others[0].function} does",
            was,
            Location(model.path, others[0].line),
            severity=Severity.WARNING,
            target=target,
        )
    here = found.location if found.found else view.nearest(symbol.module, function)
    facts = model.function(function)
    line = _qualified_use(view, facts, model, symbol.name) if facts is not None else None
    if line is not None:
        return Outcome(
            Verdict.INEFFECTIVE,
            f"{function} reads {symbol.name} as an attribute of another module: rebinding "
            f"{target} has "
            f"no effect on it",
            was,
            Location(model.path, line),
            target=target,
        )
    what = "does not read" if found.found else "does not exist, and nothing else reads"
    return Outcome(
        Verdict.REMOVED,
        f"{symbol.module}:{function} {what} {symbol.name} in {view.label}"
        f"{_where_else(view, symbol.module, symbol.name)}",
        was,
        here,
        target=target,
    )


def _now_conditional(target: str, before: _Bound, after: _Bound) -> list[Outcome]:
    if before.sometimes or not after.sometimes:
        return []
    return [
        Outcome(
            Verdict.CHANGED_SHAPE,
            f"{target} is bound only under a condition now, and may be missing at run time",
            before.here,
            after.here,
            severity=Severity.WARNING,
            target=target,
        )
    ]


def _other_source(
    view: View, symbol: FromImport | ReplacedClass, bound: _Bound, was: Location | None
) -> Outcome:
    found = view.resolve(symbol.module, symbol.name)
    leads = f" (it leads to {found.target})" if found.found else ""
    return Outcome(
        Verdict.MOVED,
        f"{symbol.module} has {symbol.name} from {bound.source} now, not from "
        f"{symbol.source}{leads}",
        was,
        bound.here,
        severity=Severity.WARNING,
        target=f"{symbol.module}:{symbol.name}",
    )


# replaced classes ---------------------------------------------------------------------------------


def judge_replaced_class(symbol: ReplacedClass, context: Context) -> list[Outcome]:
    """Hold one release against: the class is defined in `source`, bound in `module`, tested
    there.
    """
    view = context.new
    target = f"{symbol.module}:{symbol.name}"
    bound = _bound(view, symbol.module, symbol.name)
    if bound is None:
        return [lost(view, None, symbol.module, symbol.name, kind="class")]
    problem = _binding_problem(view, None, symbol.module, symbol.name, bound)
    if problem is not None:
        return [problem]
    outcomes = []
    definition = view.cls(symbol.source, symbol.name)
    if definition is None:
        outcomes.append(lost(view, None, symbol.source, symbol.name, kind="class"))
    elif bound.source != symbol.source:
        outcomes.append(_other_source(view, symbol, bound, None))
    for function in symbol.isinstance_in:
        problem = _test_problem(view, None, symbol, function)
        if problem is not None:
            outcomes.append(problem)
    outcomes += _undeclared_demands(symbol, context)
    return outcomes or [
        Outcome(Verdict.UNCHANGED, f"{target} is as declared", None, bound.here, target=target)
    ]


def compare_replaced_class(symbol: ReplacedClass, context: Context) -> list[Outcome]:
    """Hold a replaced class, its binding, its tests and what is asked of it against two
    releases.
    """
    old, new = context.old, context.new
    assert old is not None
    target = f"{symbol.module}:{symbol.name}"
    before, after = _bound(old, symbol.module, symbol.name), _bound(new, symbol.module, symbol.name)
    had = before is not None and before.binding is not None
    has = after is not None and after.binding is not None
    if not had:
        if not has:
            return []
        assert after is not None
        return [_appeared(target, after.here, old)]
    assert before is not None
    was = before.here
    if after is None:
        return [lost(new, old, symbol.module, symbol.name, kind="class")]
    problem = _binding_problem(new, was, symbol.module, symbol.name, after)
    if problem is not None and not _had_problem(old, symbol, before, problem):
        return [problem]
    outcomes = []
    if before.source != after.source:
        outcomes.append(_other_source(new, symbol, after, was))
    outcomes += _now_conditional(target, before, after)
    for function in symbol.isinstance_in:
        test = _test(old, symbol.module, function, symbol.name)
        if test is not None:
            problem = _test_problem(new, test, symbol, function)
            if problem is not None:
                outcomes.append(problem)
    outcomes += _new_demands(symbol, context)
    old_class, new_class = old.cls(symbol.module, symbol.name), new.cls(symbol.module, symbol.name)
    if old_class is not None and new_class is not None:
        body = body_outcome(
            f"class {symbol.name}",
            (old_class[0], old_class[1].qualname),
            (new_class[0], new_class[1].qualname),
            target,
        )
        if body is not None:
            outcomes.append(body)
    return outcomes or [
        Outcome(Verdict.UNCHANGED, f"{target} is unchanged", was, after.here, target=target)
    ]


def _test(view: View, module: str, function: str, name: str) -> Location | None:
    """Where a function tests `isinstance(value, name)`, or None."""
    found = view.function(module, function)
    if found is None:
        return None
    for test in found[1].tests:
        if any(c.rpartition(".")[2] == name for c in test.classes):
            return Location(found[0].path, test.line)
    return None


def _test_problem(
    view: View, was: Location | None, symbol: ReplacedClass, function: str
) -> Outcome | None:
    if _test(view, symbol.module, function, symbol.name) is not None:
        return None
    target = f"{symbol.module}:{function}"
    model = view.model(symbol.module)
    for other in model.functions_mentioning(symbol.name) if model is not None else ():
        for test in other.tests:
            if model is not None and any(c.rpartition(".")[2] == symbol.name for c in test.classes):
                return Outcome(
                    Verdict.MOVED,
                    f"{function} does not test isinstance(..., {symbol.name}) any more; "
                    f"{other.qualname} "
                    f"does",
                    was,
                    Location(model.path, test.line),
                    severity=Severity.WARNING,
                    target=target,
                )
    found = view.function(symbol.module, function)
    if found is None:
        return lost(view, None, symbol.module, function, kind="function")
    return Outcome(
        Verdict.CALLER_CHANGED,
        f"{function} does not test isinstance(..., {symbol.name}) in {view.label}",
        was,
        Location(found[0].path, found[1].line),
        severity=Severity.WARNING,
        target=target,
    )


@dataclass(frozen=True)
class _Demand:
    """Something that vLLM asks of an object of the replaced class."""

    name: str
    location: Location
    certain: bool
    """Narrowed to the class, rather than merely possible."""


def _demands(view: View, symbol: ReplacedClass) -> dict[str, _Demand]:
    """What vLLM reads of, or calls on, objects of the class: where `isinstance` says so, and where
    a value that was constructed from it is used and the class has that attribute.
    """
    found: dict[str, _Demand] = {}
    model = view.model(symbol.module)
    if model is None:
        return found
    for function in model.functions_mentioning(symbol.name):
        for use in function.attributes:
            if _is_ours(use, symbol.name) and not use.store:
                place = Location(model.path, use.line)
                found.setdefault(use.name, _Demand(use.name, place, certain=True))
    for value in _constructed_values(model, symbol.name):
        names = set(re.findall(rf"\b{re.escape(value)}\.(\w+)", model.text)) - set(found)
        for name in sorted(n for n in names if _class_has(view, symbol, n)):
            for function in model.functions_mentioning(f"{value}.{name}"):
                for use in function.attributes:
                    if (use.value, use.name) != (value, name) or use.store:
                        continue
                    if not use.guarded and not use.narrowed:
                        place = Location(model.path, use.line)
                        found.setdefault(name, _Demand(name, place, certain=False))
    return found


def _class_has(view: View, symbol: ReplacedClass, name: str) -> bool:
    """Whether vLLM's own class, or a base of it, has the attribute."""
    definition = view.cls(symbol.module, symbol.name)
    return definition is not None and (
        view.resolver.member(definition[0].dotted, definition[1].qualname, name) is not None
    )


def _is_ours(use: AttributeUse, name: str) -> bool:
    return any(c.rpartition(".")[2] == name for c in use.narrowed)


def _constructed_values(model: ModuleModel, name: str) -> list[str]:
    """The attributes of self that are assigned a newly constructed object of the class."""
    values = [
        a.target
        for function in model.functions_mentioning(name)
        for a in function.assignments
        if a.value.partition("(")[0].rpartition(".")[2] == name and "." in a.target
    ]
    return list(dict.fromkeys(values))


def _new_demands(symbol: ReplacedClass, context: Context) -> list[Outcome]:
    """What the newer release asks of the class and the older did not."""
    assert context.old is not None
    before, after = _demands(context.old, symbol), _demands(context.new, symbol)
    declared = context.known_methods.get(symbol.name, set()) | context.known_methods.get("", set())
    settled = {(member, why) for member, _, _, why in _unfit_calls(symbol, context.old)}
    outcomes = [
        _unfit_outcome(symbol, found, _class_place(context.old, symbol))
        for found in _unfit_calls(symbol, context.new)
        if (found[0], found[3]) not in settled
    ]
    for name, demand in after.items():
        if name in before or name in declared or _plugin_provides(context, symbol, name):
            continue
        outcomes.append(
            Outcome(
                Verdict.NEW_DEMAND,
                f"vLLM reads .{name} of the object now (in {demand.location}), which it did not in "
                f"{context.old.label}: the class that replaces {symbol.name} must have it",
                _class_place(context.old, symbol),
                demand.location,
                target=f"{symbol.module}:{symbol.name}.{name}",
            )
        )
    return outcomes


def _undeclared_demands(symbol: ReplacedClass, context: Context) -> list[Outcome]:
    """What vLLM asks of the class beyond the methods that the surface declares as called, where it
    declares any.
    """
    declared = context.known_methods.get(symbol.name, set())
    unfit = [_unfit_outcome(symbol, found, None) for found in _unfit_calls(symbol, context.new)]
    if not declared and not symbol.provides:
        return unfit
    declared = declared | context.known_methods.get("", set())
    return unfit + [
        Outcome(
            Verdict.NEW_DEMAND,
            f"vLLM reads .{name} of an object of {symbol.name} (in {demand.location}); the surface "
            f"declares no such method-call",
            None,
            demand.location,
            target=f"{symbol.module}:{symbol.name}.{name}",
        )
        for name, demand in _demands(context.new, symbol).items()
        if name not in declared and not _plugin_provides(context, symbol, name)
    ]


def _class_place(view: View, symbol: ReplacedClass) -> Location | None:
    found = view.cls(symbol.module, symbol.name)
    return Location(found[0].path, found[1].line) if found is not None else None


def _plugin_provides(context: Context, symbol: ReplacedClass, name: str) -> bool:
    """Whether the class that the plugin puts there has the attribute, as the surface or the
    plugin's source says.
    """
    if symbol.provides:
        return name in dict(symbol.provides)
    if context.plugin is None:
        return False
    known = context.known_methods.get(symbol.name, set())
    for model, owner in context.plugin.replacements_of(symbol.name, known):
        if context.plugin.resolver.member(model.dotted, owner, name) is not None:
            return True
        cls = model.class_header(owner)
        if cls is not None and any(b.rpartition(".")[2] == symbol.name for b in cls.bases):
            return context.new.resolver.member(symbol.source, symbol.name, name) is not None
    return False


def _unfit_calls(symbol: ReplacedClass, view: View) -> Iterator[tuple[str, Location, Call, str]]:
    """The calls of vLLM that the class which the plugin provides cannot take, as
    (member, place, call, why).
    """
    model = view.model(symbol.module)
    signatures = dict(symbol.provides)
    if model is None or not signatures:
        return
    for function in model.functions_mentioning(symbol.name):
        for call in function.calls:
            if call.callee.rpartition(".")[2] == symbol.name and "__init__" in signatures:
                member = "__init__"
            elif any(n.rpartition(".")[2] == symbol.name for n in call.narrowed):
                member = call.name
            else:
                continue
            text = signatures.get(member)
            if not text:
                continue
            try:
                signature = parse_signature(text)
            except NotParsed:
                continue
            problem = binding_problem(signature, call, bound=True)
            if problem is not None:
                yield member, Location(model.path, call.line), call, problem


def _unfit_outcome(
    symbol: ReplacedClass, found: tuple[str, Location, Call, str], was: Location | None
) -> Outcome:
    member, place, call, problem = found
    return Outcome(
        Verdict.NEW_DEMAND,
        f"vLLM calls {call.callee}{CallShape.of(call)}, which the plugin's {member}"
        f"{dict(symbol.provides)[member]} cannot take: {problem}",
        was,
        place,
        target=f"{symbol.module}:{symbol.name}.{member}",
    )


# calls --------------------------------------------------------------------------------------------


_FoundCalls = list[tuple[Location, Call]]


def judge_constructor_call(symbol: ConstructorCall, context: Context) -> list[Outcome]:
    """Hold the way in which a function constructs something against its declaration."""
    return _judge_calls(symbol, symbol.name, context)


def compare_constructor_call(symbol: ConstructorCall, context: Context) -> list[Outcome]:
    """Hold the way in which a function constructs something against each other in two releases."""
    return _compare_calls(symbol, symbol.name, context)


def judge_method_call(symbol: MethodCall, context: Context) -> list[Outcome]:
    """Hold the way in which a function calls a method against its declaration."""
    return _judge_calls(symbol, f"{symbol.name or symbol.value}.{symbol.method}", context)


def compare_method_call(symbol: MethodCall, context: Context) -> list[Outcome]:
    """Hold the way in which a function calls a method against each other in two releases."""
    return _compare_calls(symbol, f"{symbol.name or symbol.value}.{symbol.method}", context)


def _calls(
    symbol: ConstructorCall | MethodCall, function: Function, model: ModuleModel
) -> _FoundCalls:
    """The calls of a function that the symbol is about."""
    if isinstance(symbol, ConstructorCall):
        calls = [
            c
            for c in function.calls
            if c.callee.rpartition(".")[2] == symbol.name.rpartition(".")[2]
        ]
        if "." in symbol.name:
            calls = [
                c for c in calls if c.callee == symbol.name or c.callee.endswith(f".{symbol.name}")
            ]
    elif symbol.name is not None:
        last = symbol.name.rpartition(".")[2]
        calls = [
            c
            for c in function.calls
            if c.name == symbol.method and any(n.rpartition(".")[2] == last for n in c.narrowed)
        ]
    else:
        calls = _calls_on_value(symbol, function)
    return [(Location(model.path, c.line), c) for c in calls]


def _calls_on_value(symbol: MethodCall, function: Function) -> list[Call]:
    assert symbol.value is not None
    value = normal.expression(symbol.value)
    aliases = {
        a.target for a in function.assignments if a.value == value and a.target.isidentifier()
    }
    calls = [
        c
        for c in function.calls
        if c.name == symbol.method and (c.receiver == value or c.receiver in aliases)
    ]
    return [c for c in calls if not c.narrowed] or calls


def _declared(symbol: ConstructorCall | MethodCall) -> CallShape:
    return CallShape(
        tuple(normal.expression(a) if not a.startswith("*") else a for a in symbol.args),
        tuple(sorted((k, normal.expression(v)) for k, v in symbol.keywords)),
    )


def _judge_calls(
    symbol: ConstructorCall | MethodCall, what: str, context: Context
) -> list[Outcome]:
    view = context.new
    target = f"{symbol.module}:{symbol.function}"
    found = view.function(symbol.module, symbol.function)
    if found is None:
        outcome = _no_call(symbol, what, view, None, None)
        if outcome.verdict is Verdict.LOST_CALL_SITE:
            outcome = lost(view, None, symbol.module, symbol.function, kind="function")
        return [outcome]
    model, function = found
    calls = _calls(symbol, function, model)
    if not calls:
        return [_no_call(symbol, what, view, None, Location(model.path, function.line))]
    declared = _declared(symbol)
    outcomes = []
    for place, call in calls:
        shape = CallShape.of(call)
        changes = call_changes(declared, shape)
        if any(c.breaks for c in changes):
            outcomes.append(
                of_changes(
                    f"{symbol.function} calls {what}{shape}, expected {declared}",
                    changes,
                    None,
                    place,
                    verdict=Verdict.CALLER_CHANGED,
                    target=target,
                )
            )
    if outcomes:
        return outcomes
    return [
        Outcome(
            Verdict.UNCHANGED,
            f"{symbol.function} calls {what}{declared} as declared",
            None,
            calls[0][0],
            target=target,
        )
    ]


def _compare_calls(
    symbol: ConstructorCall | MethodCall, what: str, context: Context
) -> list[Outcome]:
    old, new = context.old, context.new
    assert old is not None
    target = f"{symbol.module}:{symbol.function}"
    before = old.function(symbol.module, symbol.function)
    after = new.function(symbol.module, symbol.function)
    if before is not None and after is not None and _is_inherited_now(before, after, old):
        after = None
    had = _calls(symbol, before[1], before[0]) if before is not None else []
    has = _calls(symbol, after[1], after[0]) if after is not None else []
    if not had:
        if not has:
            return []
        words = f"{symbol.function} calls {what}{CallShape.of(has[0][1])} now"
        return [Outcome(Verdict.COMPATIBLE, words, None, has[0][0], target=target)]
    was = had[0][0]
    if after is None:
        outcome = _no_call(symbol, what, new, was, None)
        if outcome.verdict is Verdict.LOST_CALL_SITE:
            return [lost(new, old, symbol.module, symbol.function, kind="function")]
        return [outcome]
    if not has:
        return [_no_call(symbol, what, new, was, Location(after[0].path, after[1].line))]
    known = [CallShape.of(c) for _, c in had]
    outcomes = []
    for place, call in has:
        shape = CallShape.of(call)
        if shape in known:
            continue
        nearest, position = _nearest(shape, had)
        changes = call_changes(nearest, shape)
        outcomes.append(
            of_changes(
                f"{symbol.function} calls {what}{shape} now, {what}{nearest} before",
                changes,
                position,
                place,
                verdict=Verdict.CALLER_CHANGED,
                target=target,
            )
        )
    if outcomes:
        return outcomes
    return [
        Outcome(
            Verdict.UNCHANGED,
            f"{symbol.function} calls {what}{known[0]} as before",
            was,
            has[0][0],
            target=target,
        )
    ]


def _is_inherited_now(
    before: tuple[ModuleModel, Function], after: tuple[ModuleModel, Function], old: View
) -> bool:
    """Whether the class no longer has the method, and a base that had it before is what is left."""
    place = (after[0].dotted, after[1].qualname)
    return place != (before[0].dotted, before[1].qualname) and old.header(*place) is not None


def _nearest(shape: CallShape, had: _FoundCalls) -> tuple[CallShape, Location]:
    """The older call that differs least."""

    def distance(item: tuple[Location, Call]) -> tuple[int, int]:
        changes = call_changes(CallShape.of(item[1]), shape)
        return sum(c.breaks for c in changes), len(changes)

    place, call = min(had, key=distance)
    return CallShape.of(call), place


def _no_call(
    symbol: ConstructorCall | MethodCall,
    what: str,
    view: View,
    was: Location | None,
    here: Location | None,
) -> Outcome:
    """The function does not make the call: another one of the module may."""
    model = view.model(symbol.module)
    needle = symbol.method if isinstance(symbol, MethodCall) else symbol.name.rpartition(".")[2]
    if model is not None:
        for other in model.functions_mentioning(needle):
            if other.qualname == symbol.function:
                continue
            calls = _calls(symbol, other, model)
            if calls:
                place, call = calls[0]
                return Outcome(
                    Verdict.MOVED,
                    f"{symbol.function} does not call {what} any more; {other.qualname} does, as "
                    f"{what}{CallShape.of(call)}",
                    was,
                    place,
                    severity=Severity.WARNING
                    if CallShape.of(call) == _declared(symbol)
                    else Severity.ERROR,
                    target=f"{symbol.module}:{symbol.function}",
                )
    return Outcome(
        Verdict.LOST_CALL_SITE,
        f"{symbol.function} does not call {what} in {view.label}",
        was,
        here or view.nearest(symbol.module, symbol.function),
        target=f"{symbol.module}:{symbol.function}",
    )


# call sites ---------------------------------------------------------------------------------------


def _callers(view: View, callee: str) -> dict[str, Location]:
    """The functions that call a function, `module:qualified.name`, with the place of the first
    call.
    """
    module, _, name = callee.partition(":")
    last = name.rpartition(".")[2]
    found: dict[str, Location] = {}
    for dotted in view.tree.files_containing(f"{last}("):
        model = view.model(dotted)
        if model is None:
            continue
        for function in model.functions_mentioning(f"{last}("):
            call = _call_to(view, model, function, module, name)
            if call is not None:
                found.setdefault(f"{dotted}:{function.qualname}", Location(model.path, call.line))
    return found


def _call_to(
    view: View, model: ModuleModel, function: Function, module: str, name: str
) -> Call | None:
    """The first call in a function that reaches the callee, as far as source tells."""
    owner, _, last = name.rpartition(".")
    wanted = view.resolve(module, name)
    for call in function.calls:
        if call.name.rpartition(".")[2] != last and call.callee != last:
            continue
        if owner:
            if _receiver_fits(view, model, function, call, module, owner):
                return call
            continue
        imported = [i for i in function.imports if i.bound == call.callee.partition(".")[0]]
        if imported:
            fact = imported[0]
            source = model.imported_from(fact)
            rest = call.callee.partition(".")[2]
            full = ".".join(p for p in (fact.name, rest) if p)
            reached = view.resolve(source, full) if full else None
        elif call.callee.partition(".")[0] in function.local_names:
            continue
        else:
            reached = view.resolve(model.dotted, call.callee) if "(" not in call.callee else None
        if reached is not None and wanted.found and reached.target == wanted.target:
            return call
        if reached is not None and reached.target == f"{module}:{name}":
            return call
    return None


def _receiver_fits(
    view: View, model: ModuleModel, function: Function, call: Call, module: str, owner: str
) -> bool:
    """Whether a method call's receiver is of the class: by name, by `self`, by narrowing."""
    if any(n.rpartition(".")[2] == owner.rpartition(".")[2] for n in call.narrowed):
        return True
    if call.receiver.rpartition(".")[2] == owner.rpartition(".")[2]:
        return True
    parameters = function.signature.parameters
    enclosing = function.qualname.rpartition(".")[0]
    me = parameters[0].name if parameters and enclosing else ""
    if call.receiver in (me, "super()") and me:
        wanted = view.resolve(module, owner)
        return any(
            (m, c) == (wanted.module, wanted.qualname)
            for m, c in view.resolver.mro(model.dotted, enclosing)
        )
    annotation = next((p.annotation for p in parameters if p.name == call.receiver), None)
    return annotation is not None and annotation.rpartition(".")[2] == owner.rpartition(".")[2]


def _site_calls(view: View, site: str, callee: str) -> Location | None:
    """Where a declared site calls the callee, or None."""
    module, _, name = callee.partition(":")
    place, _, qualname = site.partition(":")
    found = view.function(place, qualname)
    if found is None:
        return None
    model, function = found
    call = _call_to(view, model, function, module, name)
    if call is None and "." in name:
        # A declared site may call a method of a value whose class source does not show.
        last = name.rpartition(".")[2]
        call = next((c for c in function.calls if c.name == last), None)
    return Location(model.path, call.line) if call is not None else None


def judge_call_sites(symbol: CallSites, context: Context) -> list[Outcome]:
    """Hold the functions that call something against the declared ones."""
    view = context.new
    module, _, name = symbol.callee.partition(":")
    if not view.resolve(module, name).found:
        return [lost(view, None, module, name, kind="function")]
    outcomes = []
    places = {site: _site_calls(view, site, symbol.callee) for site in symbol.sites}
    if symbol.match != "all":
        outcomes += [
            _lost_site(view, symbol, site, None) for site, place in places.items() if place is None
        ]
    if symbol.match != "at-least":
        for site, place in _callers(view, symbol.callee).items():
            if site not in symbol.sites:
                outcomes.append(_new_site(symbol, site, place, None, Severity.WARNING))
    first = next((p for p in places.values() if p is not None), None)
    if outcomes:
        return outcomes
    return [
        Outcome(
            Verdict.UNCHANGED,
            f"{symbol.callee} is called by the {len(places)} declared functions",
            None,
            first or view.resolve(module, name).location,
            detail="\n".join(f"{site} at {place}" for site, place in places.items()),
            target=symbol.callee,
        )
    ]


def compare_call_sites(symbol: CallSites, context: Context) -> list[Outcome]:
    """Hold the functions that call something against each other in two releases."""
    old, new = context.old, context.new
    assert old is not None
    module, _, name = symbol.callee.partition(":")
    was_there, is_there = old.resolve(module, name), new.resolve(module, name)
    if not was_there.found and not is_there.found:
        return []
    if not was_there.found:
        return [_appeared(symbol.callee, is_there.location, old)]
    if not is_there.found:
        return [lost(new, old, module, name, kind="function")]
    before, after = _callers(old, symbol.callee), _callers(new, symbol.callee)
    for site in symbol.sites:
        module, _, name = site.partition(":")
        was, now = old.function(module, name), new.function(module, name)
        for view, sites in ((old, before), (new, after)):
            place = _site_calls(view, site, symbol.callee)
            inherited = was is not None and now is not None and _is_inherited_now(was, now, old)
            if place is not None and not (view is new and inherited):
                sites.setdefault(site, place)
    outcomes = []
    gone = [
        s for s in before if s not in after and (s in symbol.sites or symbol.match != "at-least")
    ]
    fresh = [s for s in after if s not in before]
    for site in gone:
        outcomes.append(_lost_site(new, symbol, site, before[site]))
    for site in fresh:
        severity = Severity.INFO if symbol.match == "at-least" else Severity.WARNING
        anchor = before.get(symbol.sites[0]) if symbol.sites else None
        outcomes.append(
            _new_site(symbol, site, after[site], anchor or was_there.location, severity)
        )
    if outcomes:
        return outcomes
    first = next((s for s in symbol.sites if s in after), None)
    return [
        Outcome(
            Verdict.UNCHANGED,
            f"{symbol.callee} is called by the same {len(after)} functions",
            before.get(first) if first else was_there.location,
            after.get(first) if first else is_there.location,
            target=symbol.callee,
        )
    ]


def _lost_site(view: View, symbol: CallSites, site: str, was: Location | None) -> Outcome:
    module, _, name = site.partition(":")
    found = view.resolve(module, name)
    owner = name.rpartition(".")[0]
    own_method = was is not None and bool(owner) and view.resolve(module, owner).found
    if found.status == "unknown" and not own_method:
        return Outcome(
            Verdict.CANNOT_TELL,
            f"whether {site} calls {symbol.callee} cannot be told: {found.reason}",
            was,
            found.location or view.nearest(module, name),
            target=symbol.callee,
        )
    words = "does not call" if found.found else "does not exist, and so does not call"
    return Outcome(
        Verdict.LOST_CALL_SITE,
        f"{site} {words} {symbol.callee} in {view.label}",
        was,
        found.location if found.found else view.nearest(module, name),
        severity=Severity.WARNING if symbol.match == "all" else None,
        target=symbol.callee,
    )


def _new_site(
    symbol: CallSites, site: str, place: Location, was: Location | None, severity: Severity
) -> Outcome:
    return Outcome(
        Verdict.NEW_CALL_SITE,
        f"{site} calls {symbol.callee} too",
        was,
        place,
        severity=severity,
        target=symbol.callee,
    )


# anchors ------------------------------------------------------------------------------------------


def _occurrences(view: View, symbol: Anchor) -> tuple[list[int], ModuleModel] | None:
    """The lines at which the text occurs in the module or its function; None where that is gone."""
    model = view.model(symbol.module)
    if model is None:
        return None
    text, first = model.text, 1
    if symbol.function is not None:
        found = model.function(symbol.function)
        part = model.text_of(symbol.function)
        if found is None or part is None:
            return None
        first = found.end - part.rstrip("\n").count("\n")
        text = part
    lines = []
    position = text.find(symbol.text)
    while position >= 0:
        lines.append(first + text.count("\n", 0, position))
        position = text.find(symbol.text, position + 1)
    return lines, model


def judge_anchor(symbol: Anchor, context: Context) -> list[Outcome]:
    """Hold one release against: the text occurs exactly once."""
    view = context.new
    place = symbol.module + (f":{symbol.function}" if symbol.function else "")
    found = _occurrences(view, symbol)
    if found is None:
        if view.model(symbol.module) is None or symbol.function is None:
            return [lost(view, None, symbol.module, symbol.function or "", kind="function")]
        return [lost(view, None, symbol.module, symbol.function, kind="function")]
    lines, model = found
    if len(lines) == 1:
        return [
            Outcome(
                Verdict.UNCHANGED,
                f"the anchor occurs once in {place}",
                None,
                Location(model.path, lines[0]),
                target=place,
            )
        ]
    return [_anchor_problem(view, symbol, place, lines, model, None)]


def compare_anchor(symbol: Anchor, context: Context) -> list[Outcome]:
    """Hold the number of times that a text occurs against each other in two releases."""
    old, new = context.old, context.new
    assert old is not None
    place = symbol.module + (f":{symbol.function}" if symbol.function else "")
    before, after = _occurrences(old, symbol), _occurrences(new, symbol)
    if before is None or not before[0]:
        if after is None or not after[0]:
            return []
        return [_appeared(place, Location(after[1].path, after[0][0]), old)]
    was = Location(before[1].path, before[0][0])
    # Beside what became of the anchor: a plugin whose replacement does not take may refuse to run.
    upstreamed = _upstreamed_anchor(symbol, context, place, was)
    if after is None:
        gone = lost(new, old, symbol.module, symbol.function or "", kind="function")
        return [gone, *upstreamed]
    if len(after[0]) == 1:
        now = Location(after[1].path, after[0][0])
        once = f"the anchor occurs once in {place}"
        return upstreamed or [Outcome(Verdict.UNCHANGED, once, was, now, target=place)]
    return [_anchor_problem(new, symbol, place, after[0], after[1], was), *upstreamed]


def _upstreamed_anchor(
    symbol: Anchor, context: Context, place: str, was: Location
) -> list[Outcome]:
    """Information that what the plugin puts in the anchor's place is there without it."""
    if context.plugin is None or context.old is None:
        return []
    for text in texts_put_for(symbol.text, context.plugin.tree):
        put = dataclasses.replace(symbol, text=text)
        before, after = _occurrences(context.old, put), _occurrences(context.new, put)
        if after is not None and after[0] and not (before is not None and before[0]):
            return [
                Outcome(
                    Verdict.UPSTREAMED,
                    f"what the plugin puts in the anchor's place in {place} is there by "
                    "itself now: the replacement is not needed any more",
                    was,
                    Location(after[1].path, after[0][0]),
                    target=place,
                )
            ]
    return []


def _anchor_problem(
    view: View,
    symbol: Anchor,
    place: str,
    lines: list[int],
    model: ModuleModel,
    was: Location | None,
) -> Outcome:
    if len(lines) > 1:
        shown = ", ".join(map(str, lines))
        return Outcome(
            Verdict.CHANGED_SHAPE,
            f"the anchor occurs {len(lines)} times in {place} (lines {shown}): replacing it is "
            "ambiguous",
            was,
            Location(model.path, lines[0]),
            target=place,
        )
    here = view.nearest(symbol.module, symbol.function or "") or Location(model.path, 1)
    if symbol.function is not None and model.function(symbol.function) is not None:
        here = Location(model.path, model.function(symbol.function).line)  # type: ignore[union-attr]
    for dotted in view.tree.files_containing(symbol.text):
        other = view.model(dotted)
        if other is not None and other.text.count(symbol.text) == 1:
            line = other.text[: other.text.index(symbol.text)].count("\n") + 1
            return Outcome(
                Verdict.MOVED,
                f"the anchor does not occur in {place} any more; it is in {other.path}:{line}",
                was,
                Location(other.path, line),
                target=place,
            )
    squeezed = "".join(symbol.text.split())
    same = squeezed and squeezed in "".join(model.text.split())
    hint = ": the same code is there, laid out otherwise" if same else ""
    return Outcome(
        Verdict.REMOVED,
        f"the anchor does not occur in {place} any more{hint}",
        was,
        here,
        target=place,
    )


def symbols_of(symbols: tuple[Symbol, ...], kind: type[Symbol]) -> Iterator[Symbol]:
    """The symbols of one kind."""
    return (s for s in symbols if isinstance(s, kind))
