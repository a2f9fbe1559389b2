"""Requests with a LoRA adapter beside others, and whose answers they are drafted from."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from engines import SUFFIX
from traffic import HEAD, TABLE, Pair, Phase, run_pair, run_traffic

RANK = 8
REQUESTS = 8


def make_adapter(folder: Path, model: str) -> str:
    """An adapter of random weights that are large enough to change what the model says."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    config = json.loads((Path(model) / "config.json").read_text())
    hidden, between = config["hidden_size"], config["intermediate_size"]
    generator = torch.Generator().manual_seed(20241104)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, between, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(hidden, RANK, generator=generator)
    folder.mkdir(parents=True)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    adapter = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 16,
        "target_modules": ["down_proj"],
        "bias": "none",
        "base_model_name_or_path": model,
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return str(folder)


@pytest.fixture(scope="module")
def traffic(folder, tiny) -> dict[str, object]:
    """An engine's arguments, and phases: all together, then the same asked of each in turn."""
    adapter = make_adapter(folder / "adapter", tiny)
    # Another adapter that says the same, so that what it is drafted from is all that can differ.
    twin = shutil.copytree(adapter, folder / "twin")
    rng = random.Random(7)
    prompts = [[rng.randrange(1000, 40000) for _ in range(20)] * 2 for _ in range(REQUESTS)]
    later = [[rng.randrange(1000, 40000) for _ in range(20)] * 2 for _ in range(REQUESTS)]
    sampling = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}

    def ask(who: str, path: str | None, prompts: list[list[int]]) -> list[dict[str, object]]:
        return [
            {"key": f"{who} {place}", "prompt": prompt, "sampling": sampling, "lora": path}
            for place, prompt in enumerate(prompts)
        ]

    return {
        "engine": {
            "model": tiny,
            "max_num_seqs": 8,
            "enable_lora": True,
            "max_loras": 2,
            "max_lora_rank": RANK,
        },
        "phases": {
            # Not of the twin: of two adapters in one batch, each has a drafter of its own.
            "mixed": [*ask("with", adapter, prompts), *ask("without", None, prompts)],
            "twin": ask("twin", str(twin), prompts),
            "adapter, later": ask("with", adapter, later),
            "twin, later": ask("twin", str(twin), later),
        },
    }


@pytest.fixture(scope="module")
def pair(request, folder, traffic) -> Pair:
    pair = run_pair(folder / "lora", traffic["engine"], traffic["phases"])
    rows = [pair.row(*phase) for phase in traffic["phases"].items()]
    request.config.stash[TABLE] += ["adapters, answers shared by all:", HEAD, *rows]
    return pair


@pytest.fixture(scope="module")
def apart(request, folder, traffic, pair) -> dict[str, Phase]:
    """The same, and answers are shared only among those who ask for the same adapter."""
    engine = {**traffic["engine"], "speculative_config": SUFFIX}
    phases, log = run_traffic(
        folder / "apart", engine, traffic["phases"], VLLM_DRAFTER_SHARING="lora"
    )
    assert "a fault while drafting" not in log
    kept_apart = Pair(pair.plain, phases, log)
    rows = [kept_apart.row(*phase) for phase in traffic["phases"].items()]
    request.config.stash[TABLE] += ["adapters, answers kept apart by adapter:", HEAD, *rows]
    return phases


def test_requests_with_and_without_an_adapter_say_the_same(pair, traffic):
    for phase in traffic["phases"]:
        pair.check(phase)


def test_the_adapter_changes_what_is_said(pair):
    samples = pair.drafting["mixed"].samples
    assert any(
        samples[f"with {place}"][0]["token_ids"] != samples[f"without {place}"][0]["token_ids"]
        for place in range(REQUESTS)
    )


def test_answers_kept_apart_by_adapter_change_no_token(pair, apart, traffic):
    for phase in traffic["phases"]:
        assert apart[phase].told("token_ids") == pair.plain[phase].told("token_ids")
        assert apart[phase].accepted > 0


def test_another_adapter_s_answers_are_drafted_from_only_where_they_are_shared(pair, apart):
    shared, kept_apart = (run["twin, later"].steps for run in (pair.drafting, apart))
    assert shared < kept_apart
