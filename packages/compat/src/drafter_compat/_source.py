"""Reading Python source without importing it, fast enough for every process start.

A plugin's gate looks at a handful of definitions in files of hundreds of kilobytes, in every
process that vLLM starts. `ModuleSource` therefore cuts a definition out of the text by its
indentation and parses that slice only. A slice that ends too early leaves a bracket or a string
open and does not parse, and one that could start inside a string is not trusted: both fall back to
parsing the whole file. Knows no manifest and no patch.
"""

from __future__ import annotations

import ast
import bisect
import functools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Binding", "Definition", "ModuleSource", "SourceTree", "normalised", "signature_shape"]

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
"""What `ModuleSource.definition` finds."""


@dataclass(frozen=True)
class Binding:
    """A name that an import statement binds."""

    name: str
    """The name it is bound to (`y` in `from a import x as y`)."""
    source: str
    """The module it is taken from, absolute."""
    original: str
    """Its name there (`x`), or `*`."""
    lineno: int


class SourceTree:
    """The modules below the directory of one package, each read at most once."""

    def __init__(self, package: str, root: Path) -> None:
        self.package = package
        self.root = root
        self._modules: dict[str, ModuleSource | None] = {}

    def module(self, name: str) -> ModuleSource | None:
        """The source of a module of the package, or None where there is none."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> ModuleSource | None:
        package, *rest = name.split(".")
        if package != self.package:
            return None
        base = self.root.joinpath(*rest)
        for path in (base / "__init__.py", base.with_name(f"{base.name}.py") if rest else None):
            if path is not None and path.is_file():
                return ModuleSource(name, path, path.read_text("utf-8", errors="replace"))
        return None

    def location(self, source: ModuleSource, lineno: int | None = None) -> str:
        """`vllm/config/speculative.py:17`, relative to the directory that holds the package."""
        path = source.path.relative_to(self.root.parent) if self._below(source) else source.path
        return path.as_posix() if lineno is None else f"{path.as_posix()}:{lineno}"

    def _below(self, source: ModuleSource) -> bool:
        return source.path.is_relative_to(self.root.parent)

    def modules_that_mention(self, word: str) -> Iterator[ModuleSource]:
        """Every module of the package whose text has that word."""
        wanted = word.encode()
        for path in sorted(self.root.rglob("*.py")):
            if wanted not in path.read_bytes():
                continue
            parts = path.relative_to(self.root).with_suffix("").parts
            parts = parts[:-1] if parts[-1:] == ("__init__",) else parts
            source = self.module(".".join((self.package, *parts)))
            if source is not None:
                yield source


class ModuleSource:
    """The text of one module, and questions about it. Line numbers are those of the file."""

    def __init__(self, name: str, path: Path, text: str) -> None:
        self.name = name
        self.path = path
        self.text = text
        self._definitions: dict[str, Definition | None] = {}

    @functools.cached_property
    def tree(self) -> ast.Module:
        """The whole module, parsed. An empty module where the file is not valid for this Python."""
        try:
            return ast.parse(self.text)
        except SyntaxError:
            return ast.Module(body=[], type_ignores=[])

    @functools.cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(match.end() for match in re.finditer("\n", self.text))]

    def lineno(self, position: int) -> int:
        """The line of a position in the text, from 1."""
        return bisect.bisect_right(self._line_starts, position)

    # --- definitions ---------------------------------------------------------------------

    def definition(self, qualname: str) -> Definition | None:
        """The function or class of that qualified name, wherever at its level it is defined.

        Of several definitions (overloads, branches of an if) it is the last, as it is at run time.
        """
        if qualname not in self._definitions:
            span = self._span(qualname)
            node = self._parse_slice(*span) if span is not None else None
            if node is None or node.name != qualname.rpartition(".")[2]:
                node = self._definition_in_tree(qualname)
            self._definitions[qualname] = node
        return self._definitions[qualname]

    def _definition_in_tree(self, qualname: str) -> Definition | None:
        body: list[ast.stmt] = self.tree.body
        found: Definition | None = None
        for part in qualname.split("."):
            found = None
            for node in _at_this_level(body):
                if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and node.name == part:
                    found = node
            if found is None:
                return None
            body = found.body
        return found

    def _span(self, qualname: str) -> tuple[int, int] | None:
        """Where the definition stands in the text, if that can be told from the text alone."""
        start, end, level = 0, len(self.text), -1
        for part in qualname.split("."):
            pattern = re.compile(
                rf"^([ \t]*)(?:async[ \t]+def|def|class)[ \t]+{re.escape(part)}\b", re.MULTILINE
            )
            heads = [
                head
                for head in pattern.finditer(self.text, start, end)
                if not self._is_inside_another(head, level, start)
            ]
            if len(heads) != 1 or self._may_be_in_string(heads[0].start()):
                return None
            head = heads[0]
            if not _is_next_level(level, head.group(1)):
                return None
            start, level = head.start(), len(head.group(1))
            end = self._end_of_block(head.end(), end, level)
        above = self._with_decorators(start)
        return None if above is None else (above, end)

    def _is_inside_another(self, head: re.Match[str], level: int, start: int) -> bool:
        """Whether what stands at `head` belongs to a function or class that is itself at `level` +
        1.

        Told for modules and for classes at column 0; elsewhere the answer is no, and the caller
        parses.
        """
        if level > 0 or _is_next_level(level, head.group(1)):
            return False
        outer = re.compile(r"^(?:    |\t)(?![ \t#)\]}])\S" if level == 0 else r"^(?![#)\]}])\S")
        for line in reversed(self.text[start : head.start()].splitlines()):
            if outer.match(line):
                return re.match(r"\s*(?:async[ \t]+def|def|class)[ \t]", line) is not None
        return False

    def _end_of_block(self, position: int, limit: int, indent: int) -> int:
        # A line that is indented no deeper ends the block, unless it closes a bracket or is a
        # comment.
        pattern = re.compile(rf"^[ \t]{{0,{indent}}}(?![ \t\n\r#)\]}}])", re.MULTILINE)
        found = pattern.search(self.text, self.text.find("\n", position) + 1 or limit, limit)
        return found.start() if found else limit

    def _with_decorators(self, start: int) -> int | None:
        """Move up over decorators and comments; None where what stands above cannot be told."""
        while start > 0:
            above_start = self.text.rfind("\n", 0, start - 1) + 1
            above = self.text[above_start : start - 1].strip()
            if above == ")":
                return None
            if not above.startswith(("@", "#")):
                break
            start = above_start
        return start

    def _parse_slice(self, start: int, end: int) -> Definition | None:
        text = self.text[start:end]
        indent = len(text) - len(text.lstrip(" \t"))
        # An indented slice is put below an `if`, so that strings in it keep their text.
        source = f"if 1:\n{text}" if indent else text
        try:
            body = ast.parse(source).body
        except SyntaxError:
            return None
        if indent:
            body = body[0].body if isinstance(body[0], ast.If) else []
        if len(body) != 1 or not isinstance(body[0], (*_FUNCTIONS, ast.ClassDef)):
            return None
        ast.increment_lineno(body[0], self.lineno(start) - (2 if indent else 1))
        return body[0]

    def _may_be_in_string(self, position: int) -> bool:
        return any(self.text.count(quotes, 0, position) % 2 for quotes in ('"""', "'''"))

    def has_class(self, qualname: str) -> bool:
        """Whether there is a class of that name; parses nothing where the text shows it."""
        span = self._span(qualname)
        if span is not None:
            head = re.compile(r"^[ \t]*class[ \t]", re.MULTILINE)
            return head.search(self.text, *span) is not None
        return isinstance(self.definition(qualname), ast.ClassDef)

    # --- attributes of classes ----------------------------------------------------------

    def class_attribute(self, class_name: str, attribute: str) -> int | None:
        """The line that gives the class or its instances that attribute; bases do not count."""
        span = self._span(class_name)
        if span is not None:
            name = re.escape(attribute)
            pattern = re.compile(
                rf"^[ \t]+(?:async[ \t]+)?def[ \t]+{name}\("
                rf"|^[ \t]+self\.{name}[ \t]*(?::[^=\n]+)?=(?!=)"
                rf"|^(?:    |\t){name}[ \t]*[:=](?!=)",
                re.MULTILINE,
            )
            for found in pattern.finditer(self.text, *span):
                if not self._may_be_in_string(found.start()):
                    return self.lineno(found.start())
        node = self.definition(class_name)
        return _attribute_line(node, attribute) if isinstance(node, ast.ClassDef) else None

    # --- imports -------------------------------------------------------------------------

    def module_level_bindings(self, name: str) -> list[Binding]:
        """What import statements bind `name` (or `*`) at module level when the module runs.

        Imports below `if TYPE_CHECKING:` do not run, and are left out.
        """
        if not re.search(rf"\b{re.escape(name)}\b", self.text) and "import *" not in self.text:
            return []
        quick = [
            binding
            for found in _TOP_IMPORT.finditer(self.text)
            if name in found.group() and not self._may_be_in_string(found.start())
            for binding in self._parse_import(found)
            if binding.name == name
        ]
        if quick:
            return quick
        statements = (
            node for node in _at_this_level(self.tree.body) if isinstance(node, ast.ImportFrom)
        )
        return [
            binding
            for node in statements
            for binding in self._bindings(node)
            if binding.name in (name, "*")
        ]

    def local_bindings(self, node: ast.AST, name: str) -> list[Binding]:
        """What import statements inside `node` bind `name`."""
        statements = (item for item in ast.walk(node) if isinstance(item, ast.ImportFrom))
        return [b for statement in statements for b in self._bindings(statement) if b.name == name]

    def _parse_import(self, found: re.Match[str]) -> list[Binding]:
        try:
            node = ast.parse(textwrap.dedent(found.group())).body[0]
        except SyntaxError:
            return []
        if not isinstance(node, ast.ImportFrom):
            return []
        ast.increment_lineno(node, self.lineno(found.start()) - 1)
        return self._bindings(node)

    def _bindings(self, node: ast.ImportFrom) -> list[Binding]:
        source = self._absolute(node)
        return [
            Binding(alias.asname or alias.name, source, alias.name, node.lineno)
            for alias in node.names
        ]

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        drop = node.level - (1 if self.path.name == "__init__.py" else 0)
        parts = parts[: len(parts) - drop] if drop else parts
        return ".".join([*parts, *([node.module] if node.module else [])])

    # --- constants -----------------------------------------------------------------------

    def mentions_assignment(self, name: str) -> bool:
        """Whether the text has a line that could assign to `name`, at any indentation."""
        pattern = rf"^[ \t]*{re.escape(name)}[ \t]*(?::[^=\n]+)?=(?!=)"
        return re.search(pattern, self.text, re.MULTILINE) is not None

    def assignments(self, name: str) -> list[ast.expr]:
        """The values that module-level assignments give to `name`, in order."""
        pattern = re.compile(rf"^{re.escape(name)}[ \t]*(?::[^=\n]+)?=(?!=)", re.MULTILINE)
        heads = list(pattern.finditer(self.text))
        if len(heads) == 1 and not self._may_be_in_string(heads[0].start()):
            start = heads[0].start()
            try:
                body = ast.parse(self.text[start : self._end_of_block(start, len(self.text), 0)])
            except SyntaxError:
                pass
            else:
                ast.increment_lineno(body, self.lineno(start) - 1)
                return [value for node in body.body[:1] for value in _assigned(node, name)]
        return [value for node in _at_this_level(self.tree.body) for value in _assigned(node, name)]


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

