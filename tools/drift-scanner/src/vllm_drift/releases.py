"""Which releases of a distribution the configured indexes hold, and which of them a user means.

Knows index pages, file names and versions. Must not know what is inside a file (`_wheel`,
`sources`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit
from urllib.request import url2pathname

from packaging.specifiers import InvalidSpecifier, Specifier, SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from vllm_drift._http import Http, redact
from vllm_drift._pipconf import IndexSettings
from vllm_drift.cache import Cache
from vllm_drift.errors import NetworkError, NoSuchRelease, SourceError

__all__ = ["DistFile", "Release", "ReleaseIndex", "is_release_spec", "select"]

_JSON_TYPES = {"application/vnd.pypi.simple.v1+json", "application/json"}
_ACCEPT = ", ".join(
    (
        "application/vnd.pypi.simple.v1+json",
        "application/vnd.pypi.simple.v1+html;q=0.2",
        "text/html;q=0.1",
    )
)


@dataclass(frozen=True)
class DistFile:
    """One file of a release."""

    filename: str
    url: str
    version: Version
    is_wheel: bool
    build: tuple[int, str] = (0, "")
    """The wheel's build number (`-1` in the file name); (0, "") where there is none."""
    platform: str = ""
    size: int | None = None
    """In bytes, where the index says it."""
    sha256: str | None = None
    yanked: str | None = None
    """The reason (perhaps empty) where the file was yanked, else None."""

    @property
    def local_path(self) -> Path | None:
        """The path of a file that is not on a server."""
        parts = urlsplit(self.url)
        return Path(url2pathname(parts.path)) if parts.scheme == "file" else None


@dataclass(frozen=True)
class Release:
    """The files of one version of a distribution, those worth trying first in front."""

    dist: str
    version: Version
    files: tuple[DistFile, ...]

    @property
    def label(self) -> str:
        """The version as text."""
        return str(self.version)

    @property
    def yanked(self) -> str | None:
        """The reason where every file was yanked, else None. May be empty."""
        reasons = [f.yanked for f in self.files]
        if any(r is None for r in reasons):
            return None
        return next((r for r in reasons if r), "")

    @property
    def usable(self) -> tuple[DistFile, ...]:
        """The files to read, in order: without the yanked ones, unless there are no others."""
        kept = tuple(f for f in self.files if f.yanked is None)
        return kept or self.files


class ReleaseIndex:
    """The package indexes and link pages that pip is configured with.

    With `offline`, only what was seen before is used.
    """

    def __init__(
        self, settings: IndexSettings, http: Http, cache: Cache, *, offline: bool = False
    ) -> None:
        self._settings = settings
        self._http = http
        self._cache = cache
        self._offline = offline

    @property
    def identity(self) -> str:
        """A text that differs between configurations that may hold other files under the same
        names.
        """
        return " ".join(self._settings.index_urls + self._settings.find_links)

    def releases(self, dist: str) -> list[Release]:
        """Return every release, the oldest first. Raises NoSuchRelease where there is none.

        An extra index that cannot be read is an error too, as for pip: what it holds could be the
        newest release.
        """
        name = canonicalize_name(dist)
        files: dict[str, DistFile] = {}
        for url in self._settings.index_urls:
            for file in self._page(f"{url}/{name}/", name):
                files.setdefault(file.filename, file)
        for place in self._settings.find_links:
            for file in self._links(place, name):
                files.setdefault(file.filename, file)
        if not files:
            places = [redact(u) for u in self._settings.index_urls + self._settings.find_links]
            raise NoSuchRelease(
                f"no release of {dist} in {', '.join(places) or 'the configured places'}. Is the "
                f"name spelled as in 'pip install {dist}', and does 'pip config list' show the "
                f"index that has it?"
            )
        return _grouped(name, files.values())

    def _page(self, url: str, name: str) -> list[DistFile]:
        local = _local_directory(url)
        if local is not None:
            page = local / "index.html"
            if not page.is_file():
                return _files_in(local, name) if local.is_dir() else []
            return _parse(name, page.read_bytes(), "text/html", url)
        stored = self._cache.get("index", url)
        known: dict[str, Any] = json.loads(stored) if stored else {}
        if not {"body", "type", "url"} <= known.keys():
            known = {}
        if self._offline:
            if not known:
                raise SourceError(
                    f"{redact(url)} was never read before, and --offline forbids to read it now"
                )
            return _parse(name, known["body"].encode(), known["type"], known["url"])
        headers = {"Accept": _ACCEPT}
        if known.get("etag"):
            headers["If-None-Match"] = known["etag"]
        answer = self._http.get(url, headers)
        if answer.status == 304:
            return _parse(name, known["body"].encode(), known["type"], known["url"])
        if answer.status == 404:
            return []
        if answer.status != 200:
            raise NetworkError(
                f"the index page {redact(url)} answers {answer.status}, expected 200. Check the "
                f"address and the credentials that pip is configured with (pip config list)."
            )
        known = {
            "etag": answer.headers.get("ETag"),
            "type": answer.headers.get("Content-Type", "text/html"),
            "url": answer.url,
            "body": answer.body.decode("utf-8", errors="replace"),
        }
        files = _parse(name, answer.body, known["type"], answer.url)
        self._cache.put("index", url, json.dumps(known).encode())
        return files

    def _links(self, place: str, name: str) -> list[DistFile]:
        """Read one `find-links` entry: a directory, a `file:` URL or a page of links."""
        if urlsplit(place).scheme in {"http", "https"}:
            if self._offline:
                return []
            answer = self._http.get(place)
            if answer.status != 200:
                return []
            return _parse(name, answer.body, "text/html", answer.url)
        local = _local_directory(place) or Path(place)
        if local.is_dir():
            return _files_in(local, name)
        if local.is_file():
            return _parse(name, local.read_bytes(), "text/html", local.resolve().as_uri())
        return []


