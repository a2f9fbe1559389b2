"""Runs one engine of the demo in a process of its own and collects what came of it.

Must not know what the figures mean, nor how they are shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.witness import PEER

__all__ = ["KINDS", "PEER_KIND", "DemoFailed", "Engine", "Job"]

TOOLS = Path(__file__).resolve().parent.parent  # of generate.py, and of the workers' witness

# Both kinds run real vLLM with its defaults; only these differ.
KINDS: dict[str, dict[str, Any]] = {
    "baseline": {"speculative_config": None, "environment": {"VLLM_DRAFTER": "0"}},
    "suffix": {"speculative_config": {"method": "suffix"}, "environment": {"VLLM_DRAFTER": "1"}},
}
# What the comparison runs beside them: vLLM as it is, with arctic-inference on its path. Of the
# plugins none is loaded, the peer's own neither, which refuses a CPU; but for tests/mended, where
# that is on the path.
PEER_KIND = "arctic"
_ALL_KINDS: dict[str, dict[str, Any]] = {
    **KINDS,
    PEER_KIND: {
        "speculative_config": {"method": "suffix"},
        "environment": {"VLLM_DRAFTER": "0", "VLLM_PLUGINS": "mended_sampler"},
    },
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class DemoFailed(Exception):
    """An engine did not come through; the message says which and shows the end of its log."""


@dataclass(frozen=True)
class Job:
    """What every engine of a demo does."""

    model: Path
    groups: dict[str, list[str]]
    """The user messages of each group of prompts."""
    warm_up: list[str]
    """Messages that are answered first and not timed."""
    max_tokens: int
    max_num_seqs: int
    timeout: float
    """Seconds for one engine, its start included."""
    pause: float = 0.0
    """Seconds of work after which the engine stops until it is resumed, as before each group; 0:
    it never does."""


@dataclass
class Engine:
    """One run of one kind: where it keeps its files, and what came of it."""

    kind: str
    """A key of KINDS, or PEER_KIND."""
    round: int
    folder: Path
    path: tuple[Path, ...] = ()
    """Directories that this engine imports from beside its environment."""
    result: dict[str, Any] = field(default_factory=dict)
    """What generate.py wrote."""
    stamps: list[dict[str, Any]] = field(default_factory=list)
    """What the plugin wrote, one entry per registered process and per proposer."""
    mapped: list[int] = field(default_factory=list)
    """Ids of registered processes that had a library of the peer in memory."""
    _process: subprocess.Popen[bytes] | None = None

    def file(self, name: str) -> Path:
        """Return one of this run's files."""
        return self.folder / f"{self.kind}-{self.round}.{name}"

    def run(self, job: Job) -> Iterator[dict[str, Any]]:
        """Start the engine, yield its progress, and keep its result.

        Raises:
            DemoFailed: it ended without a result, or took longer than it may.
        """
        for name in ("events", "result", "log", "stamps"):
            self.file(name).unlink(missing_ok=True)
        self.file("job").write_text(json.dumps(self._order(job)))
        environment = {
            **os.environ,
            **ENVIRONMENT,
            **_ALL_KINDS[self.kind]["environment"],
            "PYTHONPATH": os.pathsep.join(map(str, (TOOLS, *self.path))),
            "VLLM_DRAFTER_STAMPS": str(self.file("stamps")),
        }
        command = [sys.executable, "-m", "demo.generate", str(self.file("job"))]
        with self.file("log").open("w") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
            self._process = process
            try:
                yield from self._follow(process, job.timeout)
            finally:
                _end(process)
        if process.returncode or not self.file("result").exists():
            raise DemoFailed(self._failure(f"ended with exit code {process.returncode}"))
        self.result = json.loads(self.file("result").read_text())
        self.stamps = _json_lines(self.file("stamps"))

    def resume(self) -> None:
        """Let an engine go on that said "waiting" or "pausing", and stopped all its processes."""
        assert self._process is not None
        os.waitid(os.P_PID, self._process.pid, _STOPPED)  # it says so shortly before it stops
        os.killpg(self._process.pid, signal.SIGCONT)

    def _order(self, job: Job) -> dict[str, Any]:
        return {
            "model": str(job.model),
            "speculative_config": _ALL_KINDS[self.kind]["speculative_config"],
            "max_num_seqs": job.max_num_seqs,
            "max_tokens": job.max_tokens,
            "warm_up": job.warm_up,
            "groups": job.groups,
            "pause": job.pause,
            "events": str(self.file("events")),
            "result": str(self.file("result")),
        }

    def _follow(self, process: subprocess.Popen[bytes], timeout: float) -> Iterator[dict[str, Any]]:
        seen = 0
        deadline = time.monotonic() + timeout
        while True:
            ended = process.poll() is not None
            events = _json_lines(self.file("events"))
            for event in events[seen:]:
                if event["event"] == "group":
                    self._look_into_memory()
                yield event
            seen = len(events)
            if ended:
                return
            if time.monotonic() > deadline:
                raise DemoFailed(self._failure(f"was not done after {timeout:.0f} s (--timeout)"))
            _wait_for_stop(process.pid, 0.1)

    def _look_into_memory(self) -> None:
        """Look for the peer's library in the memory of each registered process (Linux only)."""
        for stamp in _json_lines(self.file("stamps")):
            try:
                maps = Path(f"/proc/{stamp['pid']}/maps").read_text()
            except OSError:
                continue
            if PEER in maps and stamp["pid"] not in self.mapped:
                self.mapped.append(stamp["pid"])

    def _failure(self, what: str) -> str:
        lines = self.file("log").read_text(errors="replace").splitlines()
        tail = "\n".join(f"    {line[:200]}" for line in lines[-25:])
        return f"the {self.kind} engine {what}; the end of its log, {self.file('log')}:\n{tail}"


_STOPPED = os.WSTOPPED | os.WEXITED | os.WNOWAIT


def _wait_for_stop(pid: int, seconds: float) -> None:
    """Wait until a child has stopped or ended, but no longer than that."""
    deadline = time.monotonic() + seconds
    while not os.waitid(os.P_PID, pid, _STOPPED | os.WNOHANG) and time.monotonic() < deadline:
        time.sleep(0.003)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the engine and whatever it started; they are a process group of their own."""
    if process.poll() is None:
        process.terminate()
        os.killpg(process.pid, signal.SIGCONT)  # a stopped process would not notice
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # The last line may be half written.
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
