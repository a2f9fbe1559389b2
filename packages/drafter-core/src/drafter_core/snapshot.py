"""Snapshots: the cached responses in a file, so that a warm cache survives a restart.

Knows nothing of the drafter's structure: a snapshot holds token ids, oldest response first, and
loading inserts them again. So it is small, and any version of the drafter reads it.

Layout, little-endian: the magic line, version u32, responses u64, tokens u64, lengths u32 each,
token ids i32 each, SHA-256 of all before. What begins a response with ids of 2**30 and above is the
end of its prompt, each id with 2**30 added; a snapshot of exact mode has none of that, and exact
mode leaves it out.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import secrets
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafter_core.errors import SnapshotError

__all__ = ["read_snapshot", "write_snapshot"]

MAGIC = b"drafter-core snapshot\n"
VERSION = 1
_HEAD = struct.Struct("<IQQ")
_MAX_TOKEN_ID = 2**31 - 2
_PART = ".part"
_ABANDONED_SECONDS = 24 * 3600


def write_snapshot(path: str | os.PathLike[str], responses: list[NDArray[np.int32]]) -> None:
    """Write responses, int32 [length] each, oldest first.

    The file appears whole or not at all: it is written beside its place and renamed. A link is
    followed, and a file that is there keeps its permissions.

    Raises:
        OSError: the file cannot be written, or what is there is no file.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "a snapshot takes the place of a regular file only", str(path))
    lengths = np.array([len(response) for response in responses], "<u4")
    parts = [
        MAGIC,
        _HEAD.pack(VERSION, len(responses), int(lengths.sum())),
        lengths.tobytes(),
    ]
    checksum = hashlib.sha256()
    _remove_abandoned(path)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_PART}")
    try:
        with temporary.open("xb") as file:
            for part in parts:
                checksum.update(part)
                file.write(part)
            for response in responses:
                block = response.astype("<i4", copy=False).tobytes()
                checksum.update(block)
                file.write(block)
            file.write(checksum.digest())
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _remove_abandoned(path: Path) -> None:
    """Remove what processes that were killed left of this snapshot; no write takes as long."""
    for part in path.parent.glob(f"{glob.escape(path.name)}.*{_PART}"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _ABANDONED_SECONDS:
                part.unlink()


def read_snapshot(path: str | os.PathLike[str]) -> list[NDArray[np.int32]]:
    """Read and check a whole snapshot; its responses, int32 [length] each, oldest first.

    Raises:
        SnapshotError: the file is no snapshot, is damaged or was written by a newer version.
        OSError: the file cannot be read.
    """
    data = Path(path).read_bytes()
    if not data.startswith(MAGIC):
        raise SnapshotError(f"{path} is no snapshot of drafter-core")
    at = len(MAGIC)
    if len(data) < at + _HEAD.size:
        raise SnapshotError(_truncated(path, len(data)))
    version, count, total = _HEAD.unpack_from(data, at)
    if version != VERSION:
        raise SnapshotError(
            f"{path} has format {version}; this drafter-core reads format {VERSION}: update it, "
            "or make the snapshot again"
        )
    at += _HEAD.size
    end = at + 4 * count + 4 * total
    if len(data) != end + hashlib.sha256().digest_size:
        raise SnapshotError(_truncated(path, len(data)))
    if hashlib.sha256(memoryview(data)[:end]).digest() != data[end:]:
        raise SnapshotError(f"{path} is damaged: its checksum does not match; make it again")
    lengths: NDArray[Any] = np.frombuffer(data, "<u4", count, at)
    tokens: NDArray[Any] = np.frombuffer(data, "<i4", total, at + 4 * count)
    if int(lengths.sum(dtype=np.int64)) != total:
        raise SnapshotError(f"{path} is damaged: its lengths do not add up; make it again")
    if total and (int(tokens.min()) < 0 or int(tokens.max()) > _MAX_TOKEN_ID):
        raise SnapshotError(f"{path} holds token ids outside of 0 to {_MAX_TOKEN_ID}")
    native = tokens.astype(np.int32)
    return np.split(native, np.cumsum(lengths.astype(np.int64))[:-1])[:count]


def _truncated(path: str | os.PathLike[str], size: int) -> str:
    return f"{path} is truncated or has something behind its end ({size} bytes); make it again"
