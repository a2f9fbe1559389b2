"""A release in a few lines, for tests of the analysis."""

from __future__ import annotations

import textwrap
from typing import Any

from packaging.version import Version

from drafter_compat.surface import Surface, Symbol, parse_surface
from vllm_drift.compare import compare_surface
from vllm_drift.findings import Finding
from vllm_drift.model import ModuleModel
from vllm_drift.resolve import Resolver
from vllm_drift.scan import scan_surface
from vllm_drift.tree import SourceTree


def release(label: str = "1.0", package: str = "vllm", **modules: str) -> SourceTree:
    """A tree of the modules, named with `__` for a dot: `v1__runner="..."` is `vllm/v1/runner.py`.

    A name ending in `__init` is a package's `__init__.py`. Packages that are not given are empty.
    """
    files = {f"{package}/__init__.py": b""}
    for name, text in modules.items():
        parts = name.split("__")
        for depth in range(1, len(parts)):
            files.setdefault("/".join([package, *parts[:depth], "__init__.py"]), b"")
        path = "/".join([package, *parts]) + ".py"
        if parts[-1] == "init":
            path = "/".join([package, *parts[:-1], "__init__.py"])
        files[path] = textwrap.dedent(text).encode()
    return SourceTree.from_files(files, label=label, package=package, version=Version(label))


def model_of(text: str) -> ModuleModel:
    """The model of one module."""
    return ModuleModel("vllm.module", textwrap.dedent(text))


def resolver(**modules: str) -> Resolver:
    """A resolver of a release."""
    return Resolver(release(**modules))


def surface_of(*symbols: Symbol, versions: str = ">=0") -> Surface:
    """A surface of those symbols."""
    return Surface("a-plugin", "vllm", versions, tuple(symbols))


def surface_from(text: str) -> Surface:
    """A surface from TOML, without the head."""
    head = 'schema = 1\nplugin = "a-plugin"\npackage = "vllm"\nversions = ">=0"\n'
    return parse_surface(head + textwrap.dedent(text))


def scan(surface: Surface, tree: SourceTree, **options: Any) -> list[Finding]:
    """The findings of a scan."""
    return scan_surface(surface, tree, **options)


def verdicts(findings: list[Finding]) -> list[str]:
    """The verdicts of findings that are not preexisting, in order."""
    return [f.verdict.value for f in findings if not f.preexisting]


def compare(surface: Surface, old: SourceTree, new: SourceTree, **options: Any) -> list[Finding]:
    """The findings of a comparison."""
    return compare_surface(surface, old, new, **options)