def is_release_spec(text: str) -> bool:
    """Whether the text names releases of the index: `latest`, a version or a range."""
    if text == "latest":
        return True
    try:
        Version(text)
    except InvalidVersion:
        try:
            return bool(SpecifierSet(text))
        except InvalidSpecifier:
            return False
    return True


def select(
    spec: str, releases: Sequence[Release], *, pre: bool = False
) -> tuple[list[Release], list[str]]:
    """Return the releases that `spec` means, the oldest first, and notes for the user.

    `latest` is the newest final release, a version means exactly that one, and a range
    (`>=0.30,<0.32`) every final release in it. Pre-releases count with `pre` or when named exactly.
    A yanked release is taken only when named exactly, with a note. Raises NoSuchRelease, naming the
    nearest ones.
    """
    offered = [r for r in releases if r.yanked is None and (pre or not r.version.is_prerelease)]
    offered = _one_per_public_version(offered)
    if spec == "latest":
        if not offered:
            raise NoSuchRelease(_nothing(spec, releases, pre))
        return offered[-1:], []
    exact = _exact(spec)
    if exact is not None:
        return _pinned(exact, releases)
    try:
        wanted = SpecifierSet(spec)
    except InvalidSpecifier:
        raise SourceError(
            f"{spec!r} is neither 'latest' nor a version (0.33.0) nor a range ('>=0.30,<0.32')"
        ) from None
    found = [r for r in offered if wanted.contains(r.version, prereleases=True)]
    if not found:
        raise NoSuchRelease(_nothing(spec, releases, pre))
    return found, []


def _exact(spec: str) -> Version | None:
    try:
        return Version(spec)
    except InvalidVersion:
        pass
    try:
        pin = Specifier(spec)
    except InvalidSpecifier:
        return None
    if pin.operator not in {"==", "==="} or pin.version.endswith(".*"):
        return None
    try:
        return Version(pin.version)
    except InvalidVersion:
        return None


def _pinned(version: Version, releases: Sequence[Release]) -> tuple[list[Release], list[str]]:
    same = [r for r in releases if r.version == version]
    if not same and version.local is None:
        # `0.33.0` also means `0.33.0+cpu` where nothing else is offered, as for pip.
        same = [r for r in releases if r.version.public == version.public]
    if not same:
        raise NoSuchRelease(_nearest(version, releases))
    chosen = same[-1]
    notes = []
    if chosen.yanked is not None:
        notes.append(f"{chosen.label} was yanked: {chosen.yanked or 'no reason given'}")
    return [chosen], notes


def _one_per_public_version(releases: Sequence[Release]) -> list[Release]:
    """Keep one of `0.33.0` and `0.33.0+cpu`: the one without a local label, else the last."""
    kept: dict[str, Release] = {}
    for release in releases:
        public = release.version.public
        if public not in kept or kept[public].version.local is not None:
            kept[public] = release
    return list(kept.values())


