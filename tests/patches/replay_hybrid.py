"""Tokens per forward pass of ngram, suffix and hybrid drafting, replayed on the demo's answers.

    nox -s demo -- --rounds 1
    nox -s patches -- --collect-only      # makes the environment
    build/envs/vllm-0.32.0/bin/python tests/patches/replay_hybrid.py 1.0 2.0 4.0    # thresholds

Greedy answers do not depend on what is drafted, so the answers that `nox -s demo` wrote down
without speculation say which tokens of any draft would have been accepted. The drafts are made by
vLLM's own ngram proposer and by the patch's own drafter, as in the runner, but no model runs: a
threshold is tried in seconds. Prefill counts as a pass, as in the engine tests.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from transformers import AutoTokenizer
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

from vllm_patches.hybrid import DEFAULT_THRESHOLD, HybridDrafter, better_draft

ROOT = Path(__file__).parents[2]
MAX_MODEL_LEN = 2048
BATCH = 8
DRAFT = 8

Choose = Callable[[list[int], float, list[int]], Sequence[int]]


def recorded() -> tuple[list[str], list[list[int]], list[list[int]]]:
    """Group, prompt and answer of every prompt of the demo."""
    demo = ROOT / "build" / "demo"
    job = json.loads((demo / "baseline-1.job").read_text())
    groups = json.loads((demo / "baseline-1.result").read_text())["groups"]
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "build" / "models" / "smollm2-135m")

    def ids(message: str) -> list[int]:
        chat = [{"role": "user", "content": message}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    names = [name for name, messages in job["groups"].items() for _ in messages]
    prompts = [ids(message) for messages in job["groups"].values() for message in messages]
    answers = [answer for name in job["groups"] for answer in groups[name]["tokens"]]
    return names, prompts, answers


def configuration() -> Any:
    """As much of a VllmConfig as the two proposers read."""
    speculative = SimpleNamespace(
        method="ngram",
        num_speculative_tokens=DRAFT,
        prompt_lookup_min=2,
        prompt_lookup_max=4,
        suffix_decoding_max_tree_depth=24,
        suffix_decoding_max_cached_requests=10_000,
        suffix_decoding_max_spec_factor=1.0,
        suffix_decoding_min_token_prob=0.1,
    )
    return SimpleNamespace(
        speculative_config=speculative,
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
        device_config=SimpleNamespace(device_type="cuda"),
        scheduler_config=SimpleNamespace(max_num_seqs=BATCH, async_scheduling=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


def accepted(draft: Sequence[int], answer: Sequence[int]) -> int:
    """How many tokens of a draft are those of the answer."""
    for place, (drafted, said) in enumerate(zip(draft, answer, strict=False)):
        if drafted != said:
            return place
    return min(len(draft), len(answer))


def replay(
    ngram: NgramProposer, prompts: list[list[int]], answers: list[list[int]], choose: Choose
) -> list[int]:
    """The forward passes of each request, up to BATCH at a time, in order of arrival."""
    suffixes = HybridDrafter(configuration()).proposer
    waiting = list(range(len(prompts)))
    passes = [0] * len(prompts)
    done = [0] * len(prompts)
    drafts: dict[int, Sequence[int]] = {}
    running: list[int] = []
    while waiting or running:
        while waiting and len(running) < BATCH:
            running.append(waiting.pop(0))
        rows = np.zeros((BATCH, MAX_MODEL_LEN), dtype=np.int32)
        lengths = np.zeros(BATCH, dtype=np.int32)
        sampled = []
        for row, request in enumerate(running):
            rest = answers[request][done[request] :]
            new = rest[: accepted(drafts.get(request, ()), rest) + 1]
            done[request] += len(new)
            passes[request] += 1
            text = prompts[request] + answers[request][: done[request]]
            rows[row, : len(text)] = text
            lengths[row] = len(text)
            sampled.append(new)
        names = [str(request) for request in running]
        batch = SimpleNamespace(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            req_prompt_embeds={},
            num_prompt_tokens=np.array([len(prompts[request]) for request in running]),
            num_tokens_no_spec=lengths,
            token_ids_cpu=rows,
        )
        others = ngram.propose(DRAFT, [list(new) for new in sampled], lengths, rows)
        own, scores = suffixes.propose_scored(DRAFT, batch, sampled)
        for request, suffix, score, other in zip(running, own, scores, others, strict=True):
            drafts[request] = choose(suffix, score, [int(token) for token in other])
        running = [request for request in running if done[request] < len(answers[request])]
    return passes


def main() -> None:
    """Print a table: each way of drafting, over all prompts and by group."""
    names, prompts, answers = recorded()
    groups = list(dict.fromkeys(names))
    ngram = NgramProposer(configuration())
    ways: dict[str, Choose] = {
        "ngram": lambda suffix, score, other: other,
        "suffix": lambda suffix, score, other: suffix,
    }
    for threshold in [float(text) for text in sys.argv[1:]] or [DEFAULT_THRESHOLD]:

        def hybrid(
            suffix: list[int], score: float, other: list[int], threshold: float = threshold
        ) -> Sequence[int]:
            return better_draft(suffix, score, other, threshold)[1]

        ways[f"hybrid, threshold {threshold}"] = hybrid
    print(f"| drafts | all | {' | '.join(groups)} |")
    print("| --- |" + " ---: |" * (len(groups) + 1))
    for way, choose in ways.items():
        passes = replay(ngram, prompts, answers, choose)
        cells = []
        for wanted in (set(groups), *({group} for group in groups)):
            some = [place for place, name in enumerate(names) if name in wanted]
            tokens = sum(len(answers[place]) for place in some)
            cells.append(f"{tokens / sum(passes[place] for place in some):.3f}")
        print(f"| {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
