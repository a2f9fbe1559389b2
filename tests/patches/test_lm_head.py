"""`fp32-lm-head`: the logits that an engine samples from, against a float64 reference.

The reference is computed from the very hidden states that went into the running head, and from the
weights in the checkpoint; both are bfloat16, and exact in float64.
"""

from __future__ import annotations

from pathlib import Path

import pytest

PROMPTS = [[7, 8, 9], [100, 200, 300, 400], [5] * 20]
TOLERANCE = 1e-5
"""Of the largest logit."""


@pytest.fixture(scope="session")
def heads(run, tiny):
    def measure(patches: str, workers: int) -> dict:
        engine = {"model": tiny, "dtype": "bfloat16", "tensor_parallel_size": workers}
        env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if workers == 2 else {}
        weights = str(Path(tiny) / "model.safetensors")
        return run("lm_head", patches, env=env, engine=engine, prompts=PROMPTS, weights=weights)

    return {
        "plain": measure("none", 1),
        "patched": measure("fp32-lm-head", 1),
        "two workers": measure("fp32-lm-head", 2),
    }


def error(head: dict) -> float:
    return head["largest_error"] / head["largest_logit"]


def test_in_bfloat16_the_logits_are_not_those_of_the_reference(heads):
    assert heads["plain"]["computed"] == "torch.bfloat16"
    assert error(heads["plain"]) > 10 * TOLERANCE


@pytest.mark.parametrize("way", ["patched", "two workers"])
def test_with_it_the_logits_are_those_of_the_reference(heads, way, record_property):
    for name in ("rows", "largest_error", "largest_logit"):
        record_property(name, heads[way][name])
        record_property(f"{name} in bfloat16", heads["plain"][name])
    assert error(heads[way]) < TOLERANCE
    assert heads[way]["rows"] >= len(PROMPTS) * 8
    assert heads[way]["vocabulary"] == 49152


@pytest.mark.parametrize("way", ["patched", "two workers"])
def test_the_weights_stay_as_they_are(heads, way):
    assert heads[way]["weights"] == "torch.bfloat16"
    assert heads[way]["computed"] == "torch.float32"
