"""One engine, one run: generates for every prompt, group by group, and writes down what it took.

A process of its own for each run, so that no cache of one run serves the next. Called by run.py
with a file that says what to do; it appends its progress to one file and writes its result to
another, as vLLM's log has standard output.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def native_dtype() -> str:
    """Return the type in which this processor computes the model fast.

    Where it has no instructions for bfloat16, PyTorch emulates them, at a sixth of the speed of
    float32 and with no gain from doing several tokens at once.
    """
    import torch

    return "auto" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"


class Run:
    """A running engine and the figures that it gives away."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        self.job = job
        self.events = Path(job["events"])
        self.tell("starting")
        started = time.perf_counter()
        self.llm = LLM(
            model=job["model"],
            speculative_config=job["speculative_config"],
            dtype=native_dtype(),
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=job["max_num_seqs"],
            disable_log_stats=False,  # keeps the counters of drafted and accepted tokens
            worker_extension_cls="demo.witness.Witness",
            seed=0,
        )
        self.start_seconds = time.perf_counter() - started
        self.dtype = str(self.llm.llm_engine.model_config.dtype).removeprefix("torch.")
        self.tokenizer = self.llm.get_tokenizer()
        self.tell("ready", seconds=self.start_seconds)

    def tell(self, event: str, **fields: Any) -> None:
        """Append one line of progress."""
        with self.events.open("a") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")

    def pause(self, event: str) -> None:
        """Stop all processes of this engine until another lets them go on."""
        self.tell(event)
        os.killpg(0, signal.SIGSTOP)

    def counters(self) -> dict[str, int]:
        """Return vLLM's own counters of speculation so far; all zero without speculation."""
        found = {metric.name: metric for metric in self.llm.get_metrics()}
        return {
            key: int(found[name].value) if name in found else 0 for key, name in COUNTERS.items()
        }

    def processor_seconds(self) -> float:
        """Return the processor time of the workers so far, which other load does not stretch."""
        return sum(self.llm.collective_rpc("vllm_drafter_demo_processor_seconds"))

    def generate(self, messages: list[str], max_tokens: int) -> dict[str, Any]:
        """Answer all messages at once, greedily, and count.

        `forward_passes` counts, for every request, the steps of the engine that gave it tokens: the
        number of times the model was run for it, prefill included. Without speculation each of them
        gives one token.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA
        )
        engine = self.llm.llm_engine
        prompts = [self._token_ids(message) for message in messages]
        tokens: dict[str, list[int]] = {}
        passes = steps = 0
        seconds = 0.0
        before, processor_before = self.counters(), self.processor_seconds()
        self.generation = getattr(self, "generation", 0) + 1
        started = time.perf_counter()
        for number, prompt in enumerate(prompts):
            name = f"{self.generation}-{number}"
            tokens[name] = []
            engine.add_request(name, {"prompt_token_ids": prompt}, params.clone())
        unfinished = len(prompts)
        while unfinished:
            if self.job["pause"] and time.perf_counter() - started > self.job["pause"]:
                seconds += time.perf_counter() - started
                self.pause("pausing")
                started = time.perf_counter()
            outputs = engine.step()
            steps += 1
            for output in outputs:
                new = list(output.outputs[0].token_ids)
                tokens[output.request_id] += new
                passes += bool(new)
                if output.finished:
                    unfinished -= 1
                    self.tell("answered")
        seconds += time.perf_counter() - started
        after = self.counters()
        return {
            "tokens": list(tokens.values()),
            "texts": [self.tokenizer.decode(ids) for ids in tokens.values()],
            "prompt_tokens": sum(map(len, prompts)),
            "output_tokens": sum(map(len, tokens.values())),
            "forward_passes": passes,
            "engine_steps": steps,
            "seconds": seconds,
            "processor_seconds": self.processor_seconds() - processor_before,
            **{key: after[key] - before[key] for key in COUNTERS},
        }

    def _token_ids(self, message: str) -> list[int]:
        chat = [{"role": "user", "content": message}]
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def witnesses(self) -> list[dict[str, Any]]:
        """Return what this process and every worker have imported."""
        from demo.witness import imported

        return [
            {"role": "front end", **imported()},
            *self.llm.collective_rpc("vllm_drafter_demo_witness"),
        ]


def main() -> None:
    """Do the job in the file that the command line names."""
    job = json.loads(Path(sys.argv[1]).read_text())
    run = Run(job)
    run.tell("warming up")
    run.generate(job["warm_up"], 32)
    groups = {}
    for group, messages in job["groups"].items():
        if job["pause"]:
            run.pause("waiting")
        run.tell("group", name=group)
        groups[group] = run.generate(messages, job["max_tokens"])
    result = {
        "groups": groups,
        "start_seconds": run.start_seconds,
        "dtype": run.dtype,
        "witnesses": run.witnesses(),
    }
    Path(job["result"]).write_text(json.dumps(result))
    run.tell("done")


if __name__ == "__main__":
    main()
