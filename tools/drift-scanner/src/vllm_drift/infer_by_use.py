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
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from drafter_compat.surface import ClassShape, FunctionShape
from vllm_drift.findings import Location, Severity, Verdict
from vllm_drift.infer_callers import Caller, find_callers
from vllm_drift.infer_release import (
    Definition,
    FunctionNode,
    Release,
    child_nodes,
    parse_quietly,
    walk,
)
from vllm_drift.judging import Outcome
from vllm_drift.tree import SourceTree

__all__ = [
    "is_mentioned",
    "is_only_overridden",
    "judge_class_by_use",
    "judge_factory_by_use",
    "judge_function_by_use",
    "texts_put_for",
]

_P = inspect.Parameter
_DATACLASS = frozenset(("dataclass", "config", "dataclasses.dataclass", "pydantic_dataclass"))
_FIELD_BASES = frozenset(("BaseModel", "Struct", "NamedTuple", "TypedDict"))


# --- functions -----------------------------------------------------------------------------


def judge_function_by_use(
    symbol: FunctionShape, old_tree: SourceTree, new_tree: SourceTree
) -> list[Outcome]:
    """Say what a bump means for a plugin that calls or replaces the function.

    Returns `changed-shape` for each call of the plugin that no longer binds, `new-demand` or
    `caller-changed` for each function of the package whose call the replacement can no longer
    take, also where the signature is as it was, `compatible` where the signature changed and
    everything still fits, and nothing where it did not change or a release does not have it. What
    fitted neither release is among them as `preexisting`.
    """
    old, new = Release.of(old_tree), Release.of(new_tree)
    before, after = old.find(symbol.module, symbol.name), new.find(symbol.module, symbol.name)
    if before is None or after is None:
        return []
    was, now = _signature(before), _signature(after)
    if was is None or now is None:
        return []
    where = _Where(
        f"{symbol.module}:{symbol.name}", _location(old, before), _location(new, after), was, now
    )
    outcomes = [*_broken_calls(symbol.calls, where), *_never_fitted(symbol.calls, where)]
    outcomes += _now_generator(where, before, after)
    if symbol.replacement is not None:
        outcomes += _demands(symbol, where, old, new, before, after)
        if all(o.preexisting for o in outcomes):
            outcomes += _never_called(symbol, where, old, new, before)
            outcomes += _never_looked_up(symbol, where, old, new)
    if where.same_shape or not all(o.preexisting for o in outcomes):
        return outcomes
    return [where.fits(), *outcomes]


@dataclass(frozen=True)
class _Where:
    """The function or class that is judged, in both releases."""

    target: str
    old: Location
    new: Location
    was: inspect.Signature
    now: inspect.Signature

    @property
    def same_shape(self) -> bool:
        """Whether calls bind to both alike."""
        return _shape(self.was) == _shape(self.now)

    def outcome(
        self,
        verdict: Verdict,
        message: str,
        *,
        new: Location | None = None,
        detail: str = "",
        severity: Severity | None = None,
        preexisting: bool = False,
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
            preexisting,
        )

    def fits(self) -> Outcome:
        """The signature changed, and nothing that the plugin does is touched by it."""
        return self.outcome(
            Verdict.COMPATIBLE, f"{_difference(self.was, self.now)}; what the plugin does fits"
        )


def _broken_calls(calls: tuple[str, ...], where: _Where) -> Iterator[Outcome]:
    if where.same_shape or any(_is_for_the_new(text, where) for text in calls):
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
            continue
        swallowed = [
            k.arg
            for k in call.keywords
            if k.arg in where.was.parameters and k.arg not in where.now.parameters
        ]
        if swallowed:
            yield where.outcome(
                Verdict.CANNOT_TELL,
                f"the plugin calls it with {text}, and {', '.join(map(str, swallowed))} is no "
                f"parameter any more: its ** takes it, and whether it still does anything does "
                f"not show",
            )


def _now_generator(where: _Where, before: Definition, after: Definition) -> Iterator[Outcome]:
    """A function whose call runs it became one whose call gives an iterator, or the other way.

    A decorator that came or went with it (`contextmanager`) says something else of the call.
    """
    was, now = _is_generator(before), _is_generator(after)
    if was != now and _decorators(before) == _decorators(after):
        words = (
            "is a generator now: a call gives an iterator, and runs nothing by itself"
            if now
            else "is no generator any more: a call runs it, and gives its value"
        )
        yield where.outcome(Verdict.CHANGED_SHAPE, words)


