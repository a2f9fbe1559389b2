"""Is the package that is installed here, or loaded already, the one that a surface describes?

`check_surface` reads source with `ast`, imports nothing and takes a fraction of a second.
`check_live` looks at modules that this process has imported already, where what counts is memory
and not the file. Both return a `Report` with one `Result` per symbol. Knows the manifest's symbols
and no patch of its own.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from drafter_compat._layers import MISSING, before, unpatched
from drafter_compat._source import (
    ModuleSource,
    SourceTree,
    arguments_shape,
    normalised,
    signature_shape,
)
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

__all__ = ["Report", "Result", "SurfaceMismatch", "check_live", "check_surface"]

OK = "ok"
MISMATCH = "mismatch"


@dataclass(frozen=True)
class Result:
    """What was found for one symbol."""

    id: str
    """The symbol's id, or `version` for the claim about versions as a whole."""
    kind: str
    why: str
    """Why the plugin needs the symbol."""
    status: str
    """`ok` or `mismatch`."""
    expected: str
    found: str
    location: str | None
    """`file:line` of what was found, if there is one, below the package's parent directory."""
    way_out: str
    """What to do about a mismatch; empty if ok."""

    @property
    def ok(self) -> bool:
        """Whether the symbol is as the plugin expects it."""
        return self.status == OK


@dataclass(frozen=True)
class Report:
    """The results of a check, in the order of the manifest."""

    plugin: str
    package: str
    version: str
    claimed: str
    """The specifier of the versions that the plugin claims."""
    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """Whether every symbol is as expected."""
        return not self.mismatches

    @property
    def mismatches(self) -> tuple[Result, ...]:
        """The results that are not ok."""
        return tuple(result for result in self.results if not result.ok)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __add__(self, other: Report) -> Report:
        return replace(self, results=self.results + other.results)

    def explain(self, *, turn_off: str = "") -> str:
        """The whole story in plain text, symbol by symbol.

        `turn_off` says how to start the package without the plugin.
        """
        wrong = self.mismatches
        if not wrong:
            count = len(self.results)
            these = "the one symbol" if count == 1 else f"all {count} symbols"
            return (
                f"{self.plugin}: {these} of {self.package} {self.version} "
                f"{'is' if count == 1 else 'are'} as expected"
            )
        lines = [
            f"{self.plugin} does not fit this {self.package} {self.version}: {len(wrong)} of "
            f"{len(self.results)} symbols that it relies on are not as it expects them. Nothing "
            f"was patched.",
        ]
        for result in wrong:
            lines += [
                "",
                f"  {result.id} ({result.kind})",
                f"    needed to  {result.why}",
                f"    expected   {result.expected}",
                f"    found      {result.found}",
                *([f"    at         {result.location}"] if result.location else []),
                f"    way out    {result.way_out}",
            ]
        if turn_off:
            lines += ["", f"To start {self.package} without {self.plugin}: {turn_off}"]
        return "\n".join(lines)

    def raise_for_mismatch(self, *, turn_off: str = "") -> None:
        """Raise SurfaceMismatch if anything is not as expected."""
        if not self.ok:
            raise SurfaceMismatch(self, turn_off=turn_off)


class SurfaceMismatch(RuntimeError):
    """The package is not what the plugin was written against; `report` holds every result."""

    def __init__(self, report: Report, *, turn_off: str = "") -> None:
        super().__init__(report.explain(turn_off=turn_off))
        self.report = report
        self._turn_off = turn_off

    def __reduce__(self) -> tuple[Any, ...]:
        # Processes report a failed start to each other by pickling it.
        return (_rebuild_mismatch, (self.report, self._turn_off))


def _rebuild_mismatch(report: Report, turn_off: str) -> SurfaceMismatch:
    return SurfaceMismatch(report, turn_off=turn_off)


class _Wrong(Exception):
    """Raised by a checker: the symbol is not as expected."""

    absent = False
    """Whether it is not there at all, which a plugin may cope with."""

    def __init__(self, found: str, location: str | None = None) -> None:
        super().__init__(found)
        self.found = found
        self.location = location


