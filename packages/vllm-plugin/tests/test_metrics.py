from __future__ import annotations

import gc
import json
import logging
import socket
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from batches import COPYABLE, Batch, vllm_config
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from typer.testing import CliRunner

from vllm_drafter import metrics
from vllm_drafter.activity import Activity, Sizes, Tally
from vllm_drafter.cli import app
from vllm_drafter.custom_class import CustomClassProposer
from vllm_drafter.metrics import METRICS, Publisher, serve
from vllm_drafter.proposer import TokensPerStepProposer
from vllm_drafter.stamps import Role
from vllm_drafter.top import NoMetrics, Process, parse, read, table

WORKER = Role("worker", 0)


class Loop:
    """What a publisher reads of a DraftLoop."""

    def __init__(self) -> None:
        self.activity = Activity()
        self.faults = 0
        self.settings = type("Settings", (), {"num_speculative_tokens": 4})()
        self.held = Sizes(1, 2, 30, 4096, 5)

    def sizes(self) -> Sizes:
        return self.held

    def all_faults(self) -> int:
        return self.faults


def noted(activity: Activity) -> Tally:
    return activity.take()[1]


def note(activity: Activity, seconds: float, sampled: list, drafts: list) -> None:
    """Note a step whose drafts, of these lengths, come from matches of five tokens."""
    lengths = np.array(drafts, dtype=np.int32)
    activity.note_drafts(lengths, np.full(len(drafts), 5, dtype=np.int32))
    activity.note_step(seconds, [len(tokens) for tokens in sampled])


# --- what a step notes


def activity() -> Activity:
    found = Activity()
    found.on = True
    return found


def test_a_draft_counts_at_the_step_that_can_accept_it():
    notes = activity()
    note(notes, 0.001, [[1]], [3])
    first = noted(notes)
    assert (first.draft_tokens, first.accepted_tokens) == (0, 0)
    note(notes, 0.001, [[7, 8, 4]], [0])
    second = noted(notes)
    assert (second.drafts, second.draft_tokens, second.accepted_tokens) == (1, 3, 2)


def test_accepted_tokens_are_those_sampled_but_for_the_last():
    notes = activity()
    note(notes, 0.001, [[5, 6, 7], [9], []], [0, 0, 0])
    tally = noted(notes)
    assert tally.accepted_tokens == 2
    assert tally.accepted_at(3) == [1, 1, 0]


def test_positions_count_the_drafts_that_reach_them():
    assert Tally(drafted=Counter({0: 5, 1: 2, 3: 1})).drafted_at(4) == [3, 1, 1, 0]


def test_where_nobody_takes_notes_none_pile_up():
    notes = Activity()
    note(notes, 0.001, [[1]], [1])
    assert noted(notes) == Tally()


def test_nothing_is_lost_or_counted_twice_between_two_threads():
    notes, total, steps = activity(), Tally(), 20_000

    def note_all() -> None:
        for _ in range(steps):
            note(notes, 0.001, [[1, 2]], [1])

    thread = threading.Thread(target=note_all)
    thread.start()
    while thread.is_alive():
        total.add(noted(notes))
    total.add(noted(notes))
    assert (total.steps, total.accepted_tokens) == (steps, steps)
    assert total.draft_tokens == steps - 1
    assert total.matched == Counter({5: steps})


# --- what the proposers note


