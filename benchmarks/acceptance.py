"""What exact and default mode accept on every trace, and what that is worth under load.

Replays the traces through both modes with `drafter_core.simulate.replay`; needs no peer, because
the exact mode drafts what the peer drafts (`parity.py`). `nox -s acceptance` runs it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from traces import NEW, OLD, Trace, code_edits, spec_bench

from drafter_core import SuffixDrafter
from drafter_core.simulate import CostModel, Outcome, ReplaySettings, replay

BATCHES = (1, 8, 32, 64, 128, 256)
MODES = ("exact", "default", "budget")
"""The peer's drafts, the default ones, and the default ones within a budget per step."""
BUDGET = 64
COSTS = CostModel(step_ms=20.0, verify_us=100.0)
"""A decode step of 20 ms, and 0.1 ms more for every token that is verified beside it."""


@dataclass(frozen=True)
class Line:
    """One pass over one trace at one batch size, in both modes."""

    trace: str
    batch: int
    outcomes: dict[str, Outcome]

    def gain(self) -> float:
        """Tokens per step of the default mode over those of the exact one."""
        return self.outcomes["default"].tokens_per_step / self.outcomes["exact"].tokens_per_step


def run(trace: Trace, batch: int) -> list[Line]:
    """Serve the trace in both modes; a line per pass."""
    drafters = {m: SuffixDrafter(trace.max_tree_depth, -1, exact=m == "exact") for m in MODES}
    plain = ReplaySettings(
        batch=batch, max_tokens=trace.max_spec_tokens, max_spec_factor=trace.max_spec_factor,
        min_token_prob=trace.min_token_prob,
    )  # fmt: skip
    settings = {m: replace(plain, budget=BUDGET if m == "budget" else None) for m in MODES}
    lines = []
    for turn in range(trace.passes):
        name = trace.name if trace.passes == 1 else f"{trace.name}, {('cold', 'warm')[turn]}"
        outcomes = {m: replay(drafters[m], trace.requests, settings[m]) for m in MODES}
        lines.append(Line(name, batch, outcomes))
    return lines


def accepted_rows(lines: list[Line]) -> list[list[str]]:
    """Tokens per step and acceptance rate, a row per trace, and the mean gain."""
    rows = []
    for line in lines:
        exact, default = (line.outcomes[mode] for mode in MODES[:2])
        rows.append([
            line.trace, f"{exact.tokens_per_step:.3f}", f"{default.tokens_per_step:.3f}",
            f"{line.gain() - 1:+.1%}", f"{exact.acceptance_rate:.1%}",
            f"{default.acceptance_rate:.1%}", f"{exact.drafted:,}", f"{default.drafted:,}",
        ])  # fmt: skip
    mean = sum(line.gain() for line in lines) / len(lines)
    rows.append(["mean", "", "", f"{mean - 1:+.1%}", "", "", "", ""])
    return rows


def load_rows(lines: list[Line]) -> list[list[str]]:
    """Speed-up over no drafts by batch size, a row per trace and mode."""
    rows = []
    for name in dict.fromkeys(line.trace for line in lines):
        for mode in MODES:
            found = {x.batch: x.outcomes[mode].speed_up(COSTS) for x in lines if x.trace == name}
            rows.append([name, mode, *(f"{found[b]:.2f}" if b in found else "–" for b in BATCHES)])
    return rows


ACCEPTED = ["trace", "tokens per step, exact", "default", "gain", "acceptance, exact", "default",
            "drafted, exact", "default"]  # fmt: skip
LOAD = ["trace", "mode", *(f"batch {batch}" for batch in BATCHES)]


def markdown(accepted: list[list[str]], load: list[list[str]], batch: int) -> str:
    """The committed page."""
    lines = [
        "# Exact and default drafts",
        "",
        "Written by `nox -s acceptance`. Responses are known, so a draft counts as accepted as far "
        f"as it agrees with them. The code-edit trace is vLLM {OLD} to {NEW} (old file as prompt, "
        "new file as response); Spec-Bench is asked twice, cold and warm. Exact mode drafts what "
        "arctic-inference drafts.",
        "",
        f"## Accepted, {batch} requests at once",
        "",
        *table_lines(ACCEPTED, accepted),
        "",
        "## Speed-up over no drafts, by requests at once",
        "",
        f"By a model: a step takes {COSTS.step_ms:g} ms and {COSTS.verify_us / 1000:g} ms more for "
        "every drafted token of the batch, and drafting takes what it took here. No figure where a "
        "trace has fewer requests than that. *Budget*: default mode with at most "
        f"{BUDGET} drafted tokens a step, the most probable ones.",
        "",
        *table_lines(LOAD, load),
    ]
    return "\n".join(lines) + "\n"


def table_lines(columns: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    head = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    return head + ["| " + " | ".join(row) + " |" for row in rows]


def main(
    batch: Annotated[int, typer.Option(min=1, help="Requests at once for the first table.")] = 8,
    limit: Annotated[int, typer.Option(min=1, help="Files of the code-edit trace.")] = 300,
    report: Annotated[Path | None, typer.Option(help="Write the page as Markdown.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare what the two modes accept."""
    traces = [code_edits(limit=limit), *spec_bench()]
    sizes = dict.fromkeys((batch, *BATCHES))
    plan = [(t, size) for size in sizes for t in traces if size <= max(batch, len(t.requests))]
    lines: list[Line] = []
    for trace, size in track(plan, "replaying", console=Console(stderr=True)):
        lines += run(trace, size)
    accepted = accepted_rows([line for line in lines if line.batch == batch])
    load = load_rows(lines)
    if report is not None:
        report.write_text(markdown(accepted, load, batch), encoding="utf-8")
    if as_json:
        print(json.dumps([
            {"trace": line.trace, "batch": line.batch, "mode": mode,
             "tokens_per_step": outcome.tokens_per_step, "drafted": outcome.drafted,
             "accepted": outcome.accepted, "speed_up": outcome.speed_up(COSTS)}
            for line in lines for mode, outcome in line.outcomes.items()
        ]))  # fmt: skip
        return
    for title, columns, rows in (("Accepted", ACCEPTED, accepted), ("Speed-up", LOAD, load)):
        shown = Table(*columns, title=title)
        for row in rows:
            shown.add_row(*row)
        Console().print(shown)


if __name__ == "__main__":
    typer.run(main)
