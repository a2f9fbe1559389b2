"""A report as a matrix: symbols by releases, one state per cell and the findings behind it.

What the ledger and the HTML page show. Knows findings only.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from vllm_drift.findings import Finding, Report, ScannedRelease, Severity, Verdict

__all__ = ["Cell", "CellState", "Matrix", "Row", "matrix_of"]


class CellState(str, enum.Enum):
    """What one cell says at a glance."""

    OK = "ok"
    """As the surface declares it."""
    HANDLED = "handled"
    """Changed from the release before, and the surface declares both shapes."""
    NOTE = "note"
    """Information only: a compatible change, another body."""
    CANNOT_TELL = "cannot-tell"
    WARNING = "warning"
    DRIFT = "drift"
    UNSUPPORTED = "unsupported"
    """Not as declared, in a release that the plugin does not claim."""
    UNUSED = "unused"
    """The plugin does not rely on the symbol in this release."""


@dataclass(frozen=True)
class Cell:
    """One symbol in one release."""

    state: CellState
    findings: tuple[Finding, ...] = ()
    """The evidence: what the scan of the release says, then what changed to get there."""

    @property
    def verdict(self) -> Verdict | None:
        """The verdict to print in the cell: of the worst finding that is not `unchanged`."""
        told = [f for f in self.findings if f.verdict is not Verdict.UNCHANGED]
        if not told:
            return Verdict.UNCHANGED if self.findings else None
        return max(told, key=lambda f: f.severity.rank).verdict


@dataclass(frozen=True)
class Row:
    """One symbol over all releases; `cells` are in the order of the matrix's releases."""

    symbol: str
    kind: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Matrix:
    """The matrix of a report."""

    releases: tuple[ScannedRelease, ...]
    rows: tuple[Row, ...]


_NO_CHANGE_OF_SHAPE = {Verdict.UNCHANGED, Verdict.COMPATIBLE, Verdict.BODY_CHANGED}


def matrix_of(report: Report) -> Matrix:
    """Arrange a report's findings. Symbols keep the order in which the findings name them first."""
    everything = (*report.findings, *report.outside, *report.changes)
    by_cell: dict[tuple[str, str], list[Finding]] = {}
    kinds: dict[str, str] = {}
    for finding in everything:
        kinds.setdefault(finding.symbol, finding.kind)
        by_cell.setdefault((finding.symbol, finding.release), []).append(finding)
    releases = [r for r in report.releases if any(f.release == r.label for f in everything)]
    outside = set(report.outside)
    changes = set(report.changes)
    rows = []
    for symbol, kind in kinds.items():
        cells = []
        for release in releases:
            found = tuple(by_cell.get((symbol, release.label), ()))
            cells.append(Cell(_state(found, outside, changes), found))
        rows.append(Row(symbol, kind, tuple(cells)))
    return Matrix(tuple(releases), tuple(rows))


def _state(found: tuple[Finding, ...], outside: set[Finding], changes: set[Finding]) -> CellState:
    judged = [f for f in found if f not in changes]
    if not judged:
        return CellState.UNUSED
    if any(f in outside and f.verdict is not Verdict.UNCHANGED for f in judged):
        return CellState.UNSUPPORTED
    drift = [f for f in judged if f.is_drift]
    if any(f.severity is Severity.ERROR for f in drift):
        return CellState.DRIFT
    if drift:
        return CellState.WARNING
    if any(f.verdict is Verdict.CANNOT_TELL for f in judged):
        return CellState.CANNOT_TELL
    if any(f in changes and f.verdict not in _NO_CHANGE_OF_SHAPE for f in found):
        return CellState.HANDLED
    if any(f.verdict is not Verdict.UNCHANGED for f in found):
        return CellState.NOTE
    return CellState.OK