def generate(proposer, batch: Batch) -> list[list[list[int]]]:
    """Three steps, the second of which accepts two tokens of what the first one drafted."""
    drafts = []
    for sampled in ([11], [12, 13, 14], [15]):
        rows = batch.sample({"r": sampled})
        drafts.append(proposer.propose(8, batch, rows))
    return drafts


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread takes what a proposer notes."""
    monkeypatch.setattr("vllm_drafter.proposer.publish", lambda *_: None)


def test_the_tally_of_a_proposer_is_what_it_returned(still):
    proposer = TokensPerStepProposer(vllm_config())
    proposer.loop.activity.on = True
    batch = Batch()
    batch.add("r", COPYABLE * 2)
    drafts = generate(proposer, batch)
    times, tally = proposer.loop.activity.take()
    assert len(times) == tally.steps == 3
    assert all(0 < seconds < 10 for seconds in times)
    assert tally.draft_tokens == len(drafts[0][0]) + len(drafts[1][0])
    assert tally.accepted_tokens == 2
    assert tally.matched.total() == 3
    assert tally.mean_match_length > 1


def test_a_custom_class_notes_the_same(still):
    proposer = CustomClassProposer(vllm_config())
    assert proposer.loop is not None
    proposer.loop.activity.on = True
    batch = Batch()
    batch.add("r", COPYABLE * 2)
    for sampled in ([11], [12, 13, 14], [15]):
        rows = batch.sample({"r": sampled})
        proposer.propose(rows, batch.num_tokens_no_spec, batch.token_ids_cpu)
    tally = noted(proposer.loop.activity)
    assert (tally.steps, tally.accepted_tokens) == (3, 2)
    assert tally.draft_tokens > 2


def test_a_request_that_is_started_over_counts_once(still):
    proposer = TokensPerStepProposer(vllm_config())
    batch = Batch()
    batch.add("r", COPYABLE)
    proposer.propose(8, batch, batch.sample({"r": [11, 12]}))
    batch.num_tokens_no_spec[0] -= 1  # it goes on from an earlier point
    proposer.propose(8, batch, batch.sample({"r": [13]}))
    assert proposer.loop.activity.requests == 1


def test_evictions_and_sizes_are_those_of_the_drafter(still):
    proposer = TokensPerStepProposer(vllm_config(max_cached_requests=2))
    for name in "abcd":
        batch = Batch()
        batch.add(name, COPYABLE)
        proposer.propose(8, batch, batch.sample({name: [11, 12, 13]}))
    sizes = proposer.loop.sizes()
    assert (sizes.cached_requests, sizes.evicted_responses) == (2, 2)
    assert sizes.active_requests == 1
    assert sizes.memory_bytes > 0


# --- what is published


@pytest.fixture
def published(tmp_path):
    """A loop with some activity, its publisher, and the text that its files give."""
    loop = Loop()
    publisher = Publisher(loop, WORKER, metrics._Files(tmp_path, WORKER), 0)
    loop.activity.requests = 3
    note(loop.activity, 0.0002, [[1]], [3])
    note(loop.activity, 0.0004, [[7, 8, 4], []], [0, 0])
    assert publisher.publish()

    def text() -> str:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(tmp_path))
        return generate_latest(registry).decode()

    return loop, publisher, text


def test_every_metric_is_exported_under_its_type(published):
    _, _, text = published
    for name, (kind, meaning) in METRICS.items():
        total = "_total" if kind == "counter" else ""
        assert f"# TYPE vllm_drafter_{name}{total} {kind}\n" in text()
        assert f"# HELP vllm_drafter_{name}{total} {meaning}\n" in text()


def test_the_numbers_are_those_of_the_steps(published):
    _, _, text = published
    [process] = parse(text())
    assert process.rank == "0"
    assert process.values["requests"] == 3
    assert process.values["drafts"] == 1
    assert process.values["draft_tokens"] == 3
    assert process.values["accepted_tokens"] == 2
    assert process.drafted_at == {0: 1, 1: 1, 2: 1, 3: 0}
    assert process.accepted_at == {0: 1, 1: 1, 2: 0, 3: 0}
    assert process.acceptance_by_position == [1, 1, 0]
    assert process.match_length == 5
    assert process.values["step_seconds_count"] == 2
    assert process.values["step_seconds_sum"] == pytest.approx(0.0006)
    assert process.values["cached_requests"] == 2
    assert process.values["cached_tokens"] == 30
    assert process.values["memory_bytes"] == 4096
    assert process.values["evicted_responses"] == 5
    assert process.values["faults"] == 0


def test_what_comes_later_is_added(published):
    loop, publisher, text = published
    note(loop.activity, 0.0001, [[1, 2]], [0])
    loop.faults = 2
    publisher.publish()
    [process] = parse(text())
    assert process.values["accepted_tokens"] == 3
    assert process.values["step_seconds_count"] == 3
    assert process.values["faults"] == 2


def test_a_time_beyond_all_buckets_is_counted(published):
    loop, publisher, text = published
    note(loop.activity, 7.0, [[1]], [0])
    publisher.publish()
    [process] = parse(text())
    assert process.times[float("inf")] == 3
    assert process.times[0.1] == 2


def test_publishing_ends_with_its_loop(published):
    loop, publisher, _ = published
    del loop
    publisher._loop = lambda: None
    assert not publisher.publish()


def test_a_proposer_s_thread_ends_with_it(monkeypatch):
    monkeypatch.setattr(metrics, "SECONDS", 0.01)
    before = set(threading.enumerate())
    proposer = TokensPerStepProposer(vllm_config())
    [thread] = set(threading.enumerate()) - before
    assert thread.name == "vllm-drafter-metrics"
    assert thread.is_alive()
    del proposer
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_directory_that_cannot_be_written_costs_a_warning_and_no_more(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("DRAFTER_METRICS_DIR", str(tmp_path / "missing"))
    with caplog.at_level(logging.WARNING):
        TokensPerStepProposer(vllm_config())
    assert "no metrics of this process" in caplog.text


def test_publishing_that_fails_turns_the_notes_off_and_says_so(published, caplog):
    loop, publisher, _ = published
    loop.held = None
    publisher.run()
    assert not loop.activity.on
    assert "publishing metrics failed" in caplog.text


def test_a_line_in_the_log_says_what_was_done_since_the_last_one(caplog):
    loop = Loop()
    publisher = Publisher(loop, WORKER, None, 1e-9)
    note(loop.activity, 0.0002, [[1]], [3])
    note(loop.activity, 0.0004, [[7, 8, 4]], [0])
    with caplog.at_level(logging.INFO, logger="vllm"):
        publisher.publish()
        publisher.publish()  # nothing was done: no line
    [line] = [record.getMessage() for record in caplog.records]
    assert (
        "worker 0: 2 steps, 3 tokens drafted, 2 accepted (66.7%; by position 1.00 1.00 0.00)"
        in (line)
    )
    assert "draft step 0.30 ms median, 0.40 ms p99" in line
    assert "2 cached (0.0 MiB), 5 evicted, 0 faults" in line


def test_no_lines_where_none_are_wanted(caplog):
    loop = Loop()
    publisher = Publisher(loop, WORKER, None, 0)
    note(loop.activity, 0.0002, [[1]], [1])
    with caplog.at_level(logging.INFO, logger="vllm"):
        publisher.publish()
    assert not caplog.records


# --- where vLLM serves it


@pytest.fixture
def served(monkeypatch):
    """The directory that `serve` made; its collector is taken out of the registry again."""
    monkeypatch.setenv("DRAFTER_METRICS_DIR", "")
    before = set(REGISTRY._collector_to_names)
    serve()
    added = set(REGISTRY._collector_to_names) - before
    yield metrics.os.environ["DRAFTER_METRICS_DIR"], added
    metrics._remove(metrics.os.environ["DRAFTER_METRICS_DIR"], metrics.os.getpid())
    for collector in added:
        REGISTRY.unregister(collector)


def test_the_registry_that_vllm_serves_has_the_workers_metrics(served):
    directory, _ = served
    loop = Loop()
    Publisher(loop, WORKER, metrics._Files(metrics.Path(directory), WORKER), 0).publish()
    assert "vllm_drafter_cached_requests{" in generate_latest(REGISTRY).decode()


def test_files_that_cannot_be_read_leave_vllm_s_own_metrics(served, caplog):
    directory, _ = served
    (metrics.Path(directory) / "counter_broken.db").write_bytes(b"\x01")
    assert "python_info" in generate_latest(REGISTRY).decode()
    assert "python_info" in generate_latest(REGISTRY).decode()
    assert caplog.text.count("cannot read the workers' metrics") == 1


def test_one_of_several_api_servers_makes_no_directory_that_would_stay_behind(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setenv("DRAFTER_METRICS_DIR", "the launcher's")
    before = set(REGISTRY._collector_to_names)
    serve()
    assert metrics.os.environ["DRAFTER_METRICS_DIR"] == "the launcher's"
    assert set(REGISTRY._collector_to_names) == before


def test_with_several_api_servers_the_files_are_where_vllm_s_are(tmp_path, monkeypatch):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    monkeypatch.setenv("DRAFTER_METRICS_DIR", str(ours))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(theirs))
    loop = Loop()
    metrics.publish(loop, WORKER, 0)
    assert len(list(theirs.glob("*.db"))) == 3
    assert not list(ours.iterdir())


# --- top


def a_process(**values: float) -> Process:
    return Process("0", "1", {"draft_tokens": 10.0, "accepted_tokens": 5.0, **values})


def test_top_counts_from_the_look_before():
    before = a_process(cached_requests=3.0)
    now = a_process(draft_tokens=30.0, accepted_tokens=20.0, cached_requests=4.0)
    last = now.since(before)
    assert last.acceptance == 0.75
    assert last.values["cached_requests"] == 4


def test_top_starts_over_with_a_process_that_was_started_again():
    before, now = a_process(draft_tokens=100.0), a_process()
    assert now.since(before) is now


def test_top_shows_nothing_as_a_dash(published):
    _, _, text = published
    [process] = parse(text())
    shown = table([process], [process], 2.0)
    assert [cell for column in shown.columns for cell in column.cells].count("-") == 4


def test_top_shows_a_process_that_has_only_begun_to_publish():
    labels = '{process="1",rank="0"}'
    [process] = parse(
        f"# TYPE vllm_drafter_requests counter\nvllm_drafter_requests_total{labels} 2.0\n"
    )
    shown = table([process], [process], 2.0)
    assert [cell for column in shown.columns[2:5] for cell in column.cells] == ["2", "0", "0"]


@pytest.mark.parametrize(("quantile", "expected"), [(0.25, 0.5), (0.5, 1.0), (0.75, 2.0)])
def test_quantiles_are_taken_from_within_a_bucket(quantile, expected):
    process = a_process()
    process.times = {1.0: 2.0, 3.0: 4.0, float("inf"): 4.0}
    assert process.step_seconds(quantile) == expected


def test_top_says_what_to_do_where_no_server_answers():
    with pytest.raises(NoMetrics, match=r"127\.0\.0\.1:9/metrics.*running vLLM server"):
        read("127.0.0.1:9")


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-other\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab"]
)
def test_top_says_what_to_do_where_something_else_answers(answer):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(NoMetrics, match="running vLLM server"):
            read(f"127.0.0.1:{listening.getsockname()[1]}")
        thread.join()


def test_top_says_what_to_do_with_an_address_that_is_none():
    with pytest.raises(NoMetrics, match=r"nonnumeric port.*running vLLM server"):
        read("localhost:port")


@pytest.fixture
def address(published):
    """Where the text of the published metrics, and nothing else, can be read."""
    _, _, text = published

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = {"/metrics": text(), "/none/metrics": "other 1.0\n"}.get(self.path, "<html>\n")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("form", ["{}", "http://{}", "http://{}/", "http://{}/metrics"])
def test_top_finds_the_metrics_of_a_server(address, form):
    [process] = read(form.format(address))
    assert process.values["accepted_tokens"] == 2


def test_top_says_that_a_server_does_not_draft_with_us(address):
    with pytest.raises(NoMetrics, match=r"no metric is called vllm_drafter_.*doctor"):
        read(f"{address}/none")


def test_top_says_that_what_is_there_are_no_metrics(address):
    with pytest.raises(NoMetrics, match="no Prometheus metrics"):
        read(f"{address}/page")


def test_top_prints_json_once(address):
    done = CliRunner().invoke(app, ["top", address, "--json"])
    assert done.exit_code == 0
    [process] = json.loads(done.stdout)["processes"]
    assert process["acceptance_by_position"] == [1, 1, 0]
    assert process["step_seconds_median"] == pytest.approx(0.0002, rel=0.35)


def test_top_ends_with_1_where_there_is_nothing_to_show(address):
    done = CliRunner().invoke(app, ["top", f"{address}/none"])
    assert done.exit_code == 1
    assert "error" in done.stderr


def test_top_shows_a_table_at_each_look(address, monkeypatch):
    looks = iter([None, None, KeyboardInterrupt])

    def sleep(_: float) -> None:
        if (stop := next(looks)) is not None:
            raise stop

    monkeypatch.setattr("vllm_drafter.cli.time.sleep", sleep)
    done = CliRunner().invoke(app, ["top", address], env={"COLUMNS": "160"})
    assert done.exit_code == 0
    assert "accepted/s" in done.stdout