class _Absent(_Wrong):
    """Raised by a checker: the symbol is not there."""

    absent = True


# --- the source below a directory -----------------------------------------------------------


def check_surface(
    surface: Surface, *, version: str, root: str | Path, accept_unclaimed: bool = False
) -> Report:
    """Compare the symbols that apply to `version` with the source below `root`, importing nothing.

    `root` is the directory of the package (`.../site-packages/vllm`). A version outside of what the
    plugin claims is a mismatch of its own unless `accept_unclaimed`. Source that cannot be read is
    a mismatch, never an error.
    """
    tree = SourceTree(surface.package, Path(root))
    results = [] if accept_unclaimed else [_check_claim(surface, version)]
    for symbol in surface.for_version(version):
        result = _check(symbol, surface, tree)
        if not result.ok:
            result = replace(result, way_out=_way_out(symbol, surface, version, tree))
        results.append(result)
    return Report(surface.plugin, surface.package, version, surface.versions, tuple(results))


def _check_claim(surface: Surface, version: str) -> Result:
    result = Result(
        id="version",
        kind="version",
        why=f"run on a {surface.package} that {surface.plugin} was tested with",
        status=OK,
        expected=surface.versions,
        found=version,
        location=None,
        way_out="",
    )
    if surface.claims(version):
        return result
    return replace(result, status=MISMATCH, way_out=_general_way_out(surface))


def _general_way_out(surface: Surface) -> str:
    return (
        f"pip install -U {surface.plugin} for a version that knows this {surface.package}, "
        f"or pip install '{surface.package}{surface.versions}'"
    )


def _way_out(symbol: Symbol, surface: Surface, version: str, tree: SourceTree) -> str:
    for other in surface.symbols:
        if other.id == symbol.id and other != symbol and _check(other, surface, tree).ok:
            return (
                f"the source has the shape of {surface.package} {other.versions}, its metadata "
                f"says {version}: "
                f"two versions are mixed in {tree.root.parent}; reinstall {surface.package}"
            )
    return _general_way_out(surface)


def _check(symbol: Symbol, surface: Surface, tree: SourceTree) -> Result:
    checker, expectation = _CHECKERS[type(symbol)]
    result = Result(
        id=symbol.id,
        kind=symbol.kind,
        why=symbol.why,
        status=OK,
        expected=expectation(symbol),
        found="",
        location=None,
        way_out="",
    )
    try:
        found, location = checker(symbol, tree)
    except _Wrong as wrong:
        if symbol.optional and wrong.absent:
            found = f"{wrong.found}; {surface.plugin} copes without it"
            return replace(result, found=found, location=wrong.location)
        return replace(result, status=MISMATCH, found=wrong.found, location=wrong.location)
    return replace(result, found=found, location=location)


