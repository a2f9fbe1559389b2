"""Pick symbols of a real release and write down their shapes with `ast`, apart from the scanner."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from edits import Definition, Function, Source, call_texts, definitions

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

_WHY = "mutation test"


@dataclass(frozen=True)
class Subject:
    """A symbol, the module that it is in, and the nodes that its mutations change."""

    symbol: Symbol
    source: Source
    node: ast.AST
    function: Function | None = None


def subjects_of(source: Source, rng: random.Random, known: dict[str, Source]) -> Iterator[Subject]:
    """Yield a few subjects of every kind that the module has."""
    named = dict(definitions(source.tree.body))
    unique = _unique(source, named)
    for kind in (
        _functions, _classes, _attributes, _constants, _calls, _constructions, _imports, _replaced,
        _sites, _anchors,
    ):  # fmt: skip
        yield from kind(source, unique, rng, known)


def _unique(source: Source, named: dict[str, Definition]) -> dict[str, Definition]:
    """Definitions whose qualified name is bound once, so that a mutation is not ambiguous."""
    counts: dict[str, int] = {}
    for name, _ in definitions(source.tree.body):
        counts[name] = counts.get(name, 0) + 1
    return {n: d for n, d in named.items() if counts[n] == 1}


def _ident(source: Source, name: str, kind: str) -> str:
    return f"{source.module}:{name} {kind}"


def _is_function(node: object) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def _pick(rng: random.Random, found: list, count: int) -> list:  # type: ignore[type-arg]
    return rng.sample(found, min(count, len(found)))


def _functions(
    source: Source, named: dict[str, Definition], rng: random.Random, known: dict[str, Source]
) -> Iterator[Subject]:
    found = [
        (n, d)
        for n, d in named.items()
        if _is_function(d) and len(d.args.args) >= 2 and not d.decorator_list  # type: ignore[union-attr]
    ]
    for name, node in _pick(rng, found, 3):
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield Subject(
            FunctionShape(
                _ident(source, name, "function"),
                why=_WHY,
                module=source.module,
                name=name,
                signature=f"({ast.unparse(node.args)})",
                is_async=isinstance(node, ast.AsyncFunctionDef),
            ),
            source,
            node,
        )


def _classes(
    source: Source, named: dict[str, Definition], rng: random.Random, known: dict[str, Source]
) -> Iterator[Subject]:
    found = []
    for name, node in named.items():
        if not isinstance(node, ast.ClassDef):
            continue
        fields = [
            f for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)
        ]
        methods = [m for m in node.body if _is_function(m) and not m.decorator_list]  # type: ignore[attr-defined]
        names = [m.name for m in methods]  # type: ignore[attr-defined]
        # What a base has too is still there when the class drops it.
        own = not node.bases and len(set(names)) == len(names)
        if len(fields) >= 2 and methods and own:
            found.append((name, node, fields, names))
    for name, node, fields, names in _pick(rng, found, 1):
        yield Subject(
            ClassShape(
                _ident(source, name, "class"),
                why=_WHY,
                module=source.module,
                name=name,
                bases=tuple(ast.unparse(b) for b in node.bases),
                methods=tuple(n for n in names if not n.startswith("__"))[:3],
                fields=tuple(
                    (f.target.id, ast.unparse(f.value) if f.value is not None else "")
                    for f in fields[:4]
                ),
            ),
            source,
            node,
        )


def _attributes(
    source: Source, named: dict[str, Definition], rng: random.Random, known: dict[str, Source]
) -> Iterator[Subject]:
    found = []
    for name, node in named.items():
        if isinstance(node, ast.ClassDef) and not node.bases:
            reads = sorted(own_attributes(node))
            if len(reads) >= 2:
                found.append((name, node, reads))
    for name, node, reads in _pick(rng, found, 1):
        yield Subject(
            Attributes(
                _ident(source, name, "attributes"),
                why=_WHY,
                module=source.module,
                name=name,
                reads=tuple(_pick(rng, reads, 4)),
            ),
            source,
            node,
        )


def own_attributes(node: ast.ClassDef) -> set[str]:
    """The attributes that the class's methods assign to `self`, and nothing else of it binds."""
    found = {
        t.attr
        for t in ast.walk(node)
        if isinstance(t, ast.Attribute)
        and isinstance(t.ctx, ast.Store)
        and isinstance(t.value, ast.Name)
        and t.value.id == "self"
    }
    bound = {d.name for d in node.body if hasattr(d, "name")} | {
        f.target.id
        for f in node.body
        if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)
    }
    return found - bound


