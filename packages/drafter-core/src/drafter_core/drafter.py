"""`SuffixDrafter`: the object that a caller holds. It owns the arrays and calls the kernels.

Knows nothing of vLLM. Token ids are checked here and in the kernels that take whole arrays, once,
before they enter the structure. SuffixDecoding is described in arXiv:2411.04975, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Hashable, KeysView, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafter_core import _kernels as k
from drafter_core._memory import physical_memory, reserve
from drafter_core.errors import (
    BadSetting,
    BadTokenId,
    CapacityExhausted,
    CorruptState,
    RequestActive,
    UnknownRequest,
)

__all__ = ["BatchDraft", "Draft", "DrafterStats", "SuffixDrafter", "Tokens"]

Tokens = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids: any sequence of ints, or an integer array of one dimension."""

MAX_TOKEN_ID = 2**31 - 2
MAX_DEPTH = 4096
_MAX_REQUESTS = 1 << 20
_MAX_ROWS = (1 << 31) - 4096


@dataclass(frozen=True)
class Draft:
    """What to verify next for one request.

    `token_ids[i]` is drafted with probability `probs[i]`: the product, as float32, of the shares
    that the tokens up to it had among what followed. `score` is the sum of the probabilities, the
    expected number of accepted tokens. `match_length` is how many tokens of context the draft rests
    on; without a draft, the longest match.
    """

    token_ids: list[int]
    probs: list[float]
    score: float
    match_length: int


@dataclass(frozen=True)
class BatchDraft:
    """The drafts of one step.

    token_ids int32 [n, k], probs float32 [n, k], lengths int32 [n], match_lengths int32 [n],
    scores float32 [n], status int8 [n] (0 drafted, 1 the row does not continue what was fed,
    2 a bad token id, 3 an unknown handle). The arrays are overwritten by the next step of the same
    drafter.
    """

    token_ids: NDArray[np.int32]
    probs: NDArray[np.float32]
    lengths: NDArray[np.int32]
    match_lengths: NDArray[np.int32]
    scores: NDArray[np.float32]
    status: NDArray[np.int8]

    def tolist(self) -> list[list[int]]:
        """The drafts as lists of token ids, one per request, empty where there is none."""
        return [
            row[:length]
            for row, length in zip(self.token_ids.tolist(), self.lengths.tolist(), strict=True)
        ]


@dataclass(frozen=True)
class DrafterStats:
    """Sizes of a drafter at one moment. Bytes are those in use, not the reserved address space."""

    active_requests: int
    cached_requests: int
    cached_tokens: int
    global_states: int
    bytes_in_use: int