Found = tuple[str, str | None]
"""What was found, in words, and where."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _module(tree: SourceTree, name: str) -> ModuleSource:
    source = tree.module(name)
    if source is None:
        raise _Absent(f"there is no module {name}")
    return source


def _function(tree: SourceTree, source: ModuleSource, name: str) -> _Function:
    node = source.definition(name)
    if node is None:
        raise _Absent(f"{source.name} defines no {name}", tree.location(source))
    if isinstance(node, ast.ClassDef):
        raise _Wrong(f"{name} is a class", tree.location(source, node.lineno))
    return node


def _class(tree: SourceTree, source: ModuleSource, name: str) -> ast.ClassDef:
    node = source.definition(name)
    if node is None:
        raise _Absent(f"{source.name} defines no {name}", tree.location(source))
    if not isinstance(node, ast.ClassDef):
        raise _Wrong(f"{name} is a function", tree.location(source, node.lineno))
    return node


def _bound_at_module_level(tree: SourceTree, source: ModuleSource, name: str, origin: str) -> int:
    """The line on which `source` from-imports `name` from `origin`, as that name."""
    bindings = source.module_level_bindings(name)
    for binding in bindings:
        if binding.source == origin and binding.original in (name, "*"):
            return binding.lineno
    if bindings:
        other = bindings[-1]
        raise _Wrong(
            f"{name} is {other.original} of {other.source}", tree.location(source, other.lineno)
        )
    raise _Wrong(f"{source.name} does not from-import {name}", tree.location(source))


def _check_from_import(symbol: FromImport, tree: SourceTree) -> Found:
    source = _module(tree, symbol.module)
    origin = _module(tree, symbol.source)
    if origin.definition(symbol.name) is None and not origin.assignments(symbol.name):
        raise _Absent(f"{symbol.source} defines no {symbol.name}", tree.location(origin))
    functions = [_function(tree, source, name) for name in symbol.read_in]
    local = [source.local_bindings(function, symbol.name) for function in functions]
    lineno = None
    if not functions or not all(local):
        lineno = _bound_at_module_level(tree, source, symbol.name, symbol.source)
    for function, bindings in zip(functions, local, strict=True):
        for binding in bindings:
            if binding.source != symbol.source or binding.original != symbol.name:
                raise _Wrong(
                    f"{function.name} itself imports {symbol.name} from {binding.source}",
                    tree.location(source, binding.lineno),
                )
        if not _reads(function, symbol.name):
            raise _Wrong(
                f"{function.name} does not read {symbol.name}",
                tree.location(source, function.lineno),
            )
    if lineno is None:
        lineno = local[0][0].lineno
    return "as expected", tree.location(source, lineno)


def _reads(function: ast.AST, name: str) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for node in ast.walk(function)
    )


def _check_replaced_class(symbol: ReplacedClass, tree: SourceTree) -> Found:
    _class(tree, _module(tree, symbol.source), symbol.name)
    source = _module(tree, symbol.module)
    lineno = _bound_at_module_level(tree, source, symbol.name, symbol.source)
    for name in symbol.isinstance_in:
        function = _function(tree, source, name)
        if not any(_narrowed(node, symbol.name) for node in ast.walk(function)):
            raise _Wrong(
                f"{name} does not test isinstance(..., {symbol.name})",
                tree.location(source, function.lineno),
            )
    return "as expected", tree.location(source, lineno)


def _narrowed(node: ast.AST, name: str) -> ast.expr | None:
    """The expression that `isinstance(expression, name)` tests, if node is that call."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and len(node.args) == 2
        and any(
            isinstance(part, (ast.Name, ast.Attribute))
            and ast.unparse(part).rpartition(".")[2] == name
            for part in ast.walk(node.args[1])
        )
    ):
        return node.args[0]
    return None


@dataclass(frozen=True)
class CallShape:
    """The arguments of a call, as source text without the accidents of layout."""

    args: tuple[str, ...]
    keywords: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, call: ast.Call) -> CallShape:
        """Of a call in the source."""
        return cls(
            tuple(ast.unparse(arg) for arg in call.args),
            frozenset((item.arg or "**", ast.unparse(item.value)) for item in call.keywords),
        )

    @classmethod
    def declared(cls, symbol: ConstructorCall | MethodCall) -> CallShape:
        """Of a call as a manifest declares it."""
        return cls(
            tuple(map(normalised, symbol.args)),
            frozenset((name, normalised(text)) for name, text in symbol.keywords),
        )

    def __str__(self) -> str:
        keywords = (
            f"**{text}" if name == "**" else f"{name}={text}"
            for name, text in sorted(self.keywords)
        )
        return f"({', '.join([*self.args, *keywords])})"


def _compare_calls(
    symbol: ConstructorCall | MethodCall,
    what: str,
    calls: list[ast.Call],
    source: ModuleSource,
    tree: SourceTree,
) -> Found:
    expected = CallShape.declared(symbol)
    if not calls:
        function = _function(tree, source, symbol.function)
        raise _Wrong(
            f"{symbol.function} does not call {what}", tree.location(source, function.lineno)
        )
    for call in calls:
        shape = CallShape.of(call)
        if shape != expected:
            raise _Wrong(f"{what}{shape}", tree.location(source, call.lineno))
    return f"{what}{expected}", tree.location(source, calls[0].lineno)


