"""Requests with a LoRA adapter, beside requests without one, in one batch."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from traffic import Pair, run_pair

RANK = 8


def make_adapter(folder: Path, model: str) -> str:
    """An adapter of random weights that are large enough to change what the model says."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    config = json.loads((Path(model) / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(20241104)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) * 0.3
        weights[f"{name}.lora_B.weight"] = torch.randn(heads, RANK, generator=generator) * 0.3
    folder.mkdir(parents=True)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    adapter = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 16,
        "target_modules": ["q_proj"],
        "bias": "none",
        "base_model_name_or_path": model,
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return str(folder)


@pytest.fixture(scope="module")
def pair(folder, tiny) -> Pair:
    adapter = make_adapter(folder / "adapter", tiny)
    rng = random.Random(7)
    prompts = [[rng.randrange(1000, 40000) for _ in range(20)] * 2 for _ in range(12)]
    sampling = {"temperature": 0.0, "max_tokens": 80, "ignore_eos": True}
    requests = [
        {"key": f"{with_lora} {place}", "prompt": prompt, "sampling": sampling, "lora": path}
        for place, prompt in enumerate(prompts)
        for with_lora, path in (("with", adapter), ("without", None))
    ]
    engine = {"model": tiny, "max_num_seqs": 8, "enable_lora": True, "max_lora_rank": RANK}
    return run_pair(folder / "lora", engine, {"lora": requests})


def test_requests_with_and_without_an_adapter_say_the_same(pair):
    pair.check("lora")


def test_the_adapter_changes_what_is_said(pair):
    samples = pair.drafting["lora"].samples
    assert any(
        samples[f"with {place}"][0]["token_ids"] != samples[f"without {place}"][0]["token_ids"]
        for place in range(12)
    )
