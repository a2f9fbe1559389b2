"""Checkers for what vLLM defines: functions, classes, attributes, constants, entry-point groups.

Each checker has two functions: `judge_*` holds one release against the declaration, `compare_*`
holds two releases against each other. Both return outcomes with a witness in the source.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence

from drafter_compat.surface import (
    Attributes,
    ClassShape,
    Constant,
    EntryPointGroup,
    FunctionShape,
)
from vllm_drift import normal
from vllm_drift.collect import NotParsed, parse_signature
from vllm_drift.facts import Assignment, Call, Class, Function, Signature
from vllm_drift.findings import Location, Severity, Verdict
from vllm_drift.infer_by_use import (
    is_mentioned,
    is_only_overridden,
    judge_class_by_use,
    judge_factory_by_use,
    judge_function_by_use,
)
from vllm_drift.judging import (
    Context,
    Outcome,
    PluginSource,
    View,
    body_outcome,
    is_patched,
    is_rebound,
    lost,
    of_changes,
)
from vllm_drift.model import ModuleModel
from vllm_drift.resolve import Resolution
from vllm_drift.shapes import Change, accepts, function_changes, signature_changes

__all__ = [
    "compare_attributes",
    "compare_class",
    "compare_constant",
    "compare_function",
    "compare_group",
    "judge_attributes",
    "judge_class",
    "judge_constant",
    "judge_function",
    "judge_group",
]

_TRIVIAL = 60
"""A patch's body shorter than this (normalised, in characters) is upstream's only under one
name.
"""


# functions ----------------------------------------------------------------------------------------


def judge_function(symbol: FunctionShape, context: Context) -> list[Outcome]:
    """Hold a function of one release against its declared signature, async and decorators."""
    view = context.new
    target = f"{symbol.module}:{symbol.name}"
    found = view.header(symbol.module, symbol.name)
    if found is None:
        return [_no_function(symbol.module, symbol.name, view, None)]
    model, function = found
    here = Location(model.path, function.line)
    shim = _shim(symbol, view)
    if shim is not None:
        return [shim]
    changes: list[Change] = []
    if symbol.signature is not None:
        changes += _declared_changes(symbol.signature, function.signature)
    if symbol.is_async is not None and symbol.is_async != function.signature.is_async:
        now = "is async" if function.signature.is_async else "is not async"
        changes.append(Change(f"it {now}, the plugin expects the opposite", kind="async"))
    if symbol.decorators is not None:
        declared = tuple(normal.expression(d) for d in symbol.decorators)
        if declared != function.decorators:
            changes.append(
                Change(
                    f"its decorators are {', '.join(function.decorators) or 'none'}, expected "
                    f"{', '.join(declared) or 'none'}",
                    kind="decorators",
                )
            )
    if changes:
        what = f"{target}{function.signature}"
        return [of_changes(what, changes, None, here, target=target)]
    return [Outcome(Verdict.UNCHANGED, f"{target} is as declared", None, here, target=target)]


def _declared_changes(text: str, found: Signature) -> list[Change]:
    try:
        declared = parse_signature(text)
    except NotParsed as error:
        return [Change(f"the declared signature {text!r} cannot be parsed: {error}")]
    changes = signature_changes(declared, found, declared=True)
    # A declaration says how the thing is now: what came on top of it is for the comparison to tell.
    return changes


def compare_function(symbol: FunctionShape, context: Context) -> list[Outcome]:
    """Hold a function of two releases against each other."""
    assert context.old is not None
    by_use: list[Outcome] = []
    if symbol.calls or symbol.replacement is not None:
        by_use = judge_function_by_use(symbol, context.old.tree, context.new.tree)
    outcomes = _compare_one_function(
        symbol.module,
        symbol.name,
        context,
        patched=is_patched(symbol),
        symbol=symbol,
        by_use=[o for o in by_use if not o.preexisting],
    )
    return [*outcomes, *(o for o in by_use if o.preexisting)]


def _compare_one_function(
    module: str,
    name: str,
    context: Context,
    *,
    patched: bool,
    symbol: FunctionShape | None = None,
    by_use: Sequence[Outcome] = (),
) -> list[Outcome]:
    """Hold a function of two releases against each other; `by_use` says what its change means for
    the plugin's calls and replacement.
    """
    old, new = context.old, context.new
    assert old is not None
    target = f"{module}:{name}"
    before, after = old.header(module, name), new.header(module, name)
    if before is None and after is None:
        return []
    if before is None:
        assert after is not None
        return [_appeared(target, Location(after[0].path, after[1].line), old.label)]
    if after is None:
        gone = _no_function(module, name, new, old)
        return [_silently(gone, symbol, new) if symbol is not None else gone]
    (old_model, old_function), (new_model, new_function) = before, after
    was = Location(old_model.path, old_function.line)
    now = Location(new_model.path, new_function.line)
    sometimes = _now_sometimes(context, module, name)
    if not by_use and not sometimes and old.same_text(new, module, name):
        return [Outcome(Verdict.UNCHANGED, f"{target} is unchanged", was, now, target=target)]
    outcomes: list[Outcome] = []
    if symbol is not None and _shim(symbol, old) is None:
        shim = _shim(symbol, new)
        if shim is not None:
            outcomes.append(_with_old(shim, was))
    changes = function_changes(old_function, new_function)
    if not old_function.condition and new_function.condition == "conditional":
        runtime = [
            f for f in new_model.functions(new_function.qualname) if f.condition != "type-checking"
        ]
        changes += _now_conditional(len(runtime))
    changes += sometimes
    if symbol is not None and (symbol.calls or symbol.replacement is not None):
        outcomes += by_use
        changes = [c for c in changes if c.kind not in _BINDING and _matters(c, symbol)]
        added: set[str] = set()
    else:
        added = {c.name for c in changes if c.kind == "added" and c.name}
    if changes:
        what = f"{target}{new_function.signature}"
        outcomes.append(of_changes(what, changes, was, now, target=target))
        outcomes += _new_arguments(name, added, old_function, context, was)
    moved = old.resolve(module, name).target != new.resolve(module, name).target
    dropped = _override_dropped(before, after, old, target) if moved else None
    if dropped is not None:
        return [dropped, *outcomes]
    if moved and not outcomes:
        outcomes.append(
            Outcome(
                Verdict.COMPATIBLE,
                f"{target} is defined as {new.resolve(module, name).target} now and still found "
                f"under the old name",
                was,
                now,
                target=target,
            )
        )
    if not patched:
        if outcomes:
            return outcomes
        return [Outcome(Verdict.UNCHANGED, f"{target} is unchanged", was, now, target=target)]
    upstreamed = _upstreamed(
        name,
        old_model,
        old_function,
        new_model,
        new_function,
        context,
        symbol.replaced_by if symbol is not None else None,
    )
    if upstreamed is not None:
        return [*outcomes, upstreamed]
    body = body_outcome(
        target, (old_model, old_function.qualname), (new_model, new_function.qualname), target
    )
    if body is not None:
        return [*outcomes, body]
    if outcomes:
        return outcomes
    return [Outcome(Verdict.UNCHANGED, f"{target} is unchanged", was, now, target=target)]


def _silently(gone: Outcome, symbol: FunctionShape, new: View) -> Outcome:
    """Say of a removed method that is only overridden what that means: no error, and no effect."""
    last = symbol.name.rpartition(".")[2]
    if gone.verdict is not Verdict.REMOVED or not is_only_overridden(symbol):
        return gone
    if is_mentioned(new.tree, last):
        return gone
    note = f"nothing in {new.label} mentions {last}: the plugin's override of it is never called"
    return dataclasses.replace(gone, message=f"{gone.message}; {note}")


def _override_dropped(
    before: tuple[ModuleModel, Function],
    after: tuple[ModuleModel, Function],
    old: View,
    target: str,
) -> Outcome | None:
    """The outcome for a method that the class does not define itself any more, while a base has had
    one that does something else.
    """
    (old_model, old_function), (new_model, new_function) = before, after
    inherited = old.header(new_model.dotted, new_function.qualname)
    if "." not in new_function.qualname or inherited is None or inherited[1] == old_function:
        return None
    if old_model.normal_body(old_function.qualname) == new_model.normal_body(new_function.qualname):
        return None
    return Outcome(
        Verdict.REMOVED,
        f"{target} was removed; what is left is the {new_function.qualname} of "
        f"{new_model.dotted}, which it inherits",
        Location(old_model.path, old_function.line),
        Location(new_model.path, new_function.line),
        severity=Severity.WARNING,
        target=target,
    )


def _now_conditional(definitions: int) -> list[Change]:
    """What was always there and now is only under `if` or `try`, with nothing in the other
    branch.
    """
    if definitions > 1:
        return []
    words = "it is defined only under a condition now, and may be missing at run time"
    return [Change(words, Severity.WARNING, kind="condition")]


def _now_sometimes(context: Context, module: str, name: str) -> list[Change]:
    """What was imported always, where the plugin finds it, and now is under a condition only."""
    assert context.old is not None
    if not context.new.only_sometimes(module, name) or context.old.only_sometimes(module, name):
        return []
    words = f"{module} imports it only under a condition now, and may lack it at run time"
    return [Change(words, Severity.WARNING, kind="condition")]


_BINDING = frozenset({"added", "removed", "renamed", "reordered", "required", "optional"})
"""Kinds of changes that binding the known calls judges better than the shape alone."""


def _matters(change: Change, symbol: FunctionShape) -> bool:
    """Whether a change that does not stop calls from binding can reach the plugin."""
    if change.kind == "kind" and change.name:
        return False  # of one parameter: binding judges it
    if change.kind != "default" or symbol.replacement is not None:
        return True
    return any(not re.search(rf"\b{re.escape(change.name)}\s*=", c) for c in symbol.calls)


def _no_function(module: str, name: str, view: View, old: View | None) -> Outcome:
    found = view.resolve(module, name)
    target = f"{module}:{name}"
    if found.found:
        was = old.resolve(module, name).location if old is not None else None
        if found.kind == "assignment" and not _is_literal(view, found):
            return Outcome(
                Verdict.CANNOT_TELL,
                f"{target} is a value that is made at run time in {view.label}: whether it can be "
                f"called as the function could does not show",
                was,
                found.location,
                target=target,
            )
        return Outcome(
            Verdict.CHANGED_SHAPE,
            f"{target} is no function but {_a(found.kind)} in {view.label}",
            was,
            found.location,
            target=target,
        )
    return lost(view, old, module, name, kind="function")


def _is_literal(view: View, found: Resolution) -> bool:
    """Whether a name is given a constant, a collection of constants or a type of them."""
    model = view.model(found.module)
    facts = [b.fact for b in model.bindings(found.qualname)] if model is not None else []
    values = [f.value for f in facts if isinstance(f, Assignment)]
    return bool(values) and normal.literal_values(values[-1]) is not None


def _a(kind: str) -> str:
    return {"assignment": "a value", "class": "a class", "module": "a module"}.get(kind, kind)


def _shim(symbol: FunctionShape, view: View) -> Outcome | None:
    """The outcome for a patched module-level function that its module only hands on."""
    found = view.resolve(symbol.module, symbol.name)
    if "." in symbol.name or not found.found or found.module == symbol.module:
        return None
    if not is_rebound(symbol):
        return None
    reader = _reader(view, symbol.module, symbol.name)
    if reader is not None:
        return None
    return Outcome(
        Verdict.INEFFECTIVE,
        f"{symbol.module} only hands {symbol.name} on from {found.target}, and nothing in it "
        "reads the "
        f"name: replacing it there has no effect on what calls it elsewhere",
        None,
        view.resolver.where(symbol.module, _hop_line(found)),
        target=f"{symbol.module}:{symbol.name}",
    )


def _hop_line(found: Resolution) -> int:
    return int(found.hops[0].rpartition(":")[2]) if found.hops else 1


def _reader(view: View, module: str, name: str) -> Location | None:
    """A function of the module that reads the name from the module's namespace."""
    model = view.model(module)
    if model is None:
        return None
    for function in model.functions_mentioning(name):
        for read in function.reads:
            if read.name == name:
                return Location(model.path, read.line)
    return None


