"""From patches to a surface manifest: what a plugin relies on follows from what it patches.

The declarations say what is replaced; the package's source says what that is (a function, a class,
a constant), in which shape, and who from-imports it. Imports neither the package nor the members
that a patch imports lazily.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafter_compat._source import ModuleSource, SourceTree, arguments_shape
from drafter_compat.check import CallShape, called_name, narrowed_calls
from drafter_compat.patch import Lazy, Patch, PatchError, PatchSpec
from drafter_compat.registry import WORKER_CLASS, WORKER_MODULE, WORKER_START, Registry
from drafter_compat.surface import (
    Attributes,
    ClassShape,
    Constant,
    ConstructorCall,
    FromImport,
    FunctionShape,
    MethodCall,
    ReplacedClass,
    Surface,
    Symbol,
)

__all__ = ["surface_of"]


def surface_of(registry: Registry, *, version: str, root: str | Path) -> Surface:
    """The surface of a plugin that is built on patches, as the source below `root` shows it.

    Raises PatchError for a patch whose target is not there: a surface that is wrong from the start
    helps nobody.
    """
    tree = SourceTree(registry.package, Path(root))
    symbols: dict[tuple[str, str | None], Symbol] = {}
    for patch in registry.patches:
        for symbol in _symbols_of(patch, tree):
            symbols.setdefault((symbol.id, symbol.versions), symbol)
    return Surface(
        plugin=registry.owner,
        package=registry.package,
        versions=registry.versions or f"=={version.partition('+')[0]}",
        symbols=tuple(symbols.values()),
        source=f"the patches of {registry.owner}",
    )


def _symbols_of(patch: type[Patch], tree: SourceTree) -> Iterator[Symbol]:
    spec = patch.spec
    source = tree.module(spec.target.module)
    if source is None:
        raise PatchError(
            f"patch {spec.name}: {tree.root} has no module {spec.target.module}; correct the "
            f"target, "
            f"or export from a release that the patch is for (it says {spec.versions or 'any'})"
        )
    if spec.target.qualname and not source.has_class(spec.target.qualname):
        raise PatchError(f"patch {spec.name}: {spec.target.module} has no {spec.target.qualname}")
    if spec.target.qualname and not set(spec.members) - set(spec.adds):
        yield ClassShape(
            module=spec.target.module,
            name=spec.target.qualname,
            **_common(spec, spec.target.qualname),
        )
    for name, member in spec.members.items():
        if name in spec.adds:
            continue
        if spec.target.qualname:
            yield _member_of_class(patch, source, name, member)
        else:
            yield from _name_of_module(patch, source, name, member, tree)
    for symbol in spec.relies_on:
        # Where the patch is skipped, nothing is relied on.
        skipped_elsewhere = symbol.versions is None and spec.versions
        yield dataclasses.replace(symbol, versions=spec.versions) if skipped_elsewhere else symbol
    if spec.when == "worker":
        yield FunctionShape(
            id="worker-start",
            why="know that a worker starts",
            module=WORKER_MODULE,
            name=f"{WORKER_CLASS}.{WORKER_START}",
        )


def _common(spec: PatchSpec, name: str, where: str = "") -> dict[str, Any]:
    return {
        "id": ":".join(filter(None, (spec.name, where, name))),
        "why": spec.why or f"be patched by {spec.name}",
        "versions": spec.versions or None,
    }


def _member_of_class(patch: type[Patch], source: ModuleSource, name: str, member: Any) -> Symbol:
    spec = patch.spec
    qualname = f"{spec.target.qualname}.{name}"
    node = source.definition(qualname)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return _function(patch, qualname, node, name, member)
    return Attributes(
        module=spec.target.module, name=spec.target.qualname, reads=(name,), **_common(spec, name)
    )


def _function(
    patch: type[Patch],
    qualname: str,
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    name: str,
    member: Any,
    *,
    rebound: bool = False,
) -> FunctionShape:
    spec = patch.spec
    expected = (spec.expects or {}).get(name, "")
    return FunctionShape(
        module=spec.target.module,
        name=qualname,
        signature=expected if expected.startswith("(") else _bracketed(node),
        is_async=isinstance(node, ast.AsyncFunctionDef),
        decorators=tuple(ast.unparse(item) for item in node.decorator_list),
        replacement=_replacement(member),
        replaced_by=f"{spec.module}:{patch.__name__}.{name}",
        rebound=rebound,
        **_common(spec, name),
    )


def _bracketed(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return f"({', '.join(arguments_shape(node.args))})"


def _replacement(member: Any) -> str | None:
    """The signature of what a patch puts in place, if that can be told without an import."""
    function = getattr(member, "__func__", member)
    if not inspect.isfunction(function):
        return None
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def _name_of_module(
    patch: type[Patch], source: ModuleSource, name: str, member: Any, tree: SourceTree
) -> Iterator[Symbol]:
    spec = patch.spec
    node = source.definition(name)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield _function(patch, name, node, name, member, rebound=True)
        for importer, readers in _from_importers(source.name, name, tree) if spec.rebind else ():
            yield FromImport(
                module=importer.name,
                name=name,
                source=source.name,
                read_in=readers,
                **_common(spec, name, importer.name),
            )
    elif isinstance(node, ast.ClassDef):
        importers = list(_from_importers(source.name, name, tree)) if spec.rebind else []
        for importer, readers in importers:
            yield ReplacedClass(
                module=importer.name,
                name=name,
                source=source.name,
                isinstance_in=tuple(r for r in readers if _tests(importer, r, name)),
                provides=_provides(member),
                **_common(spec, name, importer.name),
            )
            for reader in readers:
                yield from _calls_of(spec, importer, reader, name)
        if not importers:
            yield ClassShape(
                module=source.name, name=name, provides=_provides(member), **_common(spec, name)
            )
    else:
        yield Constant(module=source.name, name=name, **_common(spec, name))


def _calls_of(spec: PatchSpec, source: ModuleSource, function: str, name: str) -> Iterator[Symbol]:
    """How a function constructs the class, and calls what it has narrowed to the class.

    A function that does one of them in several ways is left out: no single shape is right for it.
    """
    node = source.definition(function)
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    place: dict[str, Any] = {"module": source.name, "function": function, "name": name}
    built = {
        CallShape.of(c)
        for c in ast.walk(node)
        if isinstance(c, ast.Call) and called_name(c) == name
    }
    for shape in built if len(built) == 1 else ():
        yield ConstructorCall(
            args=shape.args,
            keywords=tuple(sorted(shape.keywords)),
            **place,
            **_common(spec, f"{name}()", function),
        )
    called: dict[str, set[CallShape]] = {}
    for call in narrowed_calls(node.body, name):
        called.setdefault(called_name(call), set()).add(CallShape.of(call))
    for method, shapes in called.items():
        for shape in shapes if len(shapes) == 1 else ():
            yield MethodCall(
                method=method,
                args=shape.args,
                keywords=tuple(sorted(shape.keywords)),
                **place,
                **_common(spec, f"{name}.{method}()", function),
            )


def _provides(member: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(member, Lazy) or not isinstance(member, type):
        return ()
    raw = {
        name: inspect.getattr_static(member, name)
        for name in dir(member)
        if not hasattr(object, name) or name == "__init__"
    }
    raw = {
        name: value
        for name, value in raw.items()
        if not name.startswith("__") or inspect.isfunction(value)
    }
    return tuple((name, _replacement(value) or "") for name, value in raw.items())


def _from_importers(
    module: str, name: str, tree: SourceTree
) -> Iterator[tuple[ModuleSource, tuple[str, ...]]]:
    """The modules that from-import the name at module level, and their functions that read it."""
    for source in tree.modules_that_mention(name):
        bindings = source.module_level_bindings(name)
        if any(b.source == module and b.original == name for b in bindings):
            yield source, tuple(_readers(source.tree.body, name, ""))


def _readers(body: list[ast.stmt], name: str, prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _readers(node.body, name, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _reads(node, name):
            yield f"{prefix}{node.name}"


def _reads(node: ast.AST, name: str) -> bool:
    imports_itself = any(
        isinstance(item, ast.ImportFrom) and any(a.name == name for a in item.names)
        for item in ast.walk(node)
    )
    return not imports_itself and any(
        isinstance(item, ast.Name) and item.id == name and isinstance(item.ctx, ast.Load)
        for item in ast.walk(node)
    )


def _tests(source: ModuleSource, function: str, name: str) -> bool:
    node = source.definition(function)
    return node is not None and any(
        isinstance(item, ast.Call)
        and ast.unparse(item.func) == "isinstance"
        and len(item.args) == 2
        and name in {part.id for part in ast.walk(item.args[1]) if isinstance(part, ast.Name)}
        for item in ast.walk(node)
    )
