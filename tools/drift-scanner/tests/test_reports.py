"""One report in every format."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from vllm_drift.findings import (
    DEFAULT_SEVERITY,
    Finding,
    Location,
    Report,
    ScannedRelease,
    Severity,
    Verdict,
    with_first_seen,
)
from vllm_drift.matrix import CellState, matrix_of
from vllm_drift.reports import FORMATS, Style, render
from vllm_drift.reports.words import MEANING

NASTY = "a|b <script>alert(1)</script> 100%\nsecond, line: `x`"


def finding(symbol: str, verdict: Verdict, release: str = "2.0", **more: object) -> Finding:
    keywords: dict[str, object] = {
        "kind": "function",
        "severity": DEFAULT_SEVERITY[verdict],
        "message": f"{symbol} is {verdict.value}",
        "new": Location("vllm/a.py", 7),
        "release": release,
        **more,
    }
    return Finding(symbol=symbol, verdict=verdict, **keywords)  # type: ignore[arg-type]


def report(*findings: Finding, command: str = "check", **more: object) -> Report:
    keywords: dict[str, object] = {
        "surface": "my-plugin",
        "package": "vllm",
        "releases": (ScannedRelease("1.0", "index", 5), ScannedRelease("2.0", "index", 6)),
        **more,
    }
    return Report(command=command, findings=findings, **keywords)  # type: ignore[arg-type]


DRIFTED = finding(
    "propose",
    Verdict.CALLER_CHANGED,
    old=Location("vllm/a.py", 3),
    message=NASTY,
    detail="-propose(a)\n+propose(b, a)",
    first_seen="1.5",
    compared_with="1.0",
    target="vllm.a:propose",
)
FINE = finding("gate", Verdict.UNCHANGED)
BEFORE = finding("old", Verdict.REMOVED, preexisting=True)
ANCHORS = {"propose": Location("surface.toml", 12)}
WHOLE = report(DRIFTED, FINE, BEFORE, notes=("a note",))


class TestOutcome:
    """What a report comes to."""

    @pytest.mark.parametrize(
        ("findings", "code"),
        [
            ([FINE], 0),
            ([FINE, finding("x", Verdict.BODY_CHANGED)], 0),
            ([FINE, finding("x", Verdict.COMPATIBLE)], 0),
            ([FINE, finding("x", Verdict.CANNOT_TELL)], 0),
            ([FINE, BEFORE], 0),
            ([FINE, finding("x", Verdict.NEW_CALL_SITE)], 1),
            ([FINE, DRIFTED], 1),
            ([finding("x", Verdict.CANNOT_TELL)], 2),
            ([], 2),
        ],
    )
    def test_drift_is_one_and_a_blind_run_is_two(self, findings: list[Finding], code: int) -> None:
        assert report(*findings).exit_code == code

    def test_every_verdict_has_a_severity_and_a_meaning(self) -> None:
        assert set(DEFAULT_SEVERITY) == set(MEANING) == set(Verdict)

    def test_first_seen_is_where_the_unbroken_run_of_a_verdict_began(self) -> None:
        gone = [finding("x", Verdict.REMOVED, label) for label in ("1", "3", "4")]
        there = [finding("x", Verdict.UNCHANGED, "2")]

        told = with_first_seen([*gone, *there], ["1", "2", "3", "4"])

        assert [f.first_seen for f in told] == ["1", "3", "3", None]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "given",
    [WHOLE, report(FINE), report(), report(FINE, command="scan"), report(command="ledger")],
    ids=["drift", "no drift", "empty", "scan", "empty ledger"],
)
def test_every_format_takes_every_report(format: str, given: Report) -> None:
    assert render(given, format, Style(anchors=ANCHORS)).strip()


class TestJson:
    """The documented schema, version 1."""

    def document(self, given: Report = WHOLE, **style: object) -> dict[str, object]:
        text = render(given, "json", Style(**style))  # type: ignore[arg-type]
        found: dict[str, object] = json.loads(text)
        return found

    def test_a_finding_has_the_documented_keys(self) -> None:
        document = self.document(why={"propose": "to draft"})

        assert document["schema"] == 1
        assert document["findings"] == [
            {
                "symbol": "propose",
                "kind": "function",
                "verdict": "caller-changed",
                "severity": "error",
                "message": NASTY,
                "old": {"path": "vllm/a.py", "line": 3},
                "new": {"path": "vllm/a.py", "line": 7},
                "first_seen": "1.5",
                "release": "2.0",
                "compared_with": "1.0",
                "target": "vllm.a:propose",
                "why": "to draft",
                "detail": "-propose(a)\n+propose(b, a)",
            }
        ]

    def test_what_was_wrong_before_is_apart(self) -> None:
        preexisting = self.document()["preexisting"]

        assert isinstance(preexisting, list)
        assert [f["symbol"] for f in preexisting] == ["old"]

    def test_the_summary_counts_unchanged_symbols_that_are_not_listed(self) -> None:
        assert self.document()["summary"] == {
            "drift": True,
            "symbols": 2,
            "drifted": 1,
            "verdicts": {"unchanged": 1, "caller-changed": 1},
            "severities": {"error": 1, "warning": 0, "info": 0},
            "preexisting": 1,
        }

    def test_unchanged_symbols_are_listed_on_request(self) -> None:
        findings = self.document(everything=True)["findings"]

        assert isinstance(findings, list)
        assert [f["symbol"] for f in findings] == ["propose", "gate"]


class TestTerminal:
    """For people."""

    def test_it_says_what_where_and_the_outcome_without_colour(self) -> None:
        text = render(WHOLE, "terminal", Style(width=100))

        assert "\x1b" not in text
        assert "caller-changed" in text
        assert "vllm/a.py:3 -> 7" in text
        assert "(since 1.5)" in text
        assert "my-plugin: 1 symbol of 2 drifted from vllm 1.0 to 2.0" in text
        assert "preexisting" in text

    def test_colour_is_an_option(self) -> None:
        assert "\x1b[" in render(WHOLE, "terminal", Style(color=True, width=100))

    def test_a_message_is_not_taken_for_markup(self) -> None:
        odd = finding("x", Verdict.REMOVED, message="list[int] [bold]x[/bold]")

        assert "list[int] [bold]x[/bold]" in render(report(odd), "terminal", Style(width=200))


class TestMarkdown:
    """For a pull request."""

    def test_a_row_stays_one_row(self) -> None:
        text = render(WHOLE, "markdown", Style())

        (row,) = [line for line in text.splitlines() if "**caller-changed**" in line]
        assert len(re.findall(r"(?<!\\)\|", row)) == 7

    def test_a_diff_is_folded_away(self) -> None:
        assert "<details>" in render(WHOLE, "markdown", Style())

    def test_a_body_fits_into_an_issue(self) -> None:
        many = [finding(f"s{i}", Verdict.REMOVED, message="x" * 300) for i in range(500)]

        text = render(report(*many), "markdown", Style())

        assert len(text) < 65_536
        assert "cut here" in text


class TestGithub:
    """Annotations."""

    def test_a_command_points_at_the_manifest_and_escapes_its_text(self) -> None:
        first, last = render(WHOLE, "github", Style(anchors=ANCHORS)).splitlines()

        assert first.startswith(
            "::error file=surface.toml,line=12,title=vllm 2.0%3A caller-changed propose::"
        )
        assert "100%25%0Asecond, line" in first
        assert last == "my-plugin: 1 symbol of 2 drifted from vllm 1.0 to 2.0"


class TestSarif:
    """SARIF 2.1.0."""

    def run(self, given: Report = WHOLE, **style: object) -> dict[str, object]:
        document = json.loads(render(given, "sarif", Style(**style)))  # type: ignore[arg-type]
        assert document["version"] == "2.1.0"
        (run,) = document["runs"]
        assert isinstance(run, dict)
        return run

    def test_a_result_stands_in_the_readers_repository_and_shows_the_packages_lines(self) -> None:
        (result,) = self.run(anchors=ANCHORS)["results"]  # type: ignore[misc, attr-defined]

        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == "surface.toml"
        assert place["region"]["startLine"] == 12
        related = [p["physicalLocation"]["region"]["startLine"] for p in result["relatedLocations"]]
        assert related == [3, 7]
        assert (result["ruleId"], result["level"]) == ("caller-changed", "error")

    def test_every_rule_is_described(self) -> None:
        everything = report(*[finding(v.value, v) for v in Verdict])

        run = self.run(everything, everything=True)

        rules = [r["id"] for r in run["tool"]["driver"]["rules"]]  # type: ignore[index]
        assert sorted(rules) == sorted(v.value for v in Verdict)

    def test_the_same_finding_keeps_its_fingerprint_when_lines_move(self) -> None:
        moved = DRIFTED.replace(new=Location("vllm/a.py", 99))

        prints = [
            self.run(report(f))["results"][0]["partialFingerprints"]  # type: ignore[index]
            for f in (DRIFTED, moved)
        ]

        assert prints[0] == prints[1]


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


class TestHtml:
    """One page that needs nothing else."""

    def test_it_loads_nothing_from_anywhere(self) -> None:
        page = _Page(render(WHOLE, "html", Style()))

        assert not [a for _, a in page.tags if "src" in a]
        assert not [t for t, _ in page.tags if t in {"link", "iframe", "img", "object"}]
        hrefs = [a["href"] for t, a in page.tags if t == "a"]
        assert hrefs
        assert all(h is not None and h.startswith("#") for h in hrefs)

    def test_every_cell_opens_evidence_that_is_there(self) -> None:
        page = _Page(render(WHOLE, "html", Style()))

        wanted = {str(a["href"])[1:] for t, a in page.tags if t == "a"}
        there = {str(a["id"]) for t, a in page.tags if t == "section"}

        assert wanted == there

    def test_what_a_finding_says_is_text(self) -> None:
        text = render(WHOLE, "html", Style())

        assert "<script>alert" not in text
        assert "&lt;script&gt;alert" in text


class TestMatrix:
    """Symbols by releases."""

    LEDGER = report(
        finding("a", Verdict.UNCHANGED, "1.0"),
        finding("a", Verdict.UNCHANGED, "2.0"),
        finding("b", Verdict.REMOVED, "2.0"),
        finding("c", Verdict.CANNOT_TELL, "2.0"),
        finding("d", Verdict.UNCHANGED, "2.0"),
        command="ledger",
        outside=(finding("b", Verdict.REMOVED, "1.0"),),
        changes=(
            finding("a", Verdict.CALLER_CHANGED, "2.0", compared_with="1.0"),
            finding("d", Verdict.BODY_CHANGED, "2.0", compared_with="1.0"),
        ),
    )

    def test_a_cell_says_what_matters_most(self) -> None:
        rows = {r.symbol: [c.state for c in r.cells] for r in matrix_of(self.LEDGER).rows}

        assert rows == {
            "a": [CellState.OK, CellState.HANDLED],
            "b": [CellState.UNSUPPORTED, CellState.DRIFT],
            "c": [CellState.UNUSED, CellState.CANNOT_TELL],
            "d": [CellState.UNUSED, CellState.NOTE],
        }

    def test_history_and_older_releases_are_no_drift(self) -> None:
        assert [f.symbol for f in self.LEDGER.drift] == ["b"]
        assert all(f.severity is Severity.ERROR for f in self.LEDGER.drift)

    def test_the_json_of_a_ledger_holds_the_matrix(self) -> None:
        document = json.loads(render(self.LEDGER, "json", Style()))

        assert document["matrix"][0] == {
            "symbol": "a",
            "kind": "function",
            "cells": {
                "1.0": {"state": "ok", "verdict": "unchanged"},
                "2.0": {"state": "handled", "verdict": "caller-changed"},
            },
        }
