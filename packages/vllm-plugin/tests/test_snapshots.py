"""Snapshots: what a restart keeps, who writes, and what stops the start."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from pathlib import Path

import pytest
from batches import COPYABLE, Batch, vllm_config
from own_process import answer_once

from drafter_core import SuffixDrafter
from vllm_drafter.custom_class import CustomClassProposer
from vllm_drafter.proposer import TokensPerStepProposer
from vllm_drafter.settings import SettingError, read_settings
from vllm_drafter.snapshots import RESPONSES_AT_ONCE
from vllm_drafter.stamps import Role


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_DRAFTER_SNAPSHOT", str(tmp_path / "cache"))
    return tmp_path / "cache"


def answer(proposer: TokensPerStepProposer, name: str = "a") -> None:
    batch = Batch()
    batch.add(name, [1, 2, 3])
    proposer.propose(8, batch, batch.sample({name: COPYABLE}))
    batch.remove(name)
    proposer.propose(8, batch, [])


def draft(proposer: TokensPerStepProposer) -> list[int]:
    batch = Batch()
    batch.add("new", [7, 8, 1, 2, 3])
    return proposer.propose(8, batch, batch.sample({"new": COPYABLE[:1]}))[0]


def cached(proposer: TokensPerStepProposer) -> int:
    return proposer.loop.sizes().cached_requests


def started() -> TokensPerStepProposer:
    return TokensPerStepProposer(vllm_config())


def ended(proposer: TokensPerStepProposer) -> None:
    proposer.loop._keeper.close()


def test_a_restarted_process_drafts_from_answers_of_before(path):
    first = started()
    assert draft(first) == []
    answer(first)
    ended(first)
    second = started()
    assert draft(second)[:3] == COPYABLE[1:4]
    ended(second)


def test_the_custom_class_keeps_snapshots_too(path):
    first = started()
    answer(first)
    ended(first)
    second = CustomClassProposer(vllm_config(num_speculative_tokens=3))
    assert second.loop.sizes().cached_requests == 1
    ended(second)


def test_without_the_variable_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    proposer = started()
    answer(proposer)
    assert proposer.loop._keeper is None
    assert list(tmp_path.iterdir()) == []


def test_a_bad_file_stops_the_start_and_says_what_to_do(path):
    path.write_bytes(b"not a snapshot")
    with pytest.raises(SettingError, match=r"VLLM_DRAFTER_SNAPSHOT.*drafter-core build"):
        started()


def test_a_file_cut_short_stops_the_start(path):
    first = started()
    answer(first)
    ended(first)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SettingError, match="truncated"):
        started()


def test_a_lock_that_cannot_be_made_stops_the_start_and_says_what_to_do(path):
    # As in a directory that cannot be written to, of which a superuser's settings know nothing.
    path.with_name(path.name + ".lock").mkdir()
    with pytest.raises(SettingError, match=r"VLLM_DRAFTER_SNAPSHOT.*\.lock cannot be made"):
        started()


def test_a_directory_that_is_not_there_stops_the_start(tmp_path):
    with pytest.raises(SettingError, match="VLLM_DRAFTER_SNAPSHOT"):
        read_settings({"VLLM_DRAFTER_SNAPSHOT": str(tmp_path / "missing" / "cache")})


@pytest.mark.parametrize(
    "other", ["VLLM_DRAFTER_SHARING=none", "VLLM_DRAFTER_SHARING=lora", "VLLM_DRAFTER_ROUTE=shim"]
)
def test_settings_that_contradict_it_stop_the_start(tmp_path, other):
    name, value = other.split("=")
    with pytest.raises(SettingError, match=name):
        read_settings({"VLLM_DRAFTER_SNAPSHOT": str(tmp_path / "cache"), name: value})


def wait_for(path: Path, seconds: float) -> bool:
    """Whether the file appears within so many seconds."""
    until = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.02)
    return path.exists()


def loaded(path: Path) -> int:
    drafter = SuffixDrafter()
    return drafter.load(path)


def go_on(proposer: TokensPerStepProposer, path: Path) -> None:
    """Take steps without a pause until the file appears, for at most 20 seconds."""
    until = time.monotonic() + 20
    for i in itertools.count():
        answer(proposer, f"more {i}")
        time.sleep(0.01)
        if path.exists():
            return
        assert time.monotonic() < until, "nothing was written"


def test_it_is_saved_while_the_engine_serves(path, monkeypatch):
    monkeypatch.setenv("VLLM_DRAFTER_SNAPSHOT_MINUTES", "0.01")
    monkeypatch.setattr("vllm_drafter.snapshots.IDLE_SECONDS", float("inf"))
    proposer = started()
    answers = 3 * RESPONSES_AT_ONCE
    for i in range(answers):
        answer(proposer, f"{i}")
    go_on(proposer, path)
    assert loaded(path) >= answers
    ended(proposer)


def test_it_is_saved_soon_after_the_last_step_because_a_server_kills_its_workers(path):
    proposer = started()
    answer(proposer)
    assert wait_for(path, 20)  # of the 10 minutes of the default
    assert loaded(path) == 1
    ended(proposer)


def test_what_is_saved_already_is_not_saved_again(path):
    proposer = started()
    answer(proposer)
    assert wait_for(path, 20)
    keeper = proposer.loop._keeper
    later = time.monotonic() + 3600
    until = time.monotonic() + 5
    while keeper.is_due(later, idle=True):  # the file is there a little before this is noted
        assert time.monotonic() < until
        time.sleep(0.02)
    answer(proposer, "b")
    assert keeper.is_due(later, idle=True)
    ended(proposer)


def test_where_a_save_takes_long_an_idle_engine_does_not_spend_its_time_on_it(path):
    proposer = started()
    keeper = proposer.loop._keeper
    keeper._ending.set()
    keeper._thread.join()
    keeper._save_took = 2.0
    answer(proposer)
    saved = keeper._saved_at
    assert not keeper.is_due(saved + 100, idle=True)
    assert keeper.is_due(saved + 201, idle=True)
    assert not keeper.is_due(saved + 201, idle=False)
    assert keeper.is_due(saved + 601, idle=False)
    keeper._save_took = 60.0  # never later than one that is busy
    assert keeper.is_due(saved + 601, idle=True)
    ended(proposer)


def test_the_engine_takes_steps_while_a_save_is_under_way(path, monkeypatch):
    monkeypatch.setattr("vllm_drafter.snapshots._PAUSE_SECONDS", 0.5)
    proposer = started()
    for i in range(3 * RESPONSES_AT_ONCE):
        answer(proposer, f"{i}")
    keeper = proposer.loop._keeper
    saving = threading.Thread(target=keeper._save)
    saving.start()
    for i in range(50):
        answer(proposer, f"meanwhile {i}")
    assert saving.is_alive()
    saving.join()
    assert loaded(path) >= 3 * RESPONSES_AT_ONCE
    ended(proposer)


def test_with_0_minutes_it_is_saved_at_the_end_only(path, monkeypatch):
    monkeypatch.setenv("VLLM_DRAFTER_SNAPSHOT_MINUTES", "0")
    proposer = started()
    answer(proposer)
    assert not wait_for(path, 3)
    ended(proposer)
    assert path.exists()


def test_answers_that_leave_the_cache_meanwhile_do_not_hinder_the_save(path, monkeypatch):
    monkeypatch.setattr("vllm_drafter.snapshots._PAUSE_SECONDS", 0.5)
    proposer = started()
    answers = 2 * RESPONSES_AT_ONCE
    for i in range(answers):
        answer(proposer, f"{i}")
    keeper = proposer.loop._keeper
    saving = threading.Thread(target=keeper._save)
    saving.start()
    time.sleep(0.2)  # it has its list of answers, and has copied none
    proposer.loop._drafter.evict_cached_response(f"{answers - 1}")
    saving.join()
    assert loaded(path) == answers - 1
    ended(proposer)


def test_a_save_that_fails_while_serving_is_tried_again(path, monkeypatch):
    monkeypatch.setattr("vllm_drafter.snapshots.IDLE_SECONDS", 0.0)
    proposer = started()

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("drafter_core.snapshot.write_snapshot", full_disk)
        answer(proposer)
        until = time.monotonic() + 20
        while proposer.loop._keeper._faults < 2:
            assert time.monotonic() < until
            time.sleep(0.02)
    assert wait_for(path, 20)
    ended(proposer)


def test_only_the_first_of_several_workers_writes(path, monkeypatch):
    monkeypatch.setattr("vllm_drafter.proposer.current_role", lambda: Role("worker", 1))
    second = started()
    assert second.loop._keeper is None
    monkeypatch.setattr("vllm_drafter.proposer.current_role", lambda: Role("worker", 0))
    first = started()
    assert first.loop._keeper.writes
    ended(first)


def test_only_the_first_of_several_engines_writes(path):
    first, second = started(), started()
    answer(second)
    assert first.loop._keeper.writes
    assert not second.loop._keeper.writes
    ended(second)
    assert not path.exists()
    ended(first)
    third = started()
    assert third.loop._keeper.writes
    ended(third)


def test_a_save_that_fails_keeps_the_file_of_before_and_the_engine(path, monkeypatch):
    proposer = started()
    answer(proposer)
    proposer.loop._drafter.save(path)
    before = path.read_bytes()

    def full_disk(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("drafter_core.drafter.write_snapshot", full_disk)
    answer(proposer, "b")
    ended(proposer)
    assert path.read_bytes() == before
    assert proposer.loop._keeper._faults == 1


def test_an_empty_cache_does_not_replace_a_snapshot(path):
    first = started()
    answer(first)
    ended(first)
    before = path.read_bytes()
    second = TokensPerStepProposer(vllm_config(max_cached_requests=0))
    ended(second)
    assert path.read_bytes() == before


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_process_saves_when_it_ends(path, method):
    worker = multiprocessing.get_context(method).Process(target=answer_once)
    worker.start()
    worker.join(120)
    assert worker.exitcode == 0
    again = started()
    assert cached(again) == 1
    ended(again)