def _nothing(spec: str, releases: Sequence[Release], pre: bool) -> str:
    dist = releases[0].dist if releases else "the distribution"
    finals = [r for r in releases if not r.version.is_prerelease and r.yanked is None]
    hint = "" if pre else " Pre-releases count with --pre."
    newest = finals[-1] if finals else (releases[-1] if releases else None)
    has = f" It has {len(finals)} final releases; the newest is {newest.label}." if newest else ""
    return f"no release of {dist} fits {spec!r}.{has}{hint}"


def _nearest(version: Version, releases: Sequence[Release]) -> str:
    below = [r.label for r in releases if r.version < version][-2:]
    above = [r.label for r in releases if r.version > version][:2]
    dist = releases[0].dist if releases else "the distribution"
    nearest = ", ".join(below + above) or "none"
    return f"{dist} has no release {version}; the nearest are {nearest}"


def _grouped(dist: str, files: Iterable[DistFile]) -> list[Release]:
    by_version: dict[Version, list[DistFile]] = {}
    for file in files:
        by_version.setdefault(file.version, []).append(file)
    return [
        Release(dist, version, tuple(sorted(by_version[version], key=_preference)))
        for version in sorted(by_version)
    ]


def _preference(file: DistFile) -> tuple[Any, ...]:
    """Order a release's files: wheels, highest build number, pure ones, x86-64 Linux, by name.

    Every platform's wheel holds the same Python files, as far as a user of one of them can tell; a
    fixed order makes two runs read the same file.
    """
    places = ("any", "manylinux", "linux", "")
    place = next(i for i, p in enumerate(places) if p in file.platform)
    number, tag = file.build
    return (
        not file.is_wheel,
        -number,
        [-ord(c) for c in tag],
        place,
        "x86_64" not in file.platform,
        file.filename,
    )


def _parse(name: str, body: bytes, content_type: str, url: str) -> list[DistFile]:
    try:
        if content_type.partition(";")[0].strip() in _JSON_TYPES:
            return _parse_json(name, json.loads(body), url)
        return _parse_html(name, body, url)
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise SourceError(f"{redact(url)} is not an index page of {name}: {e!r}") from e


def _parse_json(name: str, page: dict[str, Any], url: str) -> list[DistFile]:
    """Read a page of the JSON simple API (PEP 691, PEP 700).

    Read here, because importing a library that does it takes longer than reading a release.
    """
    version = page["meta"]["api-version"]
    if not version.startswith("1."):
        raise ValueError(f"index API version {version}, expected 1.x")
    files = []
    for entry in page["files"]:
        yanked = entry.get("yanked", False)
        reason = None if yanked is False else ("" if yanked is True else str(yanked))
        address, sha256 = urljoin(url, entry["url"]), entry["hashes"].get("sha256")
        file = _file(name, entry["filename"], address, entry.get("size"), sha256, reason)
        if file is not None:
            files.append(file)
    return files


def _parse_html(name: str, body: bytes, url: str) -> list[DistFile]:
    """Read a page of the HTML simple API (PEP 503), or any page with links to files."""
    from pypi_simple import ProjectPage, UnsupportedRepoVersionError

    try:
        page = ProjectPage.from_html(name, body, url)
    except UnsupportedRepoVersionError as e:
        raise ValueError(str(e)) from e
    files = []
    for p in page.packages:
        reason = (p.yanked_reason or "") if p.is_yanked else None
        file = _file(name, p.filename, p.url, p.size, p.digests.get("sha256"), reason)
        if file is not None:
            files.append(file)
    return files


def _file(
    name: str, filename: str, url: str, size: int | None, sha256: str | None, yanked: str | None
) -> DistFile | None:
    """Read a file name; None for what is neither a wheel nor an sdist of that distribution."""
    try:
        if filename.endswith(".whl"):
            found, version, build, tags = parse_wheel_filename(filename)
            if found != name:
                return None
            platform = sorted(t.platform for t in tags)[0]
            number = (build[0], build[1]) if build else (0, "")
            return DistFile(filename, url, version, True, number, platform, size, sha256, yanked)
        found, version = parse_sdist_filename(filename)
        if found != name:
            return None
        return DistFile(filename, url, version, False, size=size, sha256=sha256, yanked=yanked)
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None


def _files_in(directory: Path, name: str) -> list[DistFile]:
    files = []
    for path in sorted(directory.iterdir()):
        file = _file(name, path.name, path.resolve().as_uri(), None, None, None)
        if file is not None:
            files.append(file)
    return files


def _local_directory(url: str) -> Path | None:
    parts = urlsplit(url)
    return Path(url2pathname(parts.path)) if parts.scheme == "file" else None
