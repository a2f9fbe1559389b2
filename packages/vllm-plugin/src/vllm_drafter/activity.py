"""What the drafting of one process has done, noted at each step and added up later.

The engine waits for a step, so a step only notes lengths; whoever publishes them takes the notes
and adds them up in another thread. Must not know vLLM, or who is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

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
    """Notes of the steps that nobody has taken yet. One thread notes, another one takes."""

    def __init__(self) -> None:
        self.on = False
        """Whether somebody takes the notes. Where nobody does, none are made."""
        self.requests = 0
        """Requests drafted for, so far."""
        self._seconds: list[float] = []
        self._sampled: list[int] = []
        self._drafted: list[int] = []
        self._proposed: list[int] = []
        self._matched: list[bytes] = []

    def note_step(self, seconds: float, sampled: Sequence[Sized], drafts: Sequence[Sized]) -> None:
        """Note how long a step took, what each row had sampled, and the draft for each row."""
        if self.on:
            self._seconds.append(seconds)
            self._sampled.extend(map(len, sampled))
            # What this step proposes is accepted at the next one: counted there, with what became
            # of it, no interval has more accepted tokens than drafted ones.
            self._drafted.extend(self._proposed)
            self._proposed = list(map(len, drafts))

    def note_matches(self, lengths: npt.NDArray[np.int32]) -> None:
        """Note the lengths of matches, int32 [n], in tokens."""
        if self.on:
            self._matched.append(lengths.tobytes())

    def take(self) -> tuple[list[float], Tally]:
        """Return the time of each step, in seconds, and the lengths, since the last time."""
        seconds = _take(self._seconds)
        matched = np.frombuffer(b"".join(_take(self._matched)), dtype=np.int32)
        return seconds, Tally(
            len(seconds),
            Counter(_take(self._sampled)),
            Counter(_take(self._drafted)),
            Counter(matched.tolist()),
        )


def _take(notes: list[Any]) -> list[Any]:
    # Not a new list: the other thread may be about to append to this one.
    count = len(notes)
    taken = notes[:count]
    del notes[:count]
    return taken


def _tokens(lengths: Counter[int]) -> int:
    return sum(length * count for length, count in lengths.items())


def _reaching(lengths: Counter[int], positions: int) -> list[int]:
    return [
        sum(count for length, count in lengths.items() if length > position)
        for position in range(positions)
    ]
