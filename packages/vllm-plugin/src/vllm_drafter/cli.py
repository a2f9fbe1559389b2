"""The command `vllm-drafter`. Prints what other modules find out; finds out nothing itself."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import vllm_drafter
from vllm_drafter.doctor import FAILURE, NOTE, OK, WARNING, Check, Diagnosis, diagnose

if TYPE_CHECKING:
    from vllm_drafter.top import Process

__all__ = ["app", "main"]

_MARKS = {
    OK: ("ok", "green"),
    NOTE: ("note", "cyan"),
    WARNING: ("warn", "yellow"),
    FAILURE: ("FAIL", "bold red"),
}

app = typer.Typer(
    name="vllm-drafter",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Suffix drafting for vLLM by a plugin: `pip install vllm-drafter`, then\n\n"
        'vllm serve MODEL --speculative-config \'{"method": "suffix"}\'\n\n'
        "Nothing has to be run from here to use it. Start with [bold]vllm-drafter doctor[/bold] "
        "if you want to know whether it will work, or why it does not."
    ),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-drafter {vllm_drafter.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with every check and every symbol.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List every vLLM symbol that was checked.")
    ] = False,
) -> None:
    """Say whether the plugin will work in this interpreter, and why not.

    Reads metadata and source only: vLLM is neither imported nor started. Run it with the
    environment variables that the server has, because VLLM_PLUGINS and VLLM_DRAFTER decide as well.

    Exit code 0: it will work. 1: it will not; each FAIL line says why and what to do.
    """
    diagnosis = diagnose()
    if as_json:
        typer.echo(json.dumps(diagnosis.as_dict(), indent=2))
    else:
        _print_diagnosis(diagnosis, verbose=verbose)
    raise typer.Exit(0 if diagnosis.works else 1)


@app.command()
def top(
    url: Annotated[
        str, typer.Argument(help="Address of a running vLLM server.")
    ] = "http://localhost:8000",
    interval: Annotated[
        float, typer.Option("--interval", "-n", min=0.1, help="Seconds between two looks.")
    ] = 2.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all numbers once, since start-up, as JSON.")
    ] = False,
) -> None:
    """Watch what each process of a server drafts, and how much of it is accepted.

    Rates, acceptance, match lengths and times are those of the last interval; requests, cache,
    evictions and faults those since start-up. "by position" draws the acceptance of each position
    of a draft. Ctrl-C ends it. docs/metrics.md explains every number.

    Exit code 0: shown. 1: there is nothing to show; the message says why and what to do.
    """
    from vllm_drafter.top import NoMetrics, read

    try:
        processes = read(url)
        if as_json:
            found = [process.as_dict() for process in processes]
            typer.echo(json.dumps({"url": url, "processes": found}, indent=2))
            return
        _watch(url, processes, interval)
    except NoMetrics as error:
        Console(stderr=True, highlight=False).print(f"[red]error[/red]: {escape(str(error))}")
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        return


def _watch(url: str, processes: list[Process], interval: float) -> None:
    from vllm_drafter.top import read, table

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        before, looked = processes, time.monotonic()
        live.update(Text(f"{url}: the first numbers come in {interval:g} s"), refresh=True)
        while True:
            time.sleep(interval)
            processes, now = read(url), time.monotonic()
            live.update(table(processes, before, now - looked), refresh=True)
            before, looked = processes, now


def _print_diagnosis(diagnosis: Diagnosis, *, verbose: bool) -> None:
    console = Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    symbols = [check for check in diagnosis.checks if check.id.startswith("surface:")]
    good = [check for check in symbols if check.status == OK]
    for check in diagnosis.checks:
        if check in good and not verbose:
            if check is good[0]:
                _add_row(
                    table,
                    Check(
                        "surface", OK, f"{len(good)} of {len(symbols)} vLLM symbols are as expected"
                    ),
                )
            continue
        _add_row(table, check)
    console.print(table)
    verdict = (
        "[green]The plugin will work here.[/green]"
        if diagnosis.works
        else "[bold red]The plugin will not work here.[/bold red]"
    )
    console.print(
        f"\n{verdict} Python {diagnosis.facts['python']}, {escape(diagnosis.facts['interpreter'])}"
    )


def _add_row(table: Table, check: Check) -> None:
    mark, style = _MARKS[check.status]
    table.add_row(Text(mark, style=style), check.id, Text(check.found))
    if check.way_out:
        table.add_row("", "", Text(f"→ {check.way_out}", style="bold"))


def main() -> None:
    """Entry point of the command."""
    app()