def _check_constructor_call(symbol: ConstructorCall, tree: SourceTree) -> Found:
    source = _module(tree, symbol.module)
    function = _function(tree, source, symbol.function)
    calls = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and called_name(node) == symbol.name
    ]
    return _compare_calls(symbol, symbol.name, calls, source, tree)


def called_name(call: ast.Call) -> str:
    """The last part of what is called, or nothing if it has no name."""
    if isinstance(call.func, (ast.Name, ast.Attribute)):
        return ast.unparse(call.func).rpartition(".")[2]
    return ""


def _check_method_call(symbol: MethodCall, tree: SourceTree) -> Found:
    source = _module(tree, symbol.module)
    function = _function(tree, source, symbol.function)
    if symbol.value is not None:
        value = normalised(symbol.value)
        calls = list(_method_calls(function, value, symbol.method))
        return _compare_calls(symbol, f"{value}.{symbol.method}", calls, source, tree)
    assert symbol.name is not None
    calls = list(narrowed_calls(function.body, symbol.name, symbol.method))
    return _compare_calls(symbol, f"{symbol.name}.{symbol.method}", calls, source, tree)


def _method_calls(node: ast.AST, value: str, method: str | None) -> Iterator[ast.Call]:
    for item in ast.walk(node):
        if (
            isinstance(item, ast.Call)
            and isinstance(item.func, ast.Attribute)
            and method in (None, item.func.attr)
            and ast.unparse(item.func.value) == value
        ):
            yield item


def narrowed_calls(
    body: list[ast.stmt], name: str, method: str | None = None
) -> Iterator[ast.Call]:
    """Calls of `method`, or of any, on a value that an assert or an if has narrowed to `name`."""
    narrowed: set[str] = set()
    for statement in body:
        for value in narrowed:
            yield from _method_calls(statement, value, method)
        if isinstance(statement, ast.Assert):
            for node in ast.walk(statement.test):
                if (value_node := _narrowed(node, name)) is not None:
                    narrowed.add(ast.unparse(value_node))
        elif isinstance(statement, ast.If):
            values = {
                ast.unparse(value_node)
                for node in ast.walk(statement.test)
                if (value_node := _narrowed(node, name)) is not None
            } - narrowed
            for value in values:
                for inner in statement.body:
                    yield from _method_calls(inner, value, method)
        if not narrowed:
            for inner_body in _bodies(statement):
                yield from narrowed_calls(inner_body, name, method)


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for attribute in ("body", "orelse", "finalbody"):
        body = getattr(statement, attribute, None)
        if isinstance(body, list):
            yield body
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def _check_attributes(symbol: Attributes, tree: SourceTree) -> Found:
    source = _module(tree, symbol.module)
    _class_exists(tree, source, symbol.name)
    missing = [
        name for name in symbol.reads if not _has_attribute(tree, source, symbol.name, name, set())
    ]
    if missing:
        raise _Wrong(f"{symbol.name} has no {', '.join(missing)}", tree.location(source))
    line = source.class_attribute(symbol.name, symbol.reads[0]) if symbol.reads else None
    return "as expected", tree.location(source, line)


def _class_exists(tree: SourceTree, source: ModuleSource, name: str) -> None:
    if not source.has_class(name):
        _class(tree, source, name)


