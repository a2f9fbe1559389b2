"""Which files of an archive or directory are importable source, and under which name.

Knows how wheels, sdists and source directories are laid out. Must not know how their bytes are
read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath

__all__ = ["EXTRAS", "from_sdist", "from_wheel", "in_package", "in_wheel", "source_roots"]

EXTRAS = frozenset(
    {"METADATA", "PKG-INFO", "entry_points.txt", "pyproject.toml", "setup.py", "setup.cfg"}
)
"""Base names of the files about a distribution that are kept beside its source."""

_DATA = re.compile(r"[^/]+\.data/(?:purelib|platlib)/")
_NOT_SOURCE = frozenset(
    {"test", "tests", "testing", "doc", "docs", "example", "examples", "benchmark", "benchmarks"}
)
"""Directories beside the packages of a source tree that nobody imports after an installation."""

Files = dict[str, bytes]


def in_wheel(package: str | None) -> Callable[[str], bool]:
    """Return a test for the members of a wheel to read: the package's `.py` files, and `EXTRAS`.

    With None, every package's.
    """

    def wanted(name: str) -> bool:
        directory, _, base = name.partition("/")
        if directory.endswith(".dist-info"):
            return base in EXTRAS
        path = in_package(name)
        return path.endswith(".py") and (package is None or _belongs(path, package))

    return wanted


def in_package(name: str) -> str:
    """Return a wheel member's path below the import root."""
    return _DATA.sub("", name)


def from_wheel(members: Mapping[str, bytes]) -> tuple[Files, dict[str, str]]:
    """Split what was read of a wheel into source by path and extras by base name."""
    files: Files = {}
    extras: dict[str, str] = {}
    for name, data in members.items():
        if name.partition("/")[0].endswith(".dist-info"):
            extras[name.rpartition("/")[2]] = data.decode("utf-8", errors="replace")
        else:
            files[in_package(name)] = data
    return files, extras


def from_sdist(members: Mapping[str, bytes], package: str | None) -> tuple[Files, dict[str, str]]:
    """Split what was read of an sdist or a source directory into source and extras.

    Paths are relative to the top of the source tree (in an sdist, below its one directory). With
    a package, only its files are kept, wherever below the top it lies; else those of every
    package, without tests, documentation and examples.
    """
    extras = {
        name: data.decode("utf-8", errors="replace")
        for name, data in members.items()
        if "/" not in name and name in EXTRAS
    }
    if "PKG-INFO" in extras:
        # An sdist calls its metadata by another name than a wheel does.
        extras["METADATA"] = extras.pop("PKG-INFO")
    sources = {name: data for name, data in members.items() if name.endswith(".py")}
    files: Files = {}
    for root in source_roots(sources):
        for name, data in sources.items():
            path = name[len(root) :] if name.startswith(root) else ""
            if not path or (package is not None and not _belongs(path, package)):
                continue
            if package is None and _outside(path, root):
                continue
            files.setdefault(path, data)
        if files:
            break
    return files, extras


def source_roots(names: Iterable[str]) -> list[str]:
    """Return the prefixes below which packages may lie, the likeliest first: `src/`, then the top.

    A directory without `__init__.py` that only groups packages (`python/`, `lib/`) counts too.
    """
    names = list(names)
    packages = {n.rpartition("/")[0] for n in names if n.rpartition("/")[2] == "__init__.py"}
    parents = {p.rpartition("/")[0] for p in packages if p.rpartition("/")[0] not in packages}
    grouping = sorted(p for p in parents if p and "/" not in p and p not in _NOT_SOURCE)
    roots = [f"{p}/" for p in ("src", "python", "lib") if p in grouping]
    if "src" in {n.partition("/")[0] for n in names} and "src/" not in roots:
        roots.insert(0, "src/")
    return [*roots, ""]


def _belongs(path: str, package: str) -> bool:
    return path.startswith(f"{package}/") or path == f"{package}.py"


def _outside(path: str, root: str) -> bool:
    """Whether a file of a source tree is not part of what gets installed."""
    parts = PurePosixPath(path).parts
    if parts[0] in _NOT_SOURCE or any(part.startswith(".") for part in parts):
        return True
    return root == "" and len(parts) == 1 and parts[0] in {"setup.py", "conftest.py", "noxfile.py"}
