"""The Python source of one release, held in memory or in a pack file, and read as text only.

Knows bytes, paths and dotted names. Must not know where the source came from (`sources`,
`releases`), nor what the code means.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import tokenize
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from packaging.version import InvalidVersion, Version

__all__ = [
    "CorruptPack",
    "PackSummary",
    "SearchStore",
    "SourceTree",
    "dotted_name",
    "pack_bytes",
    "read_summary",
]

_MAGIC = b"vllm-drift pack 3\n"
_HEAD = struct.Struct(">16sIIQ")
"""After the magic: hash of summary and index, then the lengths of summary, index and blob."""


class CorruptPack(ValueError):
    """A pack file is not what was written: truncated, altered, or of another format version.

    `path` is the file, where it is known.
    """

    def __init__(self, message: str, path: Path | None = None) -> None:
        super().__init__(message, path)
        self.path = path

    def __str__(self) -> str:
        return str(self.args[0])


def dotted_name(path: str) -> str:
    """Return the module name of a path below the root: `vllm/v1/__init__.py` -> `vllm.v1`."""
    stem = path.removesuffix(".py")
    return stem.removesuffix("/__init__").replace("/", ".")


class SearchStore(Protocol):
    """Where answers are kept: `vllm_drift.cache.Cache`, which knows this module."""

    def get(self, kind: str, key: str) -> bytes | None:
        """Return what was stored under the key, or None."""

    def put(self, kind: str, key: str, data: bytes) -> None:
        """Store bytes under the key."""


class _Entry(NamedTuple):
    """Where a module lies in the blob: offset, length there, size in bytes, and its hash."""

    path: str
    offset: int
    length: int
    size: int
    digest: str


class SourceTree:
    """An immutable view of one release's Python source.

    Attributes:
        label: What to call the release in reports: `0.33.0`, `v0.33.0-12-gabc`, `installed`.
        version: Its version, or None where the source does not say.
        package: The import package that it is about (`vllm`), or the distribution's name for a
            plugin, which may have several packages.
        extras: Text files beside the modules that say something about the distribution, by base
            name: `METADATA`, `entry_points.txt`, `pyproject.toml`, `setup.py`, `setup.cfg`, where
            they exist.

    Build one with `from_files` or `from_pack`. All methods are cheap to call twice; `text` and
    `files_containing` decompress what they need and keep it until `release_memory`.
    """

    def __init__(
        self,
        *,
        label: str,
        version: Version | None,
        package: str,
        entries: Mapping[str, _Entry],
        blob: bytes | Path,
        extras: Mapping[str, str],
        origin: str = "",
        notes: tuple[str, ...] = (),
    ) -> None:
        self.label = label
        self.version = version
        self.package = package
        self.extras = dict(extras)
        self.origin = origin
        self.notes = notes
        self._entries = dict(entries)
        self._blob = blob
        self._pack: Path | None = None
        self._searches: SearchStore | None = None
        self._fingerprint = ""
        self._open: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return f"SourceTree({self.label!r}, package={self.package!r}, modules={len(self._entries)})"

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, dotted: object) -> bool:
        return dotted in self._entries

    def modules(self) -> Iterator[str]:
        """Yield the dotted name of every module, in the order of their paths."""
        return iter(self._entries)

    def text(self, dotted: str) -> str | None:
        """Return a module's source, decoded as Python would, or None where there is no such module.

        A file that is not valid in its declared encoding is decoded with replacement characters.
        """
        data = self.data(dotted)
        return None if data is None else _decode(data)

    def data(self, dotted: str) -> bytes | None:
        """Return a module's bytes, or None where there is no such module."""
        data = self._open.get(dotted)
        if data is None:
            entry = self._entries.get(dotted)
            if entry is None:
                return None
            data = self._open[dotted] = self._inflated(entry)
        return data

    def path(self, dotted: str) -> str:
        """Return the module's path (`vllm/v1/core.py`). Raises KeyError if there is none."""
        return self._entries[dotted].path

    def is_package(self, dotted: str) -> bool:
        """Whether the module is an `__init__.py`. False for a module that is not there."""
        entry = self._entries.get(dotted)
        return entry is not None and entry.path.endswith("__init__.py")

    def digest(self, dotted: str) -> str:
        """Return a hash of the module's bytes, 32 hex digits. Raises KeyError if there is none."""
        return self._entries[dotted].digest

    @property
    def fingerprint(self) -> str:
        """A hash over all paths and contents, 32 hex digits: equal trees, equal fingerprints."""
        if not self._fingerprint:
            h = hashlib.blake2b(digest_size=16)
            for entry in self._entries.values():
                h.update(f"{entry.path}\0{entry.digest}\n".encode())
            self._fingerprint = h.hexdigest()
        return self._fingerprint

    def files_containing(self, *substrings: str, any_of: bool = False) -> list[str]:
        """Return the modules whose bytes contain all of the substrings (any of them with `any_of`).

        A plain text search, the cheap filter in front of parsing. The first call decompresses
        everything, which costs ten times the search; answers are kept where `keep_searches` says.
        """
        if self._searches is None:
            return self._search(substrings, any_of)
        key = json.dumps(["search 1", self.fingerprint, any_of, sorted(substrings)])
        stored = self._searches.get("facts", key)
        if stored is not None:
            return list(json.loads(stored))
        found = self._search(substrings, any_of)
        self._searches.put("facts", key, json.dumps(found).encode())
        return found

    def keep_searches(self, store: SearchStore) -> None:
        """Keep the answers of `files_containing` in a cache, under the tree's fingerprint."""
        self._searches = store

    def _search(self, substrings: tuple[str, ...], any_of: bool) -> list[str]:
        wanted = [s.encode() for s in substrings]
        found = []
        for dotted in self._entries:
            data = self.data(dotted) or b""
            for word in wanted:
                # Any word decides where one is enough, a missing one where all are needed.
                if (word in data) == any_of:
                    if any_of:
                        found.append(dotted)
                    break
            else:
                if not any_of:
                    found.append(dotted)
        return found

    def release_memory(self) -> None:
        """Forget decompressed source; it is decompressed again when asked for."""
        self._open.clear()

    def relabel(self, label: str, version: Version | None) -> SourceTree:
        """Return the same source under another label and version."""
        tree = SourceTree(
            label=label,
            version=version,
            package=self.package,
            entries=self._entries,
            blob=self._blob,
            extras=self.extras,
            origin=self.origin,
            notes=self.notes,
        )
        tree._open = self._open
        tree._fingerprint = self._fingerprint
        tree._searches = self._searches
        return tree

    def _inflated(self, entry: _Entry) -> bytes:
        if isinstance(self._blob, Path):
            self._pack, self._blob = self._blob, _read_blob(self._blob)
        raw = self._blob[entry.offset : entry.offset + entry.length]
        try:
            data = zlib.decompress(raw, -zlib.MAX_WBITS, entry.size)
        except zlib.error as e:
            raise CorruptPack(
                f"{entry.path} of {self.label} does not decompress: {e}", self._pack
            ) from e
        if _digest(data) != entry.digest:
            raise CorruptPack(f"{entry.path} of {self.label} is not what was stored", self._pack)
        return data

    def _blob_bytes(self) -> bytes:
        return _read_blob(self._blob) if isinstance(self._blob, Path) else self._blob

    @classmethod
    def from_files(
        cls,
        files: Mapping[str, bytes],
        *,
        label: str,
        package: str,
        version: Version | None = None,
        deflated: Mapping[str, bytes] | None = None,
        extras: Mapping[str, str] | None = None,
        origin: str = "",
        notes: tuple[str, ...] = (),
    ) -> SourceTree:
        """Build a tree from paths below the import root and their bytes.

        `deflated` may hold the raw deflate stream of some of them, as a zip file has it, which
        saves compressing them again. Raises ValueError for a path that does not end in `.py`.
        """
        deflated = deflated or {}
        entries: dict[str, _Entry] = {}
        pieces: list[bytes] = []
        kept: dict[str, bytes] = {}
        offset = 0
        for path in sorted(files):
            if not path.endswith(".py"):
                raise ValueError(f"not a Python source path: {path!r}")
            name = dotted_name(path)
            # A package wins over a module of the same name, as it does at import.
            if name in entries and not path.endswith("__init__.py"):
                continue
            data = files[path]
            raw = deflated.get(path) or _deflate(data)
            digest = _digest(data)
            entries[name] = _Entry(path, offset, len(raw), len(data), digest)
            kept[name] = data
            pieces.append(raw)
            offset += len(raw)
        tree = cls(
            label=label,
            version=version,
            package=package,
            entries=entries,
            blob=b"".join(pieces),
            extras=extras or {},
            origin=origin,
            notes=notes,
        )
        tree._open = kept
        return tree

    @classmethod
    def from_pack(cls, path: Path) -> SourceTree:
        """Open a pack file: only its index is read now, its source when it is asked for.

        Raises CorruptPack if the pack is damaged, OSError if it cannot be read. Damage within a
        module's source is found, and raised, when that module is asked for.
        """
        return _unpack(path)


