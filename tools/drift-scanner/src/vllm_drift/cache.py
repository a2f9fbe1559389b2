"""The on-disk cache: packs of releases, answers of the index, and facts about modules by content.

Every write is atomic (a temporary file in the same directory, then a rename), so readers in other
processes see the old file, the new file or none. What is read back is checked; a damaged entry is
deleted and counts as absent. Knows nothing of what it stores.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from vllm_drift.tree import CorruptPack, SourceTree, pack_bytes

__all__ = ["Cache", "CacheUsage", "default_cache_dir"]

_SAFE = re.compile(r"[^A-Za-z0-9._+-]+")


def default_cache_dir() -> Path:
    """Return `$VLLM_DRIFT_CACHE` if set, else the platform's cache directory for this program."""
    configured = os.environ.get("VLLM_DRIFT_CACHE")
    return Path(configured) if configured else platformdirs.user_cache_path("vllm-drift")


@dataclass(frozen=True)
class CacheUsage:
    """How much one kind of entry takes: number of files and bytes."""

    files: int
    bytes: int


class Cache:
    """A directory of cache entries; cheap, picklable, and safe to use from many processes at once.

    `Cache(None)` stores nothing and finds nothing (`--no-cache`).
    """

    kinds = ("packs", "index", "facts", "results")

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cache) and other.directory == self.directory

    def __hash__(self) -> int:
        return hash((Cache, self.directory))

    def __repr__(self) -> str:
        return f"Cache({self.directory!r})"

    # packs ----------------------------------------------------------------------------------------

    def pack_path(self, key: str) -> Path | None:
        """Return where the pack of `key` is or would be stored; None when nothing is cached."""
        return None if self.directory is None else self.directory / "packs" / (_safe(key) + ".pack")

    def load_pack(self, key: str) -> SourceTree | None:
        """Return the stored tree; None if there is none or it is damaged (then it is deleted)."""
        path = self.pack_path(key)
        if path is None:
            return None
        try:
            return SourceTree.from_pack(path)
        except CorruptPack:
            _unlink(path)
        except OSError:
            pass
        return None

    def store_pack(self, key: str, tree: SourceTree) -> None:
        """Store a tree. A cache that cannot be written to is not an error."""
        path = self.pack_path(key)
        if path is not None:
            _write(path, pack_bytes(tree))

    # small entries --------------------------------------------------------------------------------

    def get(self, kind: str, key: str) -> bytes | None:
        """Return the bytes stored under `key`, or None if there are none or they are damaged (then
        deleted).
        """
        path = self._entry(kind, key)
        if path is None:
            return None
        try:
            stored = path.read_bytes()
        except OSError:
            return None
        if hashlib.blake2b(stored[16:], digest_size=16).digest() != stored[:16]:
            _unlink(path)
            return None
        return zlib.decompress(stored[16:])

    def put(self, kind: str, key: str, data: bytes) -> None:
        """Store bytes under `key`. A cache that cannot be written to is not an error."""
        path = self._entry(kind, key)
        if path is not None:
            body = zlib.compress(data, 6)
            _write(path, hashlib.blake2b(body, digest_size=16).digest() + body)

    def facts(self, key: str, compute: Callable[[], bytes]) -> bytes:
        """Return the facts stored under `key`, computing and storing them if there are none.

        The key must name everything that the facts depend on: the kind and format version of the
        facts and the content hash of the module (`SourceTree.digest`) or tree
        (`SourceTree.fingerprint`).
        """
        data = self.get("facts", key)
        if data is None:
            data = compute()
            self.put("facts", key, data)
        return data

    def _entry(self, kind: str, key: str) -> Path | None:
        if self.directory is None:
            return None
        if kind not in self.kinds:
            raise ValueError(f"unknown kind of cache entry {kind!r}; known are {self.kinds}")
        name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        return self.directory / kind / name[:2] / name[2:]

    # housekeeping ---------------------------------------------------------------------------------

    def usage(self) -> dict[str, CacheUsage]:
        """Return the usage by kind."""
        result = {}
        for kind in self.kinds:
            files = [] if self.directory is None else _files(self.directory / kind)
            result[kind] = CacheUsage(len(files), sum(files))
        return result

    def clear(self) -> CacheUsage:
        """Delete every entry and return what was freed. Only the cache's own sub-directories are
        touched.
        """
        usage = self.usage().values()
        if self.directory is not None:
            for kind in self.kinds:
                shutil.rmtree(self.directory / kind, ignore_errors=True)
        return CacheUsage(sum(u.files for u in usage), sum(u.bytes for u in usage))


def _safe(key: str) -> str:
    """Make a file name of a key: readable, and unique through a hash of what the readable part
    drops.
    """
    readable = _SAFE.sub("_", key)[:80]
    return f"{readable}.{hashlib.blake2b(key.encode(), digest_size=6).hexdigest()}"


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
        Path(temporary).replace(path)
    except OSError:
        _unlink(Path(temporary))


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _files(directory: Path) -> list[int]:
    sizes = []
    for path in directory.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                sizes.append(path.stat().st_size)
    return sizes
