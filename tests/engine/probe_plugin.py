"""A small plugin that is put beside the installed ones, as a distribution of its own.

Its one patch has when="worker"; what the patch puts in place is imported only when it is applied,
and its import says where that was.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from engines import environment, run_python

PLUGIN = {
    "worker_probe.py": """
        import json, multiprocessing, os
        from drafter_compat.patch import Patch, lazy
        from drafter_compat.registry import Registry

        def note(event, **fields):
            with open(os.environ["WORKER_PROBE"], "a") as file:
                name = multiprocessing.current_process().name
                file.write(json.dumps({"event": event, "pid": os.getpid(), "name": name, **fields}))
                file.write("\\n")

        class Mark(
            Patch,
            target="vllm.sampling_params:SamplingParams",
            name="mark",
            adds=("marked",),
            when="worker",
        ):
            marked = lazy("worker_probe_applied:marked")

        registry = Registry("worker-probe", [Mark])

        def register():
            registry.apply()
            note("registered")
        """,
    "worker_probe_applied.py": """
        import sys, torch
        from worker_probe import note

        marked = True
        note(
            "applied",
            cuda=torch.cuda.is_initialized(),
            runner="vllm.v1.worker.gpu_model_runner" in sys.modules,
        )
        """,
    "worker_probe-1.0.dist-info/METADATA": """
        Metadata-Version: 2.1
        Name: worker-probe
        Version: 1.0
        """,
    "worker_probe-1.0.dist-info/entry_points.txt": """
        [vllm.general_plugins]
        worker_probe = worker_probe:register
        """,
}


def write_plugin(folder: Path) -> Path:
    """Put the plugin there, as if installed; returns what goes onto PYTHONPATH."""
    for name, text in PLUGIN.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
    return folder


def said(plugin: Path, code: str, notes: Path, **changes: str) -> dict[str, Any]:
    env = environment(PYTHONPATH=str(plugin), WORKER_PROBE=str(notes), **changes)
    done = run_python(code, env)
    assert done.returncode == 0, done.stdout[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.rpartition("SAID")[2].partition("\n")[0])
    return found
