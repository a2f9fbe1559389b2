"""Prints a report in each of the formats. Every format is one function from a report to text.

Knows findings; must not know where source comes from or how a program is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllm_drift.findings import Report
from vllm_drift.reports import (
    github_format,
    html_format,
    json_format,
    markdown_format,
    sarif_format,
    terminal_format,
)
from vllm_drift.reports.style import Style

__all__ = ["FORMATS", "Style", "render"]

Format = Callable[[Report, Style], str]

FORMATS: Mapping[str, Format] = {
    "terminal": terminal_format.render,
    "json": json_format.render,
    "markdown": markdown_format.render,
    "github": github_format.render,
    "sarif": sarif_format.render,
    "html": html_format.render,
}
"""The formats by the name that the command line gives them."""


def render(report: Report, format: str, style: Style) -> str:
    """Return the report as text. Raises KeyError for a format that is not in `FORMATS`."""
    return FORMATS[format](report, style)
