"""Runs one vLLM engine in a process of its own: a job comes in as JSON, its outcome goes out.

    python drive.py job.json result.json

The job: `engine`, keyword arguments of `EngineArgs`; `runs`, a list of `name`, `prompts`,
`sampling` (keyword arguments of `SamplingParams`), `arrivals` (for each prompt the engine step
before which it is added; default 0), `abort` (place of a prompt -> the number of output tokens
after which it is aborted) and `ids` (what request ids begin with; default the name). The result:
for each run the token ids, finish reasons and steps, vLLM's speculative decoding counters, and what
of the drafting world was imported in this process.

A script and not a fixture, because an engine leaves processes and module state behind that no test
should inherit.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")


def counters(engine: Any) -> dict[str, int]:
    found = dict.fromkeys(COUNTERS, 0)
    for metric in engine.get_metrics():
        for name in COUNTERS:
            if metric.name == f"vllm:spec_decode_num_{name}":
                found[name] += int(metric.value)
    return found


def drive(engine: Any, run: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    prompts = run["prompts"]
    arrivals = run.get("arrivals") or [0] * len(prompts)
    abort = {int(place): after for place, after in run.get("abort", {}).items()}
    waiting = sorted(range(len(prompts)), key=lambda place: arrivals[place])
    n = run["sampling"].get("n", 1)
    outputs: dict[str, list[list[int]]] = {}
    reasons: dict[str, list[str | None]] = {}
    before = counters(engine)
    started, steps = time.perf_counter(), 0
    while waiting or engine.has_unfinished_requests():
        if waiting and not engine.has_unfinished_requests():
            # Nothing runs before the next arrival: `step` would wait for ever for an output.
            steps = max(steps, arrivals[waiting[0]])
        while waiting and arrivals[waiting[0]] <= steps:
            place = waiting.pop(0)
            prompt = prompts[place]
            prompt = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
            engine.add_request(
                f"{run.get('ids', run['name'])}-{place}", prompt, SamplingParams(**run["sampling"])
            )
        steps += 1
        for output in engine.step():
            place = int(output.request_id.rsplit("-", 1)[1])
            for sequence in output.outputs:
                outputs.setdefault(str(place), [[] for _ in range(n)])[sequence.index] = list(
                    sequence.token_ids
                )
                reasons.setdefault(str(place), [None] * n)[sequence.index] = sequence.finish_reason
            if place in abort and len(output.outputs[0].token_ids) >= abort[place]:
                engine.abort_request([output.request_id])
                del abort[place]
    after = counters(engine)
    return {
        "token_ids": outputs,
        "finish_reasons": reasons,
        "steps": steps,
        "seconds": time.perf_counter() - started,
        "counters": {name: after[name] - before[name] for name in COUNTERS},
    }


def main(job_path: str, result_path: str) -> None:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    job = json.loads(Path(job_path).read_text())
    started = time.perf_counter()
    engine = LLMEngine.from_engine_args(EngineArgs(disable_log_stats=False, **job["engine"]))
    result: dict[str, Any] = {"start_seconds": time.perf_counter() - started, "runs": {}}
    for run in job["runs"]:
        result["runs"][run["name"]] = drive(engine, run)
    result["imported"] = sorted(
        name
        for name in ("arctic_inference", "drafter_core", "numba", "vllm_drafter")
        if name in sys.modules
    )
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":  # spawned workers import this file
    main(*sys.argv[1:])