def _with_old(outcome: Outcome, old: Location | None) -> Outcome:
    return Outcome(
        outcome.verdict, outcome.message, old, outcome.new, outcome.detail, outcome.severity,
        outcome.target,
    )  # fmt: skip


def _appeared(target: str, now: Location | None, label: str) -> Outcome:
    return Outcome(
        Verdict.COMPATIBLE, f"{target} is new: {label} does not have it", None, now, target=target
    )


def _new_arguments(
    name: str, added: set[str], before: Function, context: Context, was: Location
) -> list[Outcome]:
    """The calls that pass a parameter which the function did not have: an override, or a patch, of
    the older signature cannot take them.
    """
    method = name.rpartition(".")[2]
    outcomes = []
    for parameter in sorted(added):
        call = _passing(context.new, method, parameter, "." in name)
        if call is None or _passing(context.old, method, parameter, "." in name) is not None:
            continue
        place, fact = call
        if _plugin_accepts(context, method, parameter):
            continue
        outcomes.append(
            Outcome(
                Verdict.NEW_DEMAND,
                f"vLLM passes {parameter}= to {method} now, at {place}; a replacement or an "
                "override "
                f"with the signature of {context.old.label if context.old else 'before'}, "
                f"{method}{before.signature}, cannot take it",
                was,
                place,
                detail=f"{fact.callee}{_arguments(fact)}",
                target=name,
            )
        )
    return outcomes


