"""How two shapes differ: signatures, and the arguments of calls. Each difference in words.

Knows facts only; no tree, no surface and no verdict. What is only another layout or another name of
the same thing gives no difference.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_drift.facts import Call, Function, Parameter, Signature
from vllm_drift.findings import Severity

__all__ = [
    "CallShape",
    "Change",
    "accepts",
    "binding_problem",
    "call_changes",
    "function_changes",
    "signature_changes",
]

_SHAPING = frozenset(
    {
        "contextmanager",
        "asynccontextmanager",
        "classmethod",
        "staticmethod",
        "property",
        "cached_property",
    }
)
"""Decorators that change how a function is called."""


@dataclass(frozen=True)
class Change:
    """One difference. INFO severity: code that fitted the old shape fits the new one."""

    text: str
    severity: Severity = Severity.ERROR
    name: str = ""
    """The parameter, keyword or field that it is about, where there is one."""
    kind: str = ""
    """`added`, `removed`, `renamed`, `reordered`, `required`, `default`, `kind`, `returns`,
    `async`, ...
    """

    @property
    def breaks(self) -> bool:
        """Whether somebody should act."""
        return self.severity is not Severity.INFO


# signatures ---------------------------------------------------------------------------------------


def signature_changes(old: Signature, new: Signature, *, declared: bool = False) -> list[Change]:
    """How a signature changed. `declared`: the old one was written by a plugin's author, who may
    have left out annotations; and `...` as a default stands for any default.
    """
    changes = [*_parameter_changes(old, new), *_order_changes(old, new)]
    if old.is_async != new.is_async and not declared:
        changes.append(_async_change(new.is_async))
    if old.returns is not None and new.returns is not None and old.returns != new.returns:
        changes.append(
            Change(
                f"the return annotation changed from {old.returns} to {new.returns}",
                Severity.WARNING,
                kind="returns",
            )
        )
    return changes


def function_changes(old: Function, new: Function) -> list[Change]:
    """How a function's shape changed: signature, kind, and the decorators that change its calls."""
    changes = signature_changes(old.signature, new.signature)
    if old.kind != new.kind:
        changes.append(Change(f"it was a {old.kind} and is a {new.kind}", kind="kind"))
    else:
        before, after = _shaping(old.decorators), _shaping(new.decorators)
        if before != after:
            changes.append(
                Change(
                    f"its decorators changed from {_listed(before)} to {_listed(after)}",
                    kind="decorators",
                )
            )
    return changes


def _async_change(now_async: bool) -> Change:
    return Change("it is async now" if now_async else "it is not async any more", kind="async")


def _shaping(decorators: tuple[str, ...]) -> list[str]:
    heads = [d.partition("(")[0] for d in decorators]
    return [h for h in heads if h.rpartition(".")[2] in _SHAPING]


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words) or "none"


def _parameter_changes(old: Signature, new: Signature) -> list[Change]:
    gone = [p for p in old.parameters if new.get(p.name) is None]
    fresh = [p for p in new.parameters if old.get(p.name) is None]
    changes = []
    for before, after in _renamed(old, new, gone, fresh):
        gone.remove(before)
        fresh.remove(after)
        changes += _renaming(before, after)
    for parameter in gone:
        if parameter.kind in ("*args", "**kwargs"):
            changes.append(Change(f"it takes no {_starred(parameter)} any more", kind="removed"))
        else:
            changes.append(
                Change(
                    f"parameter {parameter.name} was removed", name=parameter.name, kind="removed"
                )
            )
    for parameter in fresh:
        changes.append(_added(parameter, old, new))
    for parameter in old.parameters:
        still = new.get(parameter.name)
        if still is not None:
            changes += _same_name(parameter, still)
    return changes


