"""Snapshots: what a restart keeps, who writes, and what stops the start."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest
from batches import COPYABLE, Batch, vllm_config
from own_process import answer_once

from vllm_drafter.custom_class import CustomClassProposer
from vllm_drafter.proposer import TokensPerStepProposer
from vllm_drafter.settings import SettingError, read_settings
from vllm_drafter.snapshots import RESPONSES_PER_STEP
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


def saved_while_serving(proposer: TokensPerStepProposer, path: Path, steps: int) -> int:
    """Take steps that have nothing to do until the file appears; return how many it took."""
    batch = Batch()
    batch.add("other", [1])
    for step in range(steps):
        proposer.propose(8, batch, batch.sample({"other": [5]}))
        writing = proposer.loop._keeper._writing
        if writing is not None:
            writing.join()
            return step
    raise AssertionError("nothing was written")


def test_it_is_saved_while_the_engine_serves(path, monkeypatch):
    monkeypatch.setenv("VLLM_DRAFTER_SNAPSHOT_MINUTES", "0.0005")
    proposer = started()
    for i in range(3 * RESPONSES_PER_STEP):
        answer(proposer, f"{i}")
        proposer.loop._keeper._begin_again()
    time.sleep(0.05)
    steps = saved_while_serving(proposer, path, 100)
    assert steps >= 3  # copied in parts, so that no step waits for all of it
    with pytest.MonkeyPatch.context() as other:
        other.setenv("VLLM_DRAFTER_SNAPSHOT_MINUTES", "0")
        assert cached(started()) >= 3 * RESPONSES_PER_STEP
    ended(proposer)


def test_with_0_minutes_it_is_saved_at_the_end_only(path, monkeypatch):
    monkeypatch.setenv("VLLM_DRAFTER_SNAPSHOT_MINUTES", "0")
    proposer = started()
    answer(proposer)
    with pytest.raises(AssertionError, match="nothing was written"):
        saved_while_serving(proposer, path, 20)
    assert not path.exists()
    ended(proposer)
    assert path.exists()


def test_answers_that_leave_the_cache_meanwhile_do_not_hinder_the_save(path, monkeypatch):
    monkeypatch.setenv("VLLM_DRAFTER_SNAPSHOT_MINUTES", "0.0005")
    proposer = started()
    for i in range(2 * RESPONSES_PER_STEP):
        answer(proposer, f"{i}")
        proposer.loop._keeper._begin_again()
    time.sleep(0.05)
    proposer.loop._keeper.after_step()
    proposer.loop._drafter.evict_cached_response(f"{2 * RESPONSES_PER_STEP - 1}")
    saved_while_serving(proposer, path, 100)
    assert proposer.loop._keeper._faults == 0
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
