"""What exact and default mode accept on every trace, and what that is worth under load.

Replays the traces through both modes with `drafter_core.simulate.replay`; needs no peer, because
the exact mode drafts what the peer drafts (`parity.py`). `nox -s acceptance` runs it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from traces import NEW, OLD, Request, Trace, code_edits, spec_bench, unchanged_files

from drafter_core import SuffixDrafter
from drafter_core.simulate import Outcome, ReplaySettings, replay

BATCHES = (1, 4, 16, 64, 256)
SHORT = 500
"""Tokens: under load only new files are served that are no longer, so that many can be."""
VERIFY_TOKENS = 256
"""What a pass of the machine of the tables, and the default of the plugin, can take."""
MODES: dict[str, dict[str, object]] = {
    "exact": {"exact": True},
    "default": {},
    "within the load": {"verify_tokens": VERIFY_TOKENS},
}
WRONG = {f"set to {n}": {"verify_tokens": n} for n in (64, 1024)}
"""Settings that do not fit the machine; tried where the load is high."""
HIGH = 64


@dataclass(frozen=True)
class Machine:
    """How long a forward pass over t tokens takes, in units of one over none."""

    name: str
    gradual: bool

    def time(self, tokens: NDArray[np.int64]) -> float:
        """The passes over so many tokens each, one after the other."""
        share = tokens / VERIFY_TOKENS
        return float((1 + share if self.gradual else np.maximum(1.0, share)).sum())


MACHINES = (Machine("gradual", gradual=True), Machine("abrupt", gradual=False))


@dataclass(frozen=True, eq=False)
class Line:
    """One pass over one trace at one batch size, in each mode."""

    trace: str
    batch: int
    outcomes: dict[str, Outcome]
    plain: NDArray[np.int64]
    """Tokens in each step without drafts."""

    def gain(self) -> float:
        """Tokens per step of the default mode over those of the exact one."""
        return self.outcomes["default"].tokens_per_step / self.outcomes["exact"].tokens_per_step

    def speed_up(self, mode: str, machine: Machine) -> float:
        """How many times sooner the requests are done than without drafts."""
        drafting = np.array(self.outcomes[mode].step_tokens)
        return machine.time(self.plain) / machine.time(drafting)


def plain_steps(requests: Iterable[Request], batch: int) -> NDArray[np.int64]:
    """How many requests run in each step without drafts; the prefill gives the first token."""
    free_at = [0] * batch
    heapify(free_at)
    for request in requests:
        heapreplace(free_at, free_at[0] + len(request.response) - 1)
    ends = np.array(free_at)
    return np.array([(ends > step).sum() for step in range(max(free_at))])


def run(trace: Trace, batch: int, modes: dict[str, dict[str, object]]) -> list[Line]:
    """Serve the trace in each mode; a line per pass."""
    drafters = {
        name: SuffixDrafter(trace.max_tree_depth, -1, **how)  # type: ignore[arg-type]
        for name, how in modes.items()
    }
    settings = ReplaySettings(
        batch=batch, max_tokens=trace.max_spec_tokens, max_spec_factor=trace.max_spec_factor,
        min_token_prob=trace.min_token_prob,
    )  # fmt: skip
    plain = plain_steps(trace.requests, batch)
    lines = []
    for turn in range(trace.passes):
        name = trace.name if trace.passes == 1 else f"{trace.name}, {('cold', 'warm')[turn]}"
        outcomes = {m: replay(drafters[m], trace.requests, settings) for m in modes}
        lines.append(Line(name, batch, outcomes, plain))
    return lines


def new_code(files: Sequence[Request], limit: int, min_tokens: int, max_tokens: int) -> Trace:
    """Whole source files, answered to nothing: little in them was there before."""
    chosen = [file for file in files if min_tokens <= len(file.response) <= max_tokens]
    return Trace("new code", tuple(chosen[:limit]))


def all_of(traces: Sequence[Trace]) -> list[Trace]:
    """Spec-Bench as one trace, its categories in turn, so that many requests can run at once."""
    if not traces:
        return []
    longest = max(len(trace.requests) for trace in traces)
    requests = [t.requests[i] for i in range(longest) for t in traces if i < len(t.requests)]
    return [replace(traces[0], name="spec-bench", requests=tuple(requests))]


# -- tables


def accepted_rows(lines: list[Line]) -> list[list[str]]:
    """Tokens per step and acceptance rate, a row per trace, and the mean gain."""
    rows = []
    for line in lines:
        exact, default = (line.outcomes[mode] for mode in ("exact", "default"))
        points = 100 * (default.acceptance_rate - exact.acceptance_rate)
        rows.append([
            line.trace, f"{exact.tokens_per_step:.3f}", f"{default.tokens_per_step:.3f}",
            f"{line.gain() - 1:+.1%}", f"{exact.acceptance_rate:.1%}",
            f"{default.acceptance_rate:.1%}", f"{points:+.1f} points",
        ])  # fmt: skip
    mean = sum(line.gain() for line in lines) / len(lines)
    rows.append(["mean", "", "", f"{mean - 1:+.1%}", "", "", ""])
    return rows


def load_rows(lines: list[Line], machine: Machine) -> list[list[str]]:
    """Speed-up over no drafts by batch size, a row per trace and mode."""
    rows = []
    for name in dict.fromkeys(line.trace for line in lines):
        found = {line.batch: line for line in lines if line.trace == name}
        modes = dict.fromkeys(mode for line in found.values() for mode in line.outcomes)
        for mode in modes:
            rows.append([
                name, mode,
                *(
                    f"{found[b].speed_up(mode, machine):.2f}"
                    if b in found and mode in found[b].outcomes
                    else "–"
                    for b in BATCHES
                ),
            ])  # fmt: skip
    return rows


ACCEPTED = ["trace", "tokens per step, exact", "default", "gain", "acceptance, exact", "default",
            "difference"]  # fmt: skip
LOAD = ["trace", "mode", *(f"batch {batch}" for batch in BATCHES)]


def worst(lines: list[Line], machine: Machine) -> str:
    """The least of what the load-aware mode gains, and the most it loses against the best mode."""
    within = {line: line.speed_up("within the load", machine) for line in lines}
    least = min(lines, key=lambda line: within[line])
    lost = {line: 1 - within[line] / max(line.speed_up(m, machine) for m in line.outcomes)
            for line in lines}  # fmt: skip
    most = max(lines, key=lambda line: lost[line])
    return (
        f"Within the load, the least is {within[least]:.2f} ({least.trace}, batch {least.batch}); "
        f"the most that it falls short of the best row is {lost[most]:.1%} ({most.trace}, batch "
        f"{most.batch})."
    )


def markdown(accepted: list[Line], load: list[Line], batch: int, limit: int) -> str:
    """The committed page."""
    gradual, abrupt = MACHINES
    lines = [
        "# Exact and default drafts",
        "",
        "Written by `benchmarks/acceptance.py`, which `nox -s acceptance` runs. Responses are "
        "known, so a draft counts as accepted as far as it agrees with them. The code-edit trace "
        f"is vLLM {OLD} to {NEW} (old file as prompt, "
        "new file as response); Spec-Bench is asked twice, cold and warm; new code is whole files "
        "without a prompt. Exact mode drafts "
        "what arctic-inference drafts ([parity.md](parity.md)); how the default mode drafts is in "
        "[drafter.md](drafter.md).",
        "",
        f"## Accepted, {batch} requests at once",
        "",
        *table_lines(ACCEPTED, accepted_rows(accepted)),
        "",
        f"The first {limit} files of each kind of code, and Spec-Bench, are what the default "
        "mode's few constants were chosen on; *other files* are all other edits, and as many "
        "other new files, which nothing was chosen on. What a step takes is in "
        "[bench-core.md](bench-core.md).",
        "",
        "## Speed-up over no drafts, by requests at once",
        "",
        "By a model of the machine: a pass over t tokens (one per request, and the drafted ones) "
        f"takes 1 + t / {VERIFY_TOKENS} times what a pass over none takes. Drafting itself, and "
        "prefills, are left out. *Within the load* drafts a token only if it pays "
        f"(`verify_tokens={VERIFY_TOKENS}`, the plugin's default but on CPUs); *set to* is the "
        "same with a setting that does not fit the machine. No figure where a trace has fewer "
        f"requests. New code is {BATCHES[-1]} files of at most {SHORT} tokens here.",
        "",
        worst(load, gradual),
        "",
        *table_lines(LOAD, load_rows(load, gradual)),
        "",
        f"The same on a machine that takes up to {VERIFY_TOKENS} tokens for nothing, and is then "
        "as slow as there are more, with the settings as they were:",
        "",
        worst(load, abrupt),
        "",
        *table_lines(LOAD, load_rows(load, abrupt)),
    ]
    return "\n".join(lines) + "\n"


def table_lines(columns: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    head = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    return head + ["| " + " | ".join(row) + " |" for row in rows]


def main(
    batch: Annotated[int, typer.Option(min=1, help="Requests at once for the first table.")] = 8,
    limit: Annotated[int, typer.Option(min=1, help="Files of the traces of code.")] = 24,
    report: Annotated[Path | None, typer.Option(help="Write the page as Markdown.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare what the two modes accept, alone and under load."""
    categories = spec_bench()
    files = unchanged_files()
    edits, news = code_edits(), new_code(files, 2 * limit, 200, 2000)
    code = [replace(trace, requests=trace.requests[:limit]) for trace in (edits, news)]
    others = [
        replace(trace, name=f"{trace.name}, other files", requests=trace.requests[limit:])
        for trace in (edits, news)
    ]
    accepted_plan = [code[0], *categories, code[1], *others]
    load_plan = [
        (trace, size)
        for trace in [code[0], *all_of(categories), new_code(files, BATCHES[-1], 64, SHORT)]
        for size in BATCHES
        if size <= max(BATCHES[0], len(trace.requests))
    ]
    progress = Console(stderr=True)
    both = {mode: MODES[mode] for mode in ("exact", "default")}
    accepted: list[Line] = []
    for trace in track(accepted_plan, "both modes", console=progress):
        accepted += run(trace, batch, both)
    load: list[Line] = []
    for trace, size in track(load_plan, "under load", console=progress):
        load += run(trace, size, MODES if size < HIGH else {**MODES, **WRONG})
    if report is not None:
        report.write_text(markdown(accepted, load, batch, limit), encoding="utf-8")
    if as_json:
        print(json.dumps([
            {"trace": line.trace, "batch": line.batch, "mode": mode,
             "tokens_per_step": outcome.tokens_per_step, "drafted": outcome.drafted,
             "accepted": outcome.accepted,
             "speed_up": {m.name: line.speed_up(mode, m) for m in MACHINES}}
            for line in [*accepted, *load] for mode, outcome in line.outcomes.items()
        ]))  # fmt: skip
        return
    for title, columns, rows in (
        ("Accepted", ACCEPTED, accepted_rows(accepted)),
        *((f"Speed-up, {m.name}", LOAD, load_rows(load, m)) for m in MACHINES),
    ):
        shown = Table(*columns, title=title)
        for row in rows:
            shown.add_row(*row)
        Console().print(shown)


if __name__ == "__main__":
    typer.run(main)
