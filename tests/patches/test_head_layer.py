"""`fp32-lm-head` in vLLM's own layers, without an engine: logits against a float64 reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_patches import registry

TOLERANCE = 1e-5
"""Of the largest logit."""


@pytest.fixture(scope="module")
def process_group() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29655", 0, "gloo")
        initialize_model_parallel(1, 1)


def compute(tiny: str) -> dict[str, Any]:
    """Logits of random hidden states by the layers, as the configuration has them computed."""
    import torch
    from safetensors.torch import load_file
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    weights = load_file(Path(tiny) / "model.safetensors")["lm_head.weight"]
    config = EngineArgs(model=tiny, dtype="bfloat16", max_model_len=256).create_engine_config()
    with set_current_vllm_config(config):
        head = ParallelLMHead(*weights.shape, params_dtype=torch.bfloat16)
        head.weight.data.copy_(weights)
        # As after loading a model; on a CPU this packs the weights.
        head.quant_method.process_weights_after_loading(head)
        torch.manual_seed(0)
        hidden = torch.randn(16, weights.shape[1]).to(torch.bfloat16)
        logits = LogitsProcessor(weights.shape[0])(head, hidden)
    reference = hidden.double() @ weights.double().T
    return {
        "type": str(logits.dtype),
        "error": (logits.double() - reference).abs().max().item(),
        "largest": reference.abs().max().item(),
    }


@pytest.fixture(scope="module")
def computed(tiny, process_group) -> dict[str, dict[str, Any]]:
    found = {"plain": compute(tiny)}
    registry.apply(select=["fp32-lm-head"])
    try:
        found["patched"] = compute(tiny)
    finally:
        registry.revert()
    print(found)
    return found


def test_in_bfloat16_the_logits_are_not_those_of_the_reference(computed):
    assert computed["plain"]["type"] == "torch.bfloat16"
    assert computed["plain"]["error"] > 10 * TOLERANCE * computed["plain"]["largest"]


def test_with_it_they_are(computed):
    assert computed["patched"]["type"] == "torch.float32"
    assert computed["patched"]["error"] < TOLERANCE * computed["patched"]["largest"]