def _arguments(call: Call) -> str:
    parts = [*call.positional, *(f"{k}={v}" if k != "**" else f"**{v}" for k, v in call.keywords)]
    return f"({', '.join(parts)})"


def _passing(
    view: View | None, method: str, keyword: str, is_method: bool
) -> tuple[Location, Call] | None:
    """A call of that name which passes the keyword."""
    if view is None:
        return None
    needle = f".{method}(" if is_method else f"{method}("
    for dotted in view.tree.files_containing(needle, f"{keyword}="):
        model = view.model(dotted)
        if model is None:
            continue
        for function in model.functions_mentioning(needle):
            for call in function.calls:
                if call.name == method and any(k == keyword for k, _ in call.keywords):
                    return Location(model.path, call.line), call
    return None


def _plugin_accepts(context: Context, method: str, keyword: str) -> bool:
    """Whether every function of the plugin by that name takes the keyword; False if there is
    none.
    """
    if context.plugin is None:
        return False
    found = [
        model.header(qualname) or next(iter(model.functions(qualname)), None)
        for model, qualname in context.plugin.functions_named(method)
        if qualname.rpartition(".")[2] == method
    ]
    return bool(found) and all(f is not None and accepts(f.signature, keyword) for f in found)


def _upstreamed(
    name: str,
    old_model: ModuleModel,
    old_function: Function,
    new_model: ModuleModel,
    new_function: Function,
    context: Context,
    replaced_by: str | None,
) -> Outcome | None:
    """Information that a patch of the plugin says what upstream says by itself now."""
    if context.plugin is None:
        return None
    after = new_model.normal_body(new_function.qualname)
    if after is None or after == old_model.normal_body(old_function.qualname):
        return None
    last = name.rpartition(".")[2]
    for model, qualname in _patches(context.plugin, last, replaced_by):
        if len(after) < _TRIVIAL and qualname.rpartition(".")[2] != last:
            continue
        if model.normal_body(qualname) == after:
            return Outcome(
                Verdict.UPSTREAMED,
                f"upstream's {name} does now what the plugin's {model.dotted}:{qualname} does: the "
                f"patch is not needed any more",
                Location(old_model.path, old_function.line),
                Location(new_model.path, new_function.line),
                target=f"{new_model.dotted}:{name}",
            )
    return None


