"""Times a step of the runner with the peer and ours, alternating in one process.

A step appends the tokens that were accepted since the last one and drafts, for every request of the
batch. The responses are known, so all see the same tokens: what is accepted follows from the
peer's drafts. Knows the two drafters' interfaces; knows nothing of reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice
from operator import ne
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from traces import Request, Tokens, Trace

from drafter_core import SuffixDrafter

CLOCKS = {"wall": time.perf_counter_ns, "processor": time.thread_time_ns}
"""What the caller waits; or what this thread computes, for a machine that is busy otherwise
(reading that clock is a system call, which weighs on steps of a few microseconds)."""


TURNS = ("replay", "step")
"""Who works when: each replays the whole trace in its turn, so that the processor's caches hold
what it left there a step ago; or the peer and one of ours take every step in turn, so that each
finds what the other left."""


@dataclass
class StepTimes:
    """One configuration: nanoseconds per step of ours and of the peer's in turn with it.

    By the name of ours, for steps with a full batch.
    """

    trace: str
    batch: int
    cached_tokens: int
    turns: str
    accepted: list[int] = field(default_factory=list)
    ours: dict[str, list[int]] = field(default_factory=dict)
    peers: dict[str, list[int]] = field(default_factory=dict)
    different_drafts: int = 0

    def microseconds(self, contestant: str) -> float:
        """Median per step; of the peer, over all that it ran in turn with."""
        if contestant == "peer":
            return median(chain.from_iterable(self.peers.values())) / 1000
        return median(self.ours[contestant]) / 1000

    def ratio(self, contestant: str) -> float:
        """How many times as long the peer's median step takes."""
        return median(self.peers[contestant]) / median(self.ours[contestant])


class Peer:
    """arctic-inference, called as vLLM's own proposer calls it."""

    name = "peer"

    def __init__(self, depth: int) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(depth)

    def start(self, name: str, prompt: Tokens) -> None:
        """Begin a request."""
        self.cache.start_request(name, prompt)

    def stop(self, name: str) -> None:
        """End a request."""
        self.cache.stop_request(name)

    def append(self, name: str, tokens: Tokens) -> None:
        """Add accepted tokens."""
        self.cache.add_active_response(name, tokens)

    def evict(self, name: str) -> None:
        """Forget a finished response."""
        self.cache.evict_cached_response(name)

    def step(self, board: Board, trace: Trace) -> list[list[int]]:
        """Append and draft, request by request."""
        depth, cache = trace.max_tree_depth, self.cache
        drafts = []
        for row, name in enumerate(board.names):
            cache.add_active_response(name, board.accepted[row])
            end = board.num_tokens[row]
            draft = cache.speculate(
                name, board.token_ids[row, max(0, end - depth) : end], trace.max_spec_tokens,
                trace.max_spec_factor, 0.0, trace.min_token_prob,
            )  # fmt: skip
            drafts.append(draft.token_ids)
        return drafts


class Ours:
    """drafter_core, one compiled call per step.

    With `lists`, a step begins with request ids and ends with lists of token ids, as the peer's
    does; without, the caller keeps the handles and reads the arrays.
    """

    def __init__(self, name: str, depth: int, lists: bool, **settings: Any) -> None:
        self.name = name
        self.lists = lists
        self.exact: bool = settings.get("exact", False)
        self.drafter = SuffixDrafter(depth, -1, **settings)

    def start(self, name: str, prompt: Tokens) -> None:
        """Begin a request."""
        self.drafter.start_request(name, prompt)

    def stop(self, name: str) -> None:
        """End a request."""
        self.drafter.stop_request(name)

    def append(self, name: str, tokens: Tokens) -> None:
        """Add accepted tokens."""
        self.drafter.append(name, tokens)

    def evict(self, name: str) -> None:
        """Forget a finished response."""
        self.drafter.evict_cached_response(name)

    def handles(self, names: Sequence[str]) -> NDArray[np.int64]:
        """The handles of running requests."""
        return self.drafter.handles(names)

    def step(self, board: Board, trace: Trace) -> Any:
        """Append and draft for the whole batch: from ids to lists, or from arrays to arrays."""
        arguments = (
            board.rows, board.token_ids, board.num_tokens,
            trace.max_spec_tokens, trace.max_spec_factor, 0.0, trace.min_token_prob,
        )  # fmt: skip
        if self.lists:
            return self.drafter.step_lists(board.names, *arguments)
        return self.drafter.step(board.handles[self.name], *arguments)


class Board:
    """What the runner holds: the token ids of every row and how many are valid."""

    def __init__(self, batch: int, width: int) -> None:
        self.token_ids = np.zeros((batch, width), np.int32)
        self.num_tokens = np.zeros(batch, np.int32)
        self.rows = np.arange(batch, dtype=np.int64)
        self.names = [""] * batch
        self.accepted: list[list[int]] = [[] for _ in range(batch)]
        self.handles: dict[str, NDArray[np.int64]] = {}
        self.rest: list[list[int]] = [[] for _ in range(batch)]


