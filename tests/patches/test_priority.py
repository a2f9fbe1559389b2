"""`priority-scheduler` under load: who finishes first, and what it costs the others.

Two seats; six long requests of no priority, then an ordinary one and, last, an urgent one. The
engine core runs in the job's own process, so that steps can be counted.
"""

from __future__ import annotations

from typing import Any

import pytest

LENGTHS = (40, 40, 60, 60, 60, 60)
URGENT = 8


def requests(urgent: dict[str, Any], ordinary: dict[str, Any]) -> list[dict[str, Any]]:
    background = [
        {"id": f"bulk-{place}", "tokens": [place + 5] * 12, "arrives": 0, "length": length}
        for place, length in enumerate(LENGTHS)
    ]
    return [
        *background,
        {"id": "ordinary", "tokens": [40] * 12, "arrives": 4, "length": URGENT, **ordinary},
        {"id": "urgent", "tokens": [50] * 12, "arrives": 6, "length": URGENT, **urgent},
    ]


@pytest.fixture(scope="session")
def served(run, tiny):
    """How the same load is served: as vLLM does by default, by its own policy, and by the patch."""

    def serve(patches: str, policy: str, *given: dict[str, Any]) -> dict[str, Any]:
        engine = {
            "model": tiny,
            "dtype": "float32",
            "max_num_seqs": 2,
            "scheduling_policy": policy,
        }
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return run("priorities", patches, env=env, engine=engine, requests=requests(*given))

    return {
        "default": serve("none", "fcfs", {}, {}),
        # vLLM: lower is more urgent.
        "built-in": serve("none", "priority", {"priority": -10}, {"priority": -1}),
        "patch": serve(
            "priority-scheduler",
            "fcfs",
            {"argument": {"priority": 10}},
            {"argument": {"priority": 1}},
        ),
    }


def order(served: dict[str, Any]) -> list[str]:
    finished = served["finished"]
    return sorted(finished, key=lambda name: finished[name]["step"])


def steps_of(served: dict[str, Any], name: str) -> int:
    found: int = served["finished"][name]["step"]
    return found


def test_without_it_the_urgent_request_is_the_last_to_begin(served):
    assert order(served["default"])[-1] == "urgent" or steps_of(
        served["default"], "urgent"
    ) > steps_of(served["default"], "bulk-3")


def test_with_it_requests_finish_by_the_priority_in_their_extra_arguments(served):
    assert order(served["patch"])[:2] == ["urgent", "ordinary"]


def test_an_urgent_request_does_not_wait_for_a_seat(served):
    # It came at step 6 and needs 8 tokens: one step each.
    assert steps_of(served["patch"], "urgent") <= 6 + URGENT + 1
    # vLLM's own policy lets the two that run finish first.
    assert steps_of(served["built-in"], "urgent") > LENGTHS[0]


def test_vllms_own_policy_gives_the_same_order_among_those_that_wait(served):
    waiting = [name for name in order(served["built-in"]) if name not in ("bulk-0", "bulk-1")]
    assert waiting[:2] == ["urgent", "ordinary"]


def test_whoever_lost_a_seat_answers_as_if_it_had_not(served):
    plain = served["default"]["finished"]
    assert {name: one["tokens"] for name, one in served["patch"]["finished"].items()} == {
        name: one["tokens"] for name, one in plain.items()
    }


@pytest.mark.parametrize("way", ["default", "built-in", "patch"])
def test_everything_is_finished_whatever_the_order(served, way, record_property):
    finished = served[way]["finished"]
    assert len(finished) == len(LENGTHS) + 2
    for name in ("urgent", "ordinary", "bulk-0", "bulk-5"):
        record_property(f"{name}: steps", finished[name]["step"])
        record_property(f"{name}: seconds", round(finished[name]["seconds"], 3))
    record_property("all: steps", served[way]["steps"])
