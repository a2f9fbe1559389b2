"""Has the running release made a patch needless? Answered from declarations and source, importing
nothing."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from drafter_compat._source import SourceTree
from drafter_compat.patch import Patch, PatchSpec, canonical
from drafter_compat.versions import applies

__all__ = ["why_needless"]


def why_needless(patch: type[Patch], *, version: str, tree: SourceTree | None) -> str | None:
    """Why the release has made the patch needless, or None.

    `remove_when` decides where it is a specifier (`>=0.35`) or names something the source must have
    (`has module:name`). Apart from that, a patch is needless if what it puts in place is what is
    there already.
    """
    spec = patch.spec
    return (
        _by_version(spec, version)
        or _by_presence(spec, tree)
        or (_by_body(spec, tree) if tree is not None else None)
    )


def _by_version(spec: PatchSpec, version: str) -> str | None:
    try:
        SpecifierSet(spec.remove_when)
    except InvalidSpecifier:
        return None
    if spec.remove_when and applies(spec.remove_when, version):
        return f"{version} is {spec.remove_when}"
    return None


def _by_presence(spec: PatchSpec, tree: SourceTree | None) -> str | None:
    words, _, place = spec.remove_when.partition(" ")
    module, colon, name = place.partition(":")
    if words != "has" or not colon or tree is None:
        return None
    source = tree.module(module)
    if source is None:
        return None
    owner, _, attribute = name.rpartition(".")
    there = (
        source.definition(name) is not None
        or bool(source.assignments(name))
        or bool(owner and source.class_attribute(owner, attribute))
    )
    return f"there is {place} now" if there else None


def _by_body(spec: PatchSpec, tree: SourceTree) -> str | None:
    source = tree.module(spec.target.module)
    if source is None or spec.adds:
        return None
    for name, member in spec.members.items():
        node = source.definition(".".join(filter(None, (spec.target.qualname, name))))
        ours = _member_node(member)
        if node is None or ours is None or _without_decorators(node) != _without_decorators(ours):
            return None
    return "the release does the same itself"


def _member_node(member: Any) -> ast.stmt | None:
    function = getattr(member, "__func__", member)
    if not inspect.isfunction(function):
        return None
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError):
        return None


def _without_decorators(node: ast.stmt) -> str:
    copy = ast.parse(ast.unparse(node)).body[0]
    if isinstance(copy, (ast.FunctionDef, ast.AsyncFunctionDef)):
        copy.decorator_list = []
    return canonical(copy)
