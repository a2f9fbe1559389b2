"""The command `drafter-core`. What it needs beyond numpy and numba is the extra `simulate`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command, or say what to install for it."""
    try:
        from drafter_core.commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("drafter_core"):
            raise
        sys.exit(
            f"the command drafter-core needs the library {error.name}, which is not installed: "
            "pip install 'drafter-core[simulate]'"
        )
    app()
