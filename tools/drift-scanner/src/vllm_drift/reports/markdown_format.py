"""A report as Markdown, for a pull request, an issue or the ledger in the documentation."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_drift.findings import Finding, Report, Severity, Verdict
from vllm_drift.matrix import Cell, CellState, Matrix, matrix_of
from vllm_drift.reports.style import Style
from vllm_drift.reports.words import by_weight, headline, place, shown

__all__ = ["render"]

_SIGNS = {Severity.ERROR: "❌", Severity.WARNING: "⚠️", Severity.INFO: "ℹ️"}
_CELLS = {
    CellState.OK: "✅",
    CellState.HANDLED: "🔷",
    CellState.NOTE: "✅",
    CellState.CANNOT_TELL: "❔",
    CellState.WARNING: "⚠️",
    CellState.DRIFT: "❌",
    CellState.UNSUPPORTED: "➖",
    CellState.UNUSED: "",
}
_LEGEND = (
    "✅ as declared · 🔷 changed here, and declared so · "
    "⚠️ warning · ❌ drift · ❔ cannot tell · ➖ not as declared, in a release that is not "
    "claimed · empty: not relied on"
)
_LONGEST = 60_000
"""A code host refuses bodies above 65,536 characters."""


def render(report: Report, style: Style) -> str:
    """Return the report as Markdown."""
    parts = [f"## {headline(report)}"]
    if report.command == "ledger":
        parts += _ledger(report)
    findings = shown(report, style.everything)
    for label in dict.fromkeys(f.release for f in findings):
        of_release = by_weight([f for f in findings if f.release == label])
        older = sorted({f.compared_with for f in of_release if f.compared_with})
        name = f"{report.package} {' '.join(older)} → {label}" if older else label
        parts.append(f"### {name}")
        parts.append(_table(of_release, style))
        parts += _details(of_release)
    preexisting = [f for f in report.preexisting if f.verdict is not Verdict.UNCHANGED]
    if preexisting:
        parts.append("### Preexisting: wrong before, and still")
        parts.append(_table(by_weight(preexisting), style))
    notes = (*report.notes, *(n for r in report.releases for n in r.notes))
    parts += [f"> {note}" for note in notes]
    text = "\n\n".join(parts) + "\n"
    if report.command != "ledger" and len(text) > _LONGEST:
        text = text[:_LONGEST].rpartition("\n")[0] + "\n\n… cut here; the JSON report has it all\n"
    return text


def _table(findings: Sequence[Finding], style: Style) -> str:
    rows = [
        "| | symbol | verdict | what | where | since |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for f in findings:
        cells = (
            _SIGNS[f.severity],
            f"`{f.symbol}`<br>{f.kind}",
            f"**{f.verdict.value}**",
            _cell(f.message) + _why(f, style),
            f"`{place(f)}`" if place(f) else "",
            f.first_seen or "",
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _why(f: Finding, style: Style) -> str:
    why = style.why.get(f.symbol)
    return f"<br><sub>why: {_cell(why)}</sub>" if why else ""


def _details(findings: Sequence[Finding]) -> list[str]:
    parts = []
    for f in findings:
        if f.detail:
            fence = "```" if "```" not in f.detail else "~~~~"
            parts.append(
                f"<details><summary><code>{f.symbol}</code>: {f.verdict.value}</summary>\n\n"
                f"{fence}diff\n{f.detail.rstrip()}\n{fence}\n\n</details>"
            )
    return parts


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _ledger(report: Report) -> list[str]:
    matrix = matrix_of(report)
    return [_LEGEND, _grid(matrix), "### What changed, release by release", *_history(report)]


def _grid(matrix: Matrix) -> str:
    labels = [r.label if r.claimed else f"*{r.label}*" for r in matrix.releases]
    rows = [
        "| symbol | " + " | ".join(labels) + " |",
        "| --- |" + " :-: |" * len(labels),
    ]
    for row in matrix.rows:
        cells = " | ".join(_sign(cell) for cell in row.cells)
        rows.append(f"| `{row.symbol}` | {cells} |")
    return "\n".join(rows)


def _sign(cell: Cell) -> str:
    return _CELLS[cell.state]


def _history(report: Report) -> list[str]:
    parts = []
    for release in report.releases:
        changes = [f for f in report.changes if f.release == release.label]
        outside = [
            f
            for f in report.outside
            if f.release == release.label and f.verdict is not Verdict.UNCHANGED
        ]
        told = [f for f in changes if f.verdict is not Verdict.BODY_CHANGED]
        bodies = [f.symbol for f in changes if f.verdict is Verdict.BODY_CHANGED]
        if not (told or bodies or outside):
            continue
        lines = [f"**{release.label}**" + ("" if release.claimed else " (not claimed)")]
        lines += [_line(f) for f in by_weight(told)]
        lines += [_line(f) for f in by_weight(outside)]
        if bodies:
            names = ", ".join(f"`{b}`" for b in bodies)
            lines.append(f"- body-changed (information): {names}")
        parts.append("\n".join([lines[0], "", *lines[1:]]))
    return parts or ["Nothing changed."]


def _line(f: Finding) -> str:
    where = f" (`{place(f)}`)" if place(f) else ""
    return f"- **{f.verdict.value}** `{f.symbol}`: {_cell(f.message)}{where}"
