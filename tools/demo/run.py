"""The demo: real vLLM with and without our drafter, on the same prompts, token by token.

Each run is an engine of its own in a process of its own: once as vLLM is (VLLM_DRAFTER=0, no
speculation), once with method="suffix" and our drafter behind it. The two kinds take turns,
--rounds times, each round in the other order; seconds are medians over the rounds, and every
round's tokens are compared. Each engine first answers a few other prompts, untimed.

Exits 0 only if all outputs are token by token identical, tokens were accepted, at least two
processes of the engine registered the plugin, and arctic_inference was neither installed nor
imported anywhere; 1 if one of these fails; 2 if an engine fails. The report is written either way.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from demo.engines import KINDS, DemoFailed, Engine, Job
from demo.prompts import GROUPS, all_prompts, warm_up
from demo.report import Engines, faults, make_report

ROOT = Path(__file__).resolve().parent.parent.parent
MAX_NUM_SEQS = 8


class Watcher:
    """Shows how far the engines are: a bar on a terminal, a line per phase elsewhere."""

    def __init__(self, console: Console, prompts: int) -> None:
        self.console = console
        self.prompts = prompts
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("prompts"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def follow(self, name: str, events: Iterator[dict[str, Any]]) -> None:
        """Show the progress of one run to its end."""
        task = self.progress.add_task(name, total=self.prompts)
        timed = False
        for event in events:
            kind = event["event"]
            if kind == "answered":
                self.progress.advance(task, int(timed))
                continue
            timed = timed or kind == "group"
            phases = {"starting": "starting vLLM (30 to 60 s)", "group": event.get("name")}
            what = f"{name}: {phases.get(kind, kind)}"
            self.progress.update(task, description=what)
            if not self.console.is_terminal:
                print(what, flush=True)


def run_rounds(job: Job, rounds: int, folder: Path, console: Console) -> Engines:
    """Run both kinds in turn and return the engines of each kind, round by round."""
    engines: Engines = {kind: [] for kind in KINDS}
    watcher = Watcher(console, sum(map(len, job.groups.values())))
    with watcher.progress:
        for number in range(1, rounds + 1):
            for kind in list(KINDS) if number % 2 else list(reversed(KINDS)):
                engine = Engine(kind, number, folder)
                watcher.follow(f"round {number} of {rounds}, {kind}", engine.run(job))
                engines[kind].append(engine)
    return engines


def table_of(report: dict[str, Any]) -> Table:
    """Return the table of figures, group by group."""
    model = f"{report['model']} in {report['dtype']}"
    table = Table(title=f"vLLM {report['vllm_version']} on the CPU, {model}, greedy")
    for column in ("prompts", "engine"):
        table.add_column(column)
    for column in ("tokens/s", "tokens per forward pass", "drafted", "accepted", "identical"):
        table.add_column(f"output {column}" if column == "tokens/s" else column, justify="right")
    differing = {entry["group"] for entry in report["differences"]}
    for group in [*GROUPS, "all"]:
        same = report["identical"] if group == "all" else group not in differing
        for kind in KINDS:
            row = report[kind] if group == "all" else report[kind]["groups"][group]
            table.add_row(
                group if kind == "baseline" else "",
                kind,
                f"{row['output_tokens_per_s']:.1f}",
                f"{row['tokens_per_forward_pass']:.2f}",
                *_speculation(row, same) if kind == "suffix" else ("-", "-", ""),
            )
        table.add_section()
    return table


def _speculation(row: dict[str, Any], same: bool) -> tuple[str, str, str]:
    accepted = f"{row['accepted']} ({row['acceptance_rate'] or 0:.0%})"
    return str(row["drafted"]), accepted, "yes" if same else "NO"


def show(report: dict[str, Any], console: Console) -> None:
    """Print the table, the processes, and what the figures mean."""
    console.print(table_of(report))
    for name, meaning in GROUPS.items():
        console.print(f"  {name:8} {meaning}")
    console.print("\nProcesses that registered the plugin:")
    for process in report["processes"]:
        console.print(f"  pid {process['pid']:<8} {process['role']}")
    console.print(f"The workers draft with {', '.join(sorted(set(report['drafters'])))}.")
    installed, imported = report["arctic_installed"], report["arctic_imported"]
    console.print(f"arctic_inference: installed {installed}, imported {imported}.")
    rounds = f"medians of {report['rounds']} rounds" if report["rounds"] > 1 else "1 round"
    console.print(
        f"\nWith the suffix drafter {report['speed_ratio']:.2f} times the output tokens/s of no "
        f"speculation ({rounds}, engines in turn)."
    )


def main() -> int:
    """Run the demo and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model, output = ROOT / "build/models/smollm2-135m", ROOT / "build/demo"
    shown = "(default %(default)s)"
    parser.add_argument("--model", type=Path, default=model, help=f"a model directory {shown}")
    parser.add_argument("--output", type=Path, default=output, help=f"for report.json {shown}")
    parser.add_argument("--rounds", type=int, default=3, help=f"runs of each kind {shown}")
    parser.add_argument("--max-tokens", type=int, default=128, help=f"longest answer {shown}")
    parser.add_argument("--timeout", type=float, default=1200, help=f"s for one engine {shown}")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    if not (options.model / "config.json").exists():
        parser.error(f"no model in {options.model}; tools/demo/make_model.py build/models makes it")

    prompts = all_prompts()
    job = Job(
        model=options.model.resolve(),
        groups={name: [p.text for p in prompts if p.group == name] for name in GROUPS},
        warm_up=warm_up(),
        max_tokens=options.max_tokens,
        max_num_seqs=MAX_NUM_SEQS,
        timeout=options.timeout,
    )
    folder: Path = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report_file = folder / "report.json"
    report_file.unlink(missing_ok=True)  # an old report must not pass for this run's
    console = Console() if sys.stdout.isatty() else Console(width=110)
    try:
        engines = run_rounds(job, options.rounds, folder, console)
    except DemoFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 2
    report = make_report(engines, prompts, job)
    report_file.write_text(json.dumps(report, indent=2) + "\n")
    show(report, console)
    console.print(f"Report: {report_file}")
    wrong = faults(report)
    for what in wrong:
        print(f"FAILED: {what}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
