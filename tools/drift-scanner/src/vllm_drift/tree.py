"""The Python source of one release, held in memory or in a pack file, and read as text only.

Knows bytes, paths and dotted names. Must not know where the source came from (`sources`,
`releases`), nor what the code means.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import tokenize
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import InvalidVersion, Version

__all__ = ["CorruptPack", "SourceTree", "dotted_name", "pack_bytes"]

_MAGIC = b"vllm-drift pack 2\n"


class CorruptPack(ValueError):
    """A pack file is not what was written: truncated, altered, or of another format version."""


def dotted_name(path: str) -> str:
    """Return the module name of a path below the root: `vllm/v1/__init__.py` -> `vllm.v1`."""
    stem = path.removesuffix(".py")
    return stem.removesuffix("/__init__").replace("/", ".")


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
        blob: bytes,
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
        h = hashlib.blake2b(digest_size=16)
        for entry in self._entries.values():
            h.update(f"{entry.path}\0{entry.digest}\n".encode())
        return h.hexdigest()

    def files_containing(self, *substrings: str, any_of: bool = False) -> list[str]:
        """Return the modules whose bytes contain all of the substrings (any of them with `any_of`).

        A plain text search, the cheap filter in front of parsing. The first call decompresses
        everything, which costs ten times the search; keep the answer by `fingerprint`.
        """
        wanted = [s.encode() for s in substrings]
        combine = any if any_of else all
        found = []
        for dotted in self._entries:
            data = self.data(dotted) or b""
            if combine(w in data for w in wanted):
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
        return tree

    def _inflated(self, entry: _Entry) -> bytes:
        raw = self._blob[entry.offset : entry.offset + entry.length]
        try:
            return zlib.decompress(raw, -zlib.MAX_WBITS, entry.size)
        except zlib.error as e:
            raise CorruptPack(f"{entry.path} of {self.label} does not decompress: {e}") from e

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
            digest = hashlib.blake2b(data, digest_size=16).hexdigest()
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
        """Open a pack. Raises CorruptPack if it is damaged and OSError if it cannot be read."""
        return _unpack(path.read_bytes(), path)


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


def pack_bytes(tree: SourceTree) -> bytes:
    """Serialise a tree: magic, a hash of the rest, a compressed JSON header, and the blob."""
    header: dict[str, Any] = {
        "label": tree.label,
        "version": None if tree.version is None else str(tree.version),
        "package": tree.package,
        "origin": tree.origin,
        "notes": list(tree.notes),
        "extras": tree.extras,
        "files": [tuple(entry) for entry in tree._entries.values()],
    }
    head = zlib.compress(json.dumps(header).encode(), 6)
    body = struct.pack(">I", len(head)) + head + tree._blob
    return _MAGIC + hashlib.blake2b(body, digest_size=16).digest() + body


def _unpack(data: bytes, path: Path) -> SourceTree:
    start = len(_MAGIC) + 16
    if data[: len(_MAGIC)] != _MAGIC or len(data) < start + 4:
        raise CorruptPack(f"{path} is not a pack of this format version")
    body = data[start:]
    if hashlib.blake2b(body, digest_size=16).digest() != data[len(_MAGIC) : start]:
        raise CorruptPack(f"{path} is damaged: its hash does not match")
    (length,) = struct.unpack_from(">I", body)
    try:
        header = json.loads(zlib.decompress(body[4 : 4 + length]))
        version = None if header["version"] is None else Version(header["version"])
    except (zlib.error, ValueError, KeyError, InvalidVersion) as e:
        raise CorruptPack(f"{path} has a damaged header: {e}") from e
    entries = {dotted_name(fields[0]): _Entry(*fields) for fields in header["files"]}
    return SourceTree(
        label=header["label"],
        version=version,
        package=header["package"],
        entries=entries,
        blob=body[4 + length :],
        extras=header["extras"],
        origin=header["origin"],
        notes=tuple(header["notes"]),
    )
