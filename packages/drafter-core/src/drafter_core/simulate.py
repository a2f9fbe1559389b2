"""Replays recorded responses through a drafter and counts what would have been accepted.

The responses are known, so no model is needed: a draft is accepted as far as it agrees with what
was answered. Requests are served `batch` at a time in their order, as a runner would: the prefill
gives the first token, then every step verifies a draft and yields what was accepted and one more.
Knows the drafter's batch interface; must not know files, text or plots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from drafter_core.drafter import SuffixDrafter

__all__ = ["CostModel", "Outcome", "ReplayRequest", "ReplaySettings", "replay"]

WINDOW = 2000
"""Response tokens per point of the course over time."""


class ReplayRequest(Protocol):
    """A prompt and the response that was given, of one token at least: int32 [n] each."""

    @property
    def prompt(self) -> NDArray[np.int32]:
        """Token ids of the prompt."""
        ...

    @property
    def response(self) -> NDArray[np.int32]:
        """Token ids of the response."""
        ...


@dataclass(frozen=True)
class ReplaySettings:
    """How to draft: `batch` requests at once, the rest as in `SuffixDrafter.step`."""

    batch: int = 8
    max_tokens: int = 24
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1
    budget: int | None = None


@dataclass(frozen=True)
class CostModel:
    """What a forward pass takes: `step_ms` as such, and `verify_us` more per drafted token."""

    step_ms: float = 20.0
    verify_us: float = 50.0


@dataclass
class Outcome:
    """What a replay counted.

    A *step* is one forward pass over the batch; `request_steps` counts every request in it. Prefill
    passes are not counted, nor the tokens that they yield.
    """

    max_tokens: int
    max_depth: int
    requests: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    steps: int = 0
    request_steps: int = 0
    plain_steps: int = 0
    """Steps that the same requests would have taken without drafts."""
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
    """Processor time to append and draft, of all steps."""
    turnover_seconds: float = 0.0
    """Processor time to start and end requests: read prompts, evict, append what came last."""
    drafted_at: NDArray[np.int64] = field(init=False)
    """int64 [max_tokens]: drafts that reached this position."""
    accepted_at: NDArray[np.int64] = field(init=False)
    """int64 [max_tokens]: drafts that were accepted up to and including this position."""
    drafts_by_match: NDArray[np.int64] = field(init=False)
    """int64 [max_depth + 1]: drafts by the length of the match they rest on."""
    drafted_by_match: NDArray[np.int64] = field(init=False)
    """int64 [max_depth + 1]: drafted tokens by match length."""
    accepted_by_match: NDArray[np.int64] = field(init=False)
    """int64 [max_depth + 1]: accepted tokens by match length."""
    step_microseconds: list[float] = field(default_factory=list)
    """Processor time to append and draft, per step."""
    step_tokens: list[int] = field(default_factory=list)
    """Tokens that the forward pass of each step takes: one per request, and the drafted ones."""
    course: list[tuple[int, float]] = field(default_factory=list)
    """(response tokens so far, tokens per step since the point before)."""
    bytes_in_use: int = 0
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.drafted_at = np.zeros(self.max_tokens, np.int64)
        self.accepted_at = np.zeros(self.max_tokens, np.int64)
        self.drafts_by_match = np.zeros(self.max_depth + 1, np.int64)
        self.drafted_by_match = np.zeros(self.max_depth + 1, np.int64)
        self.accepted_by_match = np.zeros(self.max_depth + 1, np.int64)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a request gains per step; 1.0 without drafts."""
        return 1.0 + self.accepted / max(1, self.request_steps)

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens per drafted token."""
        return self.accepted / max(1, self.drafted)

    def speed_up(self, costs: CostModel) -> float:
        """How many times sooner the requests are done than without drafts, drafting included."""
        plain = self.plain_steps * costs.step_ms
        drafting = (self.draft_seconds + self.turnover_seconds) * 1000
        verifying = self.drafted * costs.verify_us / 1000
        with_drafts = self.steps * costs.step_ms + verifying + drafting
        return plain / with_drafts if plain else 1.0  # where nothing takes a step


@dataclass
class _Row:
    """A running request in its row of the block."""

    name: int
    tokens: NDArray[np.int32]
    """Prompt and response, one after the other."""
    end: int
    """How many of them have been produced."""


def replay(
    drafter: SuffixDrafter,
    requests: Sequence[ReplayRequest],
    settings: ReplaySettings | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Serve the requests through the drafter and count.

    Args:
        drafter: may hold responses already. It learns the responses that are replayed.
        requests: in the order in which they arrive.
        settings: how to draft.
        progress: called with the response tokens that a step produced.
    """
    settings = settings or ReplaySettings()
    outcome = Outcome(max_tokens=settings.max_tokens, max_depth=drafter.max_depth)
    batch = max(1, min(settings.batch, len(requests)))
    outcome.plain_steps = _plain_steps((len(r.response) - 1 for r in requests), batch)
    board = _Board(drafter, requests, batch, settings, outcome)
    since = [0, 0]
    while board.running:
        produced = board.step()
        since[0] += produced
        since[1] += len(board.handles)
        if since[0] >= WINDOW:
            outcome.course.append((outcome.response_tokens, since[0] / since[1]))
            since = [0, 0]
        if progress is not None:
            progress(produced)
        board.turn_over()
    if since[1]:
        outcome.course.append((outcome.response_tokens, since[0] / since[1]))
    stats = drafter.stats()
    outcome.bytes_in_use, outcome.cached_tokens = stats.bytes_in_use, stats.cached_tokens
    return outcome