def _renamed(
    old: Signature, new: Signature, gone: list[Parameter], fresh: list[Parameter]
) -> list[tuple[Parameter, Parameter]]:
    """Pairs of a parameter that went and one that came in its place."""
    before = [p for p in old.parameters if p.by_position]
    after = [p for p in new.parameters if p.by_position]
    pairs = []
    if len(before) == len(after):
        pairs = [(b, a) for b, a in zip(before, after, strict=True) if b in gone and a in fresh]
    for kind in ("*args", "**kwargs"):
        pairs += [(b, a) for b in gone for a in fresh if b.kind == a.kind == kind]
    loose = [p for p in gone if p.kind == "keyword-only"]
    candidates = [p for p in fresh if p.kind == "keyword-only"]
    if len(loose) == len(candidates) == 1 and (
        loose[0].default == candidates[0].default
        and loose[0].annotation == candidates[0].annotation
    ):
        pairs.append((loose[0], candidates[0]))
    return pairs


def _renaming(before: Parameter, after: Parameter) -> list[Change]:
    if before.kind in ("*args", "**kwargs", "positional-only"):
        return []  # nobody can pass it by name
    changes = [
        Change(
            f"parameter {before.name} was renamed to {after.name}", name=before.name, kind="renamed"
        )
    ]
    return changes + _same_name(before, after)


def _added(parameter: Parameter, old: Signature, new: Signature) -> Change:
    if parameter.kind in ("*args", "**kwargs"):
        return Change(f"it takes {_starred(parameter)} now", Severity.INFO, parameter.name, "added")
    if parameter.required:
        return Change(
            f"required parameter {parameter.name} was added", name=parameter.name, kind="added"
        )
    followers = new.parameters[new.parameters.index(parameter) + 1 :]
    shifted = [p.name for p in followers if p.by_position and old.get(p.name) is not None]
    if parameter.by_position and shifted:
        return Change(
            f"optional parameter {parameter.name} was added in front of {shifted[0]}",
            name=parameter.name,
            kind="added",
        )
    return Change(
        f"optional parameter {parameter.name} was added", Severity.INFO, parameter.name, "added"
    )


def _same_name(before: Parameter, after: Parameter) -> list[Change]:
    changes = []
    name = after.name
    if before.kind != after.kind:
        changes.append(_kind_change(before, after))
    if before.default is not None and after.default is None and after.required:
        changes.append(Change(f"parameter {name} is required now", name=name, kind="required"))
    elif before.default is None and after.default is not None:
        changes.append(Change(f"parameter {name} is optional now", Severity.INFO, name, "optional"))
    elif before.default != after.default and "..." not in (before.default, after.default):
        changes.append(
            Change(
                f"the default of {name} changed from {before.default} to {after.default}",
                Severity.WARNING,
                name,
                "default",
            )
        )
    return changes


def _kind_change(before: Parameter, after: Parameter) -> Change:
    wider = after.kind == "positional" and before.kind in ("positional-only", "keyword-only")
    words = {
        "positional-only": "positional only",
        "positional": "positional or keyword",
        "keyword-only": "keyword only",
        "*args": "*args",
        "**kwargs": "**kwargs",
    }
    return Change(
        f"parameter {after.name} was {words[before.kind]} and is {words[after.kind]}",
        Severity.INFO if wider else Severity.ERROR,
        after.name,
        "kind",
    )


def _order_changes(old: Signature, new: Signature) -> list[Change]:
    before = [p.name for p in old.parameters if p.by_position]
    after = [p.name for p in new.parameters if p.by_position]
    common = [name for name in before if name in after]
    if common != [name for name in after if name in before]:
        return [
            Change(
                f"positional parameters were reordered from ({', '.join(before)}) to "
                f"({', '.join(after)})",
                kind="reordered",
            )
        ]
    return []


def _starred(parameter: Parameter) -> str:
    return ("*" if parameter.kind == "*args" else "**") + parameter.name


def accepts(signature: Signature, keyword: str) -> bool:
    """Whether a call may pass that keyword."""
    parameter = signature.get(keyword)
    if parameter is not None and parameter.kind in ("positional", "keyword-only"):
        return True
    return any(p.kind == "**kwargs" for p in signature.parameters)


