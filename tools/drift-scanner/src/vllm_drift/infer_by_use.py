"""Judges a changed function or class by how a plugin uses it, not by how it looks.

A signature can change in many ways that a plugin never notices: it passes two arguments and the
third became optional; its override takes `**kwargs`. So each call that the plugin makes is bound
to the old and to the new signature, and each call that the package makes to what the plugin put in
the function's place. Only what fitted before and fits no more is drift, and the call is the
witness.

Knows surfaces' `calls` and `replacement` keys and two releases; must not know plugins' source.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from drafter_compat.surface import ClassShape, FunctionShape
from vllm_drift.findings import Location, Severity, Verdict
from vllm_drift.infer_callers import Caller, find_callers
from vllm_drift.infer_release import Definition, FunctionNode, Release
from vllm_drift.judging import Outcome
from vllm_drift.tree import SourceTree

__all__ = ["judge_class_by_use", "judge_function_by_use"]

_P = inspect.Parameter
_DATACLASS = frozenset(("dataclass", "config", "dataclasses.dataclass", "pydantic_dataclass"))
_FIELD_BASES = frozenset(("BaseModel", "Struct", "NamedTuple", "TypedDict"))


# --- functions -----------------------------------------------------------------------------


def judge_function_by_use(
    symbol: FunctionShape, old_tree: SourceTree, new_tree: SourceTree
) -> list[Outcome]:
    """Say what a changed signature means for a plugin that calls or replaces the function.

    Returns `changed-shape` for each call of the plugin that no longer binds, `new-demand` or
    `caller-changed` for each function of the package whose call the replacement can no longer
    take, `compatible` where the signature changed and everything still fits, and nothing where it
    did not change or a release does not have it.
    """
    old, new = Release.of(old_tree), Release.of(new_tree)
    before, after = old.find(symbol.module, symbol.name), new.find(symbol.module, symbol.name)
    if before is None or after is None:
        return []
    was, now = _signature(before), _signature(after)
    if was is None or now is None or _shape(was) == _shape(now):
        return []
    where = _Where(
        f"{symbol.module}:{symbol.name}", _location(old, before), _location(new, after), was, now
    )
    outcomes = list(_broken_calls(symbol.calls, where))
    if symbol.replacement is not None:
        outcomes += _demands(symbol, where, old, new, before, after)
    if outcomes:
        return outcomes
    return [where.fits()]


@dataclass(frozen=True)
class _Where:
    """The function or class that is judged, in both releases."""

    target: str
    old: Location
    new: Location
    was: inspect.Signature
    now: inspect.Signature

    def outcome(
        self,
        verdict: Verdict,
        message: str,
        *,
        new: Location | None = None,
        detail: str = "",
        severity: Severity | None = None,
    ) -> Outcome:
        """Say something of it, with the definitions as witnesses unless `new` is another."""
        return Outcome(
            verdict,
            f"{self.target}: {message}",
            self.old,
            new or self.new,
            detail,
            severity,
            self.target,
        )

    def fits(self) -> Outcome:
        """The signature changed, and nothing that the plugin does is touched by it."""
        return self.outcome(
            Verdict.COMPATIBLE, f"{_difference(self.was, self.now)}; what the plugin does fits"
        )


def _broken_calls(calls: tuple[str, ...], where: _Where) -> Iterator[Outcome]:
    if any(_is_for_the_new(text, where) for text in calls):
        return  # the plugin chooses between releases, and has code for this one
    for text in calls:
        call = _parsed_call(text)
        if call is None or _problem(where.was, call) is not None:
            continue
        problem = _problem(where.now, call) or _reordered(where.was, where.now, call)
        if problem is not None:
            yield where.outcome(
                Verdict.CHANGED_SHAPE,
                f"the plugin calls it with {text}, which fitted {where.was}: {problem}",
            )


def _is_for_the_new(text: str, where: _Where) -> bool:
    """Whether a call could not have been made to the old release and fits the new one."""
    call = _parsed_call(text)
    return (
        call is not None
        and _problem(where.was, call) is not None
        and _problem(where.now, call) is None
    )


def _demands(
    symbol: FunctionShape,
    where: _Where,
    old: Release,
    new: Release,
    before: Definition,
    after: Definition,
) -> list[Outcome]:
    """What the package now passes to the function, and the plugin's replacement cannot take."""
    replacement = _parsed_signature(symbol.replacement or "")
    if replacement is None:
        return []
    if "." in symbol.name and not _is_static(before):
        replacement = _without_first(replacement)
    owner = symbol.name.rpartition(".")[0]
    override = "overridden" in symbol.why and "patched" not in symbol.why
    settled = _failing(old, before, old.find(symbol.module, owner), replacement, override)
    fresh = _failing(new, after, new.find(symbol.module, owner), replacement, override)
    known = {(c.function, p) for c, p in settled}
    by_problem: dict[str, list[Caller]] = {}
    for caller, problem in fresh:
        if (caller.function, problem) not in known and _problem(where.now, caller.call) is None:
            by_problem.setdefault(problem, []).append(caller)
    outcomes = [
        _demand(where, replacement, problem, callers) for problem, callers in by_problem.items()
    ]
    return outcomes or _unseen(where, replacement)


