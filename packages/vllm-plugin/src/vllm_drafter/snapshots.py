"""Keeps the drafter's cache across restarts: loads a snapshot at start-up, writes it while the
engine serves and when the process ends.

One process writes: of several workers the one of rank 0, and of several engines that were given the
same file the first, which holds a lock beside it. The others load only. Must not know vLLM, or what
a snapshot looks like.
"""

from __future__ import annotations

import fcntl
import multiprocessing.util
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_drafter.settings import SNAPSHOT, SettingError
from vllm_drafter.stamps import logger

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from drafter_core import SuffixDrafter

__all__ = ["SnapshotKeeper", "load_snapshot"]

RESPONSES_PER_STEP = 64
"""How many are copied in one step of the engine: about a millisecond's worth."""
_SAVE_BEFORE_OTHERS = 100


def load_snapshot(path: Path, drafter: SuffixDrafter) -> int:
    """Load the responses of a snapshot; return how many. A file that is not there yet gives none.

    Raises:
        SettingError: the file cannot be used; the drafter is as it was.
    """
    from drafter_core import SnapshotError

    started = time.perf_counter()
    try:
        loaded = drafter.load(path)
    except FileNotFoundError:
        logger.info("vllm-drafter: there is no snapshot at %s yet; the cache starts empty", path)
        return 0
    except (SnapshotError, OSError) as error:
        raise SettingError(
            f"{SNAPSHOT}={str(path)!r}: expected a snapshot of drafter-core, found: {error}. "
            f"Make it again with `drafter-core build`, remove it, or unset {SNAPSHOT}."
        ) from error
    logger.info(
        "vllm-drafter: loaded %d responses from %s in %.1f s",
        loaded,
        path,
        time.perf_counter() - started,
    )
    return loaded


class SnapshotKeeper:
    """Writes the cache of one drafter to a file, every so often and when the process ends."""

    def __init__(
        self, path: Path, seconds: float, drafter: Callable[[], SuffixDrafter | None]
    ) -> None:
        """Begin to keep.

        Args:
            path: where to; the file is replaced as a whole.
            seconds: between two writes while the engine serves; 0 writes at the end only.
            drafter: what is kept; asked each time, because a broken drafter is replaced.
        """
        self._path = path
        self._seconds = seconds
        self._drafter = drafter
        self._due = time.monotonic() + seconds
        self._collecting: Iterator[NDArray[np.int32]] | None = None
        self._collected: list[NDArray[np.int32]] = []
        self._writing: threading.Thread | None = None
        self._faults = 0
        self._lock = _locked(path)
        if self._lock is None:
            logger.warning(
                "vllm-drafter: another process writes %s; this one only has loaded it", path
            )
            return
        # multiprocessing runs finalizers in workers too, which never get to atexit.
        multiprocessing.util.Finalize(None, self.close, exitpriority=_SAVE_BEFORE_OTHERS)

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes the file."""
        return self._lock is not None

    def after_step(self) -> None:
        """Take a share of the work, if a snapshot is due. Never raises."""
        if self._lock is None or not self._seconds:
            return
        if self._collecting is None and time.monotonic() < self._due:
            return
        try:
            self._collect()
        except Exception as fault:  # noqa: BLE001 - whatever it is, the engine goes on
            self._note(fault)
            self._begin_again()

    def close(self) -> None:
        """Write what is cached, for the last time. Never raises."""
        if self._lock is None:
            return
        try:
            if self._writing is not None:
                self._writing.join()
            drafter = self._drafter()
            if drafter is not None and len(drafter.cached_requests):
                saved = drafter.save(self._path)
                logger.info("vllm-drafter: saved %d responses to %s", saved, self._path)
        except Exception as fault:  # noqa: BLE001 - the process ends whatever happens here
            self._note(fault)
        os.close(self._lock)
        self._lock = None

    def _collect(self) -> None:
        """Copy some more responses; when all are there, write them in a thread of their own."""
        drafter = self._drafter()
        if drafter is None or (self._writing is not None and self._writing.is_alive()):
            return
        if self._collecting is None:
            self._collected = []
            self._collecting = _responses(drafter, list(drafter.cached_requests))
        for _ in range(RESPONSES_PER_STEP):
            response = next(self._collecting, None)
            if response is None:
                collected = self._collected
                self._begin_again()
                if collected:
                    self._writing = threading.Thread(
                        target=self._write, args=(collected,), name="vllm-drafter-snapshot"
                    )
                    self._writing.start()
                return
            if len(response):
                self._collected.append(response)

    def _begin_again(self) -> None:
        self._collecting = None
        self._collected = []
        self._due = time.monotonic() + self._seconds

    def _write(self, responses: list[NDArray[np.int32]]) -> None:
        from drafter_core.snapshot import write_snapshot

        try:
            write_snapshot(self._path, responses)
        except Exception as fault:  # noqa: BLE001 - a full disk must not end the engine
            self._note(fault)

    def _note(self, fault: BaseException) -> None:
        self._faults += 1
        if self._faults == 1:
            logger.error(
                "vllm-drafter: the snapshot %s was not written; the one before stays. Further "
                "faults are not logged.",
                self._path,
                exc_info=fault,
            )


def _responses(drafter: SuffixDrafter, ids: list[Hashable]) -> Iterator[NDArray[np.int32]]:
    """The responses of these ids, as long as they are cached when their turn comes."""
    for request_id in ids:
        if request_id in drafter.cached_requests:
            yield drafter.cached_response(request_id)


def _locked(path: Path) -> int | None:
    """Take the lock beside the file, for as long as this process lives; None if another has it."""
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