def _constants(
    source: Source, named: dict[str, Definition], rng: random.Random, known: dict[str, Source]
) -> Iterator[Subject]:
    found = []
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values = _literal(node.value)
            if values and source.data.count(node.targets[0].id.encode() + b" = ") == 1:
                found.append((node.targets[0].id, node, values))
    for name, node, values in _pick(rng, found, 1):
        yield Subject(
            Constant(
                _ident(source, name, "constant"),
                why=_WHY,
                module=source.module,
                name=name,
                **(
                    {"value": values[0]}
                    if isinstance(node.value, ast.Constant)
                    else {"contains": tuple(values)}
                ),
            ),
            source,
            node,
        )


def _literal(node: ast.expr) -> list[str]:
    """The strings that a plain constant, a collection or a Literal holds."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) and node.value else []
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
        node = node.slice
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        values = [
            e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)
        ]
        return values if len(values) == len(node.elts) else []
    return []


def _outer_calls(node: Function) -> list[ast.Call]:
    return [c for c in ast.walk(node) if isinstance(c, ast.Call)]


def _plain(call: ast.Call) -> bool:
    return not any(isinstance(a, ast.Starred) for a in call.args) and all(
        k.arg for k in call.keywords
    )


def _calls(
    source: Source, named: dict[str, Definition], rng: random.Random, known: dict[str, Source]
) -> Iterator[Subject]:
    on_value, narrowed = [], []
    for name, node in named.items():
        if not _is_function(node):
            continue
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        tests = _asserted(node)
        calls = [c for c in _outer_calls(node) if isinstance(c.func, ast.Attribute) and _plain(c)]
        texts = [ast.unparse(c.func) for c in calls]
        for call, text in zip(calls, texts, strict=True):
            receiver = text.rpartition(".")[0]
            if len(call.args) < 1 or not re.fullmatch(r"self(\.\w+)+", receiver):
                continue
            if [ast.unparse(c.func) for c in _outer_calls(node)].count(text) != 1:
                continue
            if receiver in tests and call.lineno > tests[receiver][1]:
                narrowed.append((name, node, call, tests[receiver][0]))
            elif receiver not in tests:
                on_value.append((name, node, call))
    for name, node, call in _pick(rng, on_value, 2):
        args, keywords = call_texts(call)
        yield Subject(
            MethodCall(
                _ident(source, f"{name} {ast.unparse(call.func)}", "method-call"),
                why=_WHY,
                module=source.module,
                function=name,
                value=ast.unparse(call.func.value),
                method=call.func.attr,
                args=tuple(args),
                keywords=tuple(keywords),
            ),
            source,
            call,
            node,
        )
    for name, node, call, cls in _pick(rng, narrowed, 2):
        args, keywords = call_texts(call)
        yield Subject(
            MethodCall(
                _ident(source, f"{name} {cls}.{call.func.attr}", "narrowed method-call"),
                why=_WHY,
                module=source.module,
                function=name,
                name=cls,
                method=call.func.attr,
                args=tuple(args),
                keywords=tuple(keywords),
            ),
            source,
            call,
            node,
        )


def _asserted(node: Function) -> dict[str, tuple[str, int]]:
    """Values that the function's own body asserts to be of one class, tested once: class and
    line.
    """
    found: dict[str, tuple[str, int]] = {}
    texts = [
        ast.unparse(c.args[0])
        for c in _outer_calls(node)
        if ast.unparse(c.func) == "isinstance" and c.args
    ]
    for statement in node.body:
        if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Call):
            test = statement.test
            if ast.unparse(test.func) == "isinstance" and isinstance(test.args[1], ast.Name):
                value = ast.unparse(test.args[0])
                if texts.count(value) == 1:
                    found[value] = (test.args[1].id, statement.lineno)
    return found


def _constructions(
    source: Source, named: dict[str, Definition], rng: random.Random, known: dict[str, Source]
) -> Iterator[Subject]:
    found = []
    for name, node in named.items():
        if not _is_function(node):
            continue
        assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        calls = [c for c in _outer_calls(node) if isinstance(c.func, ast.Name) and _plain(c)]
        names = [c.func.id for c in calls]  # type: ignore[attr-defined]
        for call in calls:
            assert isinstance(call.func, ast.Name)
            is_class = re.match(r"[A-Z][a-z]\w+$", call.func.id) is not None
            once = names.count(call.func.id) == 1
            if is_class and once and (call.args or call.keywords):
                found.append((name, node, call))
    for name, node, call in _pick(rng, found, 2):
        args, keywords = call_texts(call)
        yield Subject(
            ConstructorCall(
                _ident(source, f"{name} {call.func.id}", "constructor-call"),
                why=_WHY,
                module=source.module,
                function=name,
                name=call.func.id,
                args=tuple(args),
                keywords=tuple(keywords),
            ),
            source,
            call,
            node,
        )


def _module_imports(
    source: Source, known: dict[str, Source]
) -> Iterator[tuple[str, ast.ImportFrom]]:
    """Names that the module from-imports, alone of its statement's kind, from modules that define
    them.
    """
    for node in source.tree.body:
        if isinstance(node, ast.ImportFrom) and node.module in known and not node.level:
            defined = {n for n, _ in definitions(known[node.module].tree.body)}
            for alias in node.names:
                if alias.asname is None and alias.name in defined:
                    yield alias.name, node


def _evaluated(function: Function) -> Iterator[ast.AST]:
    """The nodes of a body that run; annotations inside functions never do."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        yield node
        skipped = {id(getattr(node, "annotation", None)), id(getattr(node, "returns", None))}
        todo += [child for child in ast.iter_child_nodes(node) if id(child) not in skipped]


