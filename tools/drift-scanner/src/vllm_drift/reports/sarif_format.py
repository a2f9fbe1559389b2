"""A report as SARIF 2.1.0, for code scanning.

A result stands where the symbol is named in the reader's own repository, because that is what a
code host can show; the places in the scanned package are related locations.
"""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from typing import Any

from vllm_drift.findings import Finding, Location, Report, Severity, Verdict
from vllm_drift.reports.style import Style
from vllm_drift.reports.words import MEANING, shown

__all__ = ["render"]

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def render(report: Report, style: Style) -> str:
    """Return the report as a SARIF log with one run."""
    findings = shown(report, style.everything)
    rules = list(dict.fromkeys(f.verdict for f in findings))
    run = {
        "tool": {
            "driver": {
                "name": "vllm-drift",
                "version": metadata.version("vllm-drift"),
                "rules": [_rule(verdict) for verdict in rules],
            }
        },
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {
            "PACKAGE": {
                "description": {"text": f"the root of {report.package}'s source in that release"}
            }
        },
        "results": [_result(f, report, style, rules) for f in findings],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(verdict: Verdict) -> dict[str, Any]:
    return {
        "id": verdict.value,
        "name": "".join(word.title() for word in verdict.value.split("-")),
        "shortDescription": {"text": MEANING[verdict]},
    }


def _result(f: Finding, report: Report, style: Style, rules: list[Verdict]) -> dict[str, Any]:
    anchor = style.anchors.get(f.symbol)
    related = [
        _place(location, number, f"{report.package} {label}")
        for number, (location, label) in enumerate(
            ((f.old, f.compared_with or "before"), (f.new, f.release)), start=1
        )
        if location is not None
    ]
    # Code scanning wants at least one location; without a place in the reader's repository, the
    # place in the package has to do.
    primary = _own(anchor) if anchor is not None else related[-1:]
    detail = f"\n\n{f.detail}" if f.detail else ""
    identity = f"{f.symbol} {f.verdict.value} {f.target}"
    result: dict[str, Any] = {
        "ruleId": f.verdict.value,
        "ruleIndex": rules.index(f.verdict),
        "level": _LEVELS[f.severity],
        "message": {"text": f"{f.symbol} ({report.package} {f.release}): {f.message}{detail}"},
        "locations": primary,
        "relatedLocations": related,
        "partialFingerprints": {
            "symbolAndVerdict/v1": hashlib.sha256(identity.encode()).hexdigest()
        },
        "properties": {"kind": f.kind, "firstSeen": f.first_seen, "release": f.release},
    }
    if f.preexisting:
        result["baselineState"] = "unchanged"
    return result


def _own(anchor: Location) -> list[dict[str, Any]]:
    return [
        {
            "physicalLocation": {
                "artifactLocation": {"uri": anchor.path, "uriBaseId": "%SRCROOT%"},
                "region": {"startLine": anchor.line},
            }
        }
    ]


def _place(location: Location, number: int, label: str) -> dict[str, Any]:
    return {
        "id": number,
        "message": {"text": label},
        "physicalLocation": {
            "artifactLocation": {"uri": location.path, "uriBaseId": "PACKAGE"},
            "region": {"startLine": location.line},
        },
    }