_TOP_IMPORT = re.compile(r"^from[ \t]+\S+[ \t]+import[ \t]*(?:\([^()]*\)|[^(\n]+)", re.MULTILINE)


def _is_next_level(level: int, indent: str) -> bool:
    """Whether `indent` is one step deeper than `level` (-1: the module)."""
    if level < 0:
        return indent == ""
    return len(indent) - level in (1, 2, 4) if "\t" in indent else len(indent) - level == 4


def _at_this_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body that run, also those below if, try and with.

    What stands below `if TYPE_CHECKING:` does not run.
    """
    for node in body:
        yield node
        if isinstance(node, ast.If):
            if not _is_type_checking(node.test):
                yield from _at_this_level(node.body)
            yield from _at_this_level(node.orelse)
        elif isinstance(node, ast.Try):
            for part in (node.body, *(handler.body for handler in node.handlers)):
                yield from _at_this_level(part)
            yield from _at_this_level(node.orelse)
            yield from _at_this_level(node.finalbody)
        elif isinstance(node, ast.With):
            yield from _at_this_level(node.body)


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test).rpartition(".")[2] == "TYPE_CHECKING"


def _assigned(node: ast.stmt, name: str) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    else:
        return []
    if any(isinstance(target, ast.Name) and target.id == name for target in targets):
        assert node.value is not None
        return [node.value]
    return []


def _attribute_line(node: ast.ClassDef, attribute: str) -> int | None:
    for statement in _at_this_level(node.body):
        if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)) and statement.name == attribute:
            return statement.lineno
        if isinstance(statement, ast.AnnAssign) and _is_name(statement.target, attribute):
            return statement.lineno
        if isinstance(statement, ast.Assign) and any(
            _is_name(target, attribute) for target in statement.targets
        ):
            return statement.lineno
    for item in ast.walk(node):
        if (
            isinstance(item, ast.Attribute)
            and isinstance(item.ctx, ast.Store)
            and item.attr == attribute
            and _is_name(item.value, "self")
        ):
            return item.lineno
    return None


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def normalised(text: str) -> str:
    """An expression's source text without the accidents of layout."""
    try:
        return ast.unparse(ast.parse(text.strip(), mode="eval"))
    except SyntaxError:
        return text.strip()


