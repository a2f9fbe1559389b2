"""Tells from inside a process of the engine what it has imported.

vLLM adds the class to its workers (`worker_extension_cls`); the demo then asks them. It must import
nothing of ours and nothing heavy, or it would change what it reports.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from typing import Any

PEER = "arctic_inference"


def imported() -> dict[str, Any]:
    """Return this process's id, and whether the peer's package is in it or could be."""
    return {
        "pid": os.getpid(),
        "arctic_imported": any(name.split(".")[0] == PEER for name in sys.modules),
        "arctic_installed": importlib.util.find_spec(PEER) is not None,
    }


class Witness:
    """Methods that vLLM adds to each worker."""

    def vllm_drafter_demo_processor_seconds(self) -> float:
        """Return the processor time of this worker so far, of all its threads."""
        return time.process_time()

    def vllm_drafter_demo_witness(self) -> dict[str, Any]:
        """Return what this worker has imported, and the class that drafts for it."""
        runner = getattr(self, "model_runner", None)
        drafter = getattr(runner, "drafter", None)
        cls = type(drafter)
        name = None if drafter is None else f"{cls.__module__}.{cls.__qualname__}"
        return {"role": "worker", **imported(), "drafter": name}
