"""The command `drafter-core`. What it needs beyond numpy and numba is the extra `simulate`."""

from __future__ import annotations

import io
import os
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
    if isinstance(sys.stdout, io.TextIOWrapper):  # names and reasons may hold what it cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except OSError as error:
        # Python flushes once more at exit; let that succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(f"drafter-core: the output could not be written: {error.strerror or error}")
