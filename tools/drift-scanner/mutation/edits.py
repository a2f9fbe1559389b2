"""Mechanical edits of Python source, by the positions that `ast` gives. Knows nothing of the
scanner.

Everything works on bytes, because `ast` counts columns in UTF-8 bytes.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass
class Source:
    """One module's bytes, its tree, and where its lines begin."""

    module: str
    path: str
    data: bytes
    starts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        position = 0
        for line in self.data.splitlines(keepends=True):
            self.starts.append(position)
            position += len(line)
        self.starts.append(position)

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed module."""
        return ast.parse(self.data)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """First and last byte of a node."""
        return (
            self.starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            self.starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def text(self, node: ast.AST) -> str:
        """The source of a node."""
        start, end = self.span(node)
        return self.data[start:end].decode()

    def lines(self, node: ast.stmt) -> tuple[int, int]:
        """First and last byte of the whole lines of a statement, decorators included."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        assert node.end_lineno is not None
        return self.starts[first - 1], self.starts[node.end_lineno]

    def edited(self, *edits: tuple[int, int, str]) -> bytes:
        """The data with spans replaced. Raises ValueError if the result does not parse."""
        data = self.data
        for start, end, text in sorted(edits, reverse=True):
            data = data[:start] + text.encode() + data[end:]
        parsed(data)
        return data


def parsed(data: bytes) -> None:
    """Raise ValueError if the bytes are not Python."""
    try:
        ast.parse(data)
    except SyntaxError as error:
        raise ValueError(str(error)) from error


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Yield the functions and classes of a body, and of its classes, with qualified names."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield prefix + node.name, node
            yield from definitions(node.body, f"{prefix}{node.name}.")


def name_span(source: Source, node: Definition) -> tuple[int, int]:
    """The span of the name after `def` or `class`."""
    start, _ = source.span(node)
    match = re.compile(rb"(?:async\s+)?(?:def|class)\s+(\w+)").match(source.data, start)
    assert match is not None
    return match.start(1), match.end(1)


def parameters_span(source: Source, node: Function) -> tuple[int, int]:
    """The span between the brackets of a function's parameters."""
    _, start = name_span(source, node)
    start = source.data.index(b"(", start) + 1
    depth, position = 1, start
    body = node.body[0]
    stop = source.starts[
        min([body.lineno, *(d.lineno for d in getattr(body, "decorator_list", ()))]) - 1
    ]
    stop = max(stop, source.span(body)[0])
    for kind, text, at in _lexemes(source.data[start:stop].decode()):
        if kind == tokenize.OP and text in "([{":
            depth += 1
        elif kind == tokenize.OP and text in ")]}":
            depth -= 1
            if depth == 0:
                position = start + at
                break
    return start, position


def _lexemes(text: str) -> Iterator[tuple[int, str, int]]:
    """Tokens with their byte offset, until the text stops making sense."""
    starts, position = [], 0
    for line in text.splitlines(keepends=True):
        starts.append(position)
        position += len(line.encode())
    lines = text.splitlines(keepends=True)
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            row, column = token.start
            if row <= len(lines):
                yield (
                    token.type,
                    token.string,
                    starts[row - 1] + len(lines[row - 1][:column].encode()),
                )
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return


def with_parameters(source: Source, node: Function, arguments: ast.arguments) -> bytes:
    """The data with a function's parameters replaced."""
    start, end = parameters_span(source, node)
    return source.edited((start, end, ast.unparse(arguments)))


def with_call(
    source: Source, call: ast.Call, args: list[str], keywords: list[tuple[str, str]]
) -> bytes:
    """The data with a call's arguments replaced by these texts."""
    parts = [*args, *(f"{k}={v}" if k != "**" else f"**{v}" for k, v in keywords)]
    _, start = source.span(call.func)
    _, end = source.span(call)
    return source.edited((start, end, f"({', '.join(parts)})"))


def call_texts(call: ast.Call) -> tuple[list[str], list[tuple[str, str]]]:
    """The texts of a call's arguments."""
    return (
        [ast.unparse(a) for a in call.args],
        [(k.arg or "**", ast.unparse(k.value)) for k in call.keywords],
    )


def without(source: Source, node: ast.stmt) -> bytes:
    """The data without a statement; `pass` stands where a body would become empty."""
    start, end = source.lines(node)
    indent = " " * node.col_offset
    return source.edited((start, end, f"{indent}pass\n"))


def wrapped(source: Source, node: ast.stmt, header: str) -> bytes:
    """The data with a statement indented below a header such as `if x:`."""
    start, end = source.lines(node)
    indent = " " * node.col_offset
    text = source.data[start:end].decode()
    inner = _indented(text)
    return source.edited((start, end, f"{indent}{header}\n{inner}"))


