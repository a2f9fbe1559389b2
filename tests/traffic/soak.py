"""Mixed load on one server for a long time, with memory, latency and answers watched.

    python soak.py --minutes 30 build/soak

The server is that of `vllm serve`. Clients ask at random for copies, edits, open questions, long
prompts, single tokens, several samples, JSON by a schema, logprobs, and hang up in the middle of
streams. One more client asks the same question every ten seconds and compares the answer with the
first one. Every five seconds the memory of each process and the drafter's own metrics are written
down. `soak_report.py` makes a report of it. Exit code 1: a request failed, an answer changed, or
the drafter met a fault.

Some ask at a temperature, beside which vLLM's CPU build gets greedy requests wrong, whoever drafts:
the server runs with its sampler mended (`mended/`), or no answer could be compared.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from vllm_drafter.settings import ON_CPU, read_settings

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "engine"))

from engines import (  # noqa: E402
    NGRAM,
    ROOT,
    SUFFIX,
    Server,
    environment,
    model_path,
    start_server,
)
from prompts import COPIES, EDITS, EXTRACTS, LONG, OPEN  # noqa: E402
from traffic import MENDED  # noqa: E402

CACHED = 100
"""Responses in the cache: it is full after some minutes, and evicts from then on."""
SPECULATION: dict[str, dict[str, Any] | None] = {
    "suffix": {**SUFFIX, "suffix_decoding_max_cached_requests": CACHED},
    "ngram": {**NGRAM, "num_speculative_tokens": 16},
    "none": None,
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FAILURES = (OSError, ValueError, KeyError, http.client.HTTPException)
PROBE_SECONDS = 10
SAMPLE_SECONDS = 5
METRICS = (
    "vllm_drafter_active_requests",
    "vllm_drafter_cached_requests",
    "vllm_drafter_cached_tokens",
    "vllm_drafter_memory_bytes",
    "vllm_drafter_evicted_responses_total",
    "vllm_drafter_faults_total",
    "vllm_drafter_draft_tokens_total",
    "vllm_drafter_accepted_tokens_total",
    "vllm_drafter_step_seconds_sum",
    "vllm_drafter_step_seconds_count",
    "vllm:num_requests_running",
    "vllm:num_preemptions_total",
    "vllm:generation_tokens_total",
)


def varied(rng: random.Random, prompt: str) -> str:
    """The prompt with a word of its own, so that not every answer has been given before."""
    word = "".join(rng.choice("abcdefghijklmnop") for _ in range(5))
    return prompt.replace("Repeat this", f"For {word}: repeat this", 1)


KINDS: dict[str, tuple[float, Callable[[random.Random], dict[str, Any]]]] = {
    "copy": (4, lambda rng: {"prompt": varied(rng, rng.choice(COPIES)), "max_tokens": 80}),
    "edit": (3, lambda rng: {"prompt": varied(rng, rng.choice(EDITS)), "max_tokens": 120}),
    "extract": (2, lambda rng: {"prompt": rng.choice(EXTRACTS), "max_tokens": 60}),
    "open": (
        2,
        lambda rng: {"prompt": rng.choice(OPEN), "max_tokens": 60, "temperature": 0.8},
    ),
    "long": (1, lambda rng: {"prompt": rng.choice(LONG), "max_tokens": 30}),
    "one token": (1, lambda rng: {"prompt": [rng.randrange(100, 40000)], "max_tokens": 20}),
    "samples": (
        1,
        lambda rng: {"prompt": rng.choice(EDITS), "max_tokens": 40, "temperature": 0.8, "n": 3},
    ),
    "schema": (
        1,
        lambda rng: {
            "prompt": "A person as JSON: ",
            "max_tokens": 60,
            "temperature": 0.7,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": SCHEMA},
            },
        },
    ),
    "logprobs": (1, lambda rng: {"prompt": rng.choice(COPIES), "max_tokens": 40, "logprobs": 3}),
    "stop": (1, lambda rng: {"prompt": rng.choice(COPIES), "max_tokens": 80, "stop": ["day"]}),
    "hang up": (2, lambda rng: {"prompt": rng.choice(EDITS), "max_tokens": 400, "stream": True}),
}
"""What clients ask for, and how often in relation to the others."""


def measured(server: Server) -> dict[str, Any]:
    """What the server was: its own word for the versions, our commit, and its draft budget."""
    [stamp, *_] = (stamp for stamp in server.stamps if stamp["event"] == "registered")
    commit = ("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*")
    tokens = read_settings(environment()).verify_tokens
    return {
        "vllm": stamp["vllm_version"],
        "vllm_drafter": stamp["plugin_version"],
        "commit": subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip(),
        "verify_tokens_set": "auto" if tokens is None else str(tokens),
        "verify_tokens": ON_CPU if tokens is None else tokens,
    }


class Soak:
    """One run."""

    def __init__(self, server: Server, minutes: float) -> None:
        self.server = server
        self.measured = measured(server)  # now: the repository may go on while this runs
        self.began = time.monotonic()
        self.until = self.began + 60 * minutes
        self.requests: list[dict[str, Any]] = []
        self.errors: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.probes: list[dict[str, Any]] = []
        self.processes = {
            stamp["pid"]: psutil.Process(stamp["pid"])
            for stamp in server.stamps
            if stamp["event"] == "registered"
        }
        self.roles = {stamp["pid"]: stamp["role"] for stamp in server.stamps}

    def now(self) -> float:
        return time.monotonic() - self.began

    def post(self, body: dict[str, Any], read: Callable[[Any], Any] = json.load) -> Any:
        asked = urllib.request.Request(
            f"{self.server.url}/v1/completions",
            json.dumps({"model": "model", "temperature": 0.0, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=300) as answer:
            return read(answer)

    def client(self, seed: int) -> None:
        rng = random.Random(seed)
        names, weights = list(KINDS), [weight for weight, _ in KINDS.values()]
        while time.monotonic() < self.until:
            [kind] = rng.choices(names, weights)
            body = KINDS[kind][1](rng)
            began = self.now()
            try:
                if kind == "hang up":
                    lines = rng.randrange(1, 12)
                    self.post(body, lambda answer, n=lines: [answer.readline() for _ in range(n)])
                    tokens = 0
                else:
                    tokens = self.post(body)["usage"]["completion_tokens"]
            except FAILURES as error:
                self.errors.append({"at": began, "kind": kind, "error": repr(error)})
                time.sleep(1)
            else:
                took = self.now() - began
                self.requests.append({"at": began, "kind": kind, "took": took, "tokens": tokens})

    def probe(self) -> None:
        body = {"prompt": COPIES[0], "max_tokens": 60}
        while time.monotonic() < self.until:
            began = self.now()
            try:
                text = self.post(body)["choices"][0]["text"]
            except FAILURES as error:
                self.errors.append({"at": began, "kind": "probe", "error": repr(error)})
            else:
                self.probes.append({"at": began, "took": self.now() - began, "text": text})
            time.sleep(PROBE_SECONDS)

    def sample(self) -> None:
        while time.monotonic() < self.until:
            began = self.now()
            try:
                rss = {
                    self.roles[pid]: process.memory_info().rss
                    for pid, process in self.processes.items()
                }
                found = self.server.metrics(*METRICS)
                load = os.getloadavg()[0]
                self.samples.append({"at": began, "rss": rss, "load": load, **found})
            except (*FAILURES, psutil.Error) as error:
                self.errors.append({"at": began, "kind": "sample", "error": repr(error)})
            time.sleep(SAMPLE_SECONDS)

    def run(self, clients: int) -> None:
        tasks = [lambda seed=seed: self.client(seed) for seed in range(clients)]
        threads = [threading.Thread(target=task) for task in (*tasks, self.probe, self.sample)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(15)
            print(
                f"{self.now() / 60:.1f} min: {len(self.requests)} requests, "
                f"{len(self.errors)} errors, {len(self.probes)} probes, {self.changed()} changed",
                flush=True,
            )
        self.server.wait_until_idle(120)

    def changed(self) -> int:
        """How many answers to the probe are not the first one."""
        return sum(probe["text"] != self.probes[0]["text"] for probe in self.probes)

    def result(self, minutes: float, clients: int) -> dict[str, Any]:
        return {
            "minutes": minutes,
            "clients": clients,
            "measured": self.measured,
            "cached": CACHED,
            "cores": os.cpu_count(),
            "requests": self.requests,
            "errors": self.errors,
            "samples": self.samples,
            "probes": self.probes,
            "changed": self.changed(),
            "faults": self.server.metric("vllm_drafter_faults_total"),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description="Mixed load on one server, for a long time.")
    parser.add_argument("folder", type=Path, help="for the numbers: one file for each method")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument(
        "--method",
        choices=SPECULATION,
        default="suffix",
        help="none and ngram, which is vLLM's own: whether the same happens without our drafter",
    )
    options = parser.parse_args()
    out = options.folder / f"{options.method}.json"
    options.folder.mkdir(parents=True, exist_ok=True)
    config = SPECULATION[options.method]
    speculation = ("--speculative-config", json.dumps(config)) if config else ()
    with tempfile.TemporaryDirectory() as folder:
        print("starting the server (about a minute)", flush=True)
        server = start_server(
            Path(folder),
            model_path("DRAFTER_MODEL", "smollm2-135m"),
            *("--dtype", "float32", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"),
            *speculation,
            PYTHONPATH=MENDED,
        )
        try:
            soak = Soak(server, options.minutes)
            soak.run(options.clients)
            result = soak.result(options.minutes, options.clients)
        finally:
            server.stop()
            out.with_suffix(".log").write_text(server.log.read_text())
    out.write_text(json.dumps(result))
    print(
        f"{len(result['requests'])} requests, {len(result['errors'])} errors, "
        f"{result['changed']} changed answers, {result['faults']:.0f} faults"
    )
    return 1 if result["errors"] or result["changed"] or result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
