"""Starts real engines and servers in processes of their own, and reads what they left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SUFFIX = {"method": "suffix"}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
CUSTOM_CLASS = {
    "method": "custom_class",
    "model": "vllm_drafter.CustomClassProposer",
    "num_speculative_tokens": 16,
}
WHOSE = """
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm.config.speculative, vllm.utils.import_utils
import vllm.v1.spec_decode.suffix_decoding, vllm.v1.worker.gpu_model_runner
for where in (vllm.config.speculative, vllm.utils.import_utils):
    print(where.has_arctic_inference.__module__)
for where in (vllm.v1.spec_decode.suffix_decoding, vllm.v1.worker.gpu_model_runner):
    print(where.SuffixDecodingProposer.__module__)
"""
"""Prints where what stands in each name that we patch was defined, a line for each."""
VLLMS_OWN = [
    "vllm.utils.import_utils",
    "vllm.utils.import_utils",
    "vllm.v1.spec_decode.suffix_decoding",
    "vllm.v1.spec_decode.suffix_decoding",
]
"""What it prints of a vLLM that is not patched."""
TWO_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""The environment of an engine with two workers."""
START_SECONDS = 420


def model_path(variable: str, name: str) -> str:
    """A model that `tools/demo/make_model.py` made, or the one that the variable names."""
    given = os.environ.get(variable)
    models = os.environ.get("DEMO_MODELS", str(ROOT / "build" / "models"))
    path = Path(given) if given else Path(models) / name
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"no model at {path}: make it with `python tools/demo/make_model.py build/models`, "
            f"or set {variable} to the directory of one"
        )
    return str(path)


def environment(stamps: Path | None = None, **changes: str | None) -> dict[str, str]:
    """This process's environment with the settings for a small CPU; None takes a variable out."""
    base: dict[str, str | None] = {
        name: value
        for name, value in os.environ.items()
        if name != "VLLM_PLUGINS" and not name.startswith("VLLM_DRAFTER")
    }
    base |= {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if stamps is not None:
        base["VLLM_DRAFTER_STAMPS"] = str(stamps)
    base |= changes
    return {name: value for name, value in base.items() if value is not None}


def read_stamps(path: Path) -> list[dict[str, Any]]:
    """What the processes of an engine said, but for one that may or may not be there.

    vLLM keeps what it found out about a model's class, in one place for all releases. Where it is
    not there, or another release wrote it last, a process that inspects the class registers too.
    """
    stamps = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return [stamp for stamp in stamps if stamp["role"] != "model inspection"]


@dataclass(frozen=True)
class EngineResult:
    """What one engine did, from its start to its end."""

    runs: dict[str, Any]
    imported: list[str]
    stamps: list[dict[str, Any]]
    log: str

    def tokens(self, run: str) -> dict[str, list[list[int]]]:
        found: dict[str, list[list[int]]] = self.runs[run]["token_ids"]
        return found

    @property
    def registered(self) -> Counter[str]:
        """How many processes of each role registered the plugin."""
        return Counter(stamp["role"] for stamp in self.stamps if stamp["event"] == "registered")

    @property
    def proposers(self) -> list[tuple[str, int | None, str]]:
        """Role, rank and class of each proposer that was built."""
        return sorted(
            (stamp["role"], stamp["rank"], stamp["proposer"])
            for stamp in self.stamps
            if stamp["event"] == "proposer"
        )


def run_engine(
    folder: Path,
    engine: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    **changes: str | None,
) -> EngineResult:
    """Run a job of `drive.py`; AssertionError with the end of its log if it fails."""
    done, result = start_engine(folder, engine, runs, **changes)
    assert done.returncode == 0, done.stdout[-6000:]
    said = json.loads(result.read_text())
    stamps = read_stamps(folder / "stamps.jsonl")
    return EngineResult(said["runs"], said["imported"], stamps, done.stdout)


def start_engine(
    folder: Path,
    engine: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    **changes: str | None,
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run a job of `drive.py` to its end, whatever that is."""
    folder.mkdir(parents=True, exist_ok=True)
    job, result = folder / "job.json", folder / "result.json"
    defaults = {"enforce_eager": True, "max_model_len": 2048, "dtype": "float32"}
    job.write_text(json.dumps({"engine": {**defaults, **engine}, "runs": list(runs)}))
    command = [sys.executable, str(HERE / "drive.py"), str(job), str(result)]
    stamps = folder / "stamps.jsonl"
    done = _run(command, environment(stamps, **changes))
    (folder / "log.txt").write_text(done.stdout)
    return done, result


def run_python(code: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own; its output and errors are in `stdout`."""
    return _run([sys.executable, "-c", code], env)


def _run(command: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    # A session of its own, so that workers which outlive a broken engine can be ended with it.
    process = subprocess.Popen(
        command,
        env=dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=START_SECONDS + 300)
    finally:
        _end_session(process)
    return subprocess.CompletedProcess(command, process.returncode, output, None)


def _end_session(process: subprocess.Popen[Any]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@dataclass
class Server:
    """A running OpenAI-compatible server."""

    url: str
    log: Path
    stamps_path: Path
    process: subprocess.Popen[Any] = field(repr=False)

    @property
    def stamps(self) -> list[dict[str, Any]]:
        return read_stamps(self.stamps_path)

    def metric(self, name: str) -> float:
        """The sum of a metric over all its label sets."""
        return self.metrics(name)[name]

    def metrics(self, *names: str) -> dict[str, float]:
        """The same of several metrics, as they were at one time."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {
            name: sum(
                float(line.rsplit(" ", 1)[1])
                for line in lines
                if line.startswith((f"{name} ", f"{name}{{"))
            )
            for name in names
        }

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Until no request runs or waits; AssertionError if that takes longer."""
        deadline = time.monotonic() + seconds
        while self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting"):
            assert time.monotonic() < deadline, "requests are still running"
            time.sleep(0.2)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end_session(self.process)
            self.process.wait()


def start_server(folder: Path, model: str, *arguments: str, **changes: str | None) -> Server:
    """Start `vllm serve` on a free port and wait until it is ready."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log, stamps = folder / "server.log", folder / "stamps.jsonl"
    command = [
        *(str(Path(sys.executable).with_name("vllm")), "serve", model),
        *("--served-model-name", "model", "--host", "127.0.0.1"),
        *("--port", str(port), "--enforce-eager", "--max-model-len", "2048"),
        *arguments,
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=environment(stamps, **changes),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log, stamps, process)
    deadline = time.monotonic() + START_SECONDS
    while not _answers(server.url):
        if process.poll() is not None or time.monotonic() > deadline:
            server.stop()
            raise AssertionError(f"the server did not start:\n{log.read_text()[-6000:]}")
        time.sleep(0.5)
    return server


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