def _indented(text: str) -> str:
    """The text four columns further in; the inside of strings is left alone."""
    inside: set[int] = set()
    for token in _tokens(text):
        if token.type == tokenize.STRING or "FSTRING" in tokenize.tok_name[token.type]:
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
    lines = text.splitlines(keepends=True)
    return "".join(
        line if number in inside or not line.strip() else f"    {line}"
        for number, line in enumerate(lines, start=1)
    )


def _tokens(text: str) -> list[tokenize.TokenInfo]:
    dedented = text
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(f"if 1:\n{dedented}").readline):
            found.append(
                token._replace(
                    start=(token.start[0] - 1, token.start[1]), end=(token.end[0] - 1, token.end[1])
                )
            )
    except (tokenize.TokenError, IndentationError, SyntaxError):
        pass
    return found


# meaningless edits of whole modules
# -----------------------------------------------------------------


def reformatted(source: Source) -> bytes:
    """The module as `ast.unparse` writes it: no comment, other quotes, other line breaks."""
    return (ast.unparse(source.tree) + "\n").encode()


def commented(source: Source) -> bytes:
    """A comment and a blank line in front of every statement of the module and of its
    definitions.
    """
    edits = []
    for node in ast.walk(source.tree):
        for name in ("body", "orelse", "finalbody"):
            for statement in (
                getattr(node, name, []) if not isinstance(node, (ast.Lambda, ast.IfExp)) else []
            ):
                start, _ = source.lines(statement)
                indent = " " * statement.col_offset
                before = source.data[start : source.span(statement)[0]]
                if before.strip(b" \t") in (b"", b"@") or getattr(
                    statement, "decorator_list", None
                ):
                    edits.append((start, start, f"\n{indent}# def other(): pass\n"))
    unique = {start: (start, end, text) for start, end, text in edits}
    return source.edited(*unique.values())


class _Quoter(ast.NodeTransformer):
    def _quoted(self, node: ast.expr | None) -> ast.expr | None:
        if node is None or isinstance(node, ast.Constant):
            return node
        return ast.Constant(ast.unparse(node))

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = self._quoted(node.annotation)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        quoted = self._quoted(node.annotation)
        assert quoted is not None
        node.annotation = quoted
        return self.generic_visit(node)

    def _function(self, node: Function) -> ast.AST:
        node.returns = self._quoted(node.returns)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)


def quoted_annotations(source: Source) -> bytes:
    """Every annotation in quotes."""
    tree = _Quoter().visit(ast.parse(source.data))
    return (ast.unparse(ast.fix_missing_locations(tree)) + "\n").encode()


def reordered_imports(source: Source) -> bytes:
    """Runs of adjacent imports, everywhere, in the opposite order, and their names too."""
    tree = ast.parse(source.data)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, _reversed_runs(block))
    return (ast.unparse(ast.fix_missing_locations(tree)) + "\n").encode()


def _reversed_runs(block: list[ast.stmt]) -> list[ast.stmt]:
    result: list[ast.stmt] = []
    run: list[ast.stmt] = []
    for node in [*block, None]:
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not future:
            node.names.reverse()
            run.append(node)
            continue
        result += reversed(run)
        run = []
        if node is not None:
            result.append(node)
    return result


def reordered_definitions(source: Source) -> bytes:
    """The methods of every class in the opposite order, decorated families kept as they are."""
    tree = ast.parse(source.data)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = [
                n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
            ]
            names = [m.name for m in methods]
            if len(set(names)) != len(names) or any(m.decorator_list for m in methods):
                continue
            rest = [n for n in node.body if n not in methods]
            node.body = [*rest, *reversed(methods)]
    return (ast.unparse(ast.fix_missing_locations(tree)) + "\n").encode()


def with_docstrings(source: Source) -> bytes:
    """Every function and class with another docstring."""
    tree = ast.parse(source.data)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if ast.get_docstring(node) is not None:
                node.body.pop(0)
            node.body.insert(0, ast.Expr(ast.Constant("Said in other words.")))
    return (ast.unparse(ast.fix_missing_locations(tree)) + "\n").encode()


def renamed_locals(source: Source, function: Function, names: Iterable[str]) -> bytes:
    """A function's local variables under other names."""
    wanted = set(names)
    edits = []
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in wanted:
            start, end = source.span(node)
            if source.data[start:end].decode() != node.id:
                raise ValueError("inside an f-string")
            edits.append((start, end, f"{node.id}_renamed"))
    return source.edited(*edits)
