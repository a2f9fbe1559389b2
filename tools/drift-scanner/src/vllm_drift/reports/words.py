"""The sentences that several formats share."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_drift.findings import Finding, Report, Severity, Verdict

__all__ = ["MEANING", "by_weight", "headline", "numbers", "place", "shown"]

MEANING: dict[Verdict, str] = {
    Verdict.UNCHANGED: "It is as the plugin expects it.",
    Verdict.COMPATIBLE: "It changed in a way that does not matter to the plugin.",
    Verdict.CHANGED_SHAPE: "Its signature, fields or kind changed.",
    Verdict.MOVED: "It is somewhere else now.",
    Verdict.REMOVED: "It is gone.",
    Verdict.CALLER_CHANGED: "The code that calls it, or what replaced it, calls it otherwise.",
    Verdict.NEW_DEMAND: "The package asks something of the plugin's object that it does not have.",
    Verdict.INEFFECTIVE: "The name is still there, but nothing that runs reads it there.",
    Verdict.NEW_CALL_SITE: "Another function calls it now.",
    Verdict.LOST_CALL_SITE: "A function that called it no longer does.",
    Verdict.BODY_CHANGED: "The text of the function differs; its shape does not.",
    Verdict.UPSTREAMED: "The package now does itself what the patch does.",
    Verdict.CANNOT_TELL: "The source does not tell; somebody has to look.",
    Verdict.MISMATCH: "The release does not have what the surface declares.",
}
"""One sentence for each verdict."""


def shown(report: Report, everything: bool) -> list[Finding]:
    """Return the findings to list: not the preexisting ones, and unchanged ones only on request."""
    return [f for f in report.current if everything or f.verdict is not Verdict.UNCHANGED]


def by_weight(findings: Sequence[Finding]) -> list[Finding]:
    """Sort the findings of one release, the gravest first, otherwise in their order."""
    return sorted(findings, key=lambda f: (-f.severity.rank, f.verdict is Verdict.UNCHANGED))


def headline(report: Report) -> str:
    """Say the outcome in one line."""
    between = _between(report)
    symbols = numbers(len({f.symbol for f in report.current}), "symbol")
    if report.drift:
        drifted = {f.symbol for f in report.drift}
        some = numbers(len(drifted), "symbol")
        return f"{report.surface}: {some} of {symbols.split()[0]} drifted {between}"
    if not report.looked_at_something:
        return f"{report.surface}: nothing could be judged {between}"
    return f"{report.surface}: no drift in {symbols} {between}"


def _between(report: Report) -> str:
    labels = [r.label for r in report.releases]
    package = report.package
    if report.command == "check" and len(labels) == 2:
        return f"from {package} {labels[0]} to {labels[1]}"
    if len(labels) == 1:
        return f"in {package} {labels[0]}"
    if len(labels) > 4:
        return f"in {len(labels)} releases of {package}, {labels[0]} to {labels[-1]}"
    return f"in {package} {', '.join(labels)}"


def numbers(count: int, thing: str) -> str:
    """Return `1 symbol`, `2 symbols`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def place(finding: Finding) -> str:
    """Return where to look, as `path:line`, or `path:line -> path:line` where it differs."""
    if finding.old is not None and finding.new is not None and finding.old != finding.new:
        if finding.old.path == finding.new.path:
            return f"{finding.old} -> {finding.new.line}"
        return f"{finding.old} -> {finding.new}"
    found = finding.new or finding.old
    return "" if found is None else str(found)


def marks(severity: Severity) -> str:
    """Return a sign for a severity that works without colour."""
    return {Severity.ERROR: "x", Severity.WARNING: "!", Severity.INFO: "."}[severity]
