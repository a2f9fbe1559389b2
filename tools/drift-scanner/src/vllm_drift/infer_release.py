"""Looks names up in the source of one release of the package, as far as `infer` needs it.

`infer` asks three questions: what is `module.name` (through re-exports, star imports and lazy
`__getattr__` tables), has this class that member (through its bases), and of which class is a
member's value (where an annotation or a constructor tells). Every answer may be "cannot tell",
which is `None`. This module reads with `ast`; it must not know plugins or surfaces.

`resolve` looks names up too, and the two stay apart: `resolve` works on facts of pieces, which are
kept on disk, so that a second look parses nothing, and its answers say how a name was reached; this
module hands out syntax trees of whole modules, because binding calls to signatures and telling the
type of an expression need the nodes themselves. Where both can answer, the tests ask both.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm_drift.tree import SourceTree

__all__ = [
    "ClassDefinition",
    "Definition",
    "Release",
    "annotation_names",
    "calls_in",
    "child_nodes",
    "parse_quietly",
    "partial_call",
    "walk",
]

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_MAX_DEPTH = 12


@dataclass(frozen=True)
class Definition:
    """What a dotted name stands for.

    `kind` is `module`, `class`, `function` or `constant`. `name` is the qualified name inside
    `module`; empty for a module. `node` is the defining statement, or None where the name exists
    without one (a lazy name).
    """

    kind: str
    module: str
    name: str
    node: ast.AST | None = field(default=None, compare=False, repr=False)

    @property
    def line(self) -> int:
        """The line of the definition, 1 where there is none."""
        return getattr(self.node, "lineno", 1)


@dataclass
class ClassDefinition:
    """The members that a class statement itself defines."""

    definition: Definition
    node: ast.ClassDef
    members: dict[str, list[ast.stmt]]
    """Statements of the class body by the name that they bind."""
    methods: list[FunctionNode]

    @functools.cached_property
    def on_self(self) -> dict[str, list[tuple[ast.AST, FunctionNode]]]:
        """Assignments to `self.name` in methods: the statement and the method."""
        found: dict[str, list[tuple[ast.AST, FunctionNode]]] = {}
        for method in self.methods:
            _read_self(method, found)
        return found


Owned = tuple[FunctionNode, str, Definition | None]
"""A function or method, its qualified name and its class."""


@dataclass
class _Module:
    dotted: str
    is_package: bool
    tree: ast.Module
    names: dict[str, list[ast.stmt]]
    stars: list[ast.ImportFrom]
    calls: dict[FunctionNode, list[ast.Call]] = field(default_factory=dict)
    """Of each function that was looked at, as `calls_in` has them: many names are looked for."""

    @functools.cached_property
    def functions_with_owner(self) -> list[Owned]:
        found: list[Owned] = []
        for statement in _flat(self.tree.body):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.append((statement, statement.name, None))
            elif isinstance(statement, ast.ClassDef):
                owner = Definition("class", self.dotted, statement.name, statement)
                for inner in _flat(statement.body):
                    if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        found.append((inner, f"{statement.name}.{inner.name}", owner))
        return found

    def calls_in(self, function: FunctionNode) -> list[ast.Call]:
        if function not in self.calls:
            self.calls[function] = list(calls_in(function))
        return self.calls[function]


class Release:
    """Names of one release. Methods cost a parse per module the first time, then nothing."""

    @classmethod
    def of(cls, tree: SourceTree) -> Release:
        """The names of a tree: one object for each of the last trees that were asked for."""
        known = _RELEASES.get(id(tree))
        if known is None or known.tree is not tree:
            while len(_RELEASES) >= _KEPT:
                _RELEASES.pop(next(iter(_RELEASES)))
            known = _RELEASES[id(tree)] = cls(tree)
        return known

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self.package = tree.package
        self._modules: dict[str, _Module | None] = {}
        self._packages = _package_names(tree)
        self._classes: dict[tuple[str, str], ClassDefinition] = {}
        self._found: dict[tuple[str, str], Definition | None] = {}
        self._calls: dict[
            tuple[str, str], list[tuple[ast.Call, FunctionNode, str, Definition | None]]
        ] = {}
        self._texts: dict[str, list[str]] = {}
        self._alike: frozenset[str] = frozenset()
        self._alike_to: SourceTree | None = None

    # --- names -----------------------------------------------------------------------------

    def is_module(self, dotted: str) -> bool:
        """Whether there is such a module or (namespace) package."""
        return dotted in self.tree or dotted in self._packages

    def split(self, dotted: str) -> tuple[str, str]:
        """Split a dotted name at the longest prefix that is a module."""
        parts = dotted.split(".")
        for n in range(len(parts), 0, -1):
            if self.is_module(".".join(parts[:n])):
                return ".".join(parts[:n]), ".".join(parts[n:])
        return parts[0], ".".join(parts[1:])

    def find(self, module: str, name: str) -> Definition | None:
        """Find what `name` of `module` stands for, or None where source does not tell.

        `name` may be dotted (`Class.method`), and may go through submodules.
        """
        key = (module, name)
        if key not in self._found:
            self._found[key] = None  # a cycle finds nothing
            self._found[key] = self._find(module, name, 0)
        return self._found[key]

    def _find(self, module: str, name: str, depth: int) -> Definition | None:
        if depth > _MAX_DEPTH:
            return None
        module, name = self.split(f"{module}.{name}" if name else module)
        if not name:
            return Definition("module", module, "") if self.is_module(module) else None
        first, _, rest = name.partition(".")
        found = self._find_top(module, first, depth)
        for part in rest.split(".") if rest else ():
            if found is None:
                return None
            if found.kind == "module":
                found = self._find(found.module, part, depth + 1)
            elif found.kind == "class":
                found = self.member(found, part)
            else:
                return None
        return found

    def _find_top(self, dotted: str, name: str, depth: int) -> Definition | None:
        module = self._module(dotted)
        if module is None:
            return None
        for statement in reversed(module.names.get(name, [])):
            found = self._of_statement(module, name, statement, depth)
            if found is not None:
                return found
        if self.is_module(f"{dotted}.{name}"):
            return Definition("module", f"{dotted}.{name}", "")
        for star in module.stars:
            source = _absolute(module, star)
            if source and source != dotted:
                found = self._find(source, name, depth + 1)
                if found is not None:
                    return found
        return self._lazy(module, name, depth)

    def _of_statement(
        self, module: _Module, name: str, statement: ast.stmt, depth: int
    ) -> Definition | None:
        if isinstance(statement, ast.ClassDef):
            return Definition("class", module.dotted, name, statement)
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return Definition("function", module.dotted, name, statement)
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    target = alias.name if alias.asname else alias.name.partition(".")[0]
                    return self._find(target, "", depth + 1) if self._ours(target) else None
            return None
        if isinstance(statement, ast.ImportFrom):
            source = _absolute(module, statement)
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    if source is None or not self._ours(source):
                        return Definition("constant", module.dotted, name, statement)
                    return self._find(source, alias.name, depth + 1)
            return None
        return self._of_assignment(module, name, statement, depth)

    def _of_assignment(
        self, module: _Module, name: str, statement: ast.stmt, depth: int
    ) -> Definition:
        value = getattr(statement, "value", None)
        if isinstance(value, (ast.Name, ast.Attribute)):
            dotted = _dotted(value)
            if dotted and dotted != name:
                found = self._find(module.dotted, dotted, depth + 1)
                if found is not None and found.kind in ("class", "function"):
                    return found
        return Definition("constant", module.dotted, name, statement)

    def _lazy(self, module: _Module, name: str, depth: int) -> Definition | None:
        """A name that the module's `__getattr__` serves, by a table or by comparing strings."""
        if "__getattr__" not in module.names:
            return None
        for node in walk(module.tree):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name:
                        return self._lazy_target(module, name, value, depth)
        getter = module.names["__getattr__"][-1]
        if any(isinstance(n, ast.Constant) and n.value == name for n in walk(getter)):
            return Definition("constant", module.dotted, name, getter)
        return None

    def _lazy_target(
        self, module: _Module, name: str, value: ast.expr, depth: int
    ) -> Definition | None:
        text = value.value if isinstance(value, ast.Constant) else None
        if isinstance(text, str) and ":" in text:
            where, _, attribute = text.partition(":")
            source = _resolve_relative(module, where)
            return self._find(source, attribute, depth + 1) if source else None
        if isinstance(text, str) and "." in text:
            source = _resolve_relative(module, text)
            found = self._find(source, name, depth + 1) if source else None
            if found is not None:
                return found
        return Definition("constant", module.dotted, name, value)

    # --- who reads a name of a module ------------------------------------------------------

    def imported_from(self, module: str, name: str) -> tuple[str, str] | None:
        """The module and name that `module` from-imports as `name`; None where it does not."""
        found = self._module(module)
        for statement in reversed(found.names.get(name, []) if found is not None else []):
            if isinstance(statement, ast.ImportFrom) and found is not None:
                source = _absolute(found, statement)
                for alias in statement.names:
                    if (alias.asname or alias.name) == name and source and self._ours(source):
                        return source, alias.name
        return None

    def readers(self, module: str, name: str) -> list[str]:
        """The functions of a module that read a global name (`Class.method`), in order."""
        return [
            qualname
            for function, qualname, _ in self.functions_with_owner(module)
            if any(
                isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
                for n in walk(function)
            )
        ]

    def late_readers(self, module: str, name: str) -> list[tuple[str, int]]:
        """Where functions look a module's name up when they run, and so see what was put there.

        In the module itself, as an attribute of the module elsewhere, or by an import inside a
        function. (module, line) of each.
        """
        found = []
        for other in self.tree.files_containing(name):
            lines = self._lines(other)
            for function, _, _ in self.functions_with_owner(other):
                if not any(
                    name in line for line in lines[function.lineno - 1 : function.end_lineno]
                ):
                    continue
                for node in walk(function):
                    if self._looks_up(node, other, module, name):
                        found.append((other, getattr(node, "lineno", 1)))
        return found

    def _looks_up(self, node: ast.AST, where: str, module: str, name: str) -> bool:
        if isinstance(node, ast.Name):
            return where == module and node.id == name and isinstance(node.ctx, ast.Load)
        if isinstance(node, ast.ImportFrom):
            return (
                any(alias.name == name for alias in node.names)
                and self.absolute(where, node) == module
            )
        if not isinstance(node, ast.Attribute) or node.attr != name:
            return False
        dotted = _dotted(node.value)
        found = self.find(where, dotted) if dotted else None
        return found is not None and found.kind == "module" and found.module == module

    def early_importers(self, module: str, name: str) -> list[tuple[str, int]]:
        """The modules that from-import a name when they are imported themselves, and the lines."""
        found = []
        for other in self.tree.files_containing(name):
            if other != module and self.imported_from(other, name) == (module, name):
                statements = self._module(other)
                lines = statements.names[name] if statements is not None else []
                found.append((other, lines[-1].lineno if lines else 1))
        return found

    def modules_alike(self, other: Release) -> frozenset[str]:
        """The modules that another release has to the letter."""
        if other.tree is not self._alike_to:
            mine, theirs = self.tree, other.tree
            self._alike = frozenset(
                m for m in mine.modules() if m in theirs and mine.digest(m) == theirs.digest(m)
            )
            self._alike_to = theirs
        return self._alike

    def isinstance_in(self, module: str, name: str) -> list[str]:
        """The functions of a module that test `isinstance(value, name)`."""
        return [
            qualname
            for function, qualname, _ in self.functions_with_owner(module)
            if any(
                isinstance(n, ast.Call)
                and _dotted(n.func) == "isinstance"
                and len(n.args) == 2
                and any(_dotted(a) == name for a in walk(n.args[1]))
                for n in walk(function)
            )
        ]

    def constant_with_value(self, module: str, value: str) -> str | None:
        """The name of the module's constant that is this string."""
        found = self._module(module)
        for name, statements in found.names.items() if found is not None else ():
            for statement in statements:
                node = getattr(statement, "value", None)
                if isinstance(node, ast.Constant) and node.value == value:
                    return name
        return None

    def functions_with_owner(self, module: str) -> Sequence[Owned]:
        """The functions and methods of a module, their qualified names and their classes."""
        found = self._module(module)
        return found.functions_with_owner if found is not None else []

    def calls_of(
        self, module: str, name: str
    ) -> list[tuple[ast.Call, FunctionNode, str, Definition | None]]:
        """The calls in a module of anything whose last name is `name`, with what is around them.

        Each with the function, its qualified name and its class, as in `functions_with_owner`.
        """
        key = (module, name)
        if key not in self._calls:
            found = []
            lines = self._lines(module)
            kept = self._module(module)
            for function, qualname, owner in self.functions_with_owner(module):
                # Walking a function costs a thousand times what looking for a word in it does.
                if not any(
                    name in line for line in lines[function.lineno - 1 : function.end_lineno]
                ):
                    continue
                for node in kept.calls_in(function) if kept is not None else ():
                    if name in (getattr(node.func, "attr", ""), getattr(node.func, "id", "")):
                        found.append((node, function, qualname, owner))
            self._calls[key] = found
        return self._calls[key]

    def _lines(self, module: str) -> list[str]:
        if module not in self._texts:
            self._texts[module] = (self.tree.text(module) or "").split("\n")
        return self._texts[module]

    def absolute(self, module: str, statement: ast.ImportFrom) -> str | None:
        """The module that a from-import in a module names."""
        found = self._module(module)
        return _absolute(found, statement) if found is not None else None

    def imports_foreign(self, module: str, name: str) -> bool:
        """Whether a module imports a name from outside the package."""
        found = self._module(module)
        for statement in found.names.get(name, ()) if found is not None else ():
            if isinstance(statement, ast.Import):
                return not any(self._ours(a.name) for a in statement.names)
            if isinstance(statement, ast.ImportFrom) and found is not None:
                source = _absolute(found, statement)
                return source is None or not self._ours(source)
        return False

    # --- classes ---------------------------------------------------------------------------

    def class_of(self, definition: Definition) -> ClassDefinition | None:
        """The members of a class, or None where the definition is no class statement."""
        if definition.kind != "class" or not isinstance(definition.node, ast.ClassDef):
            return None
        key = (definition.module, definition.name)
        if key not in self._classes:
            self._classes[key] = _read_class(definition, definition.node)
        return self._classes[key]

    def bases(self, definition: Definition) -> list[Definition | None]:
        """The bases of a class in order, None for each that is not of this package."""
        if not isinstance(definition.node, ast.ClassDef):
            return []
        found: list[Definition | None] = []
        for base in definition.node.bases:
            target = base.value if isinstance(base, ast.Subscript) else base
            dotted = _dotted(target)
            resolved = self.find(definition.module, dotted) if dotted else None
            if resolved is not None and resolved.kind == "class":
                found.append(resolved)
            elif dotted and dotted.rpartition(".")[2] in _HARMLESS_BASES:
                continue
            else:
                found.append(None)
        return found

    def lineage(self, definition: Definition) -> tuple[list[Definition], bool]:
        """The class and its bases, depth first, and whether that is all of them."""
        seen: list[Definition] = []
        complete = True
        todo: list[Definition | None] = [definition]
        while todo:
            current = todo.pop(0)
            if current is None:
                complete = False
            elif current not in seen:
                seen.append(current)
                todo = [*self.bases(current), *todo]
        return seen, complete

    def member(self, definition: Definition, name: str) -> Definition | None:
        """A member of a class (also inherited, or only ever assigned to self), or None."""
        for current in self.lineage(definition)[0]:
            members = self.class_of(current)
            if members is None:
                continue
            qualified = f"{current.name}.{name}"
            if name in members.members:
                node = members.members[name][-1]
                kind = "constant"
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    kind = "function"
                elif isinstance(node, ast.ClassDef):
                    kind = "class"
                return Definition(kind, current.module, qualified, node)
            if name in members.on_self:
                return Definition(
                    "constant", current.module, qualified, members.on_self[name][0][0]
                )
        return None

    def type_of_member(
        self, definition: Definition, name: str, depth: int = 0
    ) -> tuple[Definition, ...]:
        """The classes of a member's value, where an annotation or an assignment tells; else ()."""
        if depth > _MAX_DEPTH:
            return ()
        for current in self.lineage(definition)[0]:
            members = self.class_of(current)
            if members is None:
                continue
            for node in members.members.get(name, ()):
                if isinstance(node, ast.AnnAssign):
                    return self.annotated(current.module, node.annotation)
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    if any(
                        _dotted(d) in ("property", "cached_property", "functools.cached_property")
                        for d in node.decorator_list
                    ):
                        return self.annotated(current.module, node.returns)
                    return ()
            assigned = members.on_self.get(name)
            if assigned:
                types = [self._type_assigned(current, s, f, depth) for s, f in assigned]
                told = {t for t in types if t}
                return told.pop() if len(told) == 1 else ()
        return ()

    def _type_assigned(
        self, owner: Definition, statement: ast.AST, method: FunctionNode, depth: int
    ) -> tuple[Definition, ...]:
        if isinstance(statement, ast.AnnAssign):
            return self.annotated(owner.module, statement.annotation)
        if isinstance(statement, ast.Assign):
            return self._type_of(owner, statement.value, method, depth + 1)
        return ()

    def _type_of(
        self, owner: Definition, expression: ast.expr, method: FunctionNode, depth: int
    ) -> tuple[Definition, ...]:
        if depth > _MAX_DEPTH:
            return ()
        if isinstance(expression, ast.Call):
            dotted = _dotted(expression.func)
            found = self.find(owner.module, dotted) if dotted else None
            return (found,) if found is not None and found.kind == "class" else ()
        if isinstance(expression, ast.Name):
            if expression.id == "self":
                return (owner,)
            for argument in _arguments(method.args):
                if argument.arg == expression.id:
                    return self.annotated(owner.module, argument.annotation)
            return ()
        if isinstance(expression, ast.Attribute):
            bases = self._type_of(owner, expression.value, method, depth + 1)
            if len(bases) == 1:
                return self.type_of_member(bases[0], expression.attr, depth + 1)
        return ()

    def annotated(self, module: str, annotation: ast.expr | None) -> tuple[Definition, ...]:
        """The classes of this package that an annotation names; () where it names anything else."""
        names = annotation_names(annotation)
        found = []
        for name in names or ():
            definition = self.find(module, name)
            if definition is None or definition.kind != "class":
                return ()
            found.append(definition)
        return tuple(found)

    def type_of_constant(self, definition: Definition) -> tuple[Definition, ...]:
        """The class of a module's constant, where an annotation or a constructor call tells."""
        node = definition.node
        module = self._module(definition.module)
        statements = [node, *(module.names.get(definition.name, ()) if module else ())]
        for statement in statements:
            if isinstance(statement, ast.AnnAssign):
                return self.annotated(definition.module, statement.annotation)
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Assign) and isinstance(value, ast.Call):
                dotted = _dotted(value.func)
                found = self.find(definition.module, dotted) if dotted else None
                if found is not None and found.kind == "class":
                    return (found,)
        return ()

    def returned(self, definition: Definition) -> tuple[Definition, ...]:
        """The classes that a function says it returns."""
        node = definition.node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return self.annotated(definition.module, node.returns)
        return ()

    # --- modules ---------------------------------------------------------------------------

    def _ours(self, dotted: str) -> bool:
        return dotted == self.package or dotted.startswith(self.package + ".")

    def _module(self, dotted: str) -> _Module | None:
        if dotted not in self._modules:
            self._modules[dotted] = self._parse(dotted)
        return self._modules[dotted]

    def _parse(self, dotted: str) -> _Module | None:
        text = self.tree.text(dotted)
        if text is None:
            return None
        for other in _RELEASES.values():
            # The release that this one is compared with has most modules to the letter.
            same = other._modules.get(dotted) if other is not self else None
            if same is not None and other.tree.digest(dotted) == self.tree.digest(dotted):
                return same
        tree = parse_quietly(text)
        if tree is None:
            return None
        names: dict[str, list[ast.stmt]] = {}
        stars = []
        for statement in _flat(tree.body):
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                stars.append(statement)
                continue
            for name in _bound(statement):
                names.setdefault(name, []).append(statement)
        return _Module(dotted, self.tree.is_package(dotted), tree, names, stars)