def _patches(
    plugin: PluginSource, last: str, replaced_by: str | None
) -> Iterator[tuple[ModuleModel, str]]:
    """The functions of the plugin that may be the patch: the one that the surface names, or those
    of that name.
    """
    if replaced_by is not None:
        module, _, qualname = replaced_by.partition(":")
        model = plugin.resolver.model(module)
        if model is not None and model.text_of(qualname) is not None:
            yield model, qualname
            return
    yield from plugin.functions_named(last)


# classes ------------------------------------------------------------------------------------------


def judge_class(symbol: ClassShape, context: Context) -> list[Outcome]:
    """Hold a class of one release against its declared bases, methods and fields."""
    view = context.new
    target = f"{symbol.module}:{symbol.name}"
    found = view.cls(symbol.module, symbol.name)
    if found is None:
        return [_no_class(symbol.module, symbol.name, view, None)]
    model, cls = found
    here = Location(model.path, cls.line)
    outcomes: list[Outcome] = []
    changes: list[Change] = []
    if symbol.bases is not None:
        declared = tuple(normal.annotation(b) for b in symbol.bases)
        if declared != cls.bases:
            changes.append(
                Change(
                    f"its bases are {', '.join(cls.bases) or 'none'}, expected "
                    f"{', '.join(declared) or 'none'}",
                    kind="bases",
                )
            )
    fields = _fields(view, model, cls)
    for name, default in symbol.fields:
        wanted = normal.expression(default) if default else ""
        if name not in fields:
            parameter = _init_parameter(view, model, cls, name)
            if parameter is None:
                outcomes.append(_no_member(view, None, model, cls, name, "field", target))
            else:
                changes += _default_changes(name, wanted, parameter.default or "")
        else:
            changes += _default_changes(name, wanted, fields[name][1].value)
    for method in symbol.methods:
        if view.resolver.member(model.dotted, cls.qualname, method) is None:
            outcomes.append(_no_method(view, None, symbol, method))
    if changes:
        outcomes.insert(0, of_changes(target, changes, None, here, target=target))
    return outcomes or [
        Outcome(Verdict.UNCHANGED, f"{target} is as declared", None, here, target=target)
    ]


def _default_changes(name: str, before: str, after: str) -> list[Change]:
    """How a field's default changed; `Field(default=None, gt=0)` and `None` are the same
    default.
    """
    if before == after:
        return []
    if before and after and _default_of(before) == _default_of(after):
        words = f"field {name} is {after} instead of {before}, with the same default"
        return [Change(words, Severity.INFO, name, "constraint")]
    return [_default_change(name, before, after)]


def _default_of(text: str) -> str:
    """What a field is when it is not given: the default inside `Field(...)`, or the text itself."""
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        return text
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].lower() == "field":
        for keyword in node.keywords:
            if keyword.arg in ("default", "default_factory", "factory"):
                made = keyword.arg != "default"
                return ast.unparse(keyword.value) + ("()" if made else "")
        return ast.unparse(node.args[0]) if node.args else "..."
    return text


def _default_change(name: str, before: str, after: str) -> Change:
    if before and not after:
        return Change(f"field {name} has no default any more", name=name, kind="required")
    if not before:
        return Change(f"field {name} has the default {after} now", Severity.INFO, name, "optional")
    return Change(
        f"the default of {name} is {after} instead of {before}", Severity.WARNING, name, "default"
    )


_Fields = dict[str, tuple[ModuleModel, Assignment]]


def _fields(view: View, model: ModuleModel, cls: Class) -> _Fields:
    """The annotated fields and class attributes of a class and its bases, the class's own first."""
    found: _Fields = {}
    for module, owner in view.resolver.mro(model.dotted, cls.qualname):
        if owner is None:
            continue
        owner_model = view.model(module)
        facts = owner_model.class_(owner) if owner_model is not None else None
        if owner_model is None or facts is None:
            continue
        for field in facts.fields:
            if field.operator == "=" and field.target not in found:
                found[field.target] = (owner_model, field)
    return found


def _init_parameter(view: View, model: ModuleModel, cls: Class, name: str):  # type: ignore[no-untyped-def]
    found = view.header(model.dotted, f"{cls.qualname}.__init__")
    return None if found is None else found[1].signature.get(name)


def _is_required(field: Assignment) -> bool:
    """Whether a dataclass or pydantic field must be given to the constructor."""
    if field.annotation is None or "ClassVar" in field.annotation or field.operator != "=":
        return False
    if not field.value:
        return True
    match = re.match(r"(?:\w+\.)*(?:Field|field)\((.*)\)\Z", field.value, re.DOTALL)
    if match is None:
        return False
    inner = match.group(1)
    if re.search(r"\b(?:default|default_factory|factory)=(?!\.\.\.|Ellipsis)", inner):
        return False
    if re.search(r"\binit=False", inner):
        return False
    first = inner.split(",")[0].strip()
    return first in ("", "...", "Ellipsis") or "=" in first