def _is_generator(definition: Definition) -> bool:
    """Whether the function itself, not one inside it, has a `yield`."""
    waiting: list[ast.AST] = list(getattr(definition.node, "body", ()))
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            waiting.extend(child_nodes(node))
    return False


def _decorators(definition: Definition) -> list[str]:
    return [ast.unparse(d) for d in getattr(definition.node, "decorator_list", ())]


def _never_called(
    symbol: FunctionShape, where: _Where, old: Release, new: Release, before: Definition
) -> Iterator[Outcome]:
    """What the plugin puts in place still has a place, and nothing asks for it any more.

    Only where the older release called it, and the newer one mentions the name nowhere but where it
    is defined: a call by a name in a string counts as a mention.
    """
    owner, _, name = symbol.name.rpartition(".")
    if name.startswith("__") or is_mentioned(new.tree, name):
        return
    override = is_only_overridden(symbol)
    through = old.find(symbol.module, owner) if owner else None
    calls = find_callers(old, before, through, override=override)
    if calls:
        yield where.outcome(
            Verdict.INEFFECTIVE,
            f"{calls[0].function} called it ({calls[0].path}:{calls[0].line}), and nothing in "
            f"{new.tree.label} does: what the plugin puts there is never called",
        )


def _never_looked_up(
    symbol: FunctionShape, where: _Where, old: Release, new: Release
) -> Iterator[Outcome]:
    """A rebound name of a module that functions looked up when they ran, and that is now only
    from-imported by other modules: those that are imported before the plugin keep the original.
    """
    if not symbol.rebound or "." in symbol.name or new.late_readers(symbol.module, symbol.name):
        return
    importers = new.early_importers(symbol.module, symbol.name)
    if importers and old.late_readers(symbol.module, symbol.name):
        module, line = importers[0]
        yield where.outcome(
            Verdict.INEFFECTIVE,
            f"nothing looks it up in {symbol.module} any more: {module} imports it by name, and "
            f"keeps the original unless it is imported after the plugin",
            new=Location(new.tree.path(module), line),
        )


def is_only_overridden(symbol: FunctionShape) -> bool:
    """Whether a subclass of the plugin defines the method, and nothing patches it."""
    return "overridden" in symbol.why and "patched" not in symbol.why


def is_mentioned(tree: SourceTree, name: str) -> bool:
    """Whether a name occurs anywhere in a release but in `def name`."""
    use = re.compile(rf"(?<!def )\b{re.escape(name)}\b")
    wanted = name.encode()
    return any(
        wanted in (tree.data(module) or b"") and use.search(tree.text(module) or "") is not None
        for module in tree.modules()
    )


