"""Speed, memory and start-up of drafter_core beside arctic-inference, as ratios from one run.

Steps, prompts and stops are timed alternating in this process; memory, growth, pauses, eviction and
start-up in a child process per contestant. Prints tables, writes JSON and, with `--report`, the
committed page. Sets no threshold: it measures. `nox -s bench` runs it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import version
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Annotated, Any

# numpy's request for huge pages makes the kernel pause to build them; set before numpy is imported.
os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")

import typer
from bench_steps import (
    CLOCKS,
    TURNS,
    Ours,
    Peer,
    PromptTimes,
    StepTimes,
    fill,
    time_prompts,
    time_steps,
)
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from traces import NEW, OLD, ROOT, code_edits, source_files, spec_bench, unchanged_files

import drafter_core

HERE = Path(__file__).resolve().parent
OUTPUT = ROOT / "build" / "bench" / "bench.json"
BATCHES = (1, 8, 64, 256)
STEPS = {1: 2000, 8: 800, 64: 250, 256: 100}
PROMPTS = {16: 4000, 64: 2000, 256: 1000, 1024: 400, 4096: 150}
CACHED = 5_000_000
OURS = ("lists", "arrays", "default")
"""Exact mode from ids to lists, exact mode on arrays, default mode on arrays."""
AIMS = {
    ("lists", 64, 0): 10, ("lists", 256, 0): 10,
    ("arrays", 64, 0): 18, ("arrays", 256, 0): 18,
    ("lists", 64, CACHED): 5, ("lists", 256, CACHED): 5,
    ("lists", 1, 0): 4, ("arrays", 1, 0): 4,
}  # fmt: skip
"""How many times faster a step is meant to be: (contestant, batch, cached tokens)."""


def contestants(depth: int) -> list[Peer | Ours]:
    """The peer and ours in every form that is compared."""
    return [
        Peer(depth),
        Ours("lists", depth, lists=True, exact=True),
        Ours("arrays", depth, lists=False, exact=True),
        Ours("default", depth, lists=False),
    ]


def measure_steps(quick: bool, clock: str, progress: Progress) -> list[StepTimes]:
    """Every trace, every batch size, with nothing cached."""
    return steps_with(0, quick, clock, progress)


def measure_cached(quick: bool, clock: str, progress: Progress) -> list[StepTimes]:
    """The same with five million other tokens cached."""
    return steps_with(CACHED // 20 if quick else CACHED, quick, clock, progress)


def steps_with(size: int, quick: bool, clock: str, progress: Progress) -> list[StepTimes]:
    """Every trace, every batch size, with `size` tokens cached."""
    traces = [code_edits(max_tokens=8192), *spec_bench()]
    share = 10 if quick else 1
    bar = progress.add_task("steps", total=len(traces) * len(BATCHES) * len(TURNS))
    caches = contestants(traces[0].max_tree_depth)
    cached = fill(caches, unchanged_files(), size)
    peer, *ours = caches
    results = []
    for turns in TURNS:
        for trace in traces:
            for batch in BATCHES:
                label = f"{trace.name}, batch {batch}, {cached:,} cached, turns by {turns}"
                progress.update(bar, description=label)
                result = StepTimes(trace.name, batch, cached, turns)
                time_steps(peer, ours, trace, batch, STEPS[batch] // share, result, CLOCKS[clock])
                progress.advance(bar)
                results.append(result)
    return results


def measure_prompts(quick: bool, clock: str, progress: Progress) -> list[PromptTimes]:
    """Prompts of source code, short to long."""
    bar = progress.add_task("prompts", total=len(PROMPTS))
    caches = contestants(24)
    texts = source_files()
    results = []
    for length, repeats in PROMPTS.items():
        repeats //= 10 if quick else 1
        results.append(time_prompts(caches, texts, length, repeats, CLOCKS[clock]))
        progress.advance(bar)
    return results


def measure_children(quick: bool, clock: str, progress: Progress) -> dict[str, dict[str, Any]]:
    """What needs a process of its own, for the peer and for ours; always by both clocks."""
    del clock
    most = 1_000_000 if quick else 10_000_000
    plan: list[tuple[str, str, list[int]]] = []
    for contestant in ("exact", "default", "peer"):
        # Five million tokens of the peer fill 1.5 GB; more would prove nothing new.
        size = min(most, 5_000_000) if contestant == "peer" else most
        plan += [
            ("growth", contestant, [size]),
            ("eviction", contestant, [size]),
            ("eviction", contestant, [most // 4, most // 250_000, 10_000]),
        ]
    bar = progress.add_task("memory, growth, eviction", total=len(plan))
    results: dict[str, dict[str, Any]] = {}
    for measurement, contestant, numbers in plan:
        progress.update(bar, description=f"{measurement} of {contestant}")
        part = f"{measurement} of long responses" if len(numbers) > 1 else measurement
        results.setdefault(part, {})[contestant] = child(measurement, contestant, *numbers)
        progress.advance(bar)
    return results


def measure_start_up(quick: bool, clock: str, progress: Progress) -> dict[str, Any]:
    """Cold with an empty Numba cache, then warm; always by both clocks."""
    del quick, clock
    bar = progress.add_task("start-up", total=6)
    with tempfile.TemporaryDirectory() as empty:
        environment = {"NUMBA_CACHE_DIR": empty}
        runs = []
        for _ in range(4):
            runs.append(child("start_up", "default", environment=environment))
            progress.advance(bar)
    peer = []
    for _ in range(2):
        peer.append(child("start_up", "peer"))
        progress.advance(bar)
    return {
        clock: {
            "cold": runs[0][clock],
            "warm": median(run[clock] for run in runs[1:]),
            "peer": median(run[clock] for run in peer),
        }
        for clock in ("wall", "processor")
    }


def child(
    measurement: str, contestant: str, *numbers: int, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run one measurement of bench_growth.py in a process of its own."""
    command = [sys.executable, str(HERE / "bench_growth.py"), measurement, contestant]
    done = subprocess.run(
        [*command, *map(str, numbers)], capture_output=True, text=True, check=False,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{measurement} of {contestant} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def geometric_mean(values: list[float]) -> float:
    """The mean of ratios."""
    return exp(sum(map(log, values)) / len(values))


# -- tables, each a title, column names and rows, for the terminal and for the report alike

Grid = tuple[str, list[str], list[list[str]]]


def step_grids(results: list[StepTimes]) -> list[Grid]:
    """Medians and ratios per trace, and the geometric means over the traces."""
    means = []
    for turns in TURNS:
        for batch in BATCHES:
            chosen = [r for r in results if (r.batch, r.turns) == (batch, turns)]
            row = [turns, str(batch), f"{chosen[0].cached_tokens:,}"]
            for name in OURS:
                aim = AIMS.get((name, batch, chosen[0].cached_tokens))
                ratio = geometric_mean([r.ratio(name) for r in chosen])
                row.append(f"{ratio:.1f}" + (f" (aim {aim})" if aim else ""))
            means.append(row)
    grids: list[Grid] = [(
        "How many times faster a step is than the peer's (geometric mean over the traces)",
        ["turns by", "batch", "cached", *OURS], means,
    )]  # fmt: skip
    for turns in TURNS:
        rows = []
        for r in results:
            if r.turns == turns:
                accepted = sum(r.accepted) / len(r.accepted)
                rows.append([
                    r.trace, str(r.batch), f"{r.cached_tokens:,}", f"{accepted:.2f}",
                    *(f"{r.microseconds(name):.1f}" for name in ("peer", *OURS)),
                    *(f"{r.ratio(name):.1f}" for name in OURS),
                    str(r.different_drafts),
                ])  # fmt: skip
        grids.append((
            f"A step: append what was accepted, then draft (median, µs; turns by {turns})",
            ["trace", "batch", "cached", "tokens per request", "peer", *OURS,
             *(f"ratio, {name}" for name in OURS), "different drafts"], rows,
        ))  # fmt: skip
    return grids


def prompt_grids(results: list[PromptTimes]) -> list[Grid]:
    """Starting and stopping requests."""
    names = ("peer", "arrays", "default")
    rows = [
        [
            f"{r.length:,}", *(f"{r.per_token(name):.0f}" for name in names),
            *(f"{r.per_token('peer') / r.per_token(name):.1f}" for name in names[1:]),
            *(f"{r.per_stop(name) / 1000:.2f}" for name in names),
            *(f"{r.per_stop('peer') / r.per_stop(name):.1f}" for name in names[1:]),
        ]
        for r in results
    ]  # fmt: skip
    return [(
        "Starting a request (ns per prompt token) and stopping it (µs)",
        ["prompt tokens", *(f"start, {n}" for n in names), *(f"ratio, {n}" for n in names[1:]),
         *(f"stop, {n}" for n in names), *(f"ratio, {n}" for n in names[1:])], rows,
    )]  # fmt: skip


def child_grids(results: dict[str, dict[str, Any]]) -> list[Grid]:
    """Memory, growth, pauses, eviction, start-up."""
    grids: list[Grid] = []
    grown = results["growth"]
    marks = list(max((run["bytes_per_token"] for run in grown.values()), key=len))
    rows = []
    for name, run in grown.items():
        rows.append([name, "bytes per token", *(cell(run["bytes_per_token"], m) for m in marks)])
        rows.append(
            [name, "append, ns per token", *(cell(run["append_ns_per_token"], m) for m in marks)]
        )
    grids.append((
        "Memory and cost of appending while the global tree grows (varied code, resident memory)",
        ["contestant", "", *(f"at {int(mark):,} tokens" for mark in marks)], rows,
    ))  # fmt: skip
    rows = []
    for name, run in grown.items():
        for clock in ("wall", "processor"):
            rows.append([name, clock, *(f"{v:.1f}" for v in run["append_us"][clock].values())])
    grids.append((
        "One append of 8 tokens (µs); processor time leaves out what else the machine did",
        ["contestant", "clock", "50 %", "99 %", "99.9 %", "99.99 %", "longest"], rows,
    ))  # fmt: skip
    for part in ("eviction", "eviction of long responses"):
        grids.append(eviction_grid(results[part]))
    return grids


def eviction_grid(runs: dict[str, dict[str, Any]]) -> Grid:
    """A full cache: its memory, and the starts that make room."""
    rows = []
    for name, run in runs.items():
        for clock in ("wall", "processor"):
            rows.append([
                name, f"{run['tokens']:,}", f"{run['growth_after_full']:.3f}", clock,
                *(f"{v:.1f}" for v in run["eviction_us"][clock].values()),
            ])  # fmt: skip
    some = next(iter(runs.values()))
    return (
        f"Tokens through a cache of {some['limit']:,} responses of {some['response_tokens']:,} "
        "tokens: resident memory at the end over that when first full; starts that evict (µs)",
        ["contestant", "tokens", "memory", "clock", "50 %", "99 %", "99.9 %", "99.99 %", "longest"],
        rows,
    )


def start_up_grids(results: dict[str, Any]) -> list[Grid]:
    """Start-up, cold and warm."""
    rows = [
        [clock, *(f"{seconds:.2f}" for seconds in run.values())] for clock, run in results.items()
    ]
    columns = ["clock", "cold, empty Numba cache", "warm", "peer"]
    title = "From the first line of a program to the first draft, imports included (s)"
    return [(title, columns, rows)]


def cell(values: dict[str, float], mark: str) -> str:
    """A value that may not have been measured."""
    return f"{values[mark]:.1f}" if mark in values else "–"


def markdown(measured: dict[str, Any]) -> str:
    """The committed page, of every part that was measured last."""
    lines = [
        "# Speed and memory of drafter_core",
        "",
        f"Written by `nox -s bench`: arctic-inference {version('arctic-inference')}, numba "
        f"{version('numba')}, numpy {version('numpy')}, Python {platform.python_version()}, "
        f"{os.cpu_count()} processors ({platform.machine()}). Ratios are of medians, ours and the "
        "peer's taken in turn in one process. *Turns by replay*: each replays the trace alone, "
        "three times in turn, so that the processor's caches hold what it left there a step ago. "
        "*Turns by step*: the peer and one of ours take every step in turn, so that each finds the "
        "caches full of what the other left: nearer to an engine whose model runs in between, and "
        "harder on whoever has less to compute. The code-edit trace is every "
        f"file of vLLM that changed from {OLD} to {NEW}; Spec-Bench is replayed on its reference "
        "answers. Cached tokens are code that the traces do not contain. *Lists*: exact mode, from "
        "request ids to lists of token ids. *Arrays*: exact mode, from the runner's arrays to an "
        "int32 block. *Default*: arrays, default mode; it sees the tokens that the peer's drafts "
        "had accepted. Memory, growth and eviction are measured without Python's garbage "
        "collector, whose pauses are the caller's. *Code* is a digest of drafter_core's sources.",
        "",
        "| part | measured | code | clock | load of the machine, before and after |",
        "| --- | --- | --- | --- | --- |",
    ]
    for part, found in measured.items():
        quick = ", quick" if found["quick"] else ""
        lines.append(
            f"| {part} | {found['when']}{quick} | {found['code']} | {found['clock']} | "
            f"{found['load'][0]:.1f}, {found['load'][1]:.1f} |"
        )
    for found in measured.values():
        for title, columns, rows in found["grids"]:
            lines += ["", f"## {title}", "", "| " + " | ".join(columns) + " |"]
            lines.append("| --- " * len(columns) + "|")
            lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def digest_of_sources() -> str:
    """Tells which drafter_core was measured."""
    digest = sha256()
    for path in sorted(Path(drafter_core.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def plain(value: Any) -> Any:
    """JSON for the result classes."""
    if isinstance(value, StepTimes):
        return {
            "trace": value.trace, "batch": value.batch, "cached_tokens": value.cached_tokens,
            "turns": value.turns,
            "tokens_per_request": sum(value.accepted) / len(value.accepted),
            "different_drafts": value.different_drafts,
            "median_us": {name: value.microseconds(name) for name in ("peer", *OURS)},
            "ratio": {name: value.ratio(name) for name in OURS},
        }  # fmt: skip
    if isinstance(value, PromptTimes):
        return {
            "length": value.length,
            "start_ns_per_token": {name: value.per_token(name) for name in value.start},
            "stop_ns": {name: value.per_stop(name) for name in value.stop},
        }
    raise TypeError(f"no JSON for {type(value)}")


PARTS: dict[str, tuple[Callable[[bool, str, Progress], Any], Callable[[Any], list[Grid]]]] = {
    "steps": (measure_steps, step_grids),
    "cached": (measure_cached, step_grids),
    "prompts": (measure_prompts, prompt_grids),
    "memory": (measure_children, child_grids),
    "start-up": (measure_start_up, start_up_grids),
}


def main(
    parts: Annotated[
        list[str] | None, typer.Argument(help=f"What to measure: {', '.join(PARTS)}. All if none.")
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="A tenth of the steps, a tenth of the tokens.")
    ] = False,
    clock: Annotated[
        str, typer.Option(help="wall, or processor on a busy machine: for steps and prompts.")
    ] = "wall",
    output: Annotated[
        Path, typer.Option(help="Where the JSON goes; other parts that are in it stay.")
    ] = OUTPUT,
    report: Annotated[
        Path | None, typer.Option(help="Write the page, of all parts in the JSON, as Markdown.")
    ] = None,
) -> None:
    """Measure drafter_core beside arctic-inference."""
    unknown = sorted(set(parts or ()) - PARTS.keys())
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}; there are {', '.join(PARTS)}")
    if clock not in CLOCKS:
        raise typer.BadParameter(f"{clock}; there are {', '.join(CLOCKS)}")
    console = Console(stderr=True)
    kept = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for part in parts or PARTS:
            measure, show = PARTS[part]
            before = os.getloadavg()[0]
            found = measure(quick, clock, progress)
            kept[part] = {
                "when": time.strftime("%Y-%m-%d %H:%M"), "code": digest_of_sources(),
                "quick": quick, "clock": clock,
                "load": [before, os.getloadavg()[0]], "grids": show(found), "found": found,
            }  # fmt: skip
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(kept, default=plain, indent=1), encoding="utf-8")
    for part in parts or PARTS:
        for title, names, rows in kept[part]["grids"]:
            table = Table(*names, title=title)
            for row in rows:
                table.add_row(*row)
            Console().print(table)
    if report is not None:
        ordered = {part: kept[part] for part in PARTS if part in kept}
        report.write_text(markdown(ordered), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