def binding_problem(signature: Signature, call: Call, *, bound: bool) -> str | None:
    """Why a call does not fit a signature, or None where it does, or may.

    `bound`: the signature's first parameter is the object, which the call does not pass.
    """
    parameters = signature.parameters[1:] if bound else signature.parameters
    positional = [p for p in parameters if p.by_position]
    open_positions = any(a.star == "*" for a in call.args)
    open_keywords = any(a.star == "**" for a in call.args)
    count = len(call.positional)
    room = any(p.kind == "*args" for p in parameters) or count <= len(positional)
    if not open_positions and not room:
        extra = call.positional[len(positional)]
        return f"it passes {count} positional arguments, {extra} among them"
    filled = {p.name for p in positional[:count]}
    for keyword, _ in call.keywords:
        if keyword == "**":
            continue
        if not accepts(Signature(parameters), keyword):
            return f"it passes {keyword}="
        if keyword in filled and not open_positions:
            return f"it passes {keyword} twice"
        filled.add(keyword)
    if not open_positions and not open_keywords:
        for parameter in parameters:
            if parameter.required and parameter.name not in filled:
                return f"it does not pass {parameter.name}"
    return None


# calls --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallShape:
    """The arguments of a call as source texts, keywords in any order."""

    positional: tuple[str, ...]
    keywords: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, call: Call) -> CallShape:
        """The shape of a call in source."""
        return cls(call.positional, tuple(sorted(call.keywords)))

    def __str__(self) -> str:
        keywords = [f"**{t}" if k == "**" else f"{k}={t}" for k, t in self.keywords]
        return f"({', '.join([*self.positional, *keywords])})"


def call_changes(old: CallShape, new: CallShape) -> list[Change]:
    """How the arguments that a caller passes changed."""
    if old == new:
        return []
    changes = _positional_changes(old, new)
    before, after = dict(old.keywords), dict(new.keywords)
    for name, text in new.keywords:
        if name not in before:
            if text in old.positional and text not in new.positional:
                what = f"it passes {text} by keyword now, as {name}="
            else:
                what = f"it passes **{text} too" if name == "**" else f"it passes {name}={text} too"
            changes.append(Change(what, name=name, kind="added"))
    for name, text in old.keywords:
        if name not in after:
            if text in new.positional and text not in old.positional:
                what = f"it passes {text} by position now, not as {name}="
            else:
                shown = f"**{text}" if name == "**" else f"{name}="
                what = f"it does not pass {shown} any more"
            changes.append(Change(what, name=name, kind="removed"))
        elif after[name] != text:
            changes.append(_value_change(f"{name}=", text, after[name]))
    return changes


def _positional_changes(old: CallShape, new: CallShape) -> list[Change]:
    before, after = old.positional, new.positional
    if len(before) == len(after):
        if Counter(before) == Counter(after):
            if before == after:
                return []
            return [
                Change(
                    f"it passes the positional arguments in another order: ({', '.join(after)}) "
                    f"instead of ({', '.join(before)})",
                    kind="reordered",
                )
            ]
        return [
            _value_change(f"positional argument {i + 1}", b, a)
            for i, (b, a) in enumerate(zip(before, after, strict=True))
            if b != a
        ]
    words = "more" if len(after) > len(before) else "fewer"
    return [
        Change(
            f"it passes {words} positional arguments: ({', '.join(after)}) instead of "
            f"({', '.join(before)})",
            kind="added" if words == "more" else "removed",
        )
    ]


def _value_change(place: str, before: str, after: str) -> Change:
    """The same argument with another text: a renamed local says nothing, other texts may."""
    if before.startswith("*") != after.startswith("*"):
        return Change(f"{place} is {after} instead of {before}", kind="value")
    same = _last_name(before) == _last_name(after) != ""
    local = before.isidentifier() and after.isidentifier()
    severity = Severity.INFO if same or local else Severity.WARNING
    return Change(f"{place} is {after} instead of {before}", severity, kind="value")


def _last_name(text: str) -> str:
    match = re.search(r"(\w+)(?:\[[^\]]*\]|\(\))*$", text)
    return match.group(1) if match else ""