def _never_fitted(calls: tuple[str, ...], where: _Where) -> Iterator[Outcome]:
    """The calls that bind to neither release, where none of the plugin's calls binds to either.

    A plugin with a call for each of several releases has some that fit neither of these two.
    """
    parsed = [(text, call) for text in calls if (call := _parsed_call(text)) is not None]
    problems = [
        (text, _problem(where.was, call), _problem(where.now, call)) for text, call in parsed
    ]
    if any(then is None or now is None for _, then, now in problems):
        return
    for text, _, problem in problems:
        yield where.outcome(
            Verdict.CHANGED_SHAPE,
            f"the plugin calls it with {text}, which fits neither release: {problem}",
            preexisting=True,
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
    if where.same_shape and _stands_in(replacement, where.now):
        return []
    owner = symbol.name.rpartition(".")[0]
    override = is_only_overridden(symbol)
    # What a module that did not change passes now, it passed before.
    alike = new.modules_alike(old)
    settled = _failing(old, before, old.find(symbol.module, owner), replacement, override, alike)
    fresh = _failing(new, after, new.find(symbol.module, owner), replacement, override)
    known = {(c.function, p) for c, p in settled if _problem(where.was, c.call) is None}
    known |= {
        (c.function, p)
        for c, p in fresh
        if c.module in alike and _problem(where.was, c.call) is None
    }
    by_problem: dict[tuple[str, bool], list[Caller]] = {}
    for caller, problem in fresh:
        if _problem(where.now, caller.call) is None:
            already = (caller.function, problem) in known
            by_problem.setdefault((problem, already), []).append(caller)
    outcomes = [
        _demand(where, replacement, problem, callers, already)
        for (problem, already), callers in by_problem.items()
    ]
    if where.same_shape or not all(o.preexisting for o in outcomes):
        return outcomes
    return [*outcomes, *_unseen(where, replacement)]


def _stands_in(replacement: inspect.Signature, original: inspect.Signature) -> bool:
    """Whether every call that binds to the original is sure to bind to the replacement."""
    theirs, mine = list(original.parameters.values()), list(replacement.parameters.values())
    extra = mine[len(theirs) :]
    return len(mine) >= len(theirs) and (
        all(
            (m.name, m.kind) == (t.name, t.kind)
            and (t.default is _P.empty or m.default is not _P.empty)
            for m, t in zip(mine, theirs, strict=False)
        )
        and all(
            m.default is not _P.empty or m.kind in (_P.VAR_POSITIONAL, _P.VAR_KEYWORD)
            for m in extra
        )
    )


def _demand(
    where: _Where,
    replacement: inspect.Signature,
    problem: str,
    callers: list[Caller],
    already: bool,
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
        preexisting=already,
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
    apart_from: Collection[str] = (),
) -> list[tuple[Caller, str]]:
    through = owner if owner is not None and owner.kind == "class" else None
    found = []
    for caller in find_callers(
        release, function, through, override=override, apart_from=apart_from
    ):
        problem = _problem(replacement, caller.call)
        if problem is not None:
            found.append((caller, problem))
    return found


# --- anchors -------------------------------------------------------------------------------


def texts_put_for(anchor: str, plugin: SourceTree) -> list[str]:
    """What a plugin puts in the place of an anchor: `source.replace(anchor, text)`.

    Both may be literals, or names that the module gives one literal each.
    """
    found = []
    for module in plugin.files_containing(".replace("):
        tree = parse_quietly(plugin.text(module) or "")
        if tree is None:
            continue
        named: dict[str, set[str]] = {}
        for node in walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                for target in node.targets:
                    if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                        named.setdefault(target.id, set()).add(node.value.value)
        for node in walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "replace":
                texts = [_literal(a, named) for a in node.args[:2]]
                if len(texts) == 2 and texts[0] == anchor and texts[1]:
                    found.append(texts[1])
    return found


def _literal(node: ast.expr, named: dict[str, set[str]]) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    values = named.get(node.id, set()) if isinstance(node, ast.Name) else set()
    return next(iter(values)) if len(values) == 1 else None


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
    if was is not None and now is not None:
        target = f"{symbol.module}:{symbol.name}"
        where = _Where(target, _location(old, before), _location(new, after), was, now)
        outcomes += _broken_calls(symbol.calls, where)
        if not outcomes and symbol.calls and not where.same_shape:
            outcomes.append(where.fits())
        outcomes += _never_fitted(symbol.calls, where)
    if symbol.provides:
        outcomes += _abstract(symbol, old, new, before, after)
    return outcomes


def judge_factory_by_use(
    symbol: ClassShape, old_tree: SourceTree, new_tree: SourceTree, plugin: SourceTree
) -> list[Outcome]:
    """Say whether a class that became a function still does for a plugin that only calls it.

    Returns `compatible` where every call of the plugin binds to the function, and nothing where the
    plugin does anything else with the class (`isinstance`, a subclass), or a call does not bind.
    """
    old, new = Release.of(old_tree), Release.of(new_tree)
    before, after = old.find(symbol.module, symbol.name), new.find(symbol.module, symbol.name)
    if before is None or after is None or after.kind != "function" or not symbol.calls:
        return []
    now = _signature(after)
    calls = [_parsed_call(text) for text in symbol.calls]
    if now is None or any(c is None or _problem(now, c) is not None for c in calls):
        return []
    if not _only_called(plugin, symbol.name):
        return []
    target = f"{symbol.module}:{symbol.name}"
    return [
        Outcome(
            Verdict.COMPATIBLE,
            f"{target} is a function now; the plugin only calls it, with what it takes",
            _location(old, before),
            _location(new, after),
            target=target,
        )
    ]


def _only_called(plugin: SourceTree, name: str) -> bool:
    """Whether a plugin does nothing with a name but call it, import it and annotate with it."""
    for module in plugin.files_containing(name):
        tree = parse_quietly(plugin.text(module) or "")
        if tree is None:
            return False
        called: set[ast.AST] = set()
        annotated: set[ast.AST] = set()
        for node in walk(tree):
            if isinstance(node, ast.Call):
                called.add(node.func)
            for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                annotated.update(walk(annotation) if annotation is not None else ())
        for node in walk(tree):
            found = getattr(node, "id", None) or getattr(node, "attr", None)
            if found == name and node not in called and node not in annotated:
                return False
    return True


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
