"""The mutations: what each does to a release's source, and which verdicts name it.

A mutation that changes something must be detected; a meaningless one must give nothing. Knows `ast`
and edits; nothing of how the scanner works.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import edits
from edits import Function, Source
from subjects import Subject

from drafter_compat.surface import (
    Anchor,
    Attributes,
    CallSites,
    ClassShape,
    Constant,
    ConstructorCall,
    FromImport,
    FunctionShape,
    MethodCall,
    ReplacedClass,
    Symbol,
)

Files = dict[str, bytes]
"""Changed or added modules, by dotted name."""

GONE = frozenset({"moved", "removed"})
SHAPE = frozenset({"changed-shape"})
CALLER = frozenset({"caller-changed"})
NOT_READ = frozenset({"ineffective", "removed", "moved"})
FINE = frozenset({"unchanged", "compatible"})
SAME = frozenset({"unchanged"})


@dataclass(frozen=True)
class Mutant:
    """A changed release, for one symbol."""

    name: str
    files: Files
    breaks: bool
    """Whether the plugin must hear of it."""
    verdicts: frozenset[str]
    """The verdicts that name it rightly."""
    symbol: Symbol | None = None
    """Another way of using the symbol, where the mutation matters only to that."""


def mutants_of(subject: Subject) -> Iterator[Mutant]:
    """Yield the mutants that apply to a subject; those whose source would not parse are left
    out.
    """
    kinds: list[tuple[type[Symbol], Callable[[Subject], Iterator[Callable[[], Mutant]]]]] = [
        (FunctionShape, _function),
        (ClassShape, _class),
        (Attributes, _attributes),
        (Constant, _constant),
        (MethodCall, _call),
        (ConstructorCall, _call),
        (FromImport, _import),
        (ReplacedClass, _replaced),
        (CallSites, _sites),
        (Anchor, _anchor),
    ]
    for kind, mutate in kinds:
        if isinstance(subject.symbol, kind):
            for make in mutate(subject):
                try:
                    yield make()
                except (ValueError, IndexError, SyntaxError):
                    continue  # it does not apply here


MEANINGLESS: dict[str, Callable[[Source], bytes]] = {
    "reformat": edits.reformatted,
    "comments and blank lines": edits.commented,
    "annotations in quotes": edits.quoted_annotations,
    "import order": edits.reordered_imports,
    "order of methods": edits.reordered_definitions,
    "docstrings": edits.with_docstrings,
}
"""Changes of a whole module that change nothing."""


def _breaking(
    subject: Subject, name: str, verdicts: frozenset[str], make: Callable[[], bytes | Files]
) -> Callable[[], Mutant]:
    def mutant() -> Mutant:
        made = make()
        files = made if isinstance(made, dict) else {subject.source.module: made}
        if files.get(subject.source.module) == subject.source.data:
            raise ValueError("nothing changed")
        return Mutant(name, files, True, verdicts)

    return mutant


def _harmless(
    subject: Subject, name: str, make: Callable[[], bytes | Files], verdicts: frozenset[str] = SAME
) -> Callable[[], Mutant]:
    def mutant() -> Mutant:
        made = make()
        files = made if isinstance(made, dict) else {subject.source.module: made}
        if files.get(subject.source.module) == subject.source.data:
            raise ValueError("nothing changed")
        return Mutant(name, files, False, verdicts)

    return mutant


# definitions --------------------------------------------------------------------------------------


def _moved(source: Source, node: ast.stmt, name: str, *, handed_on: bool) -> Files:
    """A module-level definition in a module of its own; the rest of the module imports what it
    needs.
    """
    start, end = source.lines(node)
    text = source.data[start:end].decode()
    line = f"from vllm.mutant_home import {name}\n" if handed_on else ""
    rest = source.edited((start, end, line or "pass\n"))
    home = f"from {source.module} import *\n\n\n{text}".encode()
    edits.parsed(home)
    return {source.module: rest, "vllm.mutant_home": home}


def _renamed(subject: Subject) -> bytes:
    assert isinstance(subject.node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    return _renamed_definition(subject.source, subject.node)


def _renamed_definition(source: Source, node: edits.Definition) -> bytes:
    return source.edited((*edits.name_span(source, node), f"{node.name}_renamed"))


def _function(subject: Subject) -> Iterator[Callable[[], Mutant]]:
    source, node, symbol = subject.source, subject.node, subject.symbol
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    assert isinstance(symbol, FunctionShape)

    def parameters(change: Callable[[ast.arguments], None]) -> Callable[[], bytes]:
        def make() -> bytes:
            arguments = copy.deepcopy(node.args)
            change(arguments)
            return edits.with_parameters(source, node, arguments)

        return make

    method = "." in symbol.name
    yield _breaking(subject, "remove a function", GONE, lambda: edits.without(source, node))
    yield _breaking(subject, "rename a function", GONE, lambda: _renamed(subject))
    yield _breaking(subject, "reorder parameters", SHAPE, parameters(_swap))
    yield _breaking(subject, "add a required parameter", SHAPE, parameters(_add_required))
    yield _breaking(subject, "remove a parameter", SHAPE, parameters(_drop_last))
    yield _breaking(subject, "rename a parameter", SHAPE, parameters(_rename_last))
    yield _breaking(subject, "make a parameter required", SHAPE, parameters(_require))
    yield _breaking(subject, "change a default", SHAPE, parameters(_other_default))
    yield _breaking(subject, "make a parameter keyword-only", SHAPE, parameters(_keyword_only))
    yield _breaking(
        subject, "change the return annotation", SHAPE, lambda: _other_return(source, node)
    )
    yield _breaking(subject, "sync to async or back", SHAPE, lambda: _toggle_async(source, node))
    yield _harmless(
        subject, "add an optional parameter", parameters(_add_optional), frozenset({"compatible"})
    )
    if method:
        for decorator in ("staticmethod", "property"):
            yield _breaking(
                subject,
                f"make it a {decorator}",
                SHAPE,
                partial(_decorated, source, node, decorator),
            )
        return
    yield _breaking(
        subject, "move a function", GONE, lambda: _moved(source, node, symbol.name, handed_on=False)
    )
    yield _breaking(
        subject,
        "define for type checkers only",
        GONE,
        lambda: edits.wrapped(source, node, "if TYPE_CHECKING:"),
    )
    yield _breaking(
        subject,
        "wrap a definition in a conditional",
        SHAPE,
        lambda: edits.wrapped(source, node, "if _FLAG:"),
    )
    yield _harmless(
        subject,
        "re-export a called function from elsewhere",
        lambda: _moved(source, node, symbol.name, handed_on=True),
        FINE,
    )

    def rebound() -> Mutant:
        if any(
            isinstance(n, ast.Name) and n.id == symbol.name and isinstance(n.ctx, ast.Load)
            for n in ast.walk(source.tree)
        ):
            raise ValueError("the module reads it itself")
        files = _moved(source, node, symbol.name, handed_on=True)
        patched = FunctionShape(
            symbol.id, why="patched", module=symbol.module, name=symbol.name, rebound=True
        )
        return Mutant(
            "re-export a patched function from elsewhere",
            files,
            True,
            frozenset({"ineffective"}),
            patched,
        )

    yield rebound


def _positional(arguments: ast.arguments) -> int:
    """How many parameters without a default there are, `self` among them."""
    return len(arguments.args) - len(arguments.defaults)


def _swap(arguments: ast.arguments) -> None:
    first = 1 if arguments.args[0].arg in ("self", "cls") else 0
    required = _positional(arguments)
    if required - first >= 2:
        arguments.args[first], arguments.args[first + 1] = (
            arguments.args[first + 1],
            arguments.args[first],
        )
    elif len(arguments.defaults) >= 2:
        arguments.args[-1], arguments.args[-2] = arguments.args[-2], arguments.args[-1]
        arguments.defaults[-1], arguments.defaults[-2] = (
            arguments.defaults[-2],
            arguments.defaults[-1],
        )
    else:
        raise ValueError("too few parameters")


def _add_required(arguments: ast.arguments) -> None:
    arguments.args.insert(_positional(arguments), ast.arg("mutant"))


def _add_optional(arguments: ast.arguments) -> None:
    arguments.kwonlyargs.append(ast.arg("mutant"))
    arguments.kw_defaults.append(ast.Constant(None))


def _drop_last(arguments: ast.arguments) -> None:
    if len(arguments.args) < 2:
        raise ValueError("too few parameters")
    arguments.args.pop()
    if arguments.defaults:
        arguments.defaults.pop()


def _rename_last(arguments: ast.arguments) -> None:
    if arguments.args[-1].arg in ("self", "cls"):
        raise ValueError("the receiver")
    arguments.args[-1].arg += "_renamed"


def _require(arguments: ast.arguments) -> None:
    if not arguments.defaults:
        raise ValueError("no default")
    arguments.defaults.pop(0)


def _other_default(arguments: ast.arguments) -> None:
    if not arguments.defaults:
        raise ValueError("no default")
    arguments.defaults[-1] = ast.Constant("mutant")


def _keyword_only(arguments: ast.arguments) -> None:
    if arguments.vararg is not None or arguments.args[-1].arg in ("self", "cls"):
        raise ValueError("cannot be keyword-only")
    default = arguments.defaults.pop() if arguments.defaults else None
    arguments.kwonlyargs.insert(0, arguments.args.pop())
    arguments.kw_defaults.insert(0, default)


def _other_return(source: Source, node: Function) -> bytes:
    if node.returns is None:
        raise ValueError("no annotation")
    return source.edited((*source.span(node.returns), "MutantType"))


def _toggle_async(source: Source, node: Function) -> bytes:
    start, _ = source.span(node)
    if isinstance(node, ast.AsyncFunctionDef):
        return source.edited((start, source.data.index(b"def", start), ""))
    return source.edited((start, start, "async "))


def _decorated(source: Source, node: Function, decorator: str) -> bytes:
    start, _ = source.lines(node)
    return source.edited((start, start, " " * node.col_offset + f"@{decorator}\n"))


def _class(subject: Subject) -> Iterator[Callable[[], Mutant]]:
    source, node, symbol = subject.source, subject.node, subject.symbol
    assert isinstance(node, ast.ClassDef)
    assert isinstance(symbol, ClassShape)
    fields = {
        f.target.id: f
        for f in node.body
        if isinstance(f, ast.AnnAssign)
        and isinstance(f.target, ast.Name)
        and f.target.id in dict(symbol.fields)
    }
    first = next(iter(fields.values()))
    given = [f for f in fields.values() if f.value is not None]
    methods = {
        m.name: m for m in node.body if isinstance(m, (ast.FunctionDef, ast.AsyncFunctionDef))
    }

    yield _breaking(subject, "rename a class", GONE, lambda: _renamed(subject))
    yield _breaking(subject, "remove a field", GONE | SHAPE, lambda: edits.without(source, first))
    yield _breaking(
        subject,
        "rename a field",
        GONE | SHAPE,
        lambda: source.edited((*source.span(first.target), f"{first.target.id}_renamed")),  # type: ignore[union-attr]
    )
    if given:
        value = given[-1].value
        assert value is not None
        yield _breaking(
            subject,
            "change a field's default",
            SHAPE,
            lambda: source.edited((*source.span(value), "'mutant'")),
        )
        yield _breaking(
            subject,
            "make a field required",
            SHAPE,
            lambda: source.edited(
                (source.span(given[-1].annotation)[1], source.span(value)[1], "")
            ),
        )
    if any(
        "dataclass" in ast.unparse(d) or ast.unparse(d) == "config" for d in node.decorator_list
    ):
        start, _ = source.lines(first)
        indent = " " * first.col_offset
        yield _breaking(
            subject,
            "add a required field",
            SHAPE,
            lambda: source.edited((start, start, f"{indent}mutant: int\n")),
        )
    for name in symbol.methods[:1]:
        method = methods[name]
        yield _breaking(subject, "drop a method", GONE, partial(edits.without, source, method))
        yield _breaking(
            subject,
            "rename a method",
            GONE,
            partial(_renamed_definition, source, method),
        )
    yield _breaking(
        subject, "move a class", GONE, lambda: _moved(source, node, symbol.name, handed_on=False)
    )
    yield _harmless(
        subject,
        "re-export a class from elsewhere",
        lambda: _moved(source, node, symbol.name, handed_on=True),
        FINE,
    )


def _attributes(subject: Subject) -> Iterator[Callable[[], Mutant]]:
    source, node, symbol = subject.source, subject.node, subject.symbol
    assert isinstance(node, ast.ClassDef)
    assert isinstance(symbol, Attributes)
    name = symbol.reads[0]

    def renamed() -> bytes:
        spans = []
        for use in ast.walk(node):
            if (
                isinstance(use, ast.Attribute)
                and use.attr == name
                and ast.unparse(use.value) == "self"
            ):
                _, end = source.span(use)
                if source.data[end - len(name) : end] != name.encode():
                    raise ValueError("inside an f-string")
                spans.append((end, end, "_renamed"))
        return source.edited(*spans)

    yield _breaking(subject, "rename an attribute", GONE, renamed)
    yield _breaking(subject, "rename a class", GONE, lambda: _renamed(subject))


def _constant(subject: Subject) -> Iterator[Callable[[], Mutant]]:
    source, node, symbol = subject.source, subject.node, subject.symbol
    assert isinstance(node, ast.Assign)
    assert isinstance(symbol, Constant)
    target = node.targets[0]
    assert isinstance(target, ast.Name)
    strings = [c for c in ast.walk(node.value) if isinstance(c, ast.Constant)]
    yield _breaking(
        subject,
        "change a constant's value",
        SHAPE | GONE,
        lambda: source.edited((*source.span(strings[0]), "'mutant'")),
    )
    yield _breaking(
        subject,
        "rename a constant",
        GONE,
        lambda: source.edited((*source.span(target), f"{target.id}_renamed")),
    )
    yield _breaking(
        subject,
        "compute a constant at run time",
        frozenset({"cannot-tell"}),
        lambda: source.edited((*source.span(node.value), "compute_mutant()")),
    )
    yield _harmless(
        subject,
        "re-export a constant from elsewhere",
        lambda: _moved(source, node, symbol.name, handed_on=True),
        FINE,
    )


# calls --------------------------------------------------------------------------------------------


def _call(subject: Subject) -> Iterator[Callable[[], Mutant]]:
    source, call, function = subject.source, subject.node, subject.function
    assert isinstance(call, ast.Call)
    assert function is not None
    args, keywords = edits.call_texts(call)

    def arguments(new: list[str], named: list[tuple[str, str]]) -> Callable[[], bytes]:
        return lambda: edits.with_call(source, call, new, named)

    yield _breaking(
        subject, "pass one more argument", CALLER, arguments([*args, "mutant"], keywords)
    )
    yield _breaking(
        subject, "pass one more keyword", CALLER, arguments(args, [*keywords, ("mutant", "None")])
    )
    if args:
        yield _breaking(subject, "pass one argument less", CALLER, arguments(args[:-1], keywords))
        yield _breaking(
            subject,
            "pass an argument by keyword",
            CALLER,
            arguments(args[:-1], [*keywords, ("mutant", args[-1])]),
        )
        yield _breaking(
            subject, "pass an argument in front", CALLER, arguments(["mutant", *args], keywords)
        )
    if len(args) >= 2 and args[0] != args[1]:
        yield _breaking(
            subject, "reorder arguments", CALLER, arguments([args[1], args[0], *args[2:]], keywords)
        )
    if keywords:
        yield _breaking(subject, "pass one keyword less", CALLER, arguments(args, keywords[:-1]))
        renamed = [*keywords[:-1], (f"{keywords[-1][0]}_renamed", keywords[-1][1])]
        yield _breaking(subject, "rename a keyword", CALLER, arguments(args, renamed))
    if len(keywords) >= 2:
        yield _harmless(subject, "reorder keywords", arguments(args, keywords[::-1]))
    yield _breaking(
        subject,
        "drop the call",
        frozenset({"lost-call-site", "moved"}),
        lambda: source.edited((*source.span(call), "None")),
    )
    yield _breaking(
        subject,
        "rename the caller",
        GONE,
        lambda: source.edited((*edits.name_span(source, function), f"{function.name}_renamed")),
    )
    statement = _statement_of(function, call)
    if statement is not None:
        yield _harmless(
            subject,
            "wrap the call in a conditional",
            lambda: edits.wrapped(source, statement, "if _flag:"),
        )
    local = _locals_of(function)
    passed = [a for a in args if a in local]
    if passed:
        yield _harmless(
            subject,
            "rename a local that is passed",
            lambda: edits.renamed_locals(source, function, passed[:1]),
            FINE,
        )


def _statement_of(function: Function, call: ast.Call) -> ast.stmt | None:
    """The simple statement that holds the call, where it can be wrapped."""
    found = None
    for node in ast.walk(function):
        if isinstance(node, (ast.Assign, ast.Expr, ast.Return)) and any(
            inner is call for inner in ast.walk(node)
        ):
            found = node
    return found


def _locals_of(function: Function) -> set[str]:
    """Names that the function assigns and no nested function or parameter has."""
    if any(
        isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Global, ast.Nonlocal))
        for b in function.body
        for n in ast.walk(b)
    ):
        return set()
    parameters = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
    stored = {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    return stored - parameters


def _sites(subject: Subject) -> Iterator[Callable[[], Mutant]]:
    source, function, symbol = subject.source, subject.function, subject.symbol
    assert function is not None
    assert isinstance(symbol, CallSites)
    name = symbol.callee.rpartition(":")[2]

    def dropped() -> bytes:
        calls = [
            c
            for c in ast.walk(function)
            if isinstance(c, ast.Call) and isinstance(c.func, ast.Name) and c.func.id == name
        ]
        outer = [c for c in calls if not any(c is not o and c in ast.walk(o) for o in calls)]
        return source.edited(*[(*source.span(c), "None") for c in outer])

    yield _breaking(subject, "drop a call site", frozenset({"lost-call-site"}), dropped)
    yield _breaking(
        subject,
        "rename a call site",
        frozenset({"lost-call-site"}),
        lambda: source.edited((*edits.name_span(source, function), f"{function.name}_renamed")),
    )

    def added() -> Mutant:
        module, _, callee = symbol.callee.partition(":")
        extra = (
            f"def mutant_caller():\n    from {module} import {callee}\n    {callee}()\n".encode()
        )
        exact = CallSites(
            symbol.id, why=symbol.why, callee=symbol.callee, sites=symbol.sites, match="exactly"
        )
        return Mutant(
            "add a call site",
            {"vllm.mutant_home": extra},
            True,
            frozenset({"new-call-site"}),
            exact,
        )

    yield added


# imports ------------------------------------------------------------------------------------------


def _without_name(node: ast.ImportFrom, name: str) -> str:
    """The import statement without one of its names; empty where that was the only one."""
    rest = [a for a in node.names if a.name != name]
    return ast.unparse(ast.ImportFrom(node.module, rest, node.level)) if rest else "pass"


def _import(subject: Subject) -> Iterator[Callable[[], Mutant]]:
    yield from _binding(subject)
    source, reader, symbol = subject.source, subject.function, subject.symbol
    assert reader is not None
    assert isinstance(symbol, (FromImport, ReplacedClass))
    yield _breaking(
        subject,
        "stop reading an import",
        NOT_READ,
        lambda: source.edited(*[(*s, "mutant") for s in _reads(source, reader, symbol.name)]),
    )


def _reads(source: Source, reader: Function, name: str) -> list[tuple[int, int]]:
    spans = []
    for statement in reader.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id == name:
                span = source.span(node)
                if source.data[span[0] : span[1]] != name.encode():
                    raise ValueError("inside an f-string")
                spans.append(span)
    return spans


def _binding(subject: Subject) -> Iterator[Callable[[], Mutant]]:
    source, node, reader, symbol = subject.source, subject.node, subject.function, subject.symbol
    assert isinstance(node, ast.ImportFrom)
    assert reader is not None
    assert isinstance(symbol, (FromImport, ReplacedClass))
    name, origin = symbol.name, symbol.source
    rest = _without_name(node, name)
    span = source.span(node)

    def statement(*lines: str) -> bytes:
        return source.edited((*span, "\n".join([rest, *lines])))

    def read_as(text: str, *lines: str) -> bytes:
        return source.edited(
            (*span, "\n".join([rest, *lines])),
            *[(*s, text) for s in _reads(source, reader, name)],
        )

    def lazily() -> bytes:
        body = reader.body[0]
        start, _ = source.lines(body)
        indent = " " * body.col_offset
        if source.data[start : source.span(body)[0]].strip():
            raise ValueError("the body is on the line of the header")
        return source.edited(
            (*span, rest), (start, start, f"{indent}from {origin} import {name}\n")
        )

    def shim() -> Files:
        names = sorted({n for n, _ in edits.definitions(source.tree.body) if "." not in n} | {name})
        text = "".join(f"from vllm.mutant_home import {n}\n" for n in names)
        return {source.module: text.encode(), "vllm.mutant_home": source.data}

    ineffective = frozenset({"ineffective"})
    yield _breaking(
        subject,
        "read an import as an attribute",
        NOT_READ,
        lambda: read_as(f"_mutant.{name}", f"import {origin} as _mutant"),
    )
    yield _breaking(
        subject,
        "import under another name",
        NOT_READ,
        lambda: read_as("_mutant", f"from {origin} import {name} as _mutant"),
    )
    yield _breaking(subject, "import lazily", ineffective, lazily)
    yield _breaking(
        subject,
        "import for type checkers only",
        ineffective,
        lambda: statement("if TYPE_CHECKING:", f"    from {origin} import {name}"),
    )
    yield _breaking(
        subject,
        "wrap an import in a conditional",
        SHAPE,
        lambda: statement("if _FLAG:", f"    from {origin} import {name}"),
    )
    yield _breaking(
        subject,
        "import from elsewhere",
        frozenset({"moved"}),
        lambda: {
            source.module: statement(f"from vllm.mutant_home import {name}"),
            "vllm.mutant_home": f"from {origin} import {name}\n".encode(),
        },
    )
    yield _breaking(subject, "leave a shim in the module's place", ineffective, shim)
    yield _breaking(subject, "drop an import", NOT_READ, lambda: source.edited((*span, rest)))
    yield _harmless(
        subject, "import on a line of its own", lambda: statement(f"from {origin} import {name}")
    )


def _replaced(subject: Subject) -> Iterator[Callable[[], Mutant]]:
    yield from _binding(subject)
    source, reader, symbol = subject.source, subject.function, subject.symbol
    assert reader is not None
    assert isinstance(symbol, ReplacedClass)
    tests = [
        c
        for c in ast.walk(reader)
        if isinstance(c, ast.Call)
        and ast.unparse(c.func) == "isinstance"
        and len(c.args) == 2
        and ast.unparse(c.args[1]) == symbol.name
    ]
    yield _breaking(
        subject,
        "drop an isinstance test",
        CALLER | NOT_READ,
        lambda: source.edited((*source.span(tests[0]), "mutant")),
    )


def _anchor(subject: Subject) -> Iterator[Callable[[], Mutant]]:
    source, symbol = subject.source, subject.symbol
    assert isinstance(symbol, Anchor)
    at = source.data.index(symbol.text.encode())

    def altered() -> bytes:
        for match in re.finditer(rb"[A-Za-z]{2}", source.data[at : at + len(symbol.text)]):
            place = at + match.start() + 1
            try:
                return source.edited((place, place, "_mutant_"))
            except ValueError:
                continue
        raise ValueError("no place to change")

    yield _breaking(subject, "change an anchor's text", GONE, altered)
    yield _breaking(
        subject,
        "repeat an anchor's text",
        SHAPE,
        lambda: source.edited((len(source.data), len(source.data), f"\n# {symbol.text}\n")),
    )