def _has_attribute(
    tree: SourceTree, source: ModuleSource, class_name: str, attribute: str, seen: set[str]
) -> bool:
    """Whether the class or a base of it that the package's source shows has the attribute."""
    key = f"{source.name}:{class_name}"
    if key in seen:
        return False
    seen.add(key)
    if source.class_attribute(class_name, attribute) is not None:
        return True
    node = source.definition(class_name)
    for base in node.bases if isinstance(node, ast.ClassDef) else ():
        name = ast.unparse(base).partition("[")[0]
        if source.definition(name) is not None:
            if _has_attribute(tree, source, name, attribute, seen):
                return True
            continue
        for binding in source.module_level_bindings(name):
            origin = tree.module(binding.source)
            if origin and _has_attribute(tree, origin, binding.original, attribute, seen):
                return True
    return False


def _check_function(symbol: FunctionShape, tree: SourceTree) -> Found:
    source = _module(tree, symbol.module)
    function = _function(tree, source, symbol.name)
    location = tree.location(source, function.lineno)
    found = _bracketed(arguments_shape(function.args))
    if symbol.signature is not None and found != _bracketed(signature_shape(symbol.signature)):
        raise _Wrong(f"{symbol.name}{found}", location)
    is_async = isinstance(function, ast.AsyncFunctionDef)
    if symbol.is_async is not None and symbol.is_async != is_async:
        raise _Wrong(f"{symbol.name} is {'' if is_async else 'not '}async", location)
    if symbol.decorators is not None:
        decorators = [ast.unparse(item) for item in function.decorator_list]
        if decorators != [normalised(item) for item in symbol.decorators]:
            raise _Wrong(f"its decorators are {', '.join(decorators) or 'none'}", location)
    return f"{symbol.name}{found}", location


def _bracketed(parts: Iterable[str]) -> str:
    return f"({', '.join(parts)})"


