"""Reads what drafting processes publish on a server's `/metrics`, for `vllm-drafter top`.

Knows the metrics by their names only, and nothing of how they come about.
"""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from vllm_drafter.metrics import PREFIX

__all__ = ["NoMetrics", "Process", "read", "table"]

TIMEOUT = 10.0
BAR = " ▁▂▃▄▅▆▇█"
SHOWN = (
    *("requests", "draft_tokens", "accepted_tokens", "cached_requests", "memory_bytes"),
    *("evicted_responses", "faults", "match_length_tokens_count", "match_length_tokens_sum"),
)


class NoMetrics(Exception):
    """There is nothing to show: what was asked, what was found, and the way out."""


Histogram = dict[float, float]
"""Upper bound of a bucket to how many values are not above it."""


@dataclass
class Process:
    """What one process has published so far."""

    rank: str
    process: str
    values: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SHOWN, 0.0))
    """Counters and gauges, by their names without `vllm_drafter_`; 0 until they are published."""
    drafted_at: dict[int, float] = field(default_factory=dict)
    accepted_at: dict[int, float] = field(default_factory=dict)
    matches: Histogram = field(default_factory=dict)
    times: Histogram = field(default_factory=dict)

    def since(self, before: Process | None) -> Process:
        """The same with counters and histograms counted from `before` on."""
        if before is None or before.values["draft_tokens"] > self.values["draft_tokens"]:
            return self
        gauges = ("active_requests", "cached_requests", "cached_tokens", "memory_bytes")
        return Process(
            self.rank,
            self.process,
            {
                name: value if name in gauges else value - before.values.get(name, 0.0)
                for name, value in self.values.items()
            },
            _less(self.drafted_at, before.drafted_at),
            _less(self.accepted_at, before.accepted_at),
            _less(self.matches, before.matches),
            _less(self.times, before.times),
        )

    @property
    def acceptance(self) -> float | None:
        """Accepted tokens for each one drafted; None where nothing was drafted."""
        drafted = self.values["draft_tokens"]
        return self.values["accepted_tokens"] / drafted if drafted else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """The same for each position that any draft reached."""
        return [
            self.accepted_at.get(position, 0.0) / drafted
            for position, drafted in sorted(self.drafted_at.items())
            if drafted
        ]

    @property
    def match_length(self) -> float | None:
        """Mean length of the matches, in tokens."""
        count = self.values["match_length_tokens_count"]
        return self.values["match_length_tokens_sum"] / count if count else None

    def step_seconds(self, quantile: float) -> float | None:
        """How long a step's drafts took, from the buckets of the histogram."""
        return _quantile(self.times, quantile)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        return {
            **asdict(self),
            "acceptance": self.acceptance,
            "acceptance_by_position": self.acceptance_by_position,
            "mean_match_length": self.match_length,
            "step_seconds_median": self.step_seconds(0.5),
            "step_seconds_p99": self.step_seconds(0.99),
        }


def read(url: str) -> list[Process]:
    """The processes that draft for the server at `url`. Raises NoMetrics."""
    address = _address(url)
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT) as answer:
            text = answer.read().decode()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoMetrics(
            f"{address}: {str(error).strip()}. Give the address of a running vLLM server, such as "
            "http://localhost:8000."
        ) from error
    try:
        processes = parse(text)
    except ValueError as error:
        raise NoMetrics(f"{address}: what is there are no Prometheus metrics: {error}") from error
    if not processes:
        raise NoMetrics(
            f"{address}: no metric is called {PREFIX}…. Either the server does not draft with "
            "vllm-drafter (its log says so at start-up; `vllm-drafter doctor` says why), or its "
            "workers run on other hosts."
        )
    return processes


def _address(url: str) -> str:
    url = url if "://" in url else f"http://{url}"
    url = url.rstrip("/")
    return url if url.endswith("/metrics") else f"{url}/metrics"


def parse(text: str) -> list[Process]:
    """Read the processes, in the order of their ranks, from metrics in Prometheus's text format."""
    found: dict[tuple[str, str], Process] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(PREFIX):
            continue
        for sample in family.samples:
            labels = sample.labels
            key = (labels["rank"], labels["process"])
            process = found.setdefault(key, Process(*key))
            name = sample.name.removeprefix(PREFIX).removesuffix("_total")
            if name == "draft_tokens_per_position":
                process.drafted_at[int(labels["position"])] = sample.value
            elif name == "accepted_tokens_per_position":
                process.accepted_at[int(labels["position"])] = sample.value
            elif name == "match_length_tokens_bucket":
                process.matches[float(labels["le"])] = sample.value
            elif name == "step_seconds_bucket":
                process.times[float(labels["le"])] = sample.value
            else:
                process.values[name] = sample.value
    return [found[key] for key in sorted(found)]


def table(processes: list[Process], before: list[Process], seconds: float) -> Table:
    """Show the processes; rates and times are those since `before`, `seconds` ago."""
    earlier = {(process.rank, process.process): process for process in before}
    view = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (
        "rank", "process", "requests", "drafted/s", "accepted/s", "accepted", "match", "median",
        "p99", "cached", "MiB", "evicted", "faults",
    ):  # fmt: skip
        view.add_column(heading, justify="right")
    view.add_column("by position")
    for process in processes:
        last = process.since(earlier.get((process.rank, process.process)))
        values = process.values
        view.add_row(
            process.rank,
            process.process,
            f"{values['requests']:.0f}",
            f"{last.values['draft_tokens'] / seconds:.0f}",
            f"{last.values['accepted_tokens'] / seconds:.0f}",
            _shown(last.acceptance, "{:.0%}"),
            _shown(last.match_length, "{:.1f}"),
            _milliseconds(last.step_seconds(0.5)),
            _milliseconds(last.step_seconds(0.99)),
            f"{values['cached_requests']:.0f}",
            f"{values['memory_bytes'] / 2**20:.1f}",
            f"{values['evicted_responses']:.0f}",
            f"{values['faults']:.0f}",
            "".join(
                BAR[round(min(rate, 1.0) * (len(BAR) - 1))] for rate in last.acceptance_by_position
            ),
        )
    return view


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"


def _quantile(buckets: Histogram, quantile: float) -> float | None:
    """Interpolate within the bucket, as Prometheus's histogram_quantile does."""
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]]:
        return None
    wanted = quantile * buckets[bounds[-1]]
    lower, below = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= wanted:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (wanted - below) / (buckets[bound] - below)
        lower, below = bound, buckets[bound]
    return lower


def _less(counts: Mapping[Any, float], before: Mapping[Any, float]) -> dict[Any, float]:
    return {key: count - before.get(key, 0.0) for key, count in counts.items()}