def _demand(
    where: _Where, replacement: inspect.Signature, problem: str, callers: list[Caller]
) -> Outcome:
    """One thing that calls ask for now; the first call is the witness, all stand in the detail."""
    first = callers[0]
    others = f" (and {len(callers) - 1} more)" if len(callers) > 1 else ""
    return where.outcome(
        Verdict.CALLER_CHANGED if problem.startswith("missing") else Verdict.NEW_DEMAND,
        f"{first.function}{others} calls it with {_arguments(first.call)}, and the plugin's "
        f"{replacement} cannot take that: {problem}",
        new=Location(first.path, first.line),
        detail="\n".join(f"{c.path}:{c.line}: {ast.unparse(c.call)}" for c in callers),
    )


def _unseen(where: _Where, replacement: inspect.Signature) -> list[Outcome]:
    """No call shows it, yet every call of the new signature must pass what the plugin refuses."""
    for parameter in where.now.parameters.values():
        starred = parameter.kind in (_P.VAR_POSITIONAL, _P.VAR_KEYWORD)
        required = parameter.default is _P.empty and not starred
        if required and not _takes(replacement, parameter) and not _takes(where.was, parameter):
            return [
                where.outcome(
                    Verdict.CHANGED_SHAPE,
                    f"{parameter.name} is required now, and the plugin's {replacement} does not "
                    f"take it",
                )
            ]
    return []


def _takes(signature: inspect.Signature, wanted: inspect.Parameter) -> bool:
    kinds = {p.kind for p in signature.parameters.values()}
    if wanted.name in signature.parameters or _P.VAR_KEYWORD in kinds:
        return True
    return wanted.kind is not _P.KEYWORD_ONLY and _P.VAR_POSITIONAL in kinds


def _failing(
    release: Release,
    function: Definition,
    owner: Definition | None,
    replacement: inspect.Signature,
    override: bool,
) -> list[tuple[Caller, str]]:
    through = owner if owner is not None and owner.kind == "class" else None
    found = []
    for caller in find_callers(release, function, through, override=override):
        problem = _problem(replacement, caller.call)
        if problem is not None:
            found.append((caller, problem))
    return found


# --- classes -------------------------------------------------------------------------------


def judge_class_by_use(
    symbol: ClassShape, old_tree: SourceTree, new_tree: SourceTree
) -> list[Outcome]:
    """Say which constructions of a class by the plugin no longer fit, and which methods it lacks.

    Returns `changed-shape` for each call in `calls` that bound to the old constructor and does not
    bind to the new one, `new-demand` for each new abstract method that `provides` lacks, and
    nothing where source does not tell the constructor.
    """
    old, new = Release.of(old_tree), Release.of(new_tree)
    before, after = old.find(symbol.module, symbol.name), new.find(symbol.module, symbol.name)
    if before is None or after is None or "class" not in (before.kind, after.kind):
        return []
    outcomes: list[Outcome] = []
    was, now = _constructor(old, before), _constructor(new, after)
    if was is not None and now is not None and _shape(was) != _shape(now):
        target = f"{symbol.module}:{symbol.name}"
        where = _Where(target, _location(old, before), _location(new, after), was, now)
        outcomes += _broken_calls(symbol.calls, where)
        if not outcomes and symbol.calls:
            outcomes.append(where.fits())
    if symbol.provides:
        outcomes += _abstract(symbol, old, new, before, after)
    return outcomes