def _readers(named: dict[str, Definition], name: str) -> list[tuple[str, Function]]:
    found = []
    for qualname, node in named.items():
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        reads = [n for n in _evaluated(node) if isinstance(n, ast.Name) and n.id == name]
        if reads and all(isinstance(r.ctx, ast.Load) for r in reads):
            found.append((qualname, node))
    return found


def _imports(
    source: Source, named: dict[str, Definition], rng: random.Random, known: dict[str, Source]
) -> Iterator[Subject]:
    found = []
    for name, node in _module_imports(source, known):
        readers = _readers(named, name)
        all_reads = sum(isinstance(n, ast.Name) and n.id == name for n in ast.walk(source.tree))
        own = sum(
            isinstance(n, ast.Name) and n.id == name
            for _, f in readers
            for b in f.body
            for n in ast.walk(b)
        )
        if len(readers) == 1 and own == all_reads:
            found.append((name, node, readers[0]))
    for name, node, (qualname, reader) in _pick(rng, found, 2):
        yield Subject(
            FromImport(
                _ident(source, name, "from-import"),
                why=_WHY,
                module=source.module,
                name=name,
                source=node.module or "",
                read_in=(qualname,),
            ),
            source,
            node,
            reader,
        )


def _replaced(
    source: Source, named: dict[str, Definition], rng: random.Random, known: dict[str, Source]
) -> Iterator[Subject]:
    found = []
    for name, node in _module_imports(source, known):
        if not any(
            n == name and isinstance(d, ast.ClassDef)
            for n, d in definitions(known[node.module or ""].tree.body)
        ):
            continue
        for qualname, reader in _readers(named, name):
            tests = [
                c
                for c in _outer_calls(reader)
                if ast.unparse(c.func) == "isinstance"
                and len(c.args) == 2
                and isinstance(c.args[1], ast.Name)
                and c.args[1].id == name
            ]
            others = [q for q, f in _readers(named, name) if q != qualname]
            if len(tests) == 1 and not others:
                found.append((name, node, qualname, reader))
    for name, node, qualname, reader in _pick(rng, found, 1):
        yield Subject(
            ReplacedClass(
                _ident(source, name, "replaced-class"),
                why=_WHY,
                module=source.module,
                name=name,
                source=node.module or "",
                isinstance_in=(qualname,),
            ),
            source,
            node,
            reader,
        )


def _sites(
    source: Source, named: dict[str, Definition], rng: random.Random, known: dict[str, Source]
) -> Iterator[Subject]:
    found = []
    for name, node in _module_imports(source, known):
        if not _is_function(dict(definitions(known[node.module or ""].tree.body)).get(name)):
            continue
        for qualname, reader in _readers(named, name):
            calls = [
                c
                for c in _outer_calls(reader)
                if isinstance(c.func, ast.Name) and c.func.id == name
            ]
            reads = [n for n in ast.walk(reader) if isinstance(n, ast.Name) and n.id == name]
            if calls and len(calls) == len(reads):
                found.append((name, node, qualname, reader, calls))
    for name, node, qualname, reader, calls in _pick(rng, found, 1):
        yield Subject(
            CallSites(
                _ident(source, f"{qualname} {name}", "call-sites"),
                why=_WHY,
                callee=f"{node.module}:{name}",
                sites=(f"{source.module}:{qualname}",),
                match="at-least",
            ),
            source,
            calls[0],
            reader,
        )


def _anchors(
    source: Source, named: dict[str, Definition], rng: random.Random, known: dict[str, Source]
) -> Iterator[Subject]:
    text = source.data.decode()
    lines = [
        line.strip()
        for line in text.splitlines()
        if len(line.strip()) > 30 and line.startswith("        ") and text.count(line.strip()) == 1
    ]
    for line in _pick(rng, lines, 1):
        yield Subject(
            Anchor(_ident(source, line[:30], "anchor"), why=_WHY, module=source.module, text=line),
            source,
            source.tree,
        )
