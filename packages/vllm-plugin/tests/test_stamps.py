from __future__ import annotations

import json
import multiprocessing
import sys
from types import ModuleType

import pytest

from vllm_drafter.stamps import Role, append_stamp, current_role


def role_when_called_from(module_name: str, **names: object) -> Role:
    """`current_role()` as a function of the module `module_name` would get it."""
    module = ModuleType(module_name)
    module.__dict__.update(names, current_role=current_role)
    exec("def call(self=None): return current_role()", module.__dict__)
    return module.call(names.get("self"))


@pytest.mark.parametrize(
    ("module", "role"),
    [
        ("vllm.engine.arg_utils", "front end"),
        ("vllm.v1.engine.core", "EngineCore"),
        ("vllm.v1.worker.worker_base", "worker"),
        ("vllm.model_executor.models.registry", "model inspection"),
    ],
)
def test_the_role_is_told_by_the_part_of_vllm_that_loads_plugins(module, role):
    assert role_when_called_from(module).name == role


def test_a_worker_has_its_rank():
    wrapper = type("WorkerWrapperBase", (), {"global_rank": 3, "rpc_rank": 1})()
    assert role_when_called_from("vllm.v1.worker.worker_base", self=wrapper) == Role("worker", 3)


@pytest.mark.parametrize(
    ("process", "role"),
    [
        ("EngineCore", Role("EngineCore")),
        ("EngineCore_DP1", Role("EngineCore", 1)),
        ("VllmWorker-0", Role("worker", 0)),
        ("ApiServer_2", Role("API server", 2)),
        ("MainProcess", Role("unknown")),
    ],
)
def test_without_a_caller_the_role_is_told_by_the_name_of_the_process(monkeypatch, process, role):
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {}, raising=False)
    monkeypatch.setattr(multiprocessing.current_process(), "_name", process)
    assert current_role() == role


def test_an_api_server_of_several_is_not_taken_for_a_front_end(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "ApiServer_1")
    assert role_when_called_from("vllm.engine.arg_utils") == Role("API server", 1)


def test_a_server_is_told_by_its_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/vllm", "serve", "model"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert role_when_called_from("vllm.engine.arg_utils").name == "API server"


def test_stamps_of_several_processes_are_whole_lines(tmp_path):
    path = tmp_path / "stamps.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=append_stamp, args=(path, "registered", Role("worker", rank)))
        for rank in range(8)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    stamps = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(stamp["rank"] for stamp in stamps) == list(range(8))
    assert {stamp["pid"] for stamp in stamps} == {writer.pid for writer in writers}


def test_a_file_that_cannot_be_written_does_not_stop_anything(tmp_path):
    append_stamp(tmp_path / "missing" / "file", "registered", Role("worker", 0))


def test_without_a_file_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    append_stamp(None, "registered", Role("worker", 0))
    assert list(tmp_path.iterdir()) == []
