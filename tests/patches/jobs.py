"""What the tests of the patches have an engine do, in a process of its own.

    python jobs.py NAME arguments.json result.json

A function of this module per job; it gets the arguments and returns what the tests look at.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

ENGINE = {"enforce_eager": True, "max_model_len": 1024, "seed": 0, "disable_log_stats": False}


# --- priorities ---------------------------------------------------------------------------------


def priorities(engine: dict[str, Any], requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Add requests at given steps; return when each finished and what it said.

    A request has `id`, `tokens` (its prompt), `arrives` (a step), `length`, and either `argument`
    (its extra arguments) or `priority` (vLLM's own field).
    """
    from vllm import EngineArgs, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    core = LLMEngine.from_engine_args(EngineArgs(**ENGINE, **engine))
    todo = sorted(requests, key=lambda request: request["arrives"])
    arrived: dict[str, float] = {}
    finished: dict[str, dict[str, Any]] = {}
    step = 0
    while todo or core.has_unfinished_requests():
        while todo and todo[0]["arrives"] <= step:
            request = todo.pop(0)
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request["length"],
                ignore_eos=True,
                extra_args=request.get("argument"),
            )
            arrived[request["id"]] = time.perf_counter()
            core.add_request(
                request["id"],
                {"prompt_token_ids": request["tokens"]},
                params,
                priority=request.get("priority", 0),
            )
        step += 1
        for output in core.step():
            if output.finished:
                finished[output.request_id] = {
                    "step": step,
                    "seconds": time.perf_counter() - arrived[output.request_id],
                    "tokens": list(output.outputs[0].token_ids),
                }
    return {"finished": finished, "steps": step}


def refusals(engine: dict[str, Any], requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what vLLM says to each of some wrong sampling parameters, and that it goes on."""
    from vllm import LLM, SamplingParams

    llm = LLM(**ENGINE, **engine)
    prompt = {"prompt_token_ids": [1, 2, 3]}
    messages = []
    for request in requests:
        try:
            llm.generate(prompt, SamplingParams(**request), use_tqdm=False)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    after = llm.generate(prompt, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    return {"messages": messages, "after": len(after[0].outputs[0].token_ids)}


# --- the LM head --------------------------------------------------------------------------------


def lm_head(engine: dict[str, Any], prompts: list[list[int]], weights: str) -> dict[str, Any]:
    """Generate; compare the logits that were sampled from with those computed in float64."""
    import numpy as np
    from head_in_worker import keep_head, kept_head
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    llm = LLM(**ENGINE, **engine)
    llm.apply_model(keep_head)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    started = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    found = next(one for one in llm.apply_model(kept_head) if len(one["logits"]))
    head = load_file(weights)["lm_head.weight"]
    reference = found["hidden"] @ head.double().numpy().T
    vocabulary = found["logits"].shape[-1]
    error = np.abs(found["logits"] - reference[:, :vocabulary])
    return {
        "rows": len(error),
        "vocabulary": vocabulary,
        "largest_logit": float(np.abs(reference).max()),
        "largest_error": float(error.max()),
        "weights": found["weights"],
        "computed": found["computed"],
        "seconds": seconds,
    }


# --- rollouts -----------------------------------------------------------------------------------


def rollouts(engine: dict[str, Any], requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Generate once for each of some sampling parameters; return all sequences of each."""
    from vllm import LLM, SamplingParams

    llm = LLM(**ENGINE, **engine)
    prompt = {"prompt_token_ids": list(range(10, 20))}
    answers = []
    for request in requests:
        [answer] = llm.generate(prompt, SamplingParams(**request), use_tqdm=False)
        sequences = sorted(answer.outputs, key=lambda sequence: sequence.index)
        answers.append([list(sequence.token_ids) for sequence in sequences])
    return {"answers": answers}


# --- hybrid drafting ----------------------------------------------------------------------------


def taken(worker: Any) -> dict[str, int] | None:
    """In the worker: from which of the two methods drafts came."""
    drafter = getattr(worker.model_runner, "hybrid_drafter", None)
    return None if drafter is None else drafter.taken


def drafts(
    engine: dict[str, Any], rounds: list[list[list[int]]], max_tokens: int, batch: int
) -> dict[str, Any]:
    """Answer rounds of prompts, one round after the other, and count forward passes.

    A request's forward passes are the steps of the engine that gave it tokens, prefill included.
    """
    from vllm import EngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    core = LLMEngine.from_engine_args(EngineArgs(**ENGINE, **engine, max_num_seqs=batch))
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA
    )
    results = []
    for number, prompts in enumerate(rounds):
        tokens: dict[str, list[int]] = {}
        passes = 0
        started = time.perf_counter()
        for place, prompt in enumerate(prompts):
            name = f"{number}-{place}"
            tokens[name] = []
            core.add_request(name, {"prompt_token_ids": prompt}, params.clone())
        while core.has_unfinished_requests():
            for output in core.step():
                new = output.outputs[0].token_ids
                tokens[output.request_id] += new
                passes += bool(new)
        results.append(
            {
                "tokens": list(tokens.values()),
                "passes": passes,
                "seconds": time.perf_counter() - started,
            }
        )
    [counted] = core.collective_rpc(taken)
    return {"rounds": results, "taken": counted}


JOBS = {job.__name__: job for job in (priorities, refusals, lm_head, rollouts, drafts)}


if __name__ == "__main__":  # spawned workers import this file
    given = json.loads(Path(sys.argv[2]).read_text())
    Path(sys.argv[3]).write_text(json.dumps(JOBS[sys.argv[1]](**given)))
