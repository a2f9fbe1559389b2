"""Patches that wait for a worker: nothing is touched before, and each is applied where it belongs.

A small plugin is put beside the installed ones, as a distribution of its own. Its one patch has
when="worker"; what the patch puts in place is imported only when it is applied, and its import says
where that was.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
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

GENERATE = """
import json, os, sys
from vllm import LLM, SamplingParams

def marked(worker):
    return os.getpid(), getattr(SamplingParams, "marked", False)

if __name__ == "__main__":
    llm = LLM(model={model!r}, dtype="float32", enforce_eager=True, max_model_len=256)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    [answer] = llm.generate({{"prompt_token_ids": [5, 6, 7]}}, params, use_tqdm=False)
    said = {{
        "tokens": len(answer.outputs[0].token_ids),
        "front end": [os.getpid(), hasattr(SamplingParams, "marked")],
        "workers": llm.collective_rpc(marked),
        "runner": "vllm.v1.worker.gpu_model_runner" in sys.modules,
    }}
    print("SAID" + json.dumps(said), flush=True)
"""

FRONT_END = """
import json, sys
import torch

initialised = []
torch.cuda._lazy_init = lambda: initialised.append(True)

def touched():
    runners = [name for name in sys.modules if name.startswith("vllm.v1.worker.gpu")]
    return {"runners": runners, "cuda": len(initialised)}

from vllm import EngineArgs
arguments = EngineArgs(model=MODEL, dtype="float32", enforce_eager=True)  # loads plugins
arguments.create_engine_config()
registered = [name for name in ("vllm_drafter.patches", "worker_probe") if name in sys.modules]
said = {"registered": registered, "after registration": touched()}

# What the test would see if a plugin did touch them.
import vllm.v1.worker.gpu_model_runner
try:
    torch.cuda.current_device()
except Exception:
    pass
said["afterwards"] = touched()
print("SAID" + json.dumps(said), flush=True)
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
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


def test_a_front_end_with_plugins_has_neither_cuda_nor_the_model_runner(plugin, tmp_path, tiny):
    found = said(plugin, FRONT_END.replace("MODEL", repr(tiny)), tmp_path / "notes")
    assert found["registered"] == ["vllm_drafter.patches", "worker_probe"]
    assert found["after registration"] == {"runners": [], "cuda": 0}
    assert found["afterwards"]["cuda"] > 0
    assert "vllm.v1.worker.gpu_model_runner" in found["afterwards"]["runners"]


@pytest.fixture(scope="module")
def generated(plugin, tmp_path_factory, tiny) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run whose worker is spawned: it hears of the plugin only after it has begun to start."""
    notes = tmp_path_factory.mktemp("notes") / "notes"
    changes = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    # A spawned process imports the program again, so it must be a file.
    program = notes.with_name("program.py")
    program.write_text(GENERATE.format(model=tiny))
    code = f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')"
    found = said(plugin, code, notes, **changes)
    return found, [json.loads(line) for line in notes.read_text().splitlines()]


def test_a_worker_patch_is_applied_in_the_worker_and_only_there(generated):
    found, notes = generated
    assert found["tokens"] == 4
    [[worker, marked]] = found["workers"]
    assert marked
    assert [note["pid"] for note in notes if note["event"] == "applied"] == [worker]
    registered = {note["pid"] for note in notes if note["event"] == "registered"}
    assert worker in registered
    assert len(registered) >= 3


def test_the_front_end_of_a_running_engine_stays_unpatched(generated):
    found, _ = generated
    pid, marked = found["front end"]
    assert not marked
    assert not found["runner"]
    assert [pid, True] not in found["workers"]


def test_a_worker_patch_comes_before_the_worker_touches_its_device(generated):
    _, notes = generated
    [applied] = [note for note in notes if note["event"] == "applied"]
    assert not applied["cuda"]