class SuffixDrafter:
    """Drafts from what requests contained and what was answered before.

    Args:
        max_depth: longest match plus draft, in tokens; 1 to 4096.
        max_cached_requests: how many responses the global tree holds, running ones included. The
            one started first goes first. 0: no global tree. -1: no limit.

    Not thread-safe: one drafter belongs to one thread.
    """

    def __init__(self, max_depth: int = 24, max_cached_requests: int = 10_000) -> None:
        if not 1 <= max_depth <= MAX_DEPTH:
            raise BadSetting(f"max_depth is 1 to {MAX_DEPTH}, not {max_depth!r}")
        if max_cached_requests < -1:
            raise BadSetting(
                f"max_cached_requests is -1 (no limit), 0 (no global tree) or a number of "
                f"responses, not {max_cached_requests!r}"
            )
        self._max_depth = max_depth
        self._max_cached = max_cached_requests
        self._allocate()
        self._handles: dict[Hashable, int] = {}
        self._sequences: dict[Hashable, int] = {}
        self._free_handles: list[int] = []
        self._next_handle = 1
        self._free_sequences: list[int] = []
        self._next_sequence = 0
        self._out = _BatchBuffers(0, 0)

    def _allocate(self) -> None:
        memory = physical_memory()
        rows = {
            "states": min(memory // (4 * k.STATE_FIELDS), _MAX_ROWS),
            "pairs": min(memory // 8, _MAX_ROWS),
            "tokens": min(memory // 4, _MAX_ROWS),
        }
        depth = self._max_depth
        self._states = reserve(rows["states"] // k.CHUNK * k.CHUNK, k.STATE_FIELDS, np.int32)
        self._blocks = reserve(rows["pairs"], 2, np.int32)
        self._texts = reserve(rows["tokens"] // k.CHUNK * k.CHUNK, 0, np.int32)
        chunks = max(len(self._states), len(self._texts)) // k.CHUNK
        self._chunks = reserve(chunks, 2, np.int32)
        self._trees = reserve(_MAX_REQUESTS, k.TREE_FIELDS, np.int64)
        self._texts_of = reserve(1 << 26, k.SEQ_FIELDS, np.int64)
        self._windows = reserve(_MAX_REQUESTS, depth, np.int32)
        self._header = np.zeros(k.HEADER_FIELDS, np.int64)
        self._arrays = (
            self._states, self._blocks, self._texts, self._chunks,
            self._trees, self._texts_of, self._windows, self._header,
        )  # fmt: skip
        self._draft_arrays = (
            self._states, self._blocks, self._trees, self._windows, self._header,
        )  # fmt: skip
        self._scratch_tokens = np.zeros((2, depth + 1), np.int32)
        self._scratch_probs = np.zeros((3, depth + 1), np.float32)
        self._row_tokens = np.zeros(depth + 1, np.int32)
        self._row_probs = np.zeros(depth + 1, np.float32)
        k.init(*self._arrays, depth)

    # -- settings and views

    @property
    def max_depth(self) -> int:
        """Longest match plus draft, in tokens."""
        return self._max_depth

    @property
    def max_cached_requests(self) -> int:
        """How many responses the global tree holds; 0 none, -1 without limit."""
        return self._max_cached

    @property
    def active_requests(self) -> KeysView[Hashable]:
        """The ids of the requests that were started and not stopped: a set-like view."""
        return self._handles.keys()

    @property
    def cached_requests(self) -> KeysView[Hashable]:
        """The ids whose responses are in the global tree, oldest first: a set-like view."""
        return self._sequences.keys()

    def handle(self, request_id: Hashable) -> int:
        """The handle of an active request, as `step` takes it; valid until the request stops."""
        return self._active(request_id)

    def tokens_fed(self, request_id: Hashable) -> int:
        """How many tokens (prompt and response) an active request has been given."""
        return int(self._trees[self._active(request_id), k.R_FED])

    def stats(self) -> DrafterStats:
        """Sizes now."""
        g = self._header
        return DrafterStats(
            active_requests=len(self._handles),
            cached_requests=len(self._sequences),
            cached_tokens=int(g[k.G_TOKENS]),
            global_states=int(self._trees[0, k.R_STATES]),
            bytes_in_use=int(
                g[k.G_SCHUNKS] * k.CHUNK * k.STATE_FIELDS * 4
                + g[k.G_BNEXT] * 8
                + g[k.G_TCHUNKS] * k.CHUNK * 4
                + max(g[k.G_SCHUNKS], g[k.G_TCHUNKS]) * 8
                + self._next_handle * (k.TREE_FIELDS * 8 + self._max_depth * 4)
                + self._next_sequence * k.SEQ_FIELDS * 8
            ),
        )

    # -- the life of a request

    def start_request(self, request_id: Hashable, prompt: Tokens) -> int:
        """Begin a request and read its prompt into the request's own tree.

        A response that is cached under the same id is evicted first; then, where the cache is full,
        the one that was started first.

        Returns:
            A handle for `step`, valid until `stop_request`.

        Raises:
            RequestActive: the id is active already.
            BadTokenId: the prompt holds something that is no token id; nothing was started.
        """
        if request_id in self._handles:
            raise RequestActive(request_id)
        tokens = _checked(prompt)
        sequence = -1
        if self._max_cached != 0:
            if request_id in self._sequences:
                self.evict_cached_response(request_id)
            while 0 < self._max_cached <= len(self._sequences):
                self.evict_cached_response(next(iter(self._sequences)))
            sequence = self._take_sequence()
        handle = self._take_handle()
        k.start(*self._arrays, handle, sequence)
        self._handles[request_id] = handle
        if sequence >= 0:
            self._sequences[request_id] = sequence
        self._feed(handle, tokens, False)
        return handle

    def append(self, request_id: Hashable, tokens: Tokens) -> None:
        """Add newly accepted tokens to the request's tree and, while it is cached, the global one.

        Raises:
            UnknownRequest: the request is not active.
            BadTokenId: one of the tokens is no token id; none was added.
        """
        self._feed(self._active(request_id), _checked(tokens), True)

    def draft(
        self,
        request_id: Hashable,
        max_tokens: int,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
    ) -> Draft:
        """What probably follows the tokens given to the request so far.

        Args:
            request_id: an active request.
            max_tokens: longest draft.
            max_spec_factor: at most `max_spec_factor * match_length + max_spec_offset` tokens
                rest on a match.
            max_spec_offset: see max_spec_factor.
            min_token_prob: the draft ends before the probability of its path falls below this.

        Raises:
            UnknownRequest: the request is not active.
        """
        length, score, match_length = k.draft(
            *self._draft_arrays, self._active(request_id),
            max_tokens, max_spec_factor, max_spec_offset, min_token_prob,
            self._row_tokens, self._row_probs, self._scratch_tokens, self._scratch_probs,
        )  # fmt: skip
        return Draft(
            self._row_tokens[:length].tolist(), self._row_probs[:length].tolist(),
            score, match_length,
        )  # fmt: skip

    def stop_request(self, request_id: Hashable) -> None:
        """End a request and free its tree. Its response stays in the global tree until evicted.

        Raises:
            UnknownRequest: the request is not active.
        """
        handle = self._active(request_id)
        k.stop(*self._arrays, handle)
        del self._handles[request_id]
        self._free_handles.append(handle)

    def evict_cached_response(self, request_id: Hashable) -> None:
        """Take a response out of the global tree. A request that still runs teaches it no more.

        Raises:
            UnknownRequest: there is no cached response of this id.
        """
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            raise UnknownRequest(request_id, "cached")
        handle = self._handles.get(request_id)
        if handle is not None:
            self._trees[handle, k.R_SEQ] = -1
        if k.evict(*self._arrays, sequence) != k.OK:
            raise CorruptState(
                f"the global tree does not contain the response of {request_id!r} any more; "
                "build a new drafter and report this"
            )
        self._free_sequences.append(sequence)

    # -- whole batches

    def step(
        self,
        handles: NDArray[np.int64],
        rows: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        num_tokens: NDArray[np.int32] | NDArray[np.int64],
        max_tokens: int | NDArray[np.int32],
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
    ) -> BatchDraft:
        """Feed and draft for many requests in one compiled call.

        For each i, request `handles[i]` is given what is new in
        `token_ids[rows[i], :num_tokens[rows[i]]]` (its prompt and all accepted tokens), and then
        drafted for.

        Args:
            handles: int64 [n], from `start_request`.
            rows: int64 [n], rows of `token_ids` and entries of `num_tokens`.
            token_ids: int32 [max_num_reqs, max_model_len].
            num_tokens: int32 or int64 [max_num_reqs].
            max_tokens: longest draft; one number, or int32 [n].
            max_spec_factor: as in `draft`.
            max_spec_offset: as in `draft`.
            min_token_prob: as in `draft`.

        Returns:
            The drafts; see `BatchDraft.status` for requests that could not be served. They were
            fed nothing and the others are not affected.
        """
        n = len(handles)
        if isinstance(max_tokens, np.ndarray):
            limits = max_tokens
            width = int(limits.max()) if n else 0
        else:
            width = max_tokens
            limits = self._out.constant(n, max_tokens)
        out = self._out.room(n, min(max(width, 0), self._max_depth))
        done = 0
        while True:
            done = k.step(
                *self._arrays, handles, rows, token_ids, num_tokens, limits,
                max_spec_factor, max_spec_offset, min_token_prob,
                out.token_ids, out.probs, out.lengths, out.match_lengths, out.scores, out.status,
                self._scratch_tokens, self._scratch_probs, done,
            )  # fmt: skip
            if done == n:
                return out
            self._grow()

    # -- inner workings

    def _active(self, request_id: Hashable) -> int:
        try:
            return self._handles[request_id]
        except KeyError:
            raise UnknownRequest(request_id, "active") from None

    def _feed(self, handle: int, tokens: NDArray[np.int32], response: bool) -> None:
        while True:
            fed = k.feed(*self._arrays, handle, tokens, response)
            if fed < 0:
                raise BadTokenId(
                    f"token ids are 0 to {MAX_TOKEN_ID}; position {-1 - fed} holds "
                    f"{tokens[-1 - fed]}"
                )
            if fed == len(tokens):
                return
            tokens = tokens[fed:]
            self._grow()

    def _take_handle(self) -> int:
        if self._free_handles:
            return self._free_handles.pop()
        if self._next_handle >= len(self._trees):
            raise CapacityExhausted(f"{len(self._handles)} requests are active; stop some first")
        self._next_handle += 1
        return self._next_handle - 1

    def _take_sequence(self) -> int:
        if self._free_sequences:
            return self._free_sequences.pop()
        if self._next_sequence >= len(self._texts_of):
            raise CapacityExhausted(
                f"{len(self._sequences)} responses are cached; set max_cached_requests"
            )
        self._next_sequence += 1
        return self._next_sequence - 1

    def _grow(self) -> None:
        raise CapacityExhausted("the tables are full")


class _BatchBuffers:
    """The output arrays of `step`, reused while the batch has the same shape."""

    def __init__(self, n: int, width: int) -> None:
        self._batch = BatchDraft(
            np.zeros((n, width), np.int32), np.zeros((n, width), np.float32),
            np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(n, np.float32),
            np.zeros(n, np.int8),
        )  # fmt: skip
        self._constant = np.zeros(0, np.int32)

    def room(self, n: int, width: int) -> BatchDraft:
        if self._batch.token_ids.shape != (n, width):
            constant = self._constant
            self.__init__(n, width)  # type: ignore[misc]
            self._constant = constant
        return self._batch

    def constant(self, n: int, value: int) -> NDArray[np.int32]:
        if len(self._constant) != n or (n and self._constant[0] != value):
            self._constant = np.full(n, value, np.int32)
        return self._constant


def _checked(tokens: Tokens) -> NDArray[np.int32]:
    """Token ids as a contiguous int32 array; ids below 0 are found by the kernel."""
    array = np.asarray(tokens)
    if array.dtype == np.int32 and array.ndim == 1 and array.flags.c_contiguous:
        return array
    if array.ndim != 1:
        raise BadTokenId(f"token ids come as one sequence, not with shape {array.shape}")
    if len(array) == 0:
        return np.zeros(0, np.int32)
    if array.dtype.kind not in "iu":
        raise BadTokenId(f"token ids are integers, not {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > MAX_TOKEN_ID:
        raise BadTokenId(f"token ids are 0 to {MAX_TOKEN_ID}; found {low if low < 0 else high}")
    return np.ascontiguousarray(array, np.int32)