_RELEASES: dict[int, Release] = {}
_KEPT = 2
"""A comparison looks at two releases; a release holds its parsed modules."""
_HARMLESS_BASES = frozenset(
    ("object", "ABC", "Protocol", "Generic", "Enum", "IntEnum", "NamedTuple", "TypedDict")
)
"""Bases that have no members which a plugin could mean."""


def parse_quietly(text: str) -> ast.Module | None:
    """Parse somebody else's source: None where it is none, and no warnings about its style."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError):
            return None


def child_nodes(node: ast.AST) -> list[ast.AST]:
    """What `ast.iter_child_nodes` gives, in half the time."""
    found: list[ast.AST] = []
    values = node.__dict__
    for name in node._fields:
        value = values.get(name)
        if isinstance(value, ast.AST):
            found.append(value)
        elif value.__class__ is list:
            found += [v for v in value if isinstance(v, ast.AST)]
    return found


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """What `ast.walk` gives, in the same order."""
    waiting = [node]
    for inner in waiting:
        yield inner
        waiting += child_nodes(inner)


def calls_in(function: FunctionNode) -> Iterator[ast.Call]:
    """The calls that a function makes, those through `partial` and through a local name included.

    `partial(f, 1)` gives the call `f(1, **later)`, which may get more arguments; `step = self.step`
    and then `step(1)` gives `self.step(1)` beside `step(1)`.
    """
    aliases: dict[str, list[ast.expr]] = {}
    calls = []
    for node in walk(function):
        if isinstance(node, ast.Call):
            calls.append(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    aliases.setdefault(target.id, []).append(node.value)
    for call in calls:
        yield call
        later = partial_call(call)
        if later is not None:
            yield later
        meant = aliases.get(call.func.id, []) if isinstance(call.func, ast.Name) else []
        if len(meant) == 1:
            yield ast.copy_location(ast.Call(meant[0], call.args, call.keywords), call)


def partial_call(call: ast.Call) -> ast.Call | None:
    """The call that `functools.partial(f, ...)` prepares, open-ended; None for other calls."""
    if _dotted(call.func) not in ("partial", "functools.partial") or not call.args:
        return None
    function, *arguments = call.args
    if isinstance(function, ast.Starred):
        return None
    later = ast.keyword(None, ast.Name("later", ast.Load()))
    prepared = ast.Call(function, arguments, [*call.keywords, later])
    return ast.fix_missing_locations(ast.copy_location(prepared, call))


def annotation_names(annotation: ast.expr | None) -> list[str] | None:
    """The dotted class names that an annotation allows, without None; None where it is no such.

    `X`, `"X"`, `X | None`, `Optional[X]`, `Union[X, Y]`, `Annotated[X, ...]` and `type`-free
    names are understood; a container (`list[X]`) is not of class `X` and gives None.
    """
    if annotation is None:
        return None
    if isinstance(annotation, ast.Constant):
        if annotation.value is None:
            return []
        if isinstance(annotation.value, str):
            try:
                return annotation_names(ast.parse(annotation.value.strip(), mode="eval").body)
            except (SyntaxError, ValueError):
                return None
        return None
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        left, right = annotation_names(annotation.left), annotation_names(annotation.right)
        return None if left is None or right is None else left + right
    if isinstance(annotation, ast.Subscript):
        head = (_dotted(annotation.value) or "").rpartition(".")[2]
        parts = (
            annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        )
        if head in (
            "Optional",
            "Annotated",
            "Required",
            "NotRequired",
            "ClassVar",
            "SkipValidation",
        ):
            return annotation_names(parts[0])
        if head == "Union":
            names = [annotation_names(part) for part in parts]
            return None if None in names else [n for part in names for n in part or ()]
        return None
    dotted = _dotted(annotation)
    return None if dotted is None else [dotted]


def _package_names(tree: SourceTree) -> frozenset[str]:
    """Every package, those without an `__init__.py` included."""
    names = set()
    for dotted in tree.modules():
        parts = dotted.split(".")
        for n in range(1, len(parts)):
            names.add(".".join(parts[:n]))
    return frozenset(names)


def _absolute(module: _Module, statement: ast.ImportFrom) -> str | None:
    if not statement.level:
        return statement.module
    return _resolve_relative(module, "." * statement.level + (statement.module or ""))


def _resolve_relative(module: _Module, text: str) -> str | None:
    level = len(text) - len(text.lstrip("."))
    if level == 0:
        return text
    base = module.dotted.split(".")
    if not module.is_package:
        base = base[:-1]
    base = base[: len(base) - (level - 1)]
    rest = text[level:]
    return ".".join([*base, rest] if rest else base) or None


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body and of the if, try and with blocks in it, not of functions."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.For, ast.While)):
            yield from _flat(statement.body)
            yield from _flat(statement.orelse)
        elif isinstance(statement, ast.With):
            yield from _flat(statement.body)
        elif isinstance(statement, ast.Try):
            yield from _flat(statement.body)
            for handler in statement.handlers:
                yield from _flat(handler.body)
            yield from _flat(statement.orelse)
            yield from _flat(statement.finalbody)


def _bound(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return [statement.name]
    if isinstance(statement, ast.Import):
        return [a.asname or a.name.partition(".")[0] for a in statement.names]
    if isinstance(statement, ast.ImportFrom):
        return [a.asname or a.name for a in statement.names]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = list(statement.targets)
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        targets = [statement.target]
    elif type(statement).__name__ == "TypeAlias":
        targets = [statement.name]  # type: ignore[attr-defined]
    names: list[str] = []
    for target in targets:
        names.extend(n.id for n in walk(target) if isinstance(n, ast.Name))
    return names


def _read_class(definition: Definition, node: ast.ClassDef) -> ClassDefinition:
    members: dict[str, list[ast.stmt]] = {}
    methods: list[FunctionNode] = []
    for statement in _flat(node.body):
        for name in _bound(statement):
            members.setdefault(name, []).append(statement)
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            methods.append(statement)
    return ClassDefinition(definition, node, members, methods)


def _read_self(
    method: FunctionNode, on_self: dict[str, list[tuple[ast.AST, FunctionNode]]]
) -> None:
    arguments = [*method.args.posonlyargs, *method.args.args]
    if not arguments:
        return
    receiver = arguments[0].arg
    for inner in walk(method):
        targets: list[ast.expr] = []
        if isinstance(inner, ast.Assign):
            targets = list(inner.targets)
        elif isinstance(inner, (ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor)):
            targets = [inner.target]
        elif isinstance(inner, (ast.With, ast.AsyncWith)):
            targets = [i.optional_vars for i in inner.items if i.optional_vars is not None]
        for target in targets:
            for part in walk(target):
                if (
                    isinstance(part, ast.Attribute)
                    and isinstance(part.ctx, ast.Store)
                    and isinstance(part.value, ast.Name)
                    and part.value.id == receiver
                ):
                    on_self.setdefault(part.attr, []).append((inner, method))


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _dotted(expression: ast.AST | None) -> str | None:
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Attribute):
        base = _dotted(expression.value)
        return None if base is None else f"{base}.{expression.attr}"
    return None