def _abstract(
    symbol: ClassShape, old: Release, new: Release, before: Definition, after: Definition
) -> Iterator[Outcome]:
    provided = {name for name, _ in symbol.provides}
    known = _abstract_methods(old, before)
    for name, method in _abstract_methods(new, after).items():
        if name in provided or name in known:
            continue
        yield Outcome(
            Verdict.NEW_DEMAND,
            f"{symbol.module}:{symbol.name} has the abstract method {name} now, which the plugin's "
            f"subclass does not define: it cannot be instantiated",
            _location(old, before),
            _location(new, method),
            target=f"{symbol.module}:{symbol.name}.{name}",
        )


def _abstract_methods(release: Release, definition: Definition) -> dict[str, Definition]:
    """The methods that are abstract for a class: what is nearest in its lineage decides."""
    found: dict[str, Definition] = {}
    seen: set[str] = set()
    for current in release.lineage(definition)[0]:
        members = release.class_of(current)
        for name, nodes in members.members.items() if members is not None else ():
            if name in seen:
                continue
            seen.add(name)
            node = nodes[-1]
            decorators = {
                ast.unparse(d).rpartition(".")[2] for d in getattr(node, "decorator_list", ())
            }
            if "abstractmethod" in decorators:
                found[name] = Definition("function", current.module, f"{current.name}.{name}", node)
    return found


def _constructor(release: Release, definition: Definition) -> inspect.Signature | None:
    """The signature of a class's constructor without self, or None where source does not tell."""
    lineage, complete = release.lineage(definition)
    for current in lineage:
        members = release.class_of(current)
        if members is None:
            return None
        if "__new__" in members.members and "__init__" not in members.members:
            return None
        if "__init__" in members.members:
            node = members.members["__init__"][-1]
            found = Definition("function", current.module, f"{current.name}.__init__", node)
            signature = _signature(found)
            return signature
        if _has_fields(members.node):
            return _of_fields(release, lineage)
    return None if not complete else inspect.Signature()


def _has_fields(node: ast.ClassDef) -> bool:
    names = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
    bases = {ast.unparse(b).rpartition(".")[2] for b in node.bases}
    return any(n in _DATACLASS or n.endswith(".dataclass") for n in names) or bool(
        bases & _FIELD_BASES
    )


def _of_fields(release: Release, lineage: list[Definition]) -> inspect.Signature | None:
    parameters: dict[str, inspect.Parameter] = {}
    keyword_only = False
    for current in reversed(lineage):
        members = release.class_of(current)
        if members is None:
            return None
        head = " ".join(ast.unparse(part) for part in (*members.node.bases, *members.node.keywords))
        decorators = " ".join(ast.unparse(d) for d in members.node.decorator_list)
        keyword_only = keyword_only or "BaseModel" in head or "kw_only=True" in head + decorators
        for name, nodes in members.members.items():
            field = next((n for n in nodes if isinstance(n, ast.AnnAssign)), None)
            if field is None or "ClassVar" in ast.unparse(field.annotation):
                continue
            default = _field_default(field.value)
            if default is None:
                parameters.pop(name, None)
                continue
            kind = _P.KEYWORD_ONLY if keyword_only else _P.POSITIONAL_OR_KEYWORD
            parameters[name] = inspect.Parameter(name, kind, default=default)
    return _signature_of(list(parameters.values()))


def _field_default(value: ast.expr | None) -> object:
    """The default of a field, `empty` where it has none, None where it is no argument."""
    if value is None:
        return _P.empty
    if isinstance(value, ast.Call):
        options = {k.arg: ast.unparse(k.value) for k in value.keywords}
        if options.get("init") == "False":
            return None
        name = ast.unparse(value.func).rpartition(".")[2]
        if name.lower() == "field":
            given = {"default", "default_factory", "factory"} & options.keys()
            first = ast.unparse(value.args[0]) if value.args else "..."
            if options.get("default") == "..." or (not given and first == "..."):
                return _P.empty
            return _Text("...")
    return _Text(ast.unparse(value))


# --- signatures and calls ------------------------------------------------------------------


