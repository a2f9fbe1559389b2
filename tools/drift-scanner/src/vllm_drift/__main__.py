"""Where the command starts: `vllm-drift`, `python -m vllm_drift`.

A module of its own, because a process that analyses (`runs`) imports the module that the program
was started with: it needs no command line.
"""

from __future__ import annotations

import gc
from typing import NoReturn


def main() -> NoReturn:
    """Run the command and end the process."""
    # Syntax trees are millions of objects without cycles: looking for some took half of the time.
    # The process ends soon, and its memory with it.
    gc.disable()
    from vllm_drift.cli import main as run

    run()


if __name__ == "__main__":
    main()