def _check_class(symbol: ClassShape, tree: SourceTree) -> Found:
    source = _module(tree, symbol.module)
    node = _class(tree, source, symbol.name)
    location = tree.location(source, node.lineno)
    if symbol.bases is not None:
        bases = [ast.unparse(base) for base in node.bases]
        if bases != [normalised(base) for base in symbol.bases]:
            raise _Wrong(f"its bases are {', '.join(bases) or 'none'}", location)
    missing = [
        name
        for name in symbol.methods
        if not _has_attribute(tree, source, symbol.name, name, set())
    ]
    if missing:
        raise _Wrong(f"{symbol.name} has no method {', '.join(missing)}", location)
    defaults = {
        item.target.id: "" if item.value is None else ast.unparse(item.value)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for name, default in symbol.fields:
        if name not in defaults:
            raise _Wrong(f"{symbol.name} has no field {name}", location)
        if defaults[name] != (normalised(default) if default else ""):
            shown = defaults[name] or "no default"
            raise _Wrong(f"the default of {name} is {shown}", location)
    return "as expected", location


def _check_constant(symbol: Constant, tree: SourceTree) -> Found:
    source = _module(tree, symbol.module)
    values = source.assignments(symbol.name)
    named_only = not symbol.contains and symbol.value is None
    # Where only the name is asked for, it may come from an import or be a function as well.
    if named_only and (source.definition(symbol.name) or source.module_level_bindings(symbol.name)):
        return "as expected", tree.location(source)
    if not values:
        raise _Absent(f"{symbol.name} is not assigned in {source.name}", tree.location(source))
    location = tree.location(source, values[-1].lineno)
    if symbol.value is not None:
        if any(isinstance(v, ast.Constant) and v.value == symbol.value for v in values):
            return repr(symbol.value), location
        raise _Wrong(ast.unparse(values[-1]), location)
    missing = set(symbol.contains) - _constants_in(values, source)
    if missing:
        ordered = [value for value in symbol.contains if value in missing]
        raise _Wrong(f"{symbol.name} lacks {', '.join(map(repr, ordered))}", location)
    return "as expected", location


def _constants_in(values: Iterable[ast.expr], source: ModuleSource) -> set[Any]:
    """The constants in expressions, following the names of the module's other constants."""
    held: set[Any] = set()
    seen: set[str] = set()
    todo = list(values)
    while todo:
        for item in ast.walk(todo.pop()):
            if isinstance(item, ast.Constant):
                held.add(item.value)
            elif isinstance(item, ast.Name) and item.id not in seen:
                seen.add(item.id)
                if source.mentions_assignment(item.id):
                    todo += source.assignments(item.id)
    return held


def _check_entry_point_group(symbol: EntryPointGroup, tree: SourceTree) -> Found:
    source = _module(tree, symbol.module)
    values = source.assignments(symbol.name)
    if not values:
        raise _Absent(f"{symbol.name} is not assigned in {source.name}", tree.location(source))
    location = tree.location(source, values[-1].lineno)
    if not any(isinstance(v, ast.Constant) and v.value == symbol.group for v in values):
        raise _Wrong(ast.unparse(values[-1]), location)
    return repr(symbol.group), location


def _check_call_sites(symbol: CallSites, tree: SourceTree) -> Found:
    module, _, name = symbol.callee.partition(":")
    _function(tree, _module(tree, module), name)
    if symbol.match == "at-least":
        callers = {site for site in symbol.sites if _site_calls(site, module, name, tree)}
    else:
        callers = set(_callers(module, name, tree))
    lost = [site for site in symbol.sites if site not in callers]
    new = sorted(callers - set(symbol.sites))
    if lost and symbol.match != "all":
        raise _Wrong(f"{name} is no longer called by {', '.join(lost)}")
    if new:
        raise _Wrong(f"{name} is also called by {', '.join(new)}")
    return f"{len(callers)} call sites", None


def _site_calls(site: str, module: str, name: str, tree: SourceTree) -> bool:
    place, _, function = site.partition(":")
    source = tree.module(place)
    node = source.definition(function) if source else None
    return source is not None and node is not None and _calls(node, source, module, name)


def _calls(node: ast.AST, source: ModuleSource, module: str, name: str) -> bool:
    bindings = source.local_bindings(node, name) or source.module_level_bindings(name)
    if bindings and all(binding.source != module for binding in bindings):
        return False
    return any(isinstance(item, ast.Call) and called_name(item) == name for item in ast.walk(node))


def _callers(module: str, name: str, tree: SourceTree) -> Iterator[str]:
    for source in tree.modules_that_mention(name):
        for qualname, function in _functions(source.tree.body, ""):
            own = _without_inner_functions(function)
            if any(isinstance(item, ast.Call) and called_name(item) == name for item in own):
                yield f"{source.name}:{qualname}"


def _functions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{prefix}{node.name}", node
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        else:
            for inner in _bodies(node):
                yield from _functions(inner, prefix)


def _without_inner_functions(function: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child
            yield from _without_inner_functions(child)


def _check_anchor(symbol: Anchor, tree: SourceTree) -> Found:
    source = _module(tree, symbol.module)
    text = source.text
    lineno = 1
    if symbol.function is not None:
        node = _function(tree, source, symbol.function)
        lineno = node.lineno
        text = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
    count = text.count(symbol.text)
    if count != 1:
        problem = _Wrong if count else _Absent
        raise problem(f"it occurs {count} times", tree.location(source, lineno))
    return "once", tree.location(source, lineno + text.count("\n", 0, text.index(symbol.text)))


# --- what each kind expects, in words -------------------------------------------------------


def _expect_from_import(symbol: FromImport) -> str:
    read = f", read in {', '.join(symbol.read_in)}" if symbol.read_in else ""
    return f"{symbol.module} from-imports {symbol.name} from {symbol.source}{read}"


def _expect_replaced_class(symbol: ReplacedClass) -> str:
    tested = f", tested with isinstance in {', '.join(symbol.isinstance_in)}"
    return (
        f"class {symbol.name} of {symbol.source}, from-imported by {symbol.module}"
        f"{tested if symbol.isinstance_in else ''}"
    )


def _expect_constructor_call(symbol: ConstructorCall) -> str:
    return f"{symbol.function} constructs {symbol.name}{CallShape.declared(symbol)}"


def _expect_method_call(symbol: MethodCall) -> str:
    value = symbol.name or symbol.value
    return f"{symbol.function} calls {value}.{symbol.method}{CallShape.declared(symbol)}"


def _expect_attributes(symbol: Attributes) -> str:
    return f"{symbol.module}.{symbol.name} has {', '.join(symbol.reads)}"


def _expect_function(symbol: FunctionShape) -> str:
    prefix = "async " if symbol.is_async else ""
    decorators = "".join(f"@{item} " for item in symbol.decorators or ())
    return f"{decorators}{prefix}{symbol.module}.{symbol.name}{symbol.signature or ''}"


def _expect_class(symbol: ClassShape) -> str:
    parts = [f"class {symbol.module}.{symbol.name}"]
    if symbol.bases is not None:
        parts.append(f"with bases {', '.join(symbol.bases) or 'none'}")
    if symbol.methods:
        parts.append(f"with methods {', '.join(symbol.methods)}")
    if symbol.fields:
        parts.append("with fields " + ", ".join(f"{k} = {v}" if v else k for k, v in symbol.fields))
    return " ".join(parts)


def _expect_constant(symbol: Constant) -> str:
    place = f"{symbol.module}.{symbol.name}"
    if symbol.value is not None:
        return f"{place} = {symbol.value!r}"
    if not symbol.contains:
        return f"{place} is there"
    return f"{place} contains {', '.join(map(repr, symbol.contains))}"


def _expect_call_sites(symbol: CallSites) -> str:
    how = {
        "at-least": "is called by",
        "all": "is only called by",
        "exactly": "is called exactly by",
    }
    return f"{symbol.callee} {how[symbol.match]} {', '.join(symbol.sites)}"


def _expect_anchor(symbol: Anchor) -> str:
    place = symbol.module if symbol.function is None else f"{symbol.module}:{symbol.function}"
    return f"exactly once in {place}: {symbol.text!r}"


def _expect_entry_point_group(symbol: EntryPointGroup) -> str:
    return f"{symbol.module}.{symbol.name} = {symbol.group!r}"


_CHECKERS: dict[type[Symbol], tuple[Callable[[Any, SourceTree], Found], Callable[[Any], str]]] = {
    FromImport: (_check_from_import, _expect_from_import),
    ReplacedClass: (_check_replaced_class, _expect_replaced_class),
    ConstructorCall: (_check_constructor_call, _expect_constructor_call),
    MethodCall: (_check_method_call, _expect_method_call),
    Attributes: (_check_attributes, _expect_attributes),
    FunctionShape: (_check_function, _expect_function),
    ClassShape: (_check_class, _expect_class),
    Constant: (_check_constant, _expect_constant),
    CallSites: (_check_call_sites, _expect_call_sites),
    Anchor: (_check_anchor, _expect_anchor),
    EntryPointGroup: (_check_entry_point_group, _expect_entry_point_group),
}


# --- modules that this process has imported -------------------------------------------------


def check_live(surface: Surface, *, version: str) -> Report:
    """Compare the symbols that apply to `version` with the modules imported already, importing
    none.

    Symbols whose modules are not imported yet give no result: `check_surface` has seen their
    source. A name that a patch of this library has replaced is judged by what was there before.
    """
    results = []
    for symbol in surface.for_version(version):
        loaded = _Loaded()
        found = _live_problem(symbol, loaded)
        if not loaded.any:
            continue
        results.append(
            Result(
                id=symbol.id,
                kind=symbol.kind,
                why=symbol.why,
                status=OK if found is None else MISMATCH,
                expected=_CHECKERS[type(symbol)][1](symbol),
                found=found or "as expected, in memory",
                location=None,
                way_out="" if found is None else _live_way_out(surface),
            )
        )
    return Report(surface.plugin, surface.package, version, surface.versions, tuple(results))


def _live_way_out(surface: Surface) -> str:
    return (
        f"something in this process changed it before {surface.plugin} did: look for another "
        f"plugin that "
        f"patches {surface.package} (`python -m pip list`), and leave it out with VLLM_PLUGINS"
    )


class _Loaded:
    """Gives modules that are imported already, and remembers whether there was any."""

    def __init__(self) -> None:
        self.any = False

    def module(self, name: str) -> ModuleType | None:
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if module is None or getattr(spec, "_initializing", False):
            return None  # half-imported: what it lacks may still come
        self.any = True
        return module


def _live_problem(symbol: Symbol, loaded: _Loaded) -> str | None:
    """What is wrong with the symbol in memory, or None."""
    if isinstance(symbol, (FromImport, ReplacedClass)):
        return _live_import_problem(symbol, loaded)
    if isinstance(symbol, CallSites):
        for place in (symbol.callee, *symbol.sites):
            module, _, name = place.partition(":")
            if problem := _live_name_problem(module, name, loaded):
                return problem
        return None
    if isinstance(symbol, (ConstructorCall, MethodCall)):
        return _live_name_problem(symbol.module, symbol.function, loaded)
    if isinstance(symbol, ClassShape):
        names = (symbol.name, *(f"{symbol.name}.{method}" for method in symbol.methods))
        for name in names:
            if problem := _live_name_problem(symbol.module, name, loaded):
                return problem
        return None
    if isinstance(symbol, (Attributes, FunctionShape)):
        return _live_name_problem(symbol.module, symbol.name, loaded)
    if isinstance(symbol, (Constant, EntryPointGroup)):
        return _live_constant_problem(symbol, loaded)
    return None


def _live_name_problem(module_name: str, qualname: str, loaded: _Loaded) -> str | None:
    module = loaded.module(module_name)
    if module is None or _value(module, qualname) is not MISSING:
        return None
    return f"{module_name} has no {qualname}"


def _value(module: ModuleType, qualname: str) -> Any:
    """The value of a qualified name, beneath the patches of this library."""
    value: Any = module
    for part in qualname.split("."):
        raw = before(value, part) if isinstance(value, (type, ModuleType)) else MISSING
        value = getattr(value, part, MISSING) if raw is MISSING else raw
        if value is MISSING:
            return MISSING
        # Who from-imported the name after it was patched holds the replacement.
        value = unpatched(value)
    return value


def _live_import_problem(symbol: FromImport | ReplacedClass, loaded: _Loaded) -> str | None:
    if problem := _live_name_problem(symbol.source, symbol.name, loaded):
        return problem
    source, module = loaded.module(symbol.source), loaded.module(symbol.module)
    defined = MISSING if source is None else _value(source, symbol.name)
    if isinstance(symbol, ReplacedClass) and defined is not MISSING:
        if not isinstance(defined, type):
            return f"{symbol.source}.{symbol.name} is a {type(defined).__name__}, not a class"
        if defined.__module__ != symbol.source:
            return f"{symbol.source}.{symbol.name} is a class of {defined.__module__}"
    if module is None:
        return None
    bound = _value(module, symbol.name)
    if bound is MISSING:
        readers = symbol.read_in if isinstance(symbol, FromImport) else ()
        if readers and all(_binds_itself(_value(module, name), symbol.name) for name in readers):
            return None
        return f"{symbol.module} has no {symbol.name}"
    if defined is not MISSING and bound is not defined:
        return f"{symbol.module}.{symbol.name} is not {symbol.source}.{symbol.name} but {bound!r}"
    return None


def _binds_itself(function: Any, name: str) -> bool:
    """Whether the function has a local of that name, as one that imports it lazily has."""
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    return code is not None and name in code.co_varnames


def _live_constant_problem(symbol: Constant | EntryPointGroup, loaded: _Loaded) -> str | None:
    if problem := _live_name_problem(symbol.module, symbol.name, loaded):
        return problem
    expected = symbol.group if isinstance(symbol, EntryPointGroup) else symbol.value
    module = loaded.module(symbol.module)
    if module is None or expected is None:
        return None
    value = _value(module, symbol.name)
    return None if value == expected else f"{symbol.module}.{symbol.name} is {value!r}"
