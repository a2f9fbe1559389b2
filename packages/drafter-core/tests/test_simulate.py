"""A replay counts what a runner would have seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from drafter_core import SuffixDrafter
from drafter_core.simulate import CostModel, Outcome, ReplaySettings, replay


@dataclass
class Asked:
    prompt: NDArray[np.int32]
    response: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))


def asked(prompt: list[int], response: list[int]) -> Asked:
    return Asked(np.array(prompt, np.int32), np.array(response, np.int32))


def run(*requests: Asked, batch: int = 1, max_tokens: int = 8, factor: float = 1.0) -> Outcome:
    settings = ReplaySettings(batch=batch, max_tokens=max_tokens, max_spec_factor=factor)
    return replay(SuffixDrafter(24, -1), requests, settings)


RANDOM = np.random.default_rng(0)


def test_text_that_never_repeats_gains_nothing() -> None:
    outcome = run(asked([], list(range(100, 150))))
    assert (outcome.drafted, outcome.accepted) == (0, 0)
    assert outcome.steps == outcome.plain_steps == 49
    assert outcome.tokens_per_step == 1.0


def test_a_copy_of_the_prompt_is_accepted_in_growing_strides() -> None:
    text = list(range(100, 200))
    outcome = run(asked(text, text))
    assert outcome.steps < 20
    assert outcome.accepted + outcome.steps == 99
    assert outcome.tokens_per_step == 99 / outcome.steps


def test_every_response_token_is_counted_once() -> None:
    requests = [
        asked(RANDOM.integers(0, 4, 20).tolist(), RANDOM.integers(0, 4, n).tolist())
        for n in (1, 2, 30, 7, 1, 64)
    ]
    for batch in (1, 2, 4, 16):
        outcome = run(*requests, batch=batch)
        assert outcome.requests == 6
        assert outcome.prompt_tokens == 120
        assert outcome.response_tokens == 105
        assert outcome.request_steps + outcome.accepted == 105 - 6


def test_counts_by_position_and_by_match_length_add_up() -> None:
    requests = [asked([], RANDOM.integers(0, 3, 80).tolist()) for _ in range(5)]
    outcome = run(*requests, batch=2)
    assert outcome.drafted > 0
    assert outcome.drafted_at.sum() == outcome.drafted_by_match.sum() == outcome.drafted
    assert outcome.accepted_at.sum() == outcome.accepted_by_match.sum() == outcome.accepted
    assert outcome.drafted_at[0] == outcome.drafts_by_match.sum()
    assert (outcome.accepted_at <= outcome.drafted_at).all()
    assert (np.diff(outcome.drafted_at) <= 0).all()


def test_no_draft_is_longer_than_allowed() -> None:
    outcome = run(asked([5] * 40, [5] * 40), max_tokens=3, factor=9.0)
    assert outcome.drafted_at.tolist().count(0) == 0
    assert len(outcome.drafted_at) == 3


def test_requests_that_run_together_share_their_steps() -> None:
    alone = [asked([], list(range(begin, begin + 50))) for begin in (1000, 2000, 3000)]
    assert run(*alone, batch=1).steps == 147
    assert run(*alone, batch=3).steps == 49
    assert run(*alone, batch=2).steps == run(*alone, batch=2).plain_steps == 98


def test_a_second_replay_profits_from_what_the_first_taught() -> None:
    drafter = SuffixDrafter(24, -1)
    requests = [asked([1], RANDOM.integers(0, 10_000, 200).tolist())]
    cold, warm = replay(drafter, requests), replay(drafter, requests)
    assert cold.accepted == 0
    assert warm.acceptance_rate > 0.9
    assert warm.tokens_per_step > 5


def test_progress_sums_up_to_what_the_steps_yield() -> None:
    told: list[int] = []
    replay(SuffixDrafter(24, -1), [asked([], [3] * 30), asked([], [1, 2])], None, told.append)
    assert sum(told) == 29 + 1


@pytest.mark.parametrize("requests", [[], [asked([1, 2], [3])] * 5])
def test_where_nothing_takes_a_step_nothing_is_gained_or_lost(requests: list[Asked]) -> None:
    outcome = replay(SuffixDrafter(24, -1), requests)
    assert (outcome.requests, outcome.response_tokens) == (len(requests), len(requests))
    assert (outcome.steps, outcome.plain_steps, outcome.request_steps) == (0, 0, 0)
    assert (outcome.tokens_per_step, outcome.speed_up(CostModel())) == (1.0, 1.0)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_response_of_one_token_takes_no_step(batch: int) -> None:
    long = [asked([], list(range(begin, begin + 60))) for begin in (1000, 2000)]
    short = [asked([], [1])] * 100
    with_short = run(*short, long[0], *short, long[1], *short, batch=batch)
    without = run(*long, batch=batch)
    assert with_short.steps == with_short.plain_steps == without.steps
    assert with_short.response_tokens == 300 + 120


def test_a_response_of_one_token_is_learned() -> None:
    drafter = SuffixDrafter(24, -1)
    replay(drafter, [asked([1, 2, 3], [4])])
    assert len(drafter.cached_requests) == 1
    assert drafter.stats().cached_tokens >= 1


def test_a_batch_wider_than_the_log_needs_no_more_memory() -> None:
    requests = [asked([], list(range(begin, begin + 50))) for begin in (1000, 2000)]
    settings = ReplaySettings(batch=10**12)
    assert replay(SuffixDrafter(24, -1), requests, settings).steps == 49


def test_the_drafter_is_left_without_active_requests() -> None:
    drafter = SuffixDrafter(24, -1)
    replay(drafter, [asked([1, 2], [3, 4])] * 5)
    assert not drafter.active_requests
    assert len(drafter.cached_requests) == 5


def test_starting_requests_is_timed_apart_from_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    start = SuffixDrafter.start_request

    def slow(drafter: SuffixDrafter, *arguments: Any) -> int:
        clock[0] += 10.0
        return start(drafter, *arguments)

    monkeypatch.setattr(SuffixDrafter, "start_request", slow)
    monkeypatch.setattr("time.thread_time", lambda: clock[0])
    outcome = run(asked([1], [2, 3]), asked([1], [2]))
    assert (outcome.turnover_seconds, outcome.draft_seconds) == (20.0, 0.0)


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (CostModel(step_ms=10.0, verify_us=0.0), 100 * 10 / (20 * 10)),
        (CostModel(step_ms=10.0, verify_us=1000.0), 100 * 10 / (20 * 10 + 50 * 1)),
        (CostModel(step_ms=1.0, verify_us=2000.0), 100 * 1 / (20 * 1 + 50 * 2)),
    ],
)
def test_the_speed_up_weighs_saved_steps_against_drafted_tokens(
    costs: CostModel, expected: float
) -> None:
    outcome = Outcome(max_tokens=8, max_depth=24)
    outcome.plain_steps, outcome.steps, outcome.drafted = 100, 20, 50
    assert outcome.speed_up(costs) == pytest.approx(expected)


@pytest.mark.parametrize("spent", ["draft_seconds", "turnover_seconds"])
def test_time_spent_drafting_lowers_the_speed_up(spent: str) -> None:
    outcome = Outcome(max_tokens=8, max_depth=24)
    outcome.plain_steps, outcome.steps = 100, 50
    setattr(outcome, spent, 0.5)
    assert outcome.speed_up(CostModel(step_ms=10.0, verify_us=0.0)) == pytest.approx(1.0)
