"""A report as JSON, for programs. `docs/drift/json.md` documents it; `SCHEMA` is its version."""

from __future__ import annotations

import json
from collections import Counter
from importlib import metadata
from typing import Any

from vllm_drift.findings import Finding, Location, Report, Severity, Verdict
from vllm_drift.matrix import matrix_of
from vllm_drift.reports.style import Style
from vllm_drift.reports.words import shown

__all__ = ["SCHEMA", "document", "render"]

SCHEMA = 1
"""Raised when a key changes its meaning or goes away; new keys do not raise it."""


def render(report: Report, style: Style) -> str:
    """Return the report as JSON."""
    return json.dumps(document(report, style), indent=2) + "\n"


def document(report: Report, style: Style) -> dict[str, Any]:
    """Return the report as values that JSON has."""
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "tool": {"name": "vllm-drift", "version": metadata.version("vllm-drift")},
        "command": report.command,
        "surface": report.surface,
        "package": report.package,
        "releases": [
            {
                "label": r.label,
                "source": r.source,
                "modules": r.modules,
                "claimed": r.claimed,
                "notes": list(r.notes),
            }
            for r in report.releases
        ],
        "findings": [_finding(f, style) for f in shown(report, style.everything)],
        "preexisting": [
            _finding(f, style) for f in report.preexisting if f.verdict is not Verdict.UNCHANGED
        ],
        "summary": _summary(report),
        "notes": list(report.notes),
    }
    if report.command == "ledger":
        result["changes"] = [_finding(f, style) for f in report.changes]
        result["outside"] = [
            _finding(f, style) for f in report.outside if f.verdict is not Verdict.UNCHANGED
        ]
        result["matrix"] = _matrix(report)
    return result


def _finding(f: Finding, style: Style) -> dict[str, Any]:
    return {
        "symbol": f.symbol,
        "kind": f.kind,
        "verdict": f.verdict.value,
        "severity": f.severity.value,
        "message": f.message,
        "old": _location(f.old),
        "new": _location(f.new),
        "first_seen": f.first_seen,
        "release": f.release,
        "compared_with": f.compared_with or None,
        "target": f.target or None,
        "why": style.why.get(f.symbol),
        "detail": f.detail or None,
    }


def _location(place: Location | None) -> dict[str, Any] | None:
    return None if place is None else {"path": place.path, "line": place.line}


def _summary(report: Report) -> dict[str, Any]:
    severities = Counter(f.severity for f in report.current if f.verdict is not Verdict.UNCHANGED)
    return {
        "drift": bool(report.drift),
        "symbols": len({f.symbol for f in report.current}),
        "drifted": len({f.symbol for f in report.drift}),
        "verdicts": report.verdict_counts(),
        "severities": {s.value: severities[s] for s in Severity},
        "preexisting": sum(f.verdict is not Verdict.UNCHANGED for f in report.preexisting),
    }


def _matrix(report: Report) -> list[dict[str, Any]]:
    matrix = matrix_of(report)
    return [
        {
            "symbol": row.symbol,
            "kind": row.kind,
            "cells": {
                release.label: {
                    "state": cell.state.value,
                    "verdict": None if cell.verdict is None else cell.verdict.value,
                }
                for release, cell in zip(matrix.releases, row.cells, strict=True)
            },
        }
        for row in matrix.rows
    ]
