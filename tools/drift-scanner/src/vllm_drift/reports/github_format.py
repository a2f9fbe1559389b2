"""A report as workflow commands, which GitHub shows as annotations."""

from __future__ import annotations

from vllm_drift.findings import Finding, Report, Severity
from vllm_drift.reports.style import Style
from vllm_drift.reports.words import by_weight, headline, place, shown

__all__ = ["render"]

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def render(report: Report, style: Style) -> str:
    """Return one workflow command per finding, and the outcome as a last line of plain text."""
    lines = [_command(f, report, style) for f in by_weight(shown(report, style.everything))]
    return "\n".join([*lines, headline(report)]) + "\n"


def _command(f: Finding, report: Report, style: Style) -> str:
    properties = {"title": f"{report.package} {f.release}: {f.verdict.value} {f.symbol}"}
    anchor = style.anchors.get(f.symbol)
    if anchor is not None:
        properties = {"file": anchor.path, "line": str(anchor.line), **properties}
    told = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    where = place(f)
    message = f.message + (f"\n{where}" if where else "") + (f"\n{f.detail}" if f.detail else "")
    return f"::{_COMMANDS[f.severity]} {told}::{_message(message)}"


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
