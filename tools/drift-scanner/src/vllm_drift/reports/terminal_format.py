"""A report for people at a terminal: one table per release, the gravest first."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from vllm_drift.findings import Finding, Report, Severity, Verdict
from vllm_drift.matrix import CellState, matrix_of
from vllm_drift.reports.style import Style
from vllm_drift.reports.words import by_weight, headline, numbers, place, shown

__all__ = ["render"]

_COLORS = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}
_CELLS = {
    CellState.OK: ("●", "green"),
    CellState.HANDLED: ("◆", "blue"),
    CellState.NOTE: ("●", "green"),
    CellState.CANNOT_TELL: ("?", "magenta"),
    CellState.WARNING: ("!", "yellow"),
    CellState.DRIFT: ("x", "bold red"),
    CellState.UNSUPPORTED: ("–", "dim"),
    CellState.UNUSED: (" ", "dim"),
}


def render(report: Report, style: Style) -> str:
    """Return the report as text, with colours where the style says so."""
    out = io.StringIO()
    console = Console(
        file=out,
        force_terminal=style.color,
        no_color=not style.color,
        width=style.width,
        highlight=False,
        soft_wrap=False,
        legacy_windows=False,
    )
    for part in _parts(report, style):
        console.print(part)
    return out.getvalue()


def _parts(report: Report, style: Style) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if report.command == "ledger":
        parts.append(_ledger(report))
    findings = shown(report, style.everything)
    for label in dict.fromkeys(f.release for f in findings):
        of_release = by_weight([f for f in findings if f.release == label])
        older = {f.compared_with for f in of_release if f.compared_with}
        title = f"{report.package} {label}"
        if older:
            title = f"{report.package} {' '.join(sorted(older))} -> {label}"
        parts.append(_table(title, of_release, style))
    preexisting = [f for f in report.preexisting if f.verdict is not Verdict.UNCHANGED]
    if preexisting:
        parts.append(_table("preexisting: wrong before, and still", by_weight(preexisting), style))
    for note in (*report.notes, *(n for r in report.releases for n in r.notes)):
        parts.append(Text(f"note: {note}", style="dim"))
    parts.append(_last_line(report))
    return parts


def _table(title: str, findings: list[Finding], style: Style) -> RenderableType:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
        expand=False,
    )
    table.add_column("verdict", no_wrap=True)
    table.add_column("symbol", overflow="fold", ratio=2)
    table.add_column("what and where", overflow="fold", ratio=5)
    for f in findings:
        told = Text(f.message)
        where = place(f)
        if where:
            told.append(f"\n{where}", style="dim")
        if f.first_seen and f.first_seen != f.release:
            told.append(f"  (since {f.first_seen})", style="dim")
        evidence: RenderableType = told
        why = style.why.get(f.symbol)
        if why:
            told.append(f"\nwhy: {why}", style="dim")
        if f.detail:
            diff = Syntax(_shortened(f.detail), "diff", background_color="default", word_wrap=True)
            evidence = Group(told, Padding(diff, (0, 0, 0, 2)))
        name = Text(f.symbol)
        name.append(f"\n{f.kind}", style="dim")
        table.add_row(Text(f.verdict.value, style=_COLORS[f.severity]), name, evidence)
    return Padding(table, (0, 0, 1, 0))


def _shortened(detail: str, lines: int = 12) -> str:
    kept = detail.rstrip().splitlines()
    if len(kept) <= lines:
        return "\n".join(kept)
    return "\n".join([*kept[:lines], f"... {len(kept) - lines} more lines (--format json)"])


def _ledger(report: Report) -> RenderableType:
    matrix = matrix_of(report)
    table = Table(box=None, padding=(0, 0, 0, 0), header_style="dim")
    table.add_column("symbol", no_wrap=True)
    for _ in matrix.releases:
        table.add_column("", no_wrap=True, min_width=2)
    for row in matrix.rows:
        cells = []
        for cell in row.cells:
            sign, color = _CELLS[cell.state]
            cells.append(Text(sign, style=color))
        table.add_row(Text(row.symbol + "  "), *cells)
    labels = [r.label for r in matrix.releases] or ["none"]
    legend = Text(
        f"columns: {len(matrix.releases)} releases, {labels[0]} to {labels[-1]}.  ● as declared  "
        f"◆ changed here, and declared so  ! warning  x drift  ? cannot tell  "
        f"– not as declared in a release that is not claimed",
        style="dim",
    )
    return Padding(Group(table, legend), (0, 0, 1, 0))


def _last_line(report: Report) -> Text:
    color = "bold red" if report.drift else ("green" if report.looked_at_something else "yellow")
    line = Text(headline(report), style=color)
    counts = report.verdict_counts()
    if counts:
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        line.append(f"\n{told}", style="dim")
    preexisting = sum(f.verdict is not Verdict.UNCHANGED for f in report.preexisting)
    if preexisting:
        line.append(f"; {numbers(preexisting, 'finding')} preexisting", style="dim")
    return line