def signature_shape(signature: str) -> tuple[str, ...]:
    """What of a signature a caller or an override notices: each parameter's kind, name and default.

    Annotations are left out. `signature` is source text, `(self, a: int, *, b=1) -> None`. Raises
    ValueError.
    """
    try:
        function = ast.parse(f"def f{signature.strip()}: ...").body[0]
    except SyntaxError as error:
        raise ValueError(f"not a signature: {signature!r}") from error
    assert isinstance(function, ast.FunctionDef)
    return arguments_shape(function.args)


def arguments_shape(arguments: ast.arguments) -> tuple[str, ...]:
    """As `signature_shape`, from the parsed arguments."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
    defaults += arguments.defaults
    shape: list[str] = []
    for place, (argument, default) in enumerate(zip(plain, defaults, strict=True), start=1):
        shape.append(_with_default(argument.arg, default))
        if place == len(arguments.posonlyargs):
            shape.append("/")
    if arguments.vararg is not None:
        shape.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        shape.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        shape.append(_with_default(argument.arg, default))
    if arguments.kwarg is not None:
        shape.append(f"**{arguments.kwarg.arg}")
    return tuple(shape)


def _with_default(name: str, default: ast.expr | None) -> str:
    return name if default is None else f"{name}={ast.unparse(default)}"
