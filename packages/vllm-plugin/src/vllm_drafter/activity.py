"""What the drafting of one process has done, noted at each step and added up later.

The engine waits for a step, so a step only notes lengths; whoever publishes them takes the notes
and adds them up in another thread. Must not know vLLM, or who is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

_Drafts = tuple[bytes, bytes]
"""The lengths of drafts, and of the matches that they come from: an int32 each."""
_Step = tuple[float, list[int], list[_Drafts]]

__all__ = ["Activity", "Sizes", "Tally"]


@dataclass(frozen=True)
class Sizes:
    """How much a process's drafter holds, and how much it has let go of."""

    active_requests: int = 0
    cached_requests: int = 0
    cached_tokens: int = 0
    memory_bytes: int = 0
    evicted_responses: int = 0


@dataclass
class Tally:
    """How often each length occurred."""

    steps: int = 0
    sampled: Counter[int] = field(default_factory=Counter)
    """By the number of tokens that a row sampled: those accepted and one of the model's own."""
    drafted: Counter[int] = field(default_factory=Counter)
    """By the number of tokens in a row's draft; a draft counts at the step that can accept it."""
    matched: Counter[int] = field(default_factory=Counter)
    """By the number of tokens in the match that a draft was looked for from."""

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        self.steps += other.steps
        self.sampled.update(other.sampled)
        self.drafted.update(other.drafted)
        self.matched.update(other.matched)

    @property
    def drafts(self) -> int:
        """Drafts that were not empty."""
        return self.drafted.total() - self.drafted[0]

    @property
    def draft_tokens(self) -> int:
        """Tokens that were proposed."""
        return _tokens(self.drafted)

    @property
    def accepted_tokens(self) -> int:
        """Proposed tokens that the engine accepted."""
        return _tokens(self._accepted)

    @property
    def mean_match_length(self) -> float:
        """In tokens; 0 where nothing was looked for."""
        return _tokens(self.matched) / max(self.matched.total(), 1)

    def drafted_at(self, positions: int) -> list[int]:
        """For each position of a draft, from 0, how many drafts have a token there."""
        return _reaching(self.drafted, positions)

    def accepted_at(self, positions: int) -> list[int]:
        """For each position of a draft, from 0, how often the token there was accepted."""
        return _reaching(self._accepted, positions)

    @property
    def _accepted(self) -> Counter[int]:
        # A row that sampled nothing is a prompt that has been read in part.
        return Counter({length - 1: count for length, count in self.sampled.items() if length})


class Activity:
    """Notes of the steps that nobody has taken yet. One thread notes, another one takes.

    A step copies lengths and no more: adding them up is left to the thread that takes them.
    """

    def __init__(self) -> None:
        self.on = False
        """Whether somebody takes the notes. Where nobody does, none are made."""
        self.requests = 0
        """Requests drafted for, so far."""
        self._steps: list[_Step] = []
        self._drafts: list[_Drafts] = []
        self._proposed: list[_Drafts] = []

    def note_drafts(self, lengths: npt.NDArray[np.int32], matches: npt.NDArray[np.int32]) -> None:
        """Note drafts and the matches that they come from: int32 [n] each, in tokens."""
        if self.on:
            # Bytes: to make them costs the step what lists would, and they are added up at once.
            self._drafts.append((lengths.tobytes(), matches.tobytes()))

    def note_step(self, seconds: float, sampled: list[int]) -> None:
        """Note that a step, whose drafts have been noted, took so long, and how many tokens each
        row had sampled. The list is kept.
        """
        if self.on:
            self._steps.append((seconds, sampled, self._drafts))
            self._drafts = []

    def take(self) -> tuple[list[float], Tally]:
        """Return the time of each step, in seconds, and the lengths, since the last time."""
        # Not a new list: the other thread may be about to append to this one.
        steps = self._steps[: len(self._steps)]
        del self._steps[: len(steps)]
        if not steps:
            return [], Tally()
        drafts = [call for _, _, calls in steps for call in calls]
        # What a step proposes is accepted at the next one: counted there, with what became of it,
        # no interval has more accepted tokens than drafted ones.
        ready = self._proposed + drafts[: len(drafts) - len(steps[-1][2])]
        self._proposed = steps[-1][2]
        return [seconds for seconds, _, _ in steps], Tally(
            len(steps),
            _counted(np.fromiter(chain.from_iterable(rows for _, rows, _ in steps), np.int32)),
            _counted(_joined(lengths for lengths, _ in ready)),
            _counted(_joined(matches for _, matches in drafts)),
        )


def _joined(parts: Iterable[bytes]) -> npt.NDArray[np.int32]:
    return np.frombuffer(b"".join(parts), np.int32)


def _counted(lengths: npt.NDArray[np.int32]) -> Counter[int]:
    """How often each length occurs."""
    counts = np.bincount(lengths)
    return Counter({length: count for length, count in enumerate(counts.tolist()) if count})


def _tokens(lengths: Counter[int]) -> int:
    return sum(length * count for length, count in lengths.items())


def _reaching(lengths: Counter[int], positions: int) -> list[int]:
    return [
        sum(count for length, count in lengths.items() if length > position)
        for position in range(positions)
    ]