def time_steps(
    peer: Peer, ours: Sequence[Ours], trace: Trace, batch: int, steps: int, result: StepTimes,
    now: Callable[[], int],
) -> None:  # fmt: skip
    """Serve the trace at a constant batch size, ours and the peer in turn; add to the result."""
    if result.turns == "step":
        rounds = []
        for one in ours:
            rounds.append(serve((peer, one), trace, batch, steps, None, now))
            # The others live through the same: the order of equals depends on all that was cached.
            followed = rounds[-1].drafts["peer"]
            for other in ours:
                if other is not one:
                    serve((other,), trace, batch, steps, followed, now)
    else:
        rounds = []
        for _ in range(ROUNDS):
            served = serve((peer,), trace, batch, steps, None, now)
            followed = served.drafts["peer"]
            for one in ours:
                alone = serve((one,), trace, batch, steps, followed, now)
                served.times |= alone.times
                served.drafts |= alone.drafts
            rounds.append(served)
    for served in rounds:
        result.accepted += served.accepted
        for one in ours:
            if one.name not in served.times:
                continue
            result.ours.setdefault(one.name, []).extend(served.times[one.name])
            result.peers.setdefault(one.name, []).extend(served.times["peer"])
            if one.exact:
                pairs = zip(served.drafts[one.name], served.drafts["peer"], strict=True)
                result.different_drafts += sum(sum(map(ne, *pair)) for pair in pairs)


ROUNDS = 3
"""How often each replays the trace in its turn."""


@dataclass
class Served:
    """What each contestant did, by name."""

    times: dict[str, list[int]]
    drafts: dict[str, list[list[list[int]]]]
    accepted: list[int]


def serve(
    contestants: Sequence[Peer | Ours], trace: Trace, batch: int, steps: int,
    followed: list[list[list[int]]] | None, now: Callable[[], int],
) -> Served:  # fmt: skip
    """Serve the trace with all contestants at once, taking every step in turn.

    What is accepted follows from the drafts `followed`, or from those of the first contestant.
    """
    names = [contestant.name for contestant in contestants]
    served = Served({name: [] for name in names}, {name: [] for name in names}, [])
    width = max(len(r.prompt) + len(r.response) for r in trace.requests) + 1
    board = Board(batch, width)
    incoming = endless(trace)
    started: list[str] = []
    for row in range(batch):
        started.append(begin(contestants, board, row, next(incoming)))
    warm_up = max(3, steps // 20)
    for number in range(warm_up + steps):
        board.handles = {c.name: c.handles(board.names) for c in contestants if isinstance(c, Ours)}
        for contestant in contestants if number % 2 == 0 else contestants[::-1]:
            before = now()
            drafts = contestant.step(board, trace)
            after = now()
            if number >= warm_up:
                served.times[contestant.name].append(after - before)
            if not isinstance(drafts, list):
                drafts = drafts.tolist()
            served.drafts[contestant.name].append(drafts)
        drafts = served.drafts[names[0]][number] if followed is None else followed[number]
        for row, draft in enumerate(drafts):
            if not accept(board, row, draft):
                for contestant in contestants:
                    contestant.stop(board.names[row])
                started.append(begin(contestants, board, row, next(incoming)))
        served.accepted += [len(tokens) for tokens in board.accepted]
    for contestant in contestants:
        for name in board.names:
            contestant.stop(name)
        for name in started:
            contestant.evict(name)
    return served


def endless(trace: Trace) -> Iterator[Request]:
    """The requests again and again, under a new name every time."""
    for number, request in enumerate(cycle(trace.requests)):
        yield replace(request, name=f"{request.name} {number}")


def begin(contestants: Sequence[Peer | Ours], board: Board, row: int, request: Request) -> str:
    """Start a request in a row; its first token has been sampled."""
    for contestant in contestants:
        contestant.start(request.name, request.prompt)
    length = len(request.prompt)
    board.token_ids[row, :length] = request.prompt
    board.num_tokens[row] = length
    board.names[row] = request.name
    board.rest[row] = request.response.tolist()[::-1]
    accept(board, row, [])
    return request.name


def accept(board: Board, row: int, draft: list[int]) -> bool:
    """Take what the response confirms and one more; False when the response has ended."""
    rest = board.rest[row]
    taken: list[int] = []
    for token in chain(draft, [-1]):
        if not rest:
            break
        taken.append(rest.pop())
        if taken[-1] != token:
            break
    end = board.num_tokens[row]
    board.token_ids[row, end : end + len(taken)] = taken
    board.num_tokens[row] += len(taken)
    board.accepted[row] = taken
    return bool(rest)


def fill(contestants: Sequence[Peer | Ours], texts: Sequence[Request], tokens: int) -> int:
    """Give every contestant the same `tokens` tokens of finished responses; return how many."""
    given = 0
    nothing = np.zeros(0, np.int32)
    for text in texts:
        if given >= tokens:
            break
        response = text.response[: tokens - given]
        for contestant in contestants:
            contestant.start(text.name, nothing)
            contestant.append(text.name, response)
            contestant.stop(text.name)
        given += len(response)
    return given


@dataclass
class PromptTimes:
    """Nanoseconds to start requests with prompts of about one length, and to stop them."""

    length: int
    start: dict[str, list[float]]
    stop: dict[str, list[float]]

    def per_token(self, contestant: str) -> float:
        """Median nanoseconds per prompt token."""
        return median(self.start[contestant])

    def per_stop(self, contestant: str) -> float:
        """Median nanoseconds."""
        return median(self.stop[contestant])


def time_prompts(
    contestants: Sequence[Peer | Ours], texts: Sequence[Request], length: int, repeats: int,
    now: Callable[[], int],
) -> PromptTimes:  # fmt: skip
    """Start and stop requests whose prompt is `length` tokens of the texts, alternating."""
    result = PromptTimes(
        length, {c.name: [] for c in contestants}, {c.name: [] for c in contestants}
    )
    enough = [text.response for text in texts if len(text.response) >= length]
    for number, response in enumerate(islice(cycle(enough), repeats)):
        prompt = np.ascontiguousarray(response[:length])
        name = f"prompt {length} {number}"
        first = number % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            before = now()
            contestant.start(name, prompt)
            between = now()
            contestant.stop(name)
            after = now()
            result.start[contestant.name].append((between - before) / length)
            result.stop[contestant.name].append(after - between)
    return result