def _takes_fields(cls: Class) -> bool:
    """Whether a class's fields are its constructor's parameters."""
    heads = [d.partition("(")[0].rpartition(".")[2] for d in cls.decorators]
    return any(h in ("dataclass", "config", "define", "attrs", "frozen") for h in heads) or any(
        b.rpartition(".")[2] in ("BaseModel", "NamedTuple", "Struct", "TypedDict", "BaseSettings")
        for b in cls.bases
    )


def compare_class(symbol: ClassShape, context: Context) -> list[Outcome]:
    """Hold a class of two releases against each other: bases, overridden methods, fields."""
    old, new = context.old, context.new
    assert old is not None
    target = f"{symbol.module}:{symbol.name}"
    before, after = old.cls(symbol.module, symbol.name), new.cls(symbol.module, symbol.name)
    if before is None and after is None:
        return []
    if before is None:
        assert after is not None
        return [_appeared(target, Location(after[0].path, after[1].line), old.label)]
    if after is None:
        plugin = context.plugin
        made = (
            judge_factory_by_use(symbol, old.tree, new.tree, plugin.tree)
            if plugin is not None
            else []
        )
        return made or [_no_class(symbol.module, symbol.name, new, old)]
    (old_model, old_cls), (new_model, new_cls) = before, after
    was, now = Location(old_model.path, old_cls.line), Location(new_model.path, new_cls.line)
    changes = [
        *_base_changes(old_cls, new_cls, declared=symbol.bases is not None),
        *_field_changes(symbol, context, before, after),
        *_now_sometimes(context, symbol.module, symbol.name),
    ]
    if not old_cls.condition and new_cls.condition == "conditional":
        changes += _now_conditional(
            len([b for b in new_model.bindings(new_cls.qualname) if b.at_runtime])
        )
    outcomes: list[Outcome] = []
    if changes:
        outcomes.append(of_changes(target, changes, was, now, target=target))
    for method in symbol.methods:
        name = f"{symbol.name}.{method}"
        had = old.resolver.member(old_model.dotted, old_cls.qualname, method)
        has = new.resolver.member(new_model.dotted, new_cls.qualname, method)
        if had is not None and has is None:
            outcomes.append(_no_method(new, old, symbol, method))
        elif had is not None:
            found = _compare_one_function(symbol.module, name, context, patched=True)
            outcomes += [o for o in found if o.verdict is not Verdict.UNCHANGED]
    if symbol.calls or symbol.provides:
        outcomes += judge_class_by_use(symbol, old.tree, new.tree)
    if not symbol.provides:
        outcomes += _abstract_demands(symbol, context, before, after)
    if not outcomes and (old_model.dotted, old_cls.qualname) != (
        new_model.dotted,
        new_cls.qualname,
    ):
        outcomes.append(
            Outcome(
                Verdict.COMPATIBLE,
                f"{target} is defined in {new_model.dotted} now and still found under the old name",
                was,
                now,
                target=target,
            )
        )
    return outcomes or [
        Outcome(Verdict.UNCHANGED, f"{target} is unchanged", was, now, target=target)
    ]


def _no_class(module: str, name: str, view: View, old: View | None) -> Outcome:
    found = view.resolve(module, name)
    target = f"{module}:{name}"
    if found.found and found.kind == "function":
        was = old.resolve(module, name).location if old is not None else None
        return Outcome(
            Verdict.CHANGED_SHAPE,
            f"{target} is no class but a function in {view.label}",
            was,
            found.location,
            target=target,
        )
    if found.found:
        was = old.resolve(module, name).location if old is not None else None
        return Outcome(
            Verdict.CANNOT_TELL,
            f"{target} is a value that is computed at run time in {view.label}",
            was,
            found.location,
            target=target,
        )
    return lost(view, old, module, name, kind="class")


def _no_method(view: View, old: View | None, symbol: ClassShape, method: str) -> Outcome:
    found = view.cls(symbol.module, symbol.name)
    assert found is not None
    reasons = view.resolver.open_bases(found[0].dotted, found[1].qualname)
    if reasons:
        was = old.resolve(symbol.module, f"{symbol.name}.{method}").location if old else None
        return Outcome(
            Verdict.CANNOT_TELL,
            f"{symbol.name} shows no {method} in {view.label}, and may inherit it: {reasons[0]}",
            was,
            Location(found[0].path, found[1].line),
            target=f"{symbol.module}:{symbol.name}.{method}",
        )
    return lost(view, old, symbol.module, f"{symbol.name}.{method}", kind="function")


def _base_changes(old: Class, new: Class, *, declared: bool) -> list[Change]:
    before = [b.partition("[")[0].rpartition(".")[2] for b in old.bases]
    after = [b.partition("[")[0].rpartition(".")[2] for b in new.bases]
    if before == after:
        return []
    words = f"its bases changed from ({', '.join(old.bases)}) to ({', '.join(new.bases)})"
    # What a base gave the plugin shows in members that it uses; the list itself matters only where
    # the surface declares it.
    return [Change(words, Severity.WARNING if declared else Severity.INFO, kind="bases")]


