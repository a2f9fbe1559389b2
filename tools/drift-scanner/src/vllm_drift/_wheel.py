"""The Python files of a wheel, from a few byte ranges of it or from a file on disk.

A wheel is a zip: a directory at its end says where each member lies. The `.py` members lie in a few
runs between the large libraries, so reading the directory and then those runs is enough. Knows zip
files; must not know releases, packages or what is done with the source.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from vllm_drift._http import Http, redact
from vllm_drift.errors import SourceError

__all__ = ["BadArchive", "Members", "read_local", "read_remote"]

_TAIL = 512 * 1024
"""Bytes to read from the end at first: enough for the directory of vLLM 0.33.0 in one request."""
_GAP = 128 * 1024
"""Two runs with fewer bytes than this between them are read as one: a request costs more than the
bytes.
"""
_RUN = 2 * 1024 * 1024
"""Longer runs are split, so that they can be read at the same time."""
_SMALL = 2 * 1024 * 1024
"""A wheel up to this size is read whole."""
_CONNECTIONS = 6
_LOCAL_HEADER = struct.Struct("<4s2xHH16xHH")


class BadArchive(SourceError):
    """The archive is not what its directory says."""


@dataclass(frozen=True)
class Members:
    """What was read of an archive, by member name."""

    data: dict[str, bytes]
    deflated: dict[str, bytes] = field(default_factory=dict)
    """The raw deflate stream of members, where it was at hand."""


@dataclass(frozen=True)
class _Run:
    start: int
    end: int


class _Sparse(io.RawIOBase):
    """A file of which only some stretches are known; reading another says which is missing."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._position = 0
        self._pieces: list[tuple[int, bytes]] = []

    def add(self, start: int, data: bytes) -> None:
        self._pieces.append((start, data))

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("seek before the start")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        start = self._position
        end = self._size if size is None or size < 0 else min(start + size, self._size)
        for first, data in self._pieces:
            if first <= start and end <= first + len(data):
                self._position = end
                return data[start - first : end - first]
        raise _Missing(start, end)


class _Missing(Exception):
    def __init__(self, start: int, end: int) -> None:
        super().__init__(f"bytes {start} to {end} have not been read")
        self.start, self.end = start, end


def read_remote(
    http: Http, url: str, wanted: Callable[[str], bool], size: int | None = None
) -> Members:
    """Return the members of the wheel at `url` whose names are wanted, by name.

    `size` is the file's size in bytes where the index says it; it saves nothing but a guess. Raises
    NoByteRanges where the server serves only whole files, BadArchive where a member is not what the
    directory says, and NetworkError.
    """
    name = _file_name(url)
    if size is not None and size <= _SMALL:
        answer = http.get(url, {"Accept-Encoding": "identity"})
        if answer.status != 200:
            raise SourceError(f"{redact(url)} answers {answer.status}, expected 200")
        return _read_zip(io.BytesIO(answer.body), wanted, name)
    members, next_start = _directory(http, url, size)
    members = [m for m in members if wanted(m.filename) and not m.is_dir()]
    runs = _runs([(m.header_offset, next_start[m.header_offset]) for m in members])
    inside = _by_run(runs, members)

    def fetch(run: _Run) -> list[tuple[str, bytes, bytes | None]]:
        # Decompressing lets other threads run: it is done while the next pieces come in.
        piece, _ = http.get_range(url, run.start, run.end - run.start)
        contents = []
        for member in inside[run]:
            start = member.header_offset - run.start
            raw = piece[start : next_start[member.header_offset] - run.start]
            contents.append((member.filename, *_inflate(member, raw, name)))
        return contents

    found = Members({})
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        for contents in pool.map(fetch, runs):
            for member_name, data, deflated in contents:
                found.data[member_name] = data
                if deflated is not None:
                    found.deflated[member_name] = deflated
    return found


def read_local(path: Path, wanted: Callable[[str], bool]) -> Members:
    """Return the members of the wheel on disk whose names are wanted, by name."""
    with path.open("rb") as f:
        return _read_zip(f, wanted, str(path))


def _read_zip(file: IO[bytes], wanted: Callable[[str], bool], name: str) -> Members:
    try:
        with zipfile.ZipFile(file) as archive:
            return Members(
                {
                    m.filename: archive.read(m)
                    for m in archive.infolist()
                    if wanted(m.filename) and not m.is_dir()
                }
            )
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as e:
        raise BadArchive(f"{name} is not a readable zip file: {e}") from e


def _directory(
    http: Http, url: str, size: int | None
) -> tuple[list[zipfile.ZipInfo], dict[int, int]]:
    """Return the wheel's members, and for the start of each where the next thing starts."""
    length = _TAIL if size is None else min(_TAIL, size)
    data, size = http.get_range(url, None if size is None else size - length, length)
    sparse = _Sparse(size)
    sparse.add(size - len(data), data)
    for _ in range(4):
        try:
            sparse.seek(0)
            with zipfile.ZipFile(sparse) as archive:
                infos = archive.infolist()
                starts = sorted({m.header_offset for m in infos} | {archive.start_dir})
            return infos, dict(pairwise(starts))
        except _Missing as e:
            sparse.add(e.start, http.get_range(url, e.start, e.end - e.start)[0])
        except (zipfile.BadZipFile, struct.error) as e:
            raise BadArchive(f"{_file_name(url)} is not a readable zip file: {e}") from e
    raise BadArchive(f"{_file_name(url)} has a zip directory that does not end")


def _runs(stretches: Iterable[tuple[int, int]]) -> list[_Run]:
    """Join stretches that lie close to each other, and split what gets too long at a stretch's
    border.
    """
    runs: list[_Run] = []
    for start, end in sorted(stretches):
        last = runs[-1] if runs else None
        if last and start - last.end <= _GAP and end - last.start <= _RUN:
            runs[-1] = _Run(last.start, max(end, last.end))
        else:
            runs.append(_Run(start, end))
    return runs


def _by_run(
    runs: list[_Run], members: Iterable[zipfile.ZipInfo]
) -> dict[_Run, list[zipfile.ZipInfo]]:
    """The members that lie in each of the runs, which are in order and do not overlap."""
    starts = [run.start for run in runs]
    inside: dict[_Run, list[zipfile.ZipInfo]] = {run: [] for run in runs}
    for member in members:
        inside[runs[bisect_right(starts, member.header_offset) - 1]].append(member)
    return inside


def _inflate(member: zipfile.ZipInfo, raw: bytes, name: str) -> tuple[bytes, bytes | None]:
    """Return a member's bytes, checked, and the deflate stream that they came from."""
    if len(raw) < _LOCAL_HEADER.size:
        raise BadArchive(f"{name}: {member.filename} is cut off")
    magic, flags, method, name_length, extra_length = _LOCAL_HEADER.unpack_from(raw)
    start = _LOCAL_HEADER.size + name_length + extra_length
    data = raw[start : start + member.compress_size]
    if (
        magic != b"PK\x03\x04"
        or flags & 1
        or method not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
    ):
        raise BadArchive(f"{name}: {member.filename} is stored in a way that cannot be read")
    deflated = None
    if method == zipfile.ZIP_DEFLATED:
        deflated = data
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.file_size + 1)
        except zlib.error as e:
            raise BadArchive(f"{name}: {member.filename} does not decompress: {e}") from e
    if len(data) != member.file_size or zlib.crc32(data) != member.CRC:
        raise BadArchive(f"{name}: {member.filename} is not what the zip directory says")
    return data, deflated


def _file_name(url: str) -> str:
    return urlsplit(url).path.rpartition("/")[2]
