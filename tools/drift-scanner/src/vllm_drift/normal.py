"""One text for all layouts of the same code: quotes, brackets, line breaks, comments do not count.

Works on source texts through the running interpreter's `ast`; a text in a newer syntax than that
falls back to its own words with blanks collapsed, which is stable but less forgiving. Knows no
module and no symbol.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re

__all__ = ["annotation", "body", "body_hash", "expression", "literal_values", "statements"]

_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*\Z")
_TYPING = {"List": "list", "Dict": "dict", "Tuple": "tuple", "Set": "set", "FrozenSet": "frozenset",
           "Type": "type", "Deque": "deque", "DefaultDict": "defaultdict"}  # fmt: skip


@functools.lru_cache(maxsize=16384)
def expression(text: str) -> str:
    """Normalise an expression's text."""
    if _DOTTED.match(text):
        return text
    try:
        return ast.unparse(ast.parse(f"({text}\n)", mode="eval"))
    except (SyntaxError, ValueError):
        return _collapsed(text)


@functools.lru_cache(maxsize=16384)
def annotation(text: str) -> str:
    """Normalise an annotation: quotes around types, `Optional`, `Union` and `typing.List` go, and
    the members of a union are sorted.
    """
    if _DOTTED.match(text) and "." not in text and text not in _TYPING:
        return text
    try:
        node = ast.parse(f"({text}\n)", mode="eval").body
        return ast.unparse(ast.fix_missing_locations(_annotation(node)))
    except (SyntaxError, ValueError):
        return _collapsed(text)


def statements(text: str) -> str:
    """Normalise whole statements: layout, comments, docstrings, annotations and the order of
    adjacent imports do not count. The text may be indented.
    """
    tree = _parse(text)
    if tree is None:
        return _collapsed_lines(text)
    return ast.unparse(ast.fix_missing_locations(_Normaliser().visit(tree)))


def body(text: str) -> str:
    """Normalise the body of the function, or the whole class, that `text` defines.

    A function's name, signature and decorators do not count; of a class everything but its name
    does.
    """
    tree = _parse(text)
    if tree is None:
        return _collapsed_lines(text)
    tree = ast.fix_missing_locations(_Normaliser().visit(tree))
    node = tree.body[-1] if tree.body else None
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return "\n".join(ast.unparse(statement) for statement in node.body)
    if isinstance(node, ast.ClassDef):
        node.name = "_"
    return ast.unparse(tree)


def body_hash(text: str) -> str:
    """A hash of `body(text)`, 16 hex digits."""
    return hashlib.blake2b(body(text).encode(), digest_size=8).hexdigest()


def literal_values(text: str) -> tuple[set[object], set[str]] | None:
    """The constants that a `Literal[...]`, a collection or a constant holds, and the names of other
    constants that it takes in. None where the text is something else, whose values cannot be told.

    >>> literal_values("Literal['a', OtherTypes]")
    ({'a'}, {'OtherTypes'})
    """
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    values: set[object] = set()
    names: set[str] = set()
    return (values, names) if _gather(node, values, names) else None


def _gather(node: ast.expr, values: set[object], names: set[str]) -> bool:
    """Add what an expression holds; False where some of it cannot be told."""
    if isinstance(node, ast.Constant):
        values.add(node.value)
        return True
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = node.operand
        if isinstance(inner, ast.Constant) and isinstance(inner.value, (int, float)):
            values.add(-inner.value)
            return True
        return False
    if isinstance(node, (ast.Name, ast.Attribute)):
        names.add(ast.unparse(node))
        return True
    if isinstance(node, ast.Starred):
        return _gather(node.value, values, names)
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        told = [_gather(item, values, names) for item in node.elts]
        return all(told)
    if isinstance(node, ast.Dict):
        told = [k is not None and _gather(k, values, names) for k in node.keys]
        return all(told)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.BitOr)):
        return all([_gather(node.left, values, names), _gather(node.right, values, names)])
    if isinstance(node, ast.Subscript):
        head = ast.unparse(node.value).rpartition(".")[2]
        if head in ("Literal", "Union", "Optional"):
            return _gather(node.slice, values, names)
        return False
    if isinstance(node, ast.Call) and not node.keywords:
        head = ast.unparse(node.func).rpartition(".")[2]
        if head in ("frozenset", "set", "tuple", "list", "get_args", "MappingProxyType"):
            told = [_gather(item, values, names) for item in node.args]
            return all(told)
    return False