class _Board:
    """The batch as a runner holds it: a block of token ids, a row per running request."""

    def __init__(
        self,
        drafter: SuffixDrafter,
        requests: Sequence[ReplayRequest],
        batch: int,
        settings: ReplaySettings,
        outcome: Outcome,
    ) -> None:
        self.drafter = drafter
        self.ids = object()  # so that another replay of the same requests has other request ids
        self.settings = settings
        self.outcome = outcome
        self.waiting: Iterator[tuple[int, ReplayRequest]] = iter(enumerate(requests))
        width = max((len(r.prompt) + len(r.response) for r in requests), default=0)
        self.block = np.zeros((batch, width), np.int32)
        self.ends = np.zeros(batch, np.int32)
        self.free = list(range(batch))[::-1]
        self.running: dict[int, _Row] = {}
        self.finished: set[int] = set()
        self.handles: NDArray[np.int64] = np.zeros(0, np.int64)
        self.turn_over()

    def turn_over(self) -> None:
        """Stop what is complete and start what waits."""
        for index in sorted(self.finished):
            row = self.running.pop(index)
            name = (self.ids, row.name)
            # A runner appends the last tokens too: it drafts before it learns that all is said.
            last = row.tokens[self.drafter.tokens_fed(name) :]
            with self._turnover():
                self.drafter.append(name, last)
                self.drafter.stop_request(name)
            self.free.append(index)
        changed = bool(self.finished)
        self.finished.clear()
        while self.free and (waiting := next(self.waiting, None)) is not None:
            self._start(*waiting)
            changed = True
        if changed:
            names = [(self.ids, row.name) for row in self.running.values()]
            self.handles = np.array([self.drafter.handle(name) for name in names], np.int64)

    def _start(self, name: int, request: ReplayRequest) -> None:
        with self._turnover():
            self.drafter.start_request((self.ids, name), request.prompt)
        self.outcome.requests += 1
        self.outcome.prompt_tokens += len(request.prompt)
        self.outcome.response_tokens += 1
        if len(request.response) == 1:  # the prefill is all of it: it takes no step, and no row
            with self._turnover():
                self.drafter.append((self.ids, name), request.response)
                self.drafter.stop_request((self.ids, name))
            return
        tokens = np.concatenate([request.prompt, request.response]).astype(np.int32)
        row, end = self.free.pop(), len(request.prompt) + 1
        self.block[row, : len(tokens)] = tokens
        self.ends[row] = end
        self.running[row] = _Row(name, tokens, end)

    @contextmanager
    def _turnover(self) -> Iterator[None]:
        before = time.thread_time()
        yield
        self.outcome.turnover_seconds += time.thread_time() - before

    def step(self) -> int:
        """Draft for every running request and accept; return the tokens that it yielded."""
        rows = np.array(list(self.running), np.int64)
        settings, outcome = self.settings, self.outcome
        before = time.thread_time()  # on a busy machine the time spent waiting is not ours
        batch = self.drafter.step(
            self.handles, rows, self.block, self.ends, settings.max_tokens,
            settings.max_spec_factor, settings.max_spec_offset, settings.min_token_prob,
            settings.budget,
        )  # fmt: skip
        seconds = time.thread_time() - before
        outcome.draft_seconds += seconds
        outcome.step_microseconds.append(seconds * 1e6)
        outcome.steps += 1
        outcome.step_tokens.append(len(rows) + int(batch.lengths.sum()))
        produced = 0
        for at, (index, row) in enumerate(self.running.items()):
            length = int(batch.lengths[at])
            accepted = self._verify(row, batch.token_ids[at, :length])
            self._count(length, accepted, int(batch.match_lengths[at]))
            row.end += accepted + 1
            self.ends[index] = row.end
            produced += accepted + 1
            if row.end == len(row.tokens):
                self.finished.add(index)
        outcome.response_tokens += produced
        return produced

    def _verify(self, row: _Row, draft: NDArray[np.int32]) -> int:
        """How many tokens of the draft the response confirms; the last one is always sampled."""
        most = min(len(draft), len(row.tokens) - row.end - 1)
        wrong = np.flatnonzero(draft[:most] != row.tokens[row.end : row.end + most])
        return int(wrong[0]) if len(wrong) else most

    def _count(self, length: int, accepted: int, match_length: int) -> None:
        outcome = self.outcome
        outcome.request_steps += 1
        outcome.drafted += length
        outcome.accepted += accepted
        if not length:
            return
        outcome.drafted_at[:length] += 1
        outcome.accepted_at[:accepted] += 1
        # A drafter may rest a draft on more than max_depth tokens; those count as the longest.
        match = min(match_length, outcome.max_depth)
        outcome.drafts_by_match[match] += 1
        outcome.drafted_by_match[match] += length
        outcome.accepted_by_match[match] += accepted


def _plain_steps(lengths: Iterable[int], batch: int) -> int:
    """Steps without drafts: every running request gains one token a step, `batch` run at once."""
    free_at = [0] * batch
    heapify(free_at)
    for length in lengths:
        heapreplace(free_at, free_at[0] + length)
    return max(free_at)
