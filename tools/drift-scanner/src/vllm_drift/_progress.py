"""Says on stderr what a run is doing, once it takes longer than two seconds."""

from __future__ import annotations

import sys
import time
from threading import Lock, Timer
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["RunProgress"]

_PATIENCE = 2.0
"""Seconds before anything is shown."""
_PAUSE = 5.0
"""Seconds between two lines where stderr is not a terminal."""


class RunProgress:
    """A context manager whose methods are the callbacks that `sources` and `runs` take.

    On a terminal it draws bars that go away at the end; elsewhere it prints a line now and then.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._lock = Lock()
        self._on_terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._last_line = 0.0
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._state: tuple[str, int, int] = ("reading releases", 0, 0)
        self._timer = Timer(_PATIENCE, self._begin)
        self._timer.daemon = True

    def __enter__(self) -> RunProgress:
        if not self._quiet:
            self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._quiet = True
            if self._bars is not None:
                self._bars.stop()

    def step(self, what: str, done: int, total: int) -> None:
        """Say that one more of several things is done."""
        with self._lock:
            self._state = (what, done, total)
            self._show(what, f"{what} ({done} of {total})", done, total, "steps")

    def download(self, what: str, done: int, total: int | None) -> None:
        """Say how much of a whole file has come."""
        with self._lock:
            size = f"{done >> 20} MB" + (f" of {total >> 20} MB" if total else "")
            self._show(f"downloading {what}", f"downloading {what}: {size}", done, total, what)

    def _begin(self) -> None:
        with self._lock:
            if self._quiet:
                return
            if self._on_terminal:
                # Imported here: most runs are over before there is anything to show.
                from rich.console import Console
                from rich.progress import BarColumn, Progress, TextColumn

                self._bars = Progress(
                    TextColumn("{task.description}"),
                    BarColumn(bar_width=30),
                    TextColumn("{task.fields[count]}"),
                    console=Console(stderr=True, highlight=False),
                    transient=True,
                )
                self._bars.start()
            what, done, total = self._state
            text = f"{what} ({done} of {total})" if total else what
            self._show(what, text, done, total or None, "steps")

    def _show(self, what: str, line: str, done: int, total: int | None, key: str) -> None:
        if self._quiet or time.monotonic() - self._started < _PATIENCE:
            return
        if self._bars is not None:
            if key not in self._tasks:
                self._tasks[key] = self._bars.add_task(what, total=total, count="")
            count = line.removeprefix(what).strip(" :()")
            self._bars.update(
                self._tasks[key], description=what, completed=done, total=total, count=count
            )
        elif not self._on_terminal:
            now = time.monotonic()
            if now - self._last_line >= _PAUSE:
                self._last_line = now
                print(f"vllm-drift: {line}", file=sys.stderr, flush=True)
