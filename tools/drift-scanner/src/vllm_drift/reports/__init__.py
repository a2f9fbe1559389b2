"""Prints a report in each of the formats. Every format is one module with one function, `render`.

A format is imported when it is asked for. Knows findings; must not know where source comes from or
how a program is called.
"""

from __future__ import annotations

import importlib

from vllm_drift.findings import Report
from vllm_drift.reports.style import Style

__all__ = ["FORMATS", "Style", "render"]

FORMATS = ("terminal", "json", "markdown", "github", "sarif", "html")
"""The formats, as the command line names them; `NAME_format` is the module of one."""


def render(report: Report, format: str, style: Style) -> str:
    """Return the report as text. Raises ValueError for a format that is not in `FORMATS`."""
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; there is {', '.join(FORMATS)}")
    module = importlib.import_module(f"vllm_drift.reports.{format}_format")
    text: str = module.render(report, style)
    return text