def _field_changes(
    symbol: ClassShape,
    context: Context,
    before: tuple[ModuleModel, Class],
    after: tuple[ModuleModel, Class],
) -> list[Change]:
    assert context.old is not None
    old_fields = _fields(context.old, *before)
    new_fields = _fields(context.new, *after)
    changes: list[Change] = []
    for name, _ in symbol.fields:
        had, has = old_fields.get(name), new_fields.get(name)
        if had is None and has is None:
            changes += _parameter_as_field(symbol, context, before, after, name)
        elif had is not None and has is None:
            if _init_parameter(context.new, *after, name) is None:
                changes.append(Change(f"field {name} was removed", name=name, kind="removed"))
        elif had is None and has is not None:
            changes.append(Change(f"field {name} is new", Severity.INFO, name, "added"))
        elif had is not None and has is not None:
            changes += _default_changes(name, had[1].value, has[1].value)
    if symbol.fields and _takes_fields(after[1]):
        for name, (_, field) in new_fields.items():
            if name not in old_fields and _is_required(field):
                changes.append(Change(f"required field {name} was added", name=name, kind="added"))
            elif (
                name in old_fields
                and name not in dict(symbol.fields)
                and _is_required(field)
                and not _is_required(old_fields[name][1])
            ):
                changes.append(Change(f"field {name} is required now", name=name, kind="required"))
    return changes


def _parameter_as_field(
    symbol: ClassShape,
    context: Context,
    before: tuple[ModuleModel, Class],
    after: tuple[ModuleModel, Class],
    name: str,
) -> list[Change]:
    """A declared field that is a parameter of `__init__`."""
    assert context.old is not None
    had = _init_parameter(context.old, *before, name)
    has = _init_parameter(context.new, *after, name)
    if had is not None and has is None:
        return [Change(f"parameter {name} of __init__ was removed", name=name, kind="removed")]
    if had is not None and has is not None:
        return _default_changes(name, had.default or "", has.default or "")
    return []


def _abstract_demands(
    symbol: ClassShape,
    context: Context,
    before: tuple[ModuleModel, Class],
    after: tuple[ModuleModel, Class],
) -> list[Outcome]:
    """Abstract methods that a subclass must have now."""
    assert context.old is not None
    known = {name for name, _, _ in _abstract(context.old, *before)}
    outcomes = []
    for name, model, function in _abstract(context.new, *after):
        if name in known or name in symbol.methods:
            continue
        if context.plugin is not None and any(True for _ in context.plugin.classes_with(name)):
            continue
        outcomes.append(
            Outcome(
                Verdict.NEW_DEMAND,
                f"{symbol.name} has a new abstract method {name}{function.signature}: a subclass "
                f"without it cannot be constructed",
                Location(before[0].path, before[1].line),
                Location(model.path, function.line),
                target=f"{symbol.module}:{symbol.name}.{name}",
            )
        )
    return outcomes


def _abstract(
    view: View, model: ModuleModel, cls: Class
) -> Iterator[tuple[str, ModuleModel, Function]]:
    """The abstract methods of a class that no class before it in the hierarchy implements."""
    implemented: set[str] = set()
    for module, owner in view.resolver.mro(model.dotted, cls.qualname):
        if owner is None:
            continue
        owner_model = view.model(module)
        if owner_model is None:
            continue
        for function in owner_model.methods_mentioning(owner, "abstract"):
            heads = [d.rpartition(".")[2] for d in function.decorators]
            abstract = any(h.startswith("abstract") for h in heads)
            if abstract and function.name not in implemented:
                yield function.name, owner_model, function
        implemented |= set(owner_model.members(owner))


def _no_member(
    view: View,
    old: View | None,
    model: ModuleModel,
    cls: Class,
    name: str,
    what: str,
    target: str,
    was: Location | None = None,
) -> Outcome:
    """What to say of an attribute that the class does not show."""
    here = Location(model.path, cls.line)
    reasons = view.resolver.open_bases(model.dotted, cls.qualname)
    if reasons:
        return Outcome(
            Verdict.CANNOT_TELL,
            f"{cls.qualname} shows no {what} {name} in {view.label}, and may have it: {reasons[0]}",
            was,
            here,
            target=f"{target}.{name}",
        )
    near = _near_names(view, model, cls, name)
    hint = f"; it has {near}" if near else ""
    return Outcome(
        Verdict.REMOVED,
        f"{cls.qualname} has no {what} {name} in {view.label}{hint}",
        was,
        here,
        target=f"{target}.{name}",
    )


def _near_names(view: View, model: ModuleModel, cls: Class, name: str) -> str:
    text = model.text_of(cls.qualname) or ""
    names = set(re.findall(r"\bself\.(\w+)\s*(?:=[^=]|:)", text)) | set(model.members(cls.qualname))
    names |= {f.target for f in cls.fields}
    near = difflib.get_close_matches(name, sorted(names), n=2, cutoff=0.75)
    return " and ".join(near)


# attributes ---------------------------------------------------------------------------------------


def judge_attributes(symbol: Attributes, context: Context) -> list[Outcome]:
    """Hold a class of one release against the attributes that the plugin reads of it."""
    view = context.new
    target = f"{symbol.module}:{symbol.name}"
    found = view.cls(symbol.module, symbol.name)
    if found is None:
        return [_no_class(symbol.module, symbol.name, view, None)]
    model, cls = found
    outcomes = []
    here: Location | None = None
    for name in symbol.reads:
        member = view.resolver.member(model.dotted, cls.qualname, name)
        if member is None:
            outcomes.append(_no_member(view, None, model, cls, name, "attribute", target))
        elif here is None:
            here = member.location
    return outcomes or [
        Outcome(
            Verdict.UNCHANGED,
            f"{target} has {', '.join(symbol.reads)}",
            None,
            here or Location(model.path, cls.line),
            target=target,
        )
    ]


