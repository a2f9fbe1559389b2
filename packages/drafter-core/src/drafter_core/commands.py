"""The subcommands of `drafter-core`: `build` a snapshot from past responses, `simulate` a replay.

Joins traces, tokenizer, drafter, replay and page; holds no logic of theirs. Exit codes: 0 done,
1 nothing in the file could be used, or a file could not be read or written, 2 the command line is
wrong.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from drafter_core.drafter import MAX_DEPTH, SuffixDrafter
from drafter_core.errors import DrafterError
from drafter_core.simulate import CostModel, Outcome, ReplaySettings, replay
from drafter_core.tokenizer import FileTokenizer, TokenizerError
from drafter_core.traces import Skipped, TraceRequest, read_traces

__all__ = ["app"]

app = typer.Typer(
    help="Drafts for speculative decoding from text that was seen before.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)

FORMS = escape(  # to typer it is markup, in which [ids] would be a style
    """
Every line of the file is a JSON object in one of these forms; text needs --tokenizer:

  {"prompt": "text" or [ids], "response": "text" or [ids]}

  {"prompt_token_ids": [ids], "response_token_ids": [ids]}

  {"messages": [{"role": "user", "content": "..."}, ...]}

Lines that cannot be used are skipped, and reported with the reason.
"""
)

MOST = 2**30
"""The upper bound of counts that cost nothing by themselves."""


def _finite(value: float) -> float:
    if not math.isfinite(value):  # a range alone lets nan pass
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


Traces = Annotated[
    Path, typer.Argument(help="Logged prompts and responses, one JSON object a line.", exists=True,
                         dir_okay=False, readable=True)
]  # fmt: skip
TokenizerOption = Annotated[
    Path | None, typer.Option(help="A tokenizer.json, or the directory of a model that has one.")
]
Cached = Annotated[
    int,
    typer.Option(
        min=-1,
        max=MOST,
        help="Responses kept; -1 keeps all, 0 none (then only the request's own text drafts).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


class Mode(str, Enum):
    """How to choose drafts."""

    default = "default"
    exact = "exact"


@app.command(epilog=FORMS)
def build(
    traces: Traces,
    output: Annotated[Path, typer.Option("-o", "--output", help="The snapshot to write.")],
    tokenizer: TokenizerOption = None,
    max_depth: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_DEPTH,
            help="Tokens kept of the end of each prompt: what the server has as its depth.",
        ),
    ] = 24,
    max_cached_requests: Cached = 10_000,
    as_json: Json = False,
) -> None:
    """Make a snapshot from past responses, so that a server starts with a warm cache.

    It holds the texts of the responses, the last --max-cached-requests of them, and the end of the
    prompt of each, by which the same question finds the same answer.

    Example: drafter-core build responses.jsonl --tokenizer ./model -o warm.snapshot
    """
    _check_output(output, "--output", traces, renamed=True)
    requests, skipped = _read(traces, tokenizer)
    drafter = SuffixDrafter(max_depth, max_cached_requests)
    try:
        with _progress() as progress:
            for number, request in enumerate(progress.track(requests, description="inserting")):
                name = f"{traces.name}:{request.line}:{number}"
                drafter.start_request(name, request.prompt[-max_depth:])  # no more of it is kept
                drafter.append(name, request.response)
                drafter.stop_request(name)
        drafter.save(output)
    except OSError as error:
        _fail(f"{output} could not be written: {error.strerror or error}")
    except (DrafterError, MemoryError) as error:
        _fail(f"{output} could not be made: {str(error) or 'no memory is left'}")
    stats = drafter.stats()
    report = {
        "snapshot": str(output),
        "bytes": output.stat().st_size,
        "responses": stats.cached_requests,
        "tokens": stats.cached_tokens,
        "skipped": [asdict(one) for one in skipped],
    }
    if as_json:
        _print_json(report)
        return
    console = Console()
    _say_skipped(console, skipped)
    console.print(
        f"{escape(str(output))}: {stats.cached_requests:,} responses, "
        f"{stats.cached_tokens:,} tokens with the ends of prompts, {report['bytes']:,} bytes"
    )


@app.command(epilog=FORMS)
def simulate(
    traces: Traces,
    tokenizer: TokenizerOption = None,
    mode: Annotated[
        Mode, typer.Option(help="exact: the drafts of arctic-inference. default: better ones.")
    ] = Mode.default,
    batch: Annotated[int, typer.Option(min=1, max=65_536, help="Requests that run at once.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Longest draft.")] = 24,
    max_depth: Annotated[
        int,
        typer.Option(
            min=2,
            max=MAX_DEPTH,
            help="Exact mode: most tokens of a match and its draft together. Default mode: a match "
            "is shorter than this, and its draft may go on beyond.",
        ),
    ] = 24,
    max_cached_requests: Cached = 10_000,
    max_spec_factor: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=4096.0,
            help="A match of m tokens drafts at most this times m; in default mode more while that "
            "is at least 0.8 times as probable as drafted tokens have been right of late.",
            callback=_finite,
        ),
    ] = 1.0,
    min_token_prob: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="A draft ends before its probability falls below this; in default mode, below "
            "half of this.",
            callback=_finite,
        ),
    ] = 0.1,
    budget: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MOST,
            help="Most drafted tokens of a step over the whole batch; none means no limit.",
        ),
    ] = None,
    verify_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST,
            help="Tokens in a forward pass that take as long as the pass itself: draft no more "
            "than pays at this load; none drafts for each request as if it were alone.",
        ),
    ] = None,
    snapshot: Annotated[
        Path | None, typer.Option(help="Start from this snapshot.", exists=True, dir_okay=False)
    ] = None,
    step_ms: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=1e6,
            help="Time of one decode step of your model, in ms.",
            callback=_finite,
        ),
    ] = 20.0,
    verify_us: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1e9,
            help="What each drafted token adds to a step, in µs.",
            callback=_finite,
        ),
    ] = 50.0,
    html: Annotated[Path | None, typer.Option(help="Write plots to this page.")] = None,
    as_json: Json = False,
) -> None:
    """Replay your own traffic and say what suffix drafting would gain on it.

    Needs no model: the responses are known, so a draft counts as accepted as far as it agrees with
    what was answered. Requests are served in the order of the file, --batch at a time.

    Example: drafter-core simulate log.jsonl --tokenizer ./model --html report.html
    """
    if html is not None:
        _check_output(html, "--html", traces, snapshot)
        if find_spec("plotly") is None:
            _fail("--html needs the library plotly: pip install 'drafter-core[simulate]'")
    try:
        drafter = SuffixDrafter(
            max_depth, max_cached_requests, exact=mode is Mode.exact, verify_tokens=verify_tokens
        )
        if snapshot is not None:
            drafter.load(snapshot)
    except (OSError, DrafterError) as error:
        _fail(str(error))
    requests, skipped = _read(traces, tokenizer)
    settings = ReplaySettings(
        batch=batch, max_tokens=max_tokens, max_spec_factor=max_spec_factor,
        min_token_prob=min_token_prob, budget=budget,
    )  # fmt: skip
    try:
        with _progress() as progress:
            total = sum(len(request.response) - 1 for request in requests)
            bar = progress.add_task("replaying", total=total)
            outcome = replay(drafter, requests, settings, lambda n: progress.advance(bar, n))
    except (DrafterError, MemoryError) as error:
        _fail(
            f"{traces} could not be replayed: {str(error) or 'no memory is left'}. What takes "
            "memory: --batch times the longest line, --batch times --max-tokens, and "
            "--max-cached-requests"
        )
    costs = CostModel(step_ms, verify_us)
    cache = {
        "mode": mode.value, "max_depth": max_depth, "max_cached_requests": max_cached_requests,
        "verify_tokens": verify_tokens, "snapshot": None if snapshot is None else str(snapshot),
    }  # fmt: skip
    report = _report(outcome, costs, {**asdict(settings), **cache}, skipped)
    if as_json:
        _print_json(report)
    else:
        _show(Console(), outcome, report, skipped)
    if html is not None:
        _write_page(html, traces.name, outcome, costs, report)
        if not as_json:
            Console().print(f"plots: {html}", markup=False)


def _check_output(path: Path, option: str, *inputs: Path | None, renamed: bool = False) -> None:
    """Say at once, not after all the work, that a file cannot be written.

    `renamed`: it is written beside its place and renamed, so its directory must be writable.
    """
    parent = path.parent
    wrong = None
    if path.is_dir():
        wrong = "is a directory; name a file in it"
    elif not parent.is_dir():
        wrong = f"cannot be written: there is no directory {parent}; make it first"
    elif any(path.exists() and one is not None and path.samefile(one) for one in inputs):
        wrong = "is what is read; name another file"
    elif renamed and path.exists() and not path.is_file():
        wrong = "is no regular file, and a snapshot takes the place of what is there"
    elif not os.access(parent if renamed or not path.exists() else path, os.W_OK):
        wrong = "cannot be written: no permission, or a file system that is read-only"
    if wrong is not None:
        raise typer.BadParameter(f"{path} {wrong}", param_hint=option)


def _write_page(
    path: Path, name: str, outcome: Outcome, costs: CostModel, report: dict[str, Any]
) -> None:
    from drafter_core.page import page

    html = page(name, outcome, costs, report)
    try:
        path.write_text(html, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        _fail(f"{path} could not be written: {error.strerror or error}")


def _print_json(report: dict[str, Any]) -> None:
    print(json.dumps(report, allow_nan=False), flush=True)


def _read(path: Path, tokenizer: Path | None) -> tuple[list[TraceRequest], list[Skipped]]:
    """The usable requests of the file, and what was skipped; exits where nothing is usable."""
    try:
        text = FileTokenizer(tokenizer) if tokenizer is not None else None
    except (OSError, TokenizerError) as error:
        raise typer.BadParameter(str(error), param_hint="--tokenizer") from None
    requests: list[TraceRequest] = []
    skipped: list[Skipped] = []
    try:
        with _progress() as progress:
            for item in read_traces(_lines(path, progress), text):
                if isinstance(item, Skipped):
                    skipped.append(item)
                else:
                    requests.append(item)
    except OSError as error:
        _fail(f"{path} could not be read: {error.strerror or error}")
    if not requests:
        _say_skipped(Console(stderr=True), skipped)
        _fail(f"{path} holds no line that can be used; see drafter-core simulate --help")
    return requests, skipped


def _lines(path: Path, progress: Progress) -> Iterator[str]:
    bar = progress.add_task("reading", total=path.stat().st_size)
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            yield line
            progress.advance(bar, len(line))


def _report(
    outcome: Outcome, costs: CostModel, settings: dict[str, Any], skipped: list[Skipped]
) -> dict[str, Any]:
    """Everything that was measured, as JSON."""
    times = np.array(outcome.step_microseconds or [0.0])
    return {
        "settings": settings,
        "requests": outcome.requests,
        "prompt_tokens": outcome.prompt_tokens,
        "response_tokens": outcome.response_tokens,
        "steps": outcome.steps,
        "steps_without_drafts": outcome.plain_steps,
        "tokens_per_step": outcome.tokens_per_step,
        "drafted": outcome.drafted,
        "accepted": outcome.accepted,
        "acceptance_rate": outcome.acceptance_rate,
        "by_position": [
            {"position": at + 1, "drafted": int(drafted), "accepted": int(accepted)}
            for at, (drafted, accepted) in enumerate(
                zip(outcome.drafted_at, outcome.accepted_at, strict=True)
            )
            if drafted
        ],
        "by_match_length": [
            {
                "match_length": length,
                "drafts": int(outcome.drafts_by_match[length]),
                "drafted": int(outcome.drafted_by_match[length]),
                "accepted": int(outcome.accepted_by_match[length]),
            }
            for length in np.flatnonzero(outcome.drafts_by_match).tolist()
        ],
        "draft_us_per_step": {
            "median": float(np.median(times)),
            "p99": float(np.percentile(times, 99)),
            "max": float(times.max()),
        },
        "start_and_end_us_per_request": outcome.turnover_seconds * 1e6 / max(1, outcome.requests),
        "draft_us_per_request": outcome.draft_seconds * 1e6 / max(1, outcome.request_steps),
        "memory": {
            "bytes": outcome.bytes_in_use,
            "cached_tokens": outcome.cached_tokens,
            "bytes_per_cached_token": outcome.bytes_in_use / max(1, outcome.cached_tokens),
        },
        "cost_model": {
            **asdict(costs),
            "speed_up": outcome.speed_up(costs),
            "speed_up_by_verify_us": {
                str(cost): outcome.speed_up(CostModel(costs.step_ms, cost))
                for cost in (0.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
            },
        },
        "skipped": [asdict(one) for one in skipped],
    }


def _show(
    console: Console, outcome: Outcome, report: dict[str, Any], skipped: list[Skipped]
) -> None:
    costs, memory, cost = report["cost_model"], report["memory"], report["draft_us_per_step"]
    summary = Table(show_header=False, box=None)
    for name, value in {
        "requests": f"{outcome.requests:,}",
        "response tokens": f"{outcome.response_tokens:,}",
        "tokens per step": f"{outcome.tokens_per_step:.2f} (1.00 without drafts)",
        "accepted": f"{outcome.accepted:,} of {outcome.drafted:,} drafted tokens "
        f"({outcome.acceptance_rate:.1%})",
        "steps": f"{outcome.steps:,} instead of {outcome.plain_steps:,}",
        "drafting a step": f"{cost['median']:.0f} µs (99 %: {cost['p99']:.0f} µs)",
        "starting and ending requests": f"{report['start_and_end_us_per_request']:.0f} µs each",
        "memory": f"{memory['bytes'] / 1e6:.1f} MB for {memory['cached_tokens']:,} cached tokens",
        "expected speed-up": f"[bold]{costs['speed_up']:.2f}[/bold] at {costs['step_ms']:g} ms a "
        f"step and {costs['verify_us']:g} µs a verified token",
    }.items():
        summary.add_row(name, value)
    console.print(summary)
    positions = Table("position", "drafted", "accepted", "rate", title="By position in the draft")
    for row in _thinned(report["by_position"]):
        _add_rate(positions, row["position"], row["drafted"], row["accepted"])
    matches = Table("match", "drafted", "accepted", "rate", title="By length of the match")
    for row in report["by_match_length"]:
        _add_rate(matches, row["match_length"], row["drafted"], row["accepted"])
    for table in (positions, matches):
        for column in table.columns:
            column.justify = "right"
        console.print(table)
    _say_skipped(console, skipped)


def _thinned(rows: list[dict[str, int]]) -> list[dict[str, int]]:
    """Positions 1 to 8, then powers of two and the last: enough to see the fall."""
    last = len(rows)
    return [
        row for row in rows
        if row["position"] <= 8 or row["position"] == last or not row["position"] % 8
    ]  # fmt: skip


def _add_rate(table: Table, name: int, drafted: int, accepted: int) -> None:
    table.add_row(str(name), f"{drafted:,}", f"{accepted:,}", f"{accepted / drafted:.1%}")


def _say_skipped(console: Console, skipped: list[Skipped]) -> None:
    """How many lines were skipped, and for each reason which."""
    if not skipped:
        return
    console.print(f"[yellow]{len(skipped)} lines were skipped:[/yellow]")
    for reason, count in Counter(one.reason for one in skipped).most_common(20):
        lines = [str(one.line) for one in skipped if one.reason == reason]
        shown = ", ".join(lines[:5]) + (", …" if count > 5 else "")
        console.print(f"  line {shown}: {reason}", highlight=False, markup=False)


def _fail(message: str) -> None:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False)
    raise typer.Exit(1)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
               TimeRemainingColumn())  # fmt: skip
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
