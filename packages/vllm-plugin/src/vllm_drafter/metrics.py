"""Publishes what a process drafted: on vLLM's `/metrics`, and in a line of the log.

vLLM serves the metrics of its API server's process; proposers live in its workers. So each worker
keeps files in the format of prometheus_client's multiprocess mode, and the front end adds a
collector of them to the registry that vLLM serves. With several API servers vLLM itself uses that
mode, and collects our files with its own. Must not know how drafts are found; imports no vLLM.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import REGISTRY, Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from vllm_drafter.activity import Tally
from vllm_drafter.stamps import Role, logger

if TYPE_CHECKING:
    from vllm_drafter.loop import DraftLoop

__all__ = ["METRICS", "PREFIX", "Publisher", "publish", "serve"]

# Not VLLM_…: vLLM warns of such a variable if it does not know it, and no user sets this one.
DIRECTORY = "DRAFTER_METRICS_DIR"
VLLM_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"

SECONDS = 1.0
"""The age that a published number can reach."""

MOST_TIMES = 100_000
"""Steps whose times are kept for a line of the log."""

PREFIX = "vllm_drafter_"
METRICS: dict[str, tuple[str, str]] = {
    "requests": ("counter", "Requests drafted for"),
    "drafts": ("counter", "Drafts that the engine was given, empty ones left out"),
    "draft_tokens": ("counter", "Draft tokens that the engine was given"),
    "accepted_tokens": ("counter", "Draft tokens that the engine accepted"),
    "draft_tokens_per_position": ("counter", "Draft tokens given, by position in the draft"),
    "accepted_tokens_per_position": ("counter", "Draft tokens accepted, by position in the draft"),
    "evicted_responses": ("counter", "Responses that were taken out of the cache"),
    "faults": ("counter", "Faults while drafting; each cost a request or a step its drafts"),
    "match_length_tokens": ("histogram", "Length of the match that a draft was looked for from"),
    "step_seconds": ("histogram", "How long the engine waited for the drafts of a step"),
    "active_requests": ("gauge", "Requests that are being drafted for"),
    "cached_requests": ("gauge", "Responses in the cache, those of active requests included"),
    "cached_tokens": ("gauge", "Tokens of the responses in the cache"),
    "memory_bytes": ("gauge", "Memory that the drafter uses"),
}
"""Name without `vllm_drafter_` and `_total`, to its type and meaning."""

MATCH_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
TIME_BUCKETS = tuple(float(f"{1e-5 * 10 ** (step / 8):.3g}") for step in range(33))
"""From 10 µs to 0.1 s, each a third more than the one before."""


# --- in the process that drafts -----------------------------------------------------------------


def publish(loop: DraftLoop, role: Role, log_seconds: float) -> None:
    """Publish what `loop` does from a thread, for as long as it lives. Never raises."""
    path = os.environ.get(VLLM_DIRECTORY) or os.environ.get(DIRECTORY)
    try:
        files = _Files(Path(path), role) if path else None
    except Exception as fault:  # noqa: BLE001 - metrics must not keep the engine from starting
        logger.warning("vllm-drafter: no metrics of this process: %s: %s", path, fault)
        files = None
    publisher = Publisher(loop, role, files, log_seconds)
    threading.Thread(target=publisher.run, name="vllm-drafter-metrics", daemon=True).start()


class Publisher:
    """Adds up what a loop does and tells it: in files, if any, and in the log."""

    def __init__(
        self, loop: DraftLoop, role: Role, files: _Files | None, log_seconds: float
    ) -> None:
        """`log_seconds`: seconds between two lines in the log; 0: none."""
        loop.activity.on = True
        # Weak: the thread ends with the proposer.
        self._loop = weakref.ref(loop)
        self._role = role
        self._files = files
        self._positions = loop.settings.num_speculative_tokens
        self._total = Tally()
        self._times: Counter[float] = Counter()
        self._seconds = 0.0
        self._log_seconds = log_seconds
        self._next_line = time.monotonic() + log_seconds
        self._since = Tally()
        self._times_since: deque[float] = deque(maxlen=MOST_TIMES)

    def run(self) -> None:
        """Publish every second until the loop is gone."""
        try:
            while self.publish():
                time.sleep(SECONDS)
        except Exception as fault:  # noqa: BLE001 - metrics must not disturb the engine
            if (loop := self._loop()) is not None:
                loop.activity.on = False
            logger.error(
                "vllm-drafter: publishing metrics failed, so this process publishes no more of "
                "them; drafting goes on. Please report this traceback.",
                exc_info=fault,
            )

    def publish(self) -> bool:
        """Publish what has come since the last time; False if the loop is gone."""
        loop = self._loop()
        if loop is None:
            return False
        times, tally = loop.activity.take()
        self._total.add(tally)
        self._since.add(tally)
        self._times_since.extend(times)
        self._seconds += sum(times)
        self._times.update(_in_buckets(TIME_BUCKETS, times))
        if self._files is not None:
            self._write(self._files, loop)
        if self._log_seconds and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + self._log_seconds
            if self._since.steps:
                logger.info("vllm-drafter: %s", self._line(loop))
            self._since = Tally()
            self._times_since.clear()
        return True

    def _write(self, files: _Files, loop: DraftLoop) -> None:
        total, sizes = self._total, loop.sizes()
        files.count("requests", loop.activity.requests)
        files.count("drafts", total.drafts)
        files.count("draft_tokens", total.draft_tokens)
        files.count("accepted_tokens", total.accepted_tokens)
        for name, counts in (
            ("draft_tokens_per_position", total.drafted_at(self._positions)),
            ("accepted_tokens_per_position", total.accepted_at(self._positions)),
        ):
            for position, count in enumerate(counts):
                files.count(name, count, position=str(position))
        files.count("evicted_responses", sizes.evicted_responses)
        files.count("faults", loop.faults)
        lengths = total.matched
        matched = _in_buckets(MATCH_BUCKETS, list(lengths), list(lengths.values()))
        tokens = sum(length * count for length, count in lengths.items())
        files.distribute("match_length_tokens", MATCH_BUCKETS, matched, tokens)
        files.distribute("step_seconds", TIME_BUCKETS, self._times, self._seconds)
        files.gauge("active_requests", sizes.active_requests)
        files.gauge("cached_requests", sizes.cached_requests)
        files.gauge("cached_tokens", sizes.cached_tokens)
        files.gauge("memory_bytes", sizes.memory_bytes)

    def _line(self, loop: DraftLoop) -> str:
        """Return the line of the log: what came since the last one, and how things are."""
        since, sizes = self._since, loop.sizes()
        median, slow = np.quantile(self._times_since, [0.5, 0.99]) * 1e3
        drafted = since.drafted_at(self._positions)
        rates = [
            f"{accepted / reached:.2f}"
            for accepted, reached in zip(since.accepted_at(self._positions), drafted, strict=True)
            if reached
        ]
        return (
            f"{self._role}: {since.steps} steps, {since.draft_tokens} tokens drafted, "
            f"{since.accepted_tokens} accepted ({_percent(since)}; by position "
            f"{' '.join(rates) or 'none'}), match length {since.mean_match_length:.1f}, "
            f"draft step {median:.2f} ms median, {slow:.2f} ms p99; so far "
            f"{loop.activity.requests} requests, {sizes.cached_requests} cached "
            f"({sizes.memory_bytes / 2**20:.1f} MiB), {sizes.evicted_responses} evicted, "
            f"{loop.faults} faults"
        )


def _percent(tally: Tally) -> str:
    drafted = tally.draft_tokens
    return f"{tally.accepted_tokens / drafted:.1%}" if drafted else "nothing drafted"


def _in_buckets(
    bounds: Sequence[float], values: Sequence[float], counts: Sequence[int] | None = None
) -> dict[float, int]:
    """Count values, each once or as often as `counts` says, by the least of the bounds, or
    infinity, that is not below them.
    """
    places = np.searchsorted(bounds, np.asarray(values, dtype=np.float64))
    found = np.bincount(places, weights=counts, minlength=len(bounds) + 1).astype(np.int64)
    return dict(zip((*bounds, float("inf")), found.tolist(), strict=True))


class _Files:
    """The metrics of one process, in files that other processes can read at any time."""

    def __init__(self, directory: Path, role: Role) -> None:
        """Create the files. OSError if that cannot be done."""
        self._labels = {
            "rank": "" if role.rank is None else str(role.rank),
            # Not `pid`: prometheus_client drops that label from what it adds up.
            "process": str(os.getpid()),
        }
        # The names say the type and how the gauges of several processes are put together: each has
        # labels of its own. Not the names that this process's own prometheus_client would use.
        ending = f"drafter-{os.getpid()}.db"
        names = {"counter": "counter", "histogram": "histogram", "gauge": "gauge_max"}
        self._files = {
            kind: MmapedDict(str(directory / f"{name}_{ending}")) for kind, name in names.items()
        }
        self._keys: dict[tuple[str, ...], str] = {}

    def count(self, name: str, value: float, **labels: str) -> None:
        self._put(name, "_total", value, labels)

    def gauge(self, name: str, value: float) -> None:
        self._put(name, "", value, {})

    def distribute(
        self, name: str, bounds: Iterable[float], counts: Mapping[float, int], total: float
    ) -> None:
        """Write a histogram: how many values each bucket holds alone, and the sum of all values."""
        for bound in (*bounds, float("inf")):
            labels = {"le": floatToGoString(bound)}
            self._put(name, "_bucket", counts.get(bound, 0), labels)
        self._put(name, "_sum", total, {})

    def _put(self, name: str, suffix: str, value: float, labels: dict[str, str]) -> None:
        kind, meaning = METRICS[name]
        place = (name, suffix, *labels.values())
        key = self._keys.get(place)
        if key is None:
            labels = {**self._labels, **labels}
            full = PREFIX + name
            key = mmap_key(full, full + suffix, list(labels), list(labels.values()), meaning)
            self._keys[place] = key
        self._files[kind].write_value(key, float(value), time.time())


# --- in the process that vLLM's /metrics is served from -----------------------------------------


def serve() -> None:
    """Make the directory for the files of this engine's workers, and have vLLM serve them.

    To be called before vLLM starts its workers: they find the directory in their environment. It is
    removed when this process ends. A directory that cannot be made costs a warning.
    """
    if os.environ.get(VLLM_DIRECTORY):
        # One of several API servers. The workers write where vLLM reads; and vLLM kills this
        # process at the end, so that a directory of its own would stay behind.
        return
    try:
        directory = tempfile.mkdtemp(prefix="vllm-drafter-")
    except OSError as error:
        logger.warning("vllm-drafter: no metrics: cannot make a temporary directory: %s", error)
        return
    os.environ[DIRECTORY] = directory
    atexit.register(_remove, directory, os.getpid())
    REGISTRY.register(_Workers(directory))


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


class _Workers(Collector):
    """The metrics of all workers; whatever goes wrong, vLLM's own are served."""

    def __init__(self, directory: str) -> None:
        self._files = MultiProcessCollector(None, path=directory)
        self._warned = False

    def collect(self) -> Iterable[Metric]:
        try:
            return list(self._files.collect())
        except Exception as fault:  # noqa: BLE001 - as the class says
            if not self._warned:
                self._warned = True
                logger.warning("vllm-drafter: cannot read the workers' metrics", exc_info=fault)
            return []