def compare_attributes(symbol: Attributes, context: Context) -> list[Outcome]:
    """Hold the attributes that the plugin reads of a class against each other in two releases."""
    old, new = context.old, context.new
    assert old is not None
    target = f"{symbol.module}:{symbol.name}"
    before, after = old.cls(symbol.module, symbol.name), new.cls(symbol.module, symbol.name)
    if before is None and after is None:
        return []
    if before is None:
        assert after is not None
        return [_appeared(target, Location(after[0].path, after[1].line), old.label)]
    if after is None:
        return [_no_class(symbol.module, symbol.name, new, old)]
    outcomes = []
    first: tuple[Location, Location] | None = None
    for name in symbol.reads:
        had = old.resolver.member(before[0].dotted, before[1].qualname, name)
        has = new.resolver.member(after[0].dotted, after[1].qualname, name)
        if had is not None and has is None:
            outcomes.append(_no_member(new, old, *after, name, "attribute", target, had.location))
        elif had is None and has is not None:
            outcomes.append(_appeared(f"{target}.{name}", has.location, old.label))
        elif had is not None and has is not None:
            first = first or (had.location, has.location)
            if (had.kind == "method") != (has.kind == "method"):
                outcomes.append(
                    Outcome(
                        Verdict.CHANGED_SHAPE,
                        f"{target}.{name} was {_member(had.kind)} and is {_member(has.kind)}",
                        had.location,
                        has.location,
                        target=f"{target}.{name}",
                    )
                )
    if outcomes:
        return outcomes
    was, now = first or (
        Location(before[0].path, before[1].line),
        Location(after[0].path, after[1].line),
    )
    return [Outcome(Verdict.UNCHANGED, f"{target} is unchanged", was, now, target=target)]


def _member(kind: str) -> str:
    return "a method" if kind == "method" else "an attribute"


# constants ----------------------------------------------------------------------------------------


_Values = tuple[set[object], Location]


def _values(view: View, module: str, name: str) -> _Values | Outcome:
    """The values that a constant holds, names of other constants followed; or why not."""
    found = view.resolve(module, name)
    target = f"{module}:{name}"
    if found.found and found.kind == "class":
        return _enum_values(view, found)
    if not found.found or found.kind != "assignment":
        if found.found:
            return Outcome(
                Verdict.CHANGED_SHAPE,
                f"{target} is {_a(found.kind)} in {view.label}",
                None,
                found.location,
                target=target,
            )
        outcome = lost(view, None, module, name, kind="class")
        if outcome.verdict is Verdict.MOVED or found.status == "missing":
            moved = _moved_constant(view, module, name)
            if moved is not None:
                return moved
        return outcome
    assert found.location is not None
    values = _held(view, found, set())
    if values is None:
        return Outcome(
            Verdict.CANNOT_TELL,
            f"the value of {target} is computed at run time in {view.label}",
            None,
            found.location,
            target=target,
        )
    return values, found.location


def _moved_constant(view: View, module: str, name: str) -> Outcome | None:
    """A constant of that name that one other module assigns at its top level."""
    last = name.rpartition(".")[2]
    places = []
    for dotted in view.tree.files_containing(last):
        model = view.model(dotted)
        if model is None or dotted == module:
            continue
        places += [
            (dotted, Location(model.path, b.line))
            for b in model.bindings(last)
            if b.kind == "assignment"
        ]
    if len(places) != 1 or "." in name:
        return None
    dotted, location = places[0]
    return Outcome(
        Verdict.MOVED,
        f"{module}:{name} is gone; {dotted} assigns that name now",
        None,
        location,
        target=f"{module}:{name}",
    )


def _held(view: View, found: Resolution, seen: set[str]) -> set[object] | None:
    if found.target in seen:
        return set()
    seen.add(found.target)
    model = view.model(found.module)
    if model is None:
        return None
    owner, _, last = found.qualname.rpartition(".")
    if owner:
        cls = model.class_(owner)
        facts = [f for f in (cls.fields if cls else ()) if f.target == last]
    else:
        facts = [
            b.fact for b in model.bindings(last) if isinstance(b.fact, Assignment) and b.at_runtime
        ]
    values: set[object] = set()
    for fact in facts:
        held = normal.literal_values(fact.value) if fact.value else None
        if held is None:
            return None
        values |= held[0]
        for name in held[1]:
            inner = view.resolve(found.module, name)
            more = _held(view, inner, seen) if inner.found and inner.kind == "assignment" else None
            if more is None and inner.found and inner.kind == "class":
                continue
            if more is None:
                return None
            values |= more
    return values


def _enum_values(view: View, found: Resolution) -> _Values | Outcome:
    """The members of an enumeration: names and values."""
    model = view.model(found.module)
    cls = model.class_(found.qualname) if model is not None else None
    assert found.location is not None
    values: set[object] = set()
    for field in cls.fields if cls is not None else ():
        values.add(field.target)
        held = normal.literal_values(field.value) if field.value else None
        values |= held[0] if held is not None else set()
    return values, found.location


