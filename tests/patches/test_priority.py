"""`priority-scheduler` under load: who finishes first, and what it costs the others.

Two seats. Six long requests without a priority are there first; then three short ones come, one a
step, the most urgent neither first nor last. The engine core runs in the job's own process, so that
steps can be counted.
"""

from __future__ import annotations

from typing import Any

import pytest

LENGTHS = (40, 40, 60, 60, 60, 60)
SHORT = 12
ARRIVES = {"low": 6, "top": 7, "middle": 8}
PRIORITY = {"low": 1, "top": 9, "middle": 5}
BY_PRIORITY = ["top", "middle", "low"]


def requests(way: str) -> list[dict[str, Any]]:
    def said(name: str) -> dict[str, Any]:
        if way == "patch":
            return {"argument": {"priority": PRIORITY[name]}}
        # vLLM: lower is more urgent.
        return {"priority": -PRIORITY[name]} if way == "built-in" else {}

    background = [
        {"id": f"bulk-{place}", "tokens": [place + 5] * 12, "arrives": 0, "length": length}
        for place, length in enumerate(LENGTHS)
    ]
    short = [
        {"id": name, "tokens": [40 + step] * 12, "arrives": step, "length": SHORT, **said(name)}
        for name, step in ARRIVES.items()
    ]
    return [*background, *short]


@pytest.fixture(scope="session")
def served(run, tiny):
    """How the same load is served: as vLLM does by default, by its own policy, and by the patch."""

    def serve(way: str, patches: str, policy: str) -> dict[str, Any]:
        engine = {
            "model": tiny,
            "dtype": "float32",
            "max_num_seqs": 2,
            "scheduling_policy": policy,
        }
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return run("priorities", patches, env=env, engine=engine, requests=requests(way))

    return {
        "default": serve("default", "none", "fcfs"),
        "built-in": serve("built-in", "none", "priority"),
        "patch": serve("patch", "priority-scheduler", "fcfs"),
    }


def order(served: dict[str, Any]) -> list[str]:
    finished = served["finished"]
    return sorted(finished, key=lambda name: finished[name]["step"])


def steps_of(served: dict[str, Any], name: str) -> int:
    """How many steps a short request took, from its arrival to its end."""
    found: int = served["finished"][name]["step"] - ARRIVES[name]
    return found


def test_without_it_short_requests_finish_last_however_urgent(served):
    assert set(order(served["default"])[-3:]) == set(BY_PRIORITY)


def test_with_it_requests_finish_by_the_priority_in_their_extra_arguments(served):
    assert order(served["patch"])[:3] == BY_PRIORITY


def test_an_urgent_request_does_not_wait_for_a_seat(served):
    # One token a step, and a little for the engine to come round.
    assert steps_of(served["patch"], "top") <= SHORT + 3
    assert steps_of(served["patch"], "middle") <= SHORT + 3


def test_vllms_own_policy_gives_the_same_order_once_seats_are_free(served):
    by_policy = order(served["built-in"])
    assert [name for name in by_policy if name in PRIORITY] == BY_PRIORITY
    # Those that run keep their seats until they are done.
    assert by_policy[:2] == ["bulk-0", "bulk-1"]
    assert steps_of(served["built-in"], "top") > 2 * steps_of(served["patch"], "top")


def test_whoever_lost_a_seat_answers_as_if_it_had_not(served):
    plain = served["default"]["finished"]
    assert {name: one["tokens"] for name, one in served["patch"]["finished"].items()} == {
        name: one["tokens"] for name, one in plain.items()
    }


@pytest.mark.parametrize("way", ["default", "built-in", "patch"])
def test_everything_is_finished_whatever_the_order(served, way, record_property):
    finished = served[way]["finished"]
    assert len(finished) == len(LENGTHS) + 3
    for name in BY_PRIORITY:
        record_property(f"{name}: steps", steps_of(served[way], name))
        record_property(f"{name}: seconds", round(finished[name]["seconds"], 3))
    for name in ("bulk-0", "bulk-5"):
        record_property(f"{name}: steps", finished[name]["step"])
    record_property("all: steps", served[way]["steps"])
