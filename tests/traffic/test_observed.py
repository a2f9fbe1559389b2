"""What a server shows of the drafting: on /metrics, in the log, and in `vllm-drafter top`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from engines import ROOT, TWO_CORES, Server, start_server
from prompts import COPIES

SUFFIX = json.dumps({"method": "suffix", "suffix_decoding_max_cached_requests": 4})


@contextmanager
def serving(folder: Path, model: str, *arguments: str, **changes: str) -> Iterator[Server]:
    """A server that has answered twelve questions, four at once, and published what it did."""
    server = start_server(
        folder,
        model,
        *("--dtype", "float32", "--max-num-seqs", "8", "--speculative-config", SUFFIX),
        *arguments,
        VLLM_DRAFTER_LOG_SECONDS="1",
        **changes,
    )
    try:
        with ThreadPoolExecutor(4) as pool:
            # More than the cache holds, so that some are evicted.
            list(pool.map(lambda text: complete(server, text), COPIES * 3))
        server.wait_until_idle()
        time.sleep(2.5)  # published once a second, and lines once a second
        yield server
    finally:
        server.stop()


@pytest.fixture(
    scope="module", params=[(), ("--api-server-count", "2")], ids=["one-server", "two-servers"]
)
def server(request, folder, smollm):
    place = folder / f"observed-{len(request.param)}"
    with serving(place, smollm, *request.param, TMPDIR=str(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def replicas(folder, tiny):
    with serving(folder / "replicas", tiny, "--data-parallel-size", "2", **TWO_CORES) as server:
        yield server


@pytest.fixture(scope="module")
def two_workers(folder, tiny):
    with serving(folder / "two", tiny, "--tensor-parallel-size", "2", **TWO_CORES) as server:
        yield server


def complete(server, prompt: str, **options: object) -> str:
    body = {"model": "model", "prompt": prompt, "max_tokens": 48, "temperature": 0.0, **options}
    asked = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=300) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def exposed(server) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("vllm-drafter")), "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_accepted_tokens_are_those_that_vllm_counts_at_each_position(server):
    ours = server.metric("vllm_drafter_accepted_tokens_total")
    assert ours == server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
    found = {
        name: {
            position: float(value)
            for position, value in re.findall(
                rf'^{name}{{.*position="(\d+)".*}} (\S+)$', exposed(server), re.M
            )
        }
        for name in (
            "vllm_drafter_accepted_tokens_per_position_total",
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        )
    }
    ours_by_position, vllm_s = found.values()
    assert ours_by_position == vllm_s
    assert ours_by_position["0"] > 0


def test_no_fewer_tokens_were_drafted_than_vllm_verified(server):
    drafted = server.metric("vllm_drafter_draft_tokens_total")
    verified = server.metric("vllm:spec_decode_num_draft_tokens_total")
    assert verified <= drafted <= verified * 1.5


def test_requests_cache_and_evictions_are_counted(server):
    assert server.metric("vllm_drafter_requests_total") == 12
    assert server.metric("vllm_drafter_cached_requests") == 4
    assert server.metric("vllm_drafter_evicted_responses_total") == 8
    assert server.metric("vllm_drafter_memory_bytes") > 0
    assert server.metric("vllm_drafter_faults_total") == 0


def test_vllm_s_own_metrics_are_still_there(server):
    assert server.metric("vllm:prompt_tokens_total") > 0


def test_every_metric_of_the_dashboard_is_exported(server):
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    names = set(re.findall(r"vllm(?:_drafter_|:)\w+", asked))
    assert len(names) > 15
    text = exposed(server)
    assert [name for name in names if not re.search(rf"^{name}[{{ ]", text, re.M)] == []


def test_the_log_has_lines_of_what_was_drafted(server):
    lines = re.findall(r"vllm-drafter: worker 0: \d+ steps, .*", server.log.read_text())
    assert lines
    assert all(line.endswith("0 faults") for line in lines)


def test_top_prints_all_numbers_as_json(server):
    done = top(server.url, "--json")
    assert done.returncode == 0, done.stderr
    [process] = json.loads(done.stdout)["processes"]
    assert process["values"]["accepted_tokens"] == server.metric(
        "vllm:spec_decode_num_accepted_tokens_total"
    )
    assert 0 < process["acceptance"] <= 1
    assert 0 < process["step_seconds_median"] <= process["step_seconds_p99"]


def test_top_goes_on_until_it_is_interrupted(server):
    command = [str(Path(sys.executable).with_name("vllm-drafter")), "top", server.url, "-n", "0.5"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "160"},
        text=True,
        # A shell starts what runs in its background without this signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "accepted/s" in shown


def test_clients_that_disconnect_leave_nothing_behind(server):
    expected = complete(server, COPIES[0])

    def hang_up(place: int) -> None:
        body = {"model": "model", "prompt": COPIES[place % 4], "max_tokens": 1200, "stream": True}
        asked = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps({**body, "temperature": 0.0, "ignore_eos": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=300) as answer:
            for _ in range(3 + place % 5):
                answer.readline()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(hang_up, range(24)))
    server.wait_until_idle()
    assert complete(server, COPIES[0]) == expected
    time.sleep(1.5)
    # The one that has just ended: a step with it in the batch is not there to tell that it is gone.
    assert server.metric("vllm_drafter_active_requests") <= 1
    assert server.metric("vllm_drafter_faults_total") == 0


def test_nothing_is_left_behind_when_the_server_ends(server):
    # The last test of its server, whose TMPDIR this is.
    place = server.log.parents[1]
    assert list(place.glob("vllm-drafter-*")) != []
    server.stop()
    assert [path.name for path in place.glob("vllm-drafter-*")] == []


# --- several processes that draft -----------------------------------------------------------------


def drafting_processes(server) -> list[dict[str, dict[str, float]]]:
    done = top(server.url, "--json")
    assert done.returncode == 0, done.stderr
    return sorted(json.loads(done.stdout)["processes"], key=lambda process: process["rank"])


def test_each_replica_shows_what_it_drafted_itself(replicas):
    first, second = drafting_processes(replicas)
    assert (first["rank"], second["rank"]) == ("0", "0")
    assert first["process"] != second["process"]
    answered = [process["values"]["requests"] for process in (first, second)]
    assert min(answered) > 0
    assert sum(answered) == 12


def test_accepted_tokens_of_each_replica_are_those_that_vllm_counts_of_its_engine(replicas):
    name = "vllm:spec_decode_num_accepted_tokens_total"
    of_engines = [
        float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", exposed(replicas), re.M)
    ]
    ours = [process["values"]["accepted_tokens"] for process in drafting_processes(replicas)]
    assert sorted(ours) == sorted(of_engines)
    assert min(ours) > 0


def test_two_workers_show_the_same_and_the_first_is_what_vllm_counts(two_workers):
    first, second = drafting_processes(two_workers)
    assert (first["rank"], second["rank"]) == ("0", "1")
    counted = ("requests", "drafts", "draft_tokens", "accepted_tokens", "cached_tokens")
    assert [first["values"][name] for name in counted] == [
        second["values"][name] for name in counted
    ]
    assert first["values"]["accepted_tokens"] == two_workers.metric(
        "vllm:spec_decode_num_accepted_tokens_total"
    ) > 0  # fmt: skip
