"""The errors of drafter-core. Each says what was given, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

__all__ = [
    "BadSetting",
    "BadTokenId",
    "CapacityExhausted",
    "CorruptState",
    "DrafterError",
    "RequestActive",
    "SnapshotError",
    "UnknownRequest",
]


class DrafterError(Exception):
    """Base of every error that drafter-core raises on purpose."""


class UnknownRequest(DrafterError, KeyError):
    """A request id or handle that was never started, or was stopped or evicted."""

    def __init__(self, request_id: Hashable, where: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.request_id, self.where)

    def __str__(self) -> str:
        return f"request {self.request_id!r} is not {self.where}; call start_request first"


class RequestActive(DrafterError, ValueError):
    """A request id that is started while it is active."""

    def __init__(self, request_id: Hashable) -> None:
        super().__init__(
            f"request {request_id!r} is active already; call stop_request before starting it again"
        )
        self.request_id = request_id

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.request_id,)


class BadTokenId(DrafterError, ValueError):
    """A token id below 0 or above 2**31 - 2, or an array that does not hold token ids."""


class BadSetting(DrafterError, ValueError):
    """A setting outside of its range."""


class CapacityExhausted(DrafterError, MemoryError):
    """No memory could be had for another token, or no place for another request or response.

    What is cached drafts on. Where it was memory, evicting gives back too little: until the system
    has more, no token can be added. Build a new drafter, with a lower `max_cached_requests`.
    """


class CorruptState(DrafterError, RuntimeError):
    """The structure contradicts itself: a bug in drafter-core. Build a new drafter."""


class SnapshotError(DrafterError, ValueError):
    """A file that is no snapshot, a damaged one, or one of a newer version."""