@dataclass(frozen=True)
class _Text:
    """A default, which prints as its source."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _signature(definition: Definition) -> inspect.Signature | None:
    """The signature without the receiver, or None where the definition is no function."""
    node = definition.node
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    signature = _signature_of_node(node)
    if signature is not None and "." in definition.name and not _is_static(definition):
        return _without_first(signature)
    return signature


def _is_static(definition: Definition) -> bool:
    return any(
        ast.unparse(d) == "staticmethod" for d in getattr(definition.node, "decorator_list", ())
    )


def _signature_of_node(node: FunctionNode | ast.Lambda) -> inspect.Signature | None:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    padding: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*padding, *arguments.defaults]
    found = []
    for place, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        kind = (
            _P.POSITIONAL_ONLY if place < len(arguments.posonlyargs) else _P.POSITIONAL_OR_KEYWORD
        )
        found.append(_parameter(argument, kind, default))
    if arguments.vararg is not None:
        found.append(_parameter(arguments.vararg, _P.VAR_POSITIONAL, None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(_parameter(argument, _P.KEYWORD_ONLY, default))
    if arguments.kwarg is not None:
        found.append(_parameter(arguments.kwarg, _P.VAR_KEYWORD, None))
    return _signature_of(found)


def _parameter(argument: ast.arg, kind: object, default: ast.expr | None) -> inspect.Parameter:
    value = _P.empty if default is None else _Text(ast.unparse(default))
    return inspect.Parameter(argument.arg, kind, default=value)  # type: ignore[arg-type]


def _signature_of(parameters: list[inspect.Parameter]) -> inspect.Signature | None:
    """A signature, with keyword-only parameters last, or None where Python would refuse it."""
    ordered = sorted(parameters, key=lambda p: p.kind)
    try:
        return inspect.Signature(ordered)
    except ValueError:
        return None


def _without_first(signature: inspect.Signature) -> inspect.Signature:
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].kind in (_P.POSITIONAL_ONLY, _P.POSITIONAL_OR_KEYWORD):
        parameters = parameters[1:]
    return inspect.Signature(parameters)


def _shape(signature: inspect.Signature) -> tuple[tuple[str, object, bool], ...]:
    """What binding depends on: names, kinds, and whether there is a default; not its value."""
    return tuple((p.name, p.kind, p.default is _P.empty) for p in signature.parameters.values())


def _parsed_signature(text: str) -> inspect.Signature | None:
    try:
        node = ast.parse(f"def f{text}: ...").body[0]
    except SyntaxError:
        return None
    return _signature_of_node(node) if isinstance(node, ast.FunctionDef) else None


def _parsed_call(text: str) -> ast.Call | None:
    try:
        node = ast.parse(f"f{text}", mode="eval").body
    except SyntaxError:
        return None
    return node if isinstance(node, ast.Call) else None


def _problem(signature: inspect.Signature, call: ast.Call) -> str | None:
    """Why a call does not bind to a signature, or None where it does or may."""
    positional = [None for a in call.args if not isinstance(a, ast.Starred)]
    keywords = dict.fromkeys(k.arg for k in call.keywords if k.arg is not None)
    open_ended = len(positional) < len(call.args) or len(keywords) < len(call.keywords)
    if len(positional) < len(call.args):
        # How many a starred argument stands for is open: only the keywords can be wrong.
        positional = []
    try:
        if open_ended:
            signature.bind_partial(*positional, **keywords)
        else:
            signature.bind(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return None


def _reordered(was: inspect.Signature, now: inspect.Signature, call: ast.Call) -> str | None:
    """Whether an argument by position reaches another parameter that both signatures have."""
    before, after = _by_position(was), _by_position(now)
    for place, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred) or place >= min(len(before), len(after)):
            return None
        if before[place] != after[place] and before[place] in now.parameters:
            return (
                f"argument {place + 1} was {before[place]} and is {after[place]} now, while "
                f"{before[place]} went elsewhere"
            )
    return None


def _by_position(signature: inspect.Signature) -> list[str]:
    kinds = (_P.POSITIONAL_ONLY, _P.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.kind in kinds]


def _difference(was: inspect.Signature, now: inspect.Signature) -> str:
    gone = [n for n in was.parameters if n not in now.parameters]
    fresh = [n for n in now.parameters if n not in was.parameters]
    parts = []
    if fresh:
        parts.append(f"{', '.join(fresh)} added")
    if gone:
        parts.append(f"{', '.join(gone)} removed")
    return "; ".join(parts) or "a parameter changed its kind, its place or whether it is required"


def _arguments(call: ast.Call) -> str:
    text = ast.unparse(ast.Call(ast.Name("f"), call.args, call.keywords))[1:]
    return text if len(text) <= 200 else f"{text[:200]}..."


def _location(release: Release, definition: Definition) -> Location:
    return Location(release.tree.path(definition.module), definition.line)
