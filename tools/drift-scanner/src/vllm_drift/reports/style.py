"""What a format may need to know beside the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_drift.findings import Location

__all__ = ["Style"]


@dataclass(frozen=True)
class Style:
    """How to print, beside what to print."""

    anchors: Mapping[str, Location] = field(default_factory=dict)
    """Where each symbol stands in the reader's own repository: a line of the manifest or of the
    plugin. A code host shows what is said about a symbol there.
    """
    why: Mapping[str, str] = field(default_factory=dict)
    """Why the plugin relies on each symbol, as its surface says it."""
    color: bool = False
    width: int | None = None
    everything: bool = False
    """Show unchanged symbols too."""
