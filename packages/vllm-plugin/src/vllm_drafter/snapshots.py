"""Keeps the drafter's cache across restarts: loads a snapshot at start-up, writes it while the
engine serves, when it has nothing to do, and when the process ends.

The end alone would not do: from 0.22 on, a server of vLLM that is stopped kills its workers at
once, unless it was started with a `--shutdown-timeout`.

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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_drafter.settings import SNAPSHOT, SettingError
from vllm_drafter.stamps import logger

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from drafter_core import SuffixDrafter

__all__ = ["SnapshotKeeper", "load_snapshot"]

RESPONSES_AT_ONCE = 64
"""How many are copied while the engine waits: about a millisecond's worth."""
IDLE_SECONDS = 1.0
"""Without a step for so long, there is nothing to do."""
_PAUSE_SECONDS = 0.005
"""Between two parts of a copy, for a step of the engine that waits."""
_LOOK_SECONDS = 0.5
_SAVE_TIME_SHARE = 0.01
"""Most of the time that saving takes where the engine is idle again and again."""
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
    """Writes the cache of one drafter to a file, from a thread of its own and when all ends."""

    def __init__(
        self,
        path: Path,
        seconds: float,
        drafter: Callable[[], SuffixDrafter | None],
        in_use: threading.Lock,
    ) -> None:
        """Begin to keep.

        Args:
            path: where to; the file is replaced as a whole.
            seconds: most time between two writes while the engine serves; where it is idle it is
                written sooner. 0 writes at the end only.
            drafter: what is kept; asked each time, because a broken drafter is replaced.
            in_use: held by whoever uses the drafter.

        Raises:
            SettingError: nothing can be written beside the file.
        """
        self.steps = 0
        """Steps of the engine so far; whoever takes them counts them here."""
        self._path = path
        self._seconds = seconds
        self._drafter = drafter
        self._in_use = in_use
        self._saved_at = time.monotonic()
        self._saved_steps = 0
        self._save_took = 0.0
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._faults = 0
        self._lock = _locked(path)
        if self._lock is None:
            logger.warning(
                "vllm-drafter: another process writes %s; this one only has loaded it", path
            )
            return
        # multiprocessing runs finalizers in workers too, which never get to atexit.
        multiprocessing.util.Finalize(None, self.close, exitpriority=_SAVE_BEFORE_OTHERS)
        if seconds:
            self._thread = threading.Thread(
                target=self._keep, name="vllm-drafter-snapshot", daemon=True
            )
            self._thread.start()

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes the file."""
        return self._lock is not None

    def close(self) -> None:
        """Write what is cached, for the last time. Never raises."""
        if self._lock is None:
            return
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
        try:
            drafter = self._drafter()
            if drafter is not None and len(drafter.cached_requests):
                saved = drafter.save(self._path)
                logger.info("vllm-drafter: saved %d responses to %s", saved, self._path)
        except Exception as fault:  # noqa: BLE001 - the process ends whatever happens here
            self._note(fault)
        os.close(self._lock)
        self._lock = None

    def _keep(self) -> None:
        """Write whenever it is time to, until the end."""
        steps, since = self.steps, time.monotonic()
        while not self._ending.wait(_LOOK_SECONDS):
            now = time.monotonic()
            if self.steps != steps:
                steps, since = self.steps, now
            if self.is_due(now, idle=now - since >= IDLE_SECONDS):
                try:
                    self._save()
                except Exception as fault:  # noqa: BLE001 - whatever it is, the engine goes on
                    self._note(fault)
                    self._saved_at = time.monotonic()

    def is_due(self, now: float, *, idle: bool) -> bool:
        """Whether to write at `now` (of `time.monotonic`), given whether the engine is idle."""
        if self.steps == self._saved_steps:
            return False
        pause = self._save_took / _SAVE_TIME_SHARE if idle else self._seconds
        return now - self._saved_at >= min(pause, self._seconds)

    def _save(self) -> None:
        from drafter_core.snapshot import write_snapshot

        began, steps = time.monotonic(), self.steps
        responses = self._copied()
        if responses:
            write_snapshot(self._path, responses)
        self._saved_at = time.monotonic()
        self._save_took = self._saved_at - began
        self._saved_steps = steps

    def _copied(self) -> list[NDArray[np.int32]]:
        """The cached responses, copied in parts, so that no step of the engine waits for all of
        them; none if all ends meanwhile."""
        with self._in_use:
            drafter = self._drafter()
            ids = [] if drafter is None else list(drafter.cached_requests)
        copied: list[NDArray[np.int32]] = []
        for first in range(0, len(ids), RESPONSES_AT_ONCE):
            if self._ending.wait(_PAUSE_SECONDS):
                return []
            with self._in_use:
                if drafter is None or self._drafter() is not drafter:
                    return []
                part = ids[first : first + RESPONSES_AT_ONCE]
                there = [one for one in part if one in drafter.cached_requests]
                copied += [drafter.cached_response(one) for one in there]
        return [response for response in copied if len(response)]

    def _note(self, fault: BaseException) -> None:
        self._faults += 1
        if self._faults == 1:
            logger.error(
                "vllm-drafter: the snapshot %s was not written; the one before stays. Further "
                "faults are not logged.",
                self._path,
                exc_info=fault,
            )


def _locked(path: Path) -> int | None:
    """Take the lock beside the file, for as long as this process lives; None if another has it.

    Raises:
        SettingError: the lock's file cannot be made.
    """
    beside = path.with_name(path.name + ".lock")
    try:
        lock = os.open(beside, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise SettingError(
            f"{SNAPSHOT}={str(path)!r}: expected a directory that can be written to, found that "
            f"{beside} cannot be made: {error.strerror}. Name a file in another directory, or "
            f"unset {SNAPSHOT}."
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
