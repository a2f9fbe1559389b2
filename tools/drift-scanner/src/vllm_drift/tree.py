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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.version import InvalidVersion, Version

__all__ = ["CorruptPack", "SourceTree", "dotted_name", "pack_bytes"]

_MAGIC = b"vllm-drift pack 1\n"
_CHUNK = 1 << 20
"""Target size of a chunk before compression, in bytes: one module costs one chunk's decompression
(about 3 ms).
"""


class CorruptPack(ValueError):
    """A pack file is not what was written: truncated, altered, or of another format version."""


def dotted_name(path: str) -> str:
    """Return the module name of a path below the root: `vllm/v1/__init__.py` -> `vllm.v1`."""
    parts = list(PurePosixPath(path).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


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
        index: Mapping[str, tuple[str, int, int, int, str]],
        chunks: list[bytes],
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
        self._index = dict(index)
        self._chunks = chunks
        self._open: dict[int, bytes] = {}

    def __repr__(self) -> str:
        return f"SourceTree({self.label!r}, package={self.package!r}, modules={len(self._index)})"

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, dotted: object) -> bool:
        return dotted in self._index

    def modules(self) -> Iterator[str]:
        """Yield the dotted name of every module, in the order of their paths."""
        return iter(self._index)

    def text(self, dotted: str) -> str | None:
        """Return a module's source, decoded as Python would, or None where there is no such module.

        A file that is not valid in its declared encoding is decoded with replacement characters.
        """
        data = self.data(dotted)
        return None if data is None else _decode(data)

    def data(self, dotted: str) -> bytes | None:
        """Return a module's bytes, or None where there is no such module."""
        entry = self._index.get(dotted)
        if entry is None:
            return None
        _, chunk, start, length, _ = entry
        return self._chunk(chunk)[start : start + length]

    def path(self, dotted: str) -> str:
        """Return the module's path (`vllm/v1/core.py`). Raises KeyError if there is none."""
        return self._index[dotted][0]

    def is_package(self, dotted: str) -> bool:
        """Whether the module is an `__init__.py`. False for a module that is not there."""
        entry = self._index.get(dotted)
        return entry is not None and entry[0].endswith("__init__.py")

    def digest(self, dotted: str) -> str:
        """Return a hash of the module's bytes, 32 hex digits. Raises KeyError if there is none."""
        return self._index[dotted][4]

    @property
    def fingerprint(self) -> str:
        """A hash over all paths and contents, 32 hex digits: equal trees, equal fingerprints."""
        h = hashlib.blake2b(digest_size=16)
        for path, _, _, _, digest in self._index.values():
            h.update(f"{path}\0{digest}\n".encode())
        return h.hexdigest()

    def files_containing(self, *substrings: str, any_of: bool = False) -> list[str]:
        """Return the modules whose bytes contain all of the substrings (any of them with `any_of`).

        A plain text search, the cheap filter in front of parsing: about 10 ms per substring for all
        of vLLM.
        """
        wanted = [s.encode() for s in substrings]
        combine = any if any_of else all
        found = []
        for dotted, (_, chunk, start, length, _) in self._index.items():
            data, end = self._chunk(chunk), start + length
            if combine(data.find(w, start, end) >= 0 for w in wanted):
                found.append(dotted)
        return found

    def release_memory(self) -> None:
        """Forget decompressed source; it is decompressed again when asked for."""
        self._open.clear()

    def relabel(self, label: str, version: Version | None) -> SourceTree:
        """Return the same source under another label and version."""
        return SourceTree(
            label=label,
            version=version,
            package=self.package,
            index=self._index,
            chunks=self._chunks,
            extras=self.extras,
            origin=self.origin,
            notes=self.notes,
        )

    def _chunk(self, number: int) -> bytes:
        data = self._open.get(number)
        if data is None:
            try:
                data = zlib.decompress(self._chunks[number])
            except zlib.error as e:
                raise CorruptPack(f"chunk {number} of {self.label} does not decompress: {e}") from e
            self._open[number] = data
        return data

    @classmethod
    def from_files(
        cls,
        files: Mapping[str, bytes] | Iterable[tuple[str, bytes]],
        *,
        label: str,
        package: str,
        version: Version | None = None,
        extras: Mapping[str, str] | None = None,
        origin: str = "",
        notes: tuple[str, ...] = (),
    ) -> SourceTree:
        """Build a tree from paths below the import root and their bytes; paths that do not end in
        `.py` are refused.
        """
        index, chunks = _chunked(dict(files))
        return cls(
            label=label,
            version=version,
            package=package,
            index=index,
            chunks=chunks,
            extras=extras or {},
            origin=origin,
            notes=notes,
        )

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


def _chunked(
    files: Mapping[str, bytes],
) -> tuple[dict[str, tuple[str, int, int, int, str]], list[bytes]]:
    index: dict[str, tuple[str, int, int, int, str]] = {}
    chunks: list[bytes] = []
    pending: list[bytes] = []
    size = 0
    for path in sorted(files):
        if not path.endswith(".py"):
            raise ValueError(f"not a Python source path: {path!r}")
        data = files[path]
        if size and size + len(data) > _CHUNK:
            chunks.append(zlib.compress(b"".join(pending), 6))
            pending, size = [], 0
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        name = dotted_name(path)
        # A package wins over a module of the same name, as it does at import.
        if name not in index or path.endswith("__init__.py"):
            index[name] = (path, len(chunks), size, len(data), digest)
        pending.append(data)
        size += len(data)
    if pending:
        chunks.append(zlib.compress(b"".join(pending), 6))
    return index, chunks


def pack_bytes(tree: SourceTree) -> bytes:
    """Serialise a tree: magic, a hash of the rest, a compressed JSON header, and the compressed
    chunks.
    """
    header: dict[str, Any] = {
        "label": tree.label,
        "version": None if tree.version is None else str(tree.version),
        "package": tree.package,
        "origin": tree.origin,
        "notes": list(tree.notes),
        "extras": tree.extras,
        "files": list(tree._index.values()),
        "chunks": [len(c) for c in tree._chunks],
    }
    head = zlib.compress(json.dumps(header).encode(), 6)
    body = struct.pack(">I", len(head)) + head + b"".join(tree._chunks)
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
    chunks, at = [], 4 + length
    for size in header["chunks"]:
        chunks.append(body[at : at + size])
        at += size
    return SourceTree(
        label=header["label"],
        version=version,
        package=header["package"],
        index={dotted_name(entry[0]): tuple(entry) for entry in header["files"]},
        chunks=chunks,
        extras=header["extras"],
        origin=header["origin"],
        notes=tuple(header["notes"]),
    )