def _parse(text: str) -> ast.Module | None:
    indented = text[:1] in " \t" or re.match(r"(?:[ \t]*(?:#[^\n]*)?\n)*[ \t]+\S", text) is not None
    try:
        if not indented:
            return ast.parse(text)
        tree = ast.parse(f"if 1:\n{text}")
    except (SyntaxError, ValueError):
        return None
    outer = tree.body[0]
    assert isinstance(outer, ast.If)
    return ast.Module(outer.body, [])


class _Normaliser(ast.NodeTransformer):
    """Drops docstrings, normalises annotations and sorts adjacent imports."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, _sorted_imports(block))
        return node

    def _definition(self, node: ast.AST) -> ast.AST:
        block = node.body  # type: ignore[attr-defined]
        if _is_docstring(block[0]):
            node.body = block[1:] or [ast.Pass()]  # type: ignore[attr-defined]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        return self.generic_visit(node)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _definition

    def visit_arg(self, node: ast.arg) -> ast.AST:
        # Annotations of parameters do nothing when the body runs.
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = _annotation(node.annotation)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        # `cast("T", x)` and `cast(T, x)` do the same at run time.
        self.generic_visit(node)
        if ast.unparse(node.func) in ("cast", "typing.cast") and len(node.args) == 2:
            node.args[0] = _annotation(node.args[0])
        return node


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _sorted_imports(block: list[ast.stmt]) -> list[ast.stmt]:
    result: list[ast.stmt] = []
    run: list[ast.stmt] = []
    for node in block:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node.names.sort(key=lambda alias: (alias.name, alias.asname or ""))
            run.append(node)
            continue
        result += [*sorted(run, key=ast.unparse), node]
        run = []
    return result + sorted(run, key=ast.unparse)


def _annotation(node: ast.expr) -> ast.expr:
    """The normal form of an annotation's tree."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return _annotation(ast.parse(f"({node.value}\n)", mode="eval").body)
        except (SyntaxError, ValueError):
            return node
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union(_members(node))
    if isinstance(node, ast.Subscript):
        head = ast.unparse(node.value).rpartition(".")[2]
        if head == "Literal":
            return ast.Subscript(ast.Name("Literal"), node.slice, node.ctx)
        if head == "Annotated" and isinstance(node.slice, ast.Tuple):
            first, *rest = node.slice.elts
            return ast.Subscript(ast.Name(head), ast.Tuple([_annotation(first), *rest]), node.ctx)
        if head == "Optional":
            return _union([*_members(_annotation(node.slice)), ast.Constant(None)])
        if head == "Union":
            elements = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return _union([m for e in elements for m in _members(_annotation(e))])
        return ast.Subscript(_annotation(node.value), _annotation(node.slice), node.ctx)
    if isinstance(node, ast.Tuple):
        return ast.Tuple([_annotation(e) for e in node.elts], node.ctx)
    if isinstance(node, ast.List):
        return ast.List([_annotation(e) for e in node.elts], node.ctx)
    text = ast.unparse(node)
    if text.startswith("typing."):
        text = text.removeprefix("typing.")
        return ast.Name(_TYPING.get(text, text))
    if text in _TYPING:
        return ast.Name(_TYPING[text])
    return node


def _members(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_members(node.left), *_members(node.right)]
    return [_annotation(node)]


def _union(members: list[ast.expr]) -> ast.expr:
    by_text = {ast.unparse(ast.fix_missing_locations(member)): member for member in members}
    none = [by_text.pop("None")] if "None" in by_text else []
    ordered = [by_text[text] for text in sorted(by_text)] + none
    result = ordered[0]
    for member in ordered[1:]:
        result = ast.BinOp(result, ast.BitOr(), member)
    return result


def _collapsed(text: str) -> str:
    return " ".join(text.split())


def _collapsed_lines(text: str) -> str:
    lines = (re.sub(r"\s+#.*$", "", line).strip() for line in text.splitlines())
    return "\n".join(" ".join(line.split()) for line in lines if line and not line.startswith("#"))
