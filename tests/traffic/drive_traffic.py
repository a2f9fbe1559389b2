"""Runs one vLLM engine through phases of requests: a job comes in as JSON, its outcome goes out.

    python drive_traffic.py job.json result.json

The job: `engine`, keyword arguments of `EngineArgs`; `phases`, each a `name` and its `requests`.
A request has a `key` (its name in the result), a `prompt` (text or token ids), `sampling` (keyword
arguments of `SamplingParams`, `json` for a schema), and may have an `id` (the request id, which is
waited for where another request has it; default the key), `arrive` (the engine step before which it
is added), `abort_after` (output tokens) and `lora` (the directory of an adapter).

The result, for each phase: every request's samples, and by how much each of vLLM's counters rose.

A script and not a fixture, because an engine leaves processes and module state behind that no test
should inherit.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any


def counters(engine: Any) -> Counter[str]:
    """All counters of vLLM, each summed over its labels."""
    found: Counter[str] = Counter()
    for metric in engine.get_metrics():
        if hasattr(metric, "value"):
            found[metric.name] += int(metric.value)
    return found


def sampling_params(sampling: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    sampling = dict(sampling)
    if schema := sampling.pop("json", None):
        sampling["structured_outputs"] = StructuredOutputsParams(json=schema)
    return SamplingParams(**sampling)


ADAPTERS: dict[str, int] = {}
"""vLLM's id of each adapter: from 1, in the order in which they are asked for."""


def lora_request(path: str | None) -> Any:
    if path is None:
        return None
    from vllm.lora.request import LoRARequest

    number = ADAPTERS.setdefault(path, len(ADAPTERS) + 1)
    return LoRARequest(f"adapter-{number}", number, path)


def add(engine: Any, request: dict[str, Any]) -> None:
    prompt = request["prompt"]
    engine.add_request(
        request.get("id", request["key"]),
        {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt,
        sampling_params(request["sampling"]),
        lora_request=lora_request(request.get("lora")),
    )


def sample(output: Any) -> dict[str, Any]:
    """One sample of a request, with the logprob of each of its tokens where they were asked for."""
    tokens = list(output.token_ids)
    steps = output.logprobs or []
    return {
        "token_ids": tokens,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "logprobs": [step[token].logprob for token, step in zip(tokens, steps, strict=False)],
        "top": [sorted(step, key=lambda token: step[token].rank) for step in steps],
    }


def run(engine: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    waiting = sorted(requests, key=lambda request: request.get("arrive", 0))
    running: dict[str, dict[str, Any]] = {}
    samples: dict[str, dict[int, dict[str, Any]]] = {request["key"]: {} for request in requests}
    before = counters(engine)
    started, steps = time.perf_counter(), 0
    while waiting or running:
        if not running:
            # Nothing runs before the next arrival: `step` would wait for ever for an output.
            steps = max(steps, waiting[0].get("arrive", 0))
        for request in [r for r in waiting if r.get("arrive", 0) <= steps]:
            name = request.get("id", request["key"])
            if name not in running:
                add(engine, request)
                running[name] = request
                waiting.remove(request)
        steps += 1
        for output in engine.step():
            request = running.get(output.request_id)
            if request is None:
                continue  # of a request that was aborted meanwhile
            for one in output.outputs:
                samples[request["key"]][one.index] = sample(one)
            enough = request.get("abort_after")
            if enough is not None and len(output.outputs[0].token_ids) >= enough:
                engine.abort_request([output.request_id])
                del running[output.request_id]
            elif output.finished:
                del running[output.request_id]
    after = counters(engine)
    return {
        "samples": {
            key: [found[index] for index in sorted(found)] for key, found in samples.items()
        },
        "steps": steps,
        "seconds": time.perf_counter() - started,
        "counters": {name: after[name] - before[name] for name in after},
    }


def main(job_path: str, result_path: str) -> None:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    job = json.loads(Path(job_path).read_text())
    engine = LLMEngine.from_engine_args(EngineArgs(disable_log_stats=False, **job["engine"]))
    phases = {phase["name"]: run(engine, phase["requests"]) for phase in job["phases"]}
    Path(result_path).write_text(json.dumps(phases))


if __name__ == "__main__":  # spawned workers import this file
    main(*sys.argv[1:])
