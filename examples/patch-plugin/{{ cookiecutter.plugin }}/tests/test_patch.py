"""What the patch does, with a stand-in for its target; the real one is checked by `nox -s drift`."""

import logging
import sys
import types

import pytest

import {{ cookiecutter.package }} as plugin


@pytest.fixture(autouse=True)
def no_choice(monkeypatch):
    monkeypatch.delenv("VLLM_PATCHES", raising=False)


@pytest.fixture
def scheduler(monkeypatch):
    module = types.ModuleType("vllm.v1.core.sched.scheduler")

    class Scheduler:
        def finish_requests(self, request_ids, finished_status):
            return [("finished", request_ids)]

    module.Scheduler = Scheduler
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield Scheduler()
    plugin.registry.revert()


def test_an_abort_is_logged_and_vllm_does_what_it_did(scheduler, caplog):
    with caplog.at_level(logging.WARNING):
        plugin.registry.apply(version="0.32.0")
        assert scheduler.finish_requests("req-1", "ABORTED") == [("finished", "req-1")]
    assert "ABORTED: req-1" in caplog.text


def test_taken_off_it_leaves_what_was_there(scheduler, caplog):
    plugin.registry.apply(version="0.32.0")
    plugin.registry.revert()
    scheduler.finish_requests("req-1", "ABORTED")
    assert caplog.text == ""


def test_on_a_release_that_nobody_looked_at_it_is_skipped_and_says_why():
    standing = plugin.registry.plan(version="0.23.0")["{{ cookiecutter.patch }}"]
    assert standing.state == "skipped"
    assert "0.23.0 is outside >=0.24,<0.34" in standing.detail


def test_a_release_that_changed_the_signature_is_refused(monkeypatch):
    module = types.ModuleType("vllm.v1.core.sched.scheduler")
    module.Scheduler = type("Scheduler", (), {"finish_requests": lambda self, ids: None})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(Exception, match="written against"):
        plugin.registry.apply(version="0.32.0")
