"""Patches with when="worker" in a running engine: applied in the worker, and only there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from probe_plugin import said, write_plugin

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


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plugin(tmp_path_factory.mktemp("plugin"))


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