def _decode(data: bytes) -> str:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError:
        encoding = "utf-8"
    text = data.decode(encoding, errors="replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def pack_bytes(tree: SourceTree) -> bytes:
    """Serialise a tree: magic, head, summary (JSON), index (compressed JSON), blob."""
    summary = json.dumps(
        {
            "label": tree.label,
            "version": None if tree.version is None else str(tree.version),
            "package": tree.package,
            "origin": tree.origin,
            "notes": list(tree.notes),
            "modules": len(tree),
            "fingerprint": tree.fingerprint,
        }
    ).encode()
    contents: dict[str, Any] = {
        "extras": tree.extras,
        "files": [tuple(entry) for entry in tree._entries.values()],
    }
    index = zlib.compress(json.dumps(contents).encode(), 6)
    blob = tree._blob_bytes()
    check = hashlib.blake2b(summary + index, digest_size=16).digest()
    return _MAGIC + _HEAD.pack(check, len(summary), len(index), len(blob)) + summary + index + blob


@dataclass(frozen=True)
class PackSummary:
    """What a pack says about itself without its index being read."""

    label: str
    version: Version | None
    package: str
    origin: str
    notes: tuple[str, ...]
    modules: int
    fingerprint: str


def read_summary(path: Path) -> PackSummary:
    """Read the summary of a pack file. Raises CorruptPack and OSError as `from_pack` does."""
    with path.open("rb") as f:
        _, length, _ = _read_head(f, path)
        return _summary(f.read(length), path)


def _summary(data: bytes, path: Path) -> PackSummary:
    try:
        found = json.loads(data)
        version = None if found["version"] is None else Version(found["version"])
        return PackSummary(
            found["label"],
            version,
            found["package"],
            found["origin"],
            tuple(found["notes"]),
            found["modules"],
            found["fingerprint"],
        )
    except (ValueError, KeyError, TypeError, InvalidVersion) as e:
        raise CorruptPack(f"{path} has a damaged summary: {e}", path) from e


def _read_head(f: IO[bytes], path: Path) -> tuple[bytes, int, int]:
    """Check magic and size; return the hash and lengths of summary and index."""
    start = f.read(len(_MAGIC) + _HEAD.size)
    if not start.startswith(_MAGIC) or len(start) < len(_MAGIC) + _HEAD.size:
        raise CorruptPack(f"{path} is not a pack of this format version", path)
    check, summary, index, blob = _HEAD.unpack_from(start, len(_MAGIC))
    size = os.fstat(f.fileno()).st_size
    if size != len(start) + summary + index + blob:
        raise CorruptPack(f"{path} is damaged: it has {size} bytes, not what its head says", path)
    return check, summary, index


def _unpack(path: Path) -> SourceTree:
    with path.open("rb") as f:
        check, summary_length, index_length = _read_head(f, path)
        summary_bytes, index = f.read(summary_length), f.read(index_length)
    if hashlib.blake2b(summary_bytes + index, digest_size=16).digest() != check:
        raise CorruptPack(f"{path} is damaged: its hash does not match", path)
    summary = _summary(summary_bytes, path)
    try:
        contents = json.loads(zlib.decompress(index))
        entries = {dotted_name(fields[0]): _Entry(*fields) for fields in contents["files"]}
    except (zlib.error, ValueError, KeyError, TypeError) as e:
        raise CorruptPack(f"{path} has a damaged index: {e}", path) from e
    tree = SourceTree(
        label=summary.label,
        version=summary.version,
        package=summary.package,
        entries=entries,
        blob=path,
        extras=contents["extras"],
        origin=summary.origin,
        notes=summary.notes,
    )
    tree._fingerprint = summary.fingerprint
    return tree


def _read_blob(path: Path) -> bytes:
    try:
        with path.open("rb") as f:
            _, summary, index = _read_head(f, path)
            f.seek(summary + index, os.SEEK_CUR)
            return f.read()
    except OSError as e:
        raise CorruptPack(f"{path} cannot be read any more: {e}", path) from e
