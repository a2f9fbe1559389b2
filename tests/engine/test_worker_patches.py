"""A front end in which plugins have registered, worker patches among them, has touched nothing."""

from __future__ import annotations

from probe_plugin import said, write_plugin

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


def test_a_front_end_with_plugins_has_neither_cuda_nor_the_model_runner(tmp_path, tiny):
    plugin = write_plugin(tmp_path)
    found = said(plugin, FRONT_END.replace("MODEL", repr(tiny)), tmp_path / "notes")
    assert found["registered"] == ["vllm_drafter.patches", "worker_probe"]
    assert found["after registration"] == {"runners": [], "cuda": 0}
    assert found["afterwards"]["cuda"] > 0
    assert "vllm.v1.worker.gpu_model_runner" in found["afterwards"]["runners"]
