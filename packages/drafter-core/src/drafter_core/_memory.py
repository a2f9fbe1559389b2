"""Arrays that grow without being copied: address space is reserved, memory comes when touched.

Knows nothing of what the arrays hold. A table that doubles when it is full stops the engine for the
time of the copy. So each table reserves far more address space than it will use, and the kernel
hands out pages at the first touch. Huge pages are declined: filling two megabytes with zeros at
once is a pause of its own. Where the system does not let us reserve, or limits address space,
`reserve` gives a smaller array and the owner copies it to a larger one when it is full.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["physical_memory", "reserve"]

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""mmap exports the name from Python 3.13 on; the value is the same on every Linux platform we run
on (x86-64 and aarch64)."""

_UNRESERVED_BYTES = 1 << 22
"""What a table starts with where address space cannot be reserved."""


def physical_memory() -> int:
    """Bytes of memory that this machine has; a guess of 16 GiB where it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 16 << 30


def reserve(rows: int, columns: int, dtype: type[np.generic], minimum: int = 1024) -> NDArray[Any]:
    """A zeroed array of [rows, columns] (1-D for `columns` 0), resident only where touched.

    Halves `rows` until the system grants the address space, down to `minimum`.
    """
    width = np.dtype(dtype).itemsize * max(columns, 1)
    while True:
        try:
            buffer = _map(rows * width)
        except (OSError, ValueError, OverflowError):
            if rows <= minimum:
                raise
            rows = max(rows // 2, minimum)
            continue
        array = np.frombuffer(buffer, dtype=dtype, count=rows * max(columns, 1))
        return array.reshape(rows, columns) if columns else array


def _may_reserve() -> bool:
    """Whether address space costs nothing here: on Linux, where it is not limited (`ulimit -v`)."""
    if not sys.platform.startswith("linux"):
        return False
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def _map(size: int) -> Any:
    if _may_reserve():
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        memory = mmap.mmap(-1, size, flags=flags)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel built without huge pages
                memory.madvise(mmap.MADV_NOHUGEPAGE)
        return memory
    if size > _UNRESERVED_BYTES:
        raise OSError("address space is not to be reserved here")
    return bytearray(size)
