"""Who loses a seat to whom. The scheduler is a stand-in; the real one is in tests/patches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from vllm_patches.priority import make_room


@dataclass(eq=False)
class Request:
    request_id: str
    priority: int
    """As vLLM has it: lower is more urgent."""
    arrival_time: float = 0.0


@dataclass
class Scheduler:
    running: list[Request]
    waiting: list[Request]
    max_num_active_reqs: int = 2
    deferred_waiting: set[Request] = field(default_factory=set)
    connector: Any = None
    preempted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prev_step_scheduled_req_ids = {request.request_id for request in self.running}

    def _preempt_request(self, request: Request, now: float, drop_stale_output: bool) -> None:
        assert request not in self.running
        assert drop_stale_output
        self.preempted.append(request.request_id)
        self.waiting.append(request)


def low(name: str, arrival: float = 0.0) -> Request:
    return Request(name, 0, arrival)


def high(name: str) -> Request:
    return Request(name, -5)


def test_the_least_urgent_that_came_last_gives_way() -> None:
    scheduler = Scheduler([low("first", 1), low("second", 2)], [high("urgent")])
    assert make_room(scheduler, 0.0) == ["second"] == scheduler.preempted
    assert [request.request_id for request in scheduler.running] == ["first"]
    assert scheduler.prev_step_scheduled_req_ids == {"first"}


def test_nobody_gives_way_to_an_equal() -> None:
    assert make_room(Scheduler([low("a"), low("b")], [low("c")]), 0.0) == []


def test_nobody_gives_way_while_a_seat_is_free() -> None:
    assert make_room(Scheduler([low("a")], [high("urgent")]), 0.0) == []


def test_each_urgent_request_takes_one_seat_and_no_more_than_there_are() -> None:
    scheduler = Scheduler([low("a", 1), low("b", 2)], [high("u1"), high("u2"), high("u3")])
    assert make_room(scheduler, 0.0) == ["b", "a"]


def test_free_seats_are_taken_first() -> None:
    scheduler = Scheduler(
        [low("a", 1), low("b", 2)], [high("u1"), high("u2")], max_num_active_reqs=3
    )
    assert make_room(scheduler, 0.0) == ["b"]


def test_a_request_that_waits_for_something_else_takes_no_seat() -> None:
    urgent = high("urgent")
    scheduler = Scheduler([low("a"), low("b")], [urgent], deferred_waiting={urgent})
    assert make_room(scheduler, 0.0) == []


@pytest.mark.parametrize("changes", [{"connector": object()}, {"running": []}, {"waiting": []}])
def test_with_a_connector_or_nobody_there_nothing_happens(changes) -> None:
    scheduler = Scheduler(**{"running": [low("a"), low("b")], "waiting": [high("u")], **changes})
    assert make_room(scheduler, 0.0) == []
