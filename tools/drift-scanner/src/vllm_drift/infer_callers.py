"""Finds the places where a release calls a method or function, as far as source tells of what.

A call `value.method(...)` counts where the class of `value` is told (self, an annotation, a
constructor, a field) and is related to the class asked for by inheritance; where nothing tells, it
counts only if no unrelated class of the release has a method of that name. This module knows one
release and `ast`; neither plugins nor surfaces.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from vllm_drift.infer_release import Definition, FunctionNode, Release, walk

__all__ = ["Caller", "find_callers"]


_COMMON = 12
"""A method defined in more modules than this is of more than one family of classes."""


@dataclass(frozen=True)
class Caller:
    """A call and the function around it."""

    module: str
    function: str
    path: str
    line: int
    call: ast.Call


def find_callers(
    release: Release,
    target: Definition,
    through: Definition | None,
    *,
    override: bool = False,
    apart_from: Collection[str] = (),
) -> list[Caller]:
    """Find the calls of a function, or of a method of the class `through`.

    With `override`, those that can reach a method of a subclass of `through` that is not in the
    release: the receiver is told to be `through` or a base of it. Else those that can reach the
    method itself, also through a subclass that inherits it. `apart_from` names modules not to look
    at.
    """
    name = target.name.rpartition(".")[2]
    if through is None:
        return list(_of_function(release, target, name, apart_from))
    if name == "__init__":
        return list(_of_function(release, through, through.name, apart_from))
    return list(_of_method(release, through, name, target, override, apart_from))


def _of_function(
    release: Release, target: Definition, name: str, apart_from: Collection[str]
) -> Iterator[Caller]:
    for module in release.tree.files_containing(f"{name}(", f"({name},", any_of=True):
        if module in apart_from:
            continue
        for node, function, qualname, _ in release.calls_of(module, name):
            dotted = _dotted(node.func)
            if dotted is None:
                continue
            found = release.find(module, dotted)
            if found is None:
                found = _local_import(release, module, function, dotted)
            if found == target:
                yield _caller(release, module, qualname, node)


def _local_import(
    release: Release, module: str, function: FunctionNode, dotted: str
) -> Definition | None:
    """What a name stands for that the function itself imports."""
    head, _, rest = dotted.partition(".")
    for node in walk(function):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == head:
                    source = release.absolute(module, node)
                    full = f"{alias.name}.{rest}" if rest else alias.name
                    return release.find(source, full) if source else None
    return None


def _of_method(
    release: Release,
    through: Definition,
    name: str,
    target: Definition,
    override: bool,
    apart_from: Collection[str],
) -> Iterator[Caller]:
    # Called, handed to `partial`, or given another name first.
    spellings = (f".{name}(", f".{name},", f".{name}\n")
    modules = release.tree.files_containing(*spellings, any_of=True)
    unique: bool | None = None
    for module in modules:
        if module in apart_from:
            continue
        for node, function, qualname, owner in release.calls_of(module, name):
            if not isinstance(node.func, ast.Attribute):
                continue
            typed = _Types(release, module, function, owner)
            types = typed.of(node.func.value)
            if types:
                if any(_reaches(release, t, through, target, override) for t in types):
                    yield _caller(release, module, qualname, node)
                continue
            if typed.names_other(node.func.value):
                continue
            if unique is None:
                unique = _is_unique(release, through, name)
            if unique:
                yield _caller(release, module, qualname, node)


def _is_unique(release: Release, through: Definition, name: str) -> bool:
    """Whether every class with a method of that name is related to `through`."""
    modules = release.tree.files_containing(f"def {name}(")
    if len(modules) > _COMMON:
        return False
    for module in modules:
        for _, qualname, owner in release.functions_with_owner(module):
            if qualname.rpartition(".")[2] != name:
                continue
            if owner is None or not _related(release, owner, through):
                return False
    return True


def _reaches(
    release: Release, receiver: Definition, through: Definition, target: Definition, override: bool
) -> bool:
    if receiver in release.lineage(through)[0]:
        return True
    if override or through not in release.lineage(receiver)[0]:
        return False
    return release.member(receiver, target.name.rpartition(".")[2]) == target


def _related(release: Release, one: Definition, other: Definition) -> bool:
    return one in release.lineage(other)[0] or other in release.lineage(one)[0]


def _caller(release: Release, module: str, qualname: str, call: ast.Call) -> Caller:
    return Caller(module, qualname, release.tree.path(module), call.lineno, call)


class _Types:
    """The classes of expressions inside one function."""

    def __init__(
        self, release: Release, module: str, function: FunctionNode, owner: Definition | None
    ) -> None:
        self.release = release
        self.module = module
        self.owner = owner
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        static = any(_dotted(d) == "staticmethod" for d in function.decorator_list)
        self.receiver = positional[0].arg if positional and owner is not None and not static else ""
        self.annotations = {
            a.arg: a.annotation for a in (*positional, *arguments.kwonlyargs) if a.annotation
        }
        self.assigned: dict[str, list[ast.expr]] = {}
        for node in walk(function):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.assigned.setdefault(target.id, []).append(node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self.annotations.setdefault(node.target.id, node.annotation)

    def of(self, expression: ast.expr, depth: int = 0) -> tuple[Definition, ...]:
        """The classes that source tells for an expression, or ()."""
        if depth > 8:
            return ()
        if isinstance(expression, ast.Name):
            return self._of_name(expression.id, depth)
        if isinstance(expression, ast.Attribute):
            bases = self.of(expression.value, depth + 1)
            if len(bases) == 1:
                return self.release.type_of_member(bases[0], expression.attr)
            return ()
        if isinstance(expression, ast.Call):
            if _dotted(expression.func) == "super" and self.owner is not None:
                return tuple(b for b in self.release.bases(self.owner) if b is not None)
            dotted = _dotted(expression.func)
            found = self.release.find(self.module, dotted) if dotted else None
            if found is not None and found.kind == "class":
                return (found,)
            if found is not None and found.kind == "function":
                return self.release.returned(found)
        return ()

    def _of_name(self, name: str, depth: int) -> tuple[Definition, ...]:
        if name == self.receiver and self.owner is not None:
            return (self.owner,)
        if name in self.annotations:
            return self.release.annotated(self.module, self.annotations[name])
        values = self.assigned.get(name, [])
        if values:
            told = {self.of(v, depth + 1) for v in values}
            return told.pop() if len(told) == 1 else ()
        found = self.release.find(self.module, name)
        if found is not None and found.kind == "class":
            return (found,)
        if found is not None and found.kind == "constant":
            return self.release.type_of_constant(found)
        return ()

    def names_other(self, expression: ast.expr) -> bool:
        """Whether an expression is of a class or module outside the package, as far as it shows."""
        if isinstance(expression, ast.Name):
            if expression.id in self.annotations:
                # Annotated with something that is no class of the package, unless with anything.
                return "Any" not in ast.dump(self.annotations[expression.id])
            return self.release.imports_foreign(self.module, expression.id)
        if isinstance(expression, ast.Attribute):
            return self.names_other(expression.value) and isinstance(expression.value, ast.Name)
        return False


def _dotted(expression: ast.AST | None) -> str | None:
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Attribute):
        base = _dotted(expression.value)
        return None if base is None else f"{base}.{expression.attr}"
    return None
