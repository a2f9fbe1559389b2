"""Measures one drafter in a process of its own: memory, growth, pauses, eviction, start-up.

`bench.py` runs this file as a child, because resident memory and start-up time belong to a process.
Prints one JSON object. Knows the two drafters' interfaces; knows nothing of reports.
"""

from __future__ import annotations

import time

STARTED = time.perf_counter(), time.process_time()

import gc  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402

PIECE = 8
"""Tokens per append, about what a step accepts."""


def resident() -> int:
    """Resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class OurCache:
    """drafter_core behind the calls that are measured here."""

    def __init__(self, depth: int, cached: int, exact: bool) -> None:
        from drafter_core import SuffixDrafter

        self.drafter = SuffixDrafter(depth, cached, exact=exact)
        self.start = self.drafter.start_request
        self.append = self.drafter.append
        self.stop = self.drafter.stop_request
        self.evict = self.drafter.evict_cached_response

    def draft(self, name: str, context: Any) -> list[int]:
        """Draft after the tokens given so far."""
        return self.drafter.draft(name, 16).token_ids

    def used(self) -> int | None:
        """Bytes that the drafter says it uses."""
        return self.drafter.stats().bytes_in_use


class PeerCache:
    """arctic-inference behind the same calls."""

    def __init__(self, depth: int, cached: int) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(depth, cached)
        self.start = self.cache.start_request
        self.append = self.cache.add_active_response
        self.stop = self.cache.stop_request
        self.evict = self.cache.evict_cached_response

    def draft(self, name: str, context: Any) -> list[int]:
        """Draft after the context."""
        return list(self.cache.speculate(name, context, 16).token_ids)

    def used(self) -> int | None:
        """The peer does not say."""
        return None


def make(contestant: str, cached: int) -> OurCache | PeerCache:
    """`default`, `exact` or `peer`, with a depth of 24."""
    if contestant == "peer":
        return PeerCache(24, cached)
    return OurCache(24, cached, contestant == "exact")


def warm(cache: OurCache | PeerCache) -> None:
    """Make every kind of call once, so that compiling is not measured."""
    tokens = np.arange(64, dtype=np.int32)
    for name in ("warm 1", "warm 2"):
        cache.start(name, tokens)
        cache.append(name, tokens)
        cache.draft(name, tokens[:20])
        cache.stop(name)
    for name in ("warm 1", "warm 2"):
        cache.evict(name)


def growth(contestant: str, tokens: int) -> dict[str, Any]:
    """Append `tokens` tokens of code in pieces: memory and cost on the way, and every pause.

    `wall` is what the caller waits, `processor` leaves out what the machine did meanwhile.
    """
    from traces import source_files

    texts = [text.response for text in source_files()]
    cache = make(contestant, -1)
    warm(cache)
    gc.collect()
    gc.disable()
    nothing = np.zeros(0, np.int32)
    marks = [mark for mark in (100_000, 1_000_000, 5_000_000, 10_000_000) if mark <= tokens]
    base, given = resident(), 0
    wall = np.zeros(tokens // PIECE + len(texts), np.int64)
    processor = np.zeros(len(wall), np.int64)
    wall.fill(1)  # touch the pages now
    processor.fill(1)
    base = resident()
    counts: list[int] = []
    number, memory = 0, {}
    for at, text in enumerate(texts):
        if given >= tokens:
            break
        name = str(at)
        cache.start(name, nothing)
        for begin in range(0, len(text) - PIECE + 1, PIECE):
            piece = text[begin : begin + PIECE]
            before, before_cpu = time.perf_counter_ns(), time.thread_time_ns()
            cache.append(name, piece)
            after_cpu, after = time.thread_time_ns(), time.perf_counter_ns()
            wall[number] = after - before
            processor[number] = after_cpu - before_cpu
            number += 1
            given += PIECE
            if marks and given >= marks[0]:
                counts.append(number)
                cache.stop(name)
                memory[marks.pop(0)] = (resident() - base) / given
                break
        else:
            cache.stop(name)
    wall, processor = wall[:number], processor[:number]
    window = 100_000 // PIECE // 2
    return {
        "tokens": given,
        "bytes_per_token": {str(mark): value for mark, value in memory.items()},
        "own_count_per_token": None if cache.used() is None else cache.used() / given,
        "append_ns_per_token": {
            str(mark): float(np.median(wall[max(0, count - window) : count])) / PIECE
            for mark, count in zip(memory, counts, strict=True)
        },
        "append_us": {"wall": percentiles(wall), "processor": percentiles(processor)},
        "appends": number,
        "appends_over_200us": int((wall > 200_000).sum()),
        "appends_over_200us_processor": int((processor > 200_000).sum()),
    }


def percentiles(nanoseconds: np.ndarray[Any, Any]) -> dict[str, float]:
    """Microseconds that so many percent of the calls stay below."""
    marks = (50, 99, 99.9, 99.99, 100)
    values = np.percentile(nanoseconds, marks, method="higher") / 1000
    return {str(mark): round(float(value), 3) for mark, value in zip(marks, values, strict=True)}


def eviction(contestant: str, tokens: int, limit: int = 1000, length: int = 400) -> dict[str, Any]:
    """Put `tokens` tokens through a cache of `limit` responses of `length` tokens each."""
    from traces import source_files

    stream = np.concatenate([text.response for text in source_files()])[:tokens]
    cache = make(contestant, limit)
    warm(cache)
    gc.collect()
    gc.disable()
    nothing = np.zeros(0, np.int32)
    pieces = len(stream) // length
    pauses = np.ones((pieces, 2), np.int64)  # written to: resident before anything is measured
    base = resident()
    plateau: list[tuple[int, float, int | None]] = []
    for number in range(pieces):
        name = str(number)
        before, before_cpu = time.perf_counter_ns(), time.thread_time_ns()
        cache.start(name, nothing)
        after_cpu, after = time.thread_time_ns(), time.perf_counter_ns()
        pauses[number] = after - before, after_cpu - before_cpu
        cache.append(name, stream[number * length : (number + 1) * length])
        cache.stop(name)
        if number % max(pieces // 40, 1) == 0:
            plateau.append((number * length, (resident() - base) / 1e6, cache.used()))
    full = [point for point in plateau if point[0] >= 2 * limit * length]
    return {
        "tokens": pieces * length,
        "limit": limit,
        "response_tokens": length,
        "megabytes": plateau,
        "growth_after_full": full[-1][1] / full[0][1],
        "growth_after_full_own_count": full[-1][2] / full[0][2] if full[0][2] else None,
        "eviction_us": {
            "wall": percentiles(pauses[limit:, 0]), "processor": percentiles(pauses[limit:, 1])
        },
    }  # fmt: skip


def start_up(contestant: str) -> dict[str, Any]:
    """Seconds from the start of this file to the first draft; the interpreter has started then."""
    cache = make(contestant, -1)
    tokens = np.arange(100, dtype=np.int32) % 20
    cache.start("first", tokens)
    cache.append("first", tokens)
    draft = cache.draft("first", tokens[-24:])
    return {
        "wall": time.perf_counter() - STARTED[0],
        "processor": time.process_time() - STARTED[1],
        "drafted": len(draft),
    }


MEASUREMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "growth": growth,
    "eviction": eviction,
    "start_up": start_up,
}


if __name__ == "__main__":
    _, measurement, contestant, *numbers = sys.argv
    print(json.dumps(MEASUREMENTS[measurement](contestant, *(int(number) for number in numbers))))