def judge_constant(symbol: Constant, context: Context) -> list[Outcome]:
    """Hold a constant of one release against its declared value or members."""
    target = f"{symbol.module}:{symbol.name}"
    if symbol.value is None and not symbol.contains:
        return [_presence(symbol, context.new)]
    found = _values(context.new, symbol.module, symbol.name)
    if isinstance(found, Outcome):
        return [found]
    values, here = found
    if symbol.value is not None:
        if values == {symbol.value}:
            return [
                Outcome(Verdict.UNCHANGED, f"{target} is as declared", None, here, target=target)
            ]
        shown = ", ".join(sorted(map(repr, values)))
        return [
            Outcome(
                Verdict.CHANGED_SHAPE,
                f"{target} is {shown}, expected {symbol.value!r}",
                None,
                here,
                target=target,
            )
        ]
    missing = [v for v in symbol.contains if v not in values]
    if missing:
        return [
            Outcome(
                Verdict.REMOVED,
                f"{target} does not contain {', '.join(map(repr, missing))} in {context.new.label}",
                None,
                here,
                target=target,
            )
        ]
    return [Outcome(Verdict.UNCHANGED, f"{target} is as declared", None, here, target=target)]


def _presence(symbol: Constant, view: View) -> Outcome:
    """Whether the name is there, whatever it holds."""
    target = f"{symbol.module}:{symbol.name}"
    found = view.resolve(symbol.module, symbol.name)
    if found.found or found.status == "outside":
        return Outcome(Verdict.UNCHANGED, f"{target} is there", None, found.location, target=target)
    if found.status == "missing":
        moved = _moved_constant(view, symbol.module, symbol.name)
        if moved is not None:
            return moved
    return lost(view, None, symbol.module, symbol.name, kind="class")


def _compare_presence(symbol: Constant, old: View, new: View) -> list[Outcome]:
    target = f"{symbol.module}:{symbol.name}"
    before, after = _presence(symbol, old), _presence(symbol, new)
    if before.verdict is not Verdict.UNCHANGED:
        if after.verdict is not Verdict.UNCHANGED:
            return []
        return [_appeared(target, after.new, old.label)]
    if after.verdict is Verdict.UNCHANGED:
        words = f"{target} is unchanged"
        return [Outcome(Verdict.UNCHANGED, words, before.new, after.new, target=target)]
    kind = old.resolve(symbol.module, symbol.name).kind
    if kind in ("function", "class"):
        # A name that the plugin only imports, of something whose new place can be searched for.
        return [lost(new, old, symbol.module, symbol.name, kind=kind)]
    return [_with_old(after, before.new)]


def compare_constant(symbol: Constant, context: Context) -> list[Outcome]:
    """Hold the declared values of a constant in two releases against each other."""
    old, new = context.old, context.new
    assert old is not None
    target = f"{symbol.module}:{symbol.name}"
    if symbol.value is None and not symbol.contains:
        return _compare_presence(symbol, old, new)
    before = _values(old, symbol.module, symbol.name)
    after = _values(new, symbol.module, symbol.name)
    if isinstance(before, Outcome):
        if isinstance(after, Outcome):
            return []
        return [_appeared(target, after[1], old.label)]
    if isinstance(after, Outcome):
        return [_with_old(after, before[1])]
    if symbol.value is not None:
        if before[0] == after[0]:
            return [
                Outcome(
                    Verdict.UNCHANGED, f"{target} is unchanged", before[1], after[1], target=target
                )
            ]
        was, now = (", ".join(sorted(map(repr, v))) for v in (before[0], after[0]))
        return [
            Outcome(
                Verdict.CHANGED_SHAPE,
                f"{target} changed from {was} to {now}",
                before[1],
                after[1],
                target=target,
            )
        ]
    gone = [v for v in symbol.contains if v in before[0] and v not in after[0]]
    fresh = [v for v in symbol.contains if v not in before[0] and v in after[0]]
    if gone:
        return [
            Outcome(
                Verdict.REMOVED,
                f"{target} does not contain {', '.join(map(repr, gone))} any more",
                before[1],
                after[1],
                target=target,
            )
        ]
    if fresh:
        words = f"{target} contains {', '.join(map(repr, fresh))} now"
        return [Outcome(Verdict.COMPATIBLE, words, before[1], after[1], target=target)]
    return [
        Outcome(Verdict.UNCHANGED, f"{target} is unchanged", before[1], after[1], target=target)
    ]


# entry-point groups -------------------------------------------------------------------------------


def _as_constant(symbol: EntryPointGroup) -> Constant:
    return Constant(
        symbol.id, why=symbol.why, versions=symbol.versions, module=symbol.module, name=symbol.name,
        value=symbol.group,
    )  # fmt: skip


def judge_group(symbol: EntryPointGroup, context: Context) -> list[Outcome]:
    """Hold the constant that names the entry-point group against the declared group."""
    return judge_constant(_as_constant(symbol), context)


def compare_group(symbol: EntryPointGroup, context: Context) -> list[Outcome]:
    """Hold the name of the entry-point group in two releases against each other."""
    return compare_constant(_as_constant(symbol), context)
