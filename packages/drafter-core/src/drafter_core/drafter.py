"""`SuffixDrafter`: the object that a caller holds. It owns the arrays and calls the kernels.

Knows nothing of vLLM. Token ids are checked here and in the kernels that take whole arrays, once,
before they enter the structure. SuffixDecoding is described in arXiv:2411.04975, sections 3 and 4.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Collection, Hashable, KeysView, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from operator import index
from typing import Any, cast

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
from drafter_core.snapshot import read_snapshot, write_snapshot

__all__ = [
    "BatchDraft",
    "Draft",
    "DrafterStats",
    "RestoredResponse",
    "SuffixDrafter",
    "Tokens",
    "TreeDraft",
    "warm_up",
]

Tokens = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids: any sequence of ints, or an integer array of one dimension."""

_Plan = tuple[int, Any, float, float, float]
"""What a step is to do: number of requests, max_tokens, factor, offset, min_token_prob."""

MAX_TOKEN_ID = 2**31 - 2
MAX_DEPTH = 4096
_MAX_REQUESTS = 1 << 20
_MAX_SEQUENCES = 1 << 26
_HEAP = 1024
_MANY = 8
_MOST_VERIFY_TOKENS = 1 << 30
_HUGE = 1e6
_LONGEST = 1 << 16
_PROMPT, _RESPONSE, _GLOBAL_ONLY = 0, 1, 2
_EVICTED_AT_ONCE = 2048
_EVICTED_PER_CALL = 1024
"""Tokens: an eviction must not hold up the engine's step. 400 tokens take about 0.3 ms."""
_MAX_ROWS = (1 << 31) - 4096
_CALL = struct.Struct("=5q3d")
"""What the kernels are to do, as it stands in their header."""


@dataclass(frozen=True)
class Draft:
    """What to verify next for one request.

    `probs[i]`, a float32, is how probable it is that `token_ids[i]` and all before it are right: in
    exact mode the product of the shares that they had among what followed, in default mode what was
    learned from earlier drafts. `score` is the sum, the expected number of accepted tokens.
    `match_length` is how many tokens of context the draft rests on; without a draft, 0, and in
    exact mode the longest match.
    """

    token_ids: list[int]
    probs: list[float]
    score: float
    match_length: int


@dataclass(frozen=True)
class TreeDraft:
    """A draft whose tokens form a tree: `parents[i]` is the index of the token before token i.

    -1 stands for the end of the context. In a path, that is i - 1.
    """

    draft: Draft
    parents: list[int]


@dataclass(frozen=True, eq=False)
class RestoredResponse:
    """The id of a response that came from a snapshot: equal to no request's id."""

    number: int


@dataclass(frozen=True)
class BatchDraft:
    """The drafts of one step.

    token_ids int32 [n, k], probs float32 [n, k], lengths int32 [n], match_lengths int32 [n],
    scores float32 [n], status int32 [n] (0 drafted, 1 the row does not continue what was fed,
    2 a bad token id, 3 an unknown handle or row). A draft that was cut to nothing for a budget or
    the load keeps its match length. The arrays are overwritten by the next step of
    the same drafter.
    """

    token_ids: NDArray[np.int32]
    probs: NDArray[np.float32]
    lengths: NDArray[np.int32]
    match_lengths: NDArray[np.int32]
    scores: NDArray[np.float32]
    status: NDArray[np.int32]

    def tolist(self) -> list[list[int]]:
        """The drafts as lists of token ids, one per request, empty where there is none."""
        lengths: list[int] = self.lengths.tolist()
        if len(lengths) < _MANY:
            ids = self.token_ids
            return [ids[i, :length].tolist() if length else [] for i, length in enumerate(lengths)]
        drafted = _columns(self.token_ids.shape[1]) < self.lengths[:, None]
        tokens: list[int] = self.token_ids[drafted].tolist()  # only these become Python objects
        ends = accumulate(lengths)
        return [tokens[end - length : end] for length, end in zip(lengths, ends, strict=True)]


@dataclass(frozen=True)
class DrafterStats:
    """Sizes of a drafter at one moment. Bytes are those in use, not the reserved address space."""

    active_requests: int
    cached_requests: int
    cached_tokens: int
    global_states: int
    bytes_in_use: int
    evicted_responses: int
    """How many were taken out of the cache so far: to make room, or by their id."""


class SuffixDrafter:
    """Drafts from what requests contained and what was answered before.

    Args:
        max_depth: 1 to 4096 tokens. In exact mode a match and its draft together are at most this
            long. In default mode a match is shorter than this, and its draft may go on beyond; this
            many tokens of the end of a prompt are kept with its response.
        max_cached_requests: how many responses the global tree holds, running ones included. The
            one started first goes first. 0: no global tree. -1: no limit.
        exact: draft exactly what arctic-inference 0.3.0 drafts: among successors that occur equally
            often in the order that their history gave them there, and never on a match as long as
            the whole context. A tenth larger. Measured (docs/bench-core.md), a step with the same
            tokens takes 0.9 to 1.1 times as long as in default mode with an empty cache, 1.1 to
            1.5 times with five million cached tokens.
        verify_tokens: how many tokens in a forward pass take as long as the pass itself. A step
            then drafts no more than pays, fewer for each request the more requests there are; see
            docs/acceptance.md. None: what is drafted for a request does not depend on the others.

    Raises:
        BadSetting: a setting outside of its range or no whole number, or `verify_tokens` with
            `exact`.

    Not thread-safe: one drafter belongs to one thread.
    """

    def __init__(
        self,
        max_depth: int = 24,
        max_cached_requests: int = 10_000,
        *,
        exact: bool = False,
        verify_tokens: int | None = None,
    ) -> None:
        max_depth = _whole("max_depth", max_depth)
        max_cached_requests = _whole("max_cached_requests", max_cached_requests)
        if verify_tokens is not None:
            verify_tokens = _whole("verify_tokens", verify_tokens)
        if not 1 <= max_depth <= MAX_DEPTH:
            raise BadSetting(f"max_depth is 1 to {MAX_DEPTH}, not {max_depth!r}")
        if max_cached_requests < -1:
            raise BadSetting(
                f"max_cached_requests is -1 (no limit), 0 (no global tree) or a number of "
                f"responses, not {max_cached_requests!r}"
            )
        if verify_tokens is not None and not 1 <= verify_tokens <= _MOST_VERIFY_TOKENS:
            raise BadSetting(
                f"verify_tokens is 1 to {_MOST_VERIFY_TOKENS}, or None (drafts do not depend on "
                f"the load), not {verify_tokens!r}"
            )
        if verify_tokens is not None and exact:
            raise BadSetting("verify_tokens needs calibrated drafts, which exact=True has not")
        self._max_depth = max_depth
        self._max_cached = max_cached_requests
        self._exact = exact
        self._verify_tokens = verify_tokens
        self._row_width = max_depth if exact else max_depth + 2 + 2 * k.LEARNED
        self._handles: dict[Hashable, int] = {}
        self._sequences: dict[Hashable, int] = {}
        self._free_handles: list[int] = []
        self._next_handle = 1
        self._free_sequences: list[int] = []
        self._next_sequence = 0
        self._leaving: deque[int] = deque()
        self._left = 0
        """Tokens that have left the global tree."""
        self._entered = 0
        """Tokens that had entered it at the last call that took some out."""
        self._restored = 0
        self._evicted = 0
        self._allocate()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a SuffixDrafter is not pickled or copied: save its responses and load them"
        )

    def _allocate(self) -> None:
        depth = self._max_depth
        memory = physical_memory()
        states = min(memory // (4 * k.STATE_FIELDS), _MAX_ROWS) // k.CHUNK * k.CHUNK
        pairs = min(memory // 8, _MAX_ROWS)
        tokens = min(memory // 4, _MAX_ROWS) // k.CHUNK * k.CHUNK
        header = np.zeros(k.HEADER_FIELDS + 2 * k.CELLS * (not self._exact), np.int64)
        self._tables = _Tables(
            states=reserve(states, k.STATE_FIELDS, np.int32),
            blocks=reserve(pairs, 2, np.int32),
            texts=reserve(tokens, 0, np.int32),
            chunks=reserve(max(states, tokens) // k.CHUNK, 2, np.int32),
            trees=reserve(_MAX_REQUESTS, k.TREE_FIELDS, np.int64),
            sequences=reserve(_MAX_SEQUENCES, k.SEQ_FIELDS, np.int64),
            windows=reserve(_MAX_REQUESTS, self._row_width, np.int32),
            header=header,
        )
        header[k.G_DEPTH] = depth
        header[k.G_EXACT] = self._exact
        header[[k.G_DRAFTED, k.G_ACCEPTED]] = k.MEMORY // 4, k.MEMORY // 8
        header[k.G_VERIFY] = self._verify_tokens or 0
        header[[k.G_SFREE, k.G_STATEFREE, k.G_TFREE]] = -1
        header[k.G_BFREE : k.G_BFREE + 32] = -1
        header[k.G_TOPCLASS] = k.SMALL + 2
        self._header = header
        self._address = header.ctypes.data
        self._measure()
        self._inputs = self._use_inputs(_Inputs(_MANY))
        self._plan: _Plan | None = None
        self._arrays: tuple[Any, Any, Any] = (None, None, None)
        self._given = self._use_given(1024)
        self._context = np.zeros(depth, np.int32)
        header[k.G_CONTEXT] = self._context.ctypes.data
        self._row = _Output(1, 0)
        self._batch = self._output = _Output(0, 0)
        self._write_to(self._row)
        self._settings = (0.0, 0.0, 0.0)
        self._call = memoryview(cast(Any, header[k.G_CALL : k.G_CALL + 8])).cast("B")
        self._called = -1  # requests of the step that the header tells the kernels to do
        header[k.G_WIDEST] = -1
        self._scratch = _Scratch(0, 0)
        self._use_scratch(_Scratch(depth + k.CHUNK + 1, _HEAP if self._exact else 0))
        self._kernel = k.prepare(self._exact)
        self._run(k.INIT, 0, 0)

    # -- settings and views

    @property
    def max_depth(self) -> int:
        """As given: tokens of match plus draft in exact mode; in default mode, above any match."""
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
        """The handle of an active request, as `step` takes it; valid until the request stops.

        Raises:
            UnknownRequest: the request is not active.
        """
        return self._active(request_id)

    def handles(self, request_ids: Collection[Hashable]) -> NDArray[np.int64]:
        """The handles of active requests, int64 [n], as `step` takes them.

        Raises:
            UnknownRequest: one of them is not active.
        """
        try:
            found = map(self._handles.__getitem__, request_ids)
            return np.fromiter(found, np.int64, len(request_ids))
        except KeyError as error:
            raise UnknownRequest(error.args[0], "active") from None

    def tokens_fed(self, request_id: Hashable) -> int:
        """How many tokens (prompt and response) an active request has been given.

        Raises:
            UnknownRequest: the request is not active.
        """
        return int(self._tables.trees[self._active(request_id), k.R_FED])

    def stats(self) -> DrafterStats:
        """Sizes now."""
        g = self._tables.header
        return DrafterStats(
            active_requests=len(self._handles),
            cached_requests=len(self._sequences),
            cached_tokens=int(g[k.G_TOKENS]),
            global_states=int(self._tables.trees[0, k.R_STATES]),
            bytes_in_use=int(
                g[k.G_SCHUNKS] * k.CHUNK * k.STATE_FIELDS * 4
                + g[k.G_BNEXT] * 8
                + g[k.G_TCHUNKS] * k.CHUNK * 4
                + max(g[k.G_SCHUNKS], g[k.G_TCHUNKS]) * 8
                + self._next_handle * (k.TREE_FIELDS * 8 + self._row_width * 4)
                + self._next_sequence * k.SEQ_FIELDS * 8
            ),
            evicted_responses=self._evicted,
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
            CapacityExhausted: too many requests are active, or responses cached, or there is no
                memory for the prompt; nothing was started. What was evicted stays so.
            CorruptState: a bug, found while a response was evicted; see there.
        """
        if request_id in self._handles:
            raise RequestActive(request_id)
        tokens = _checked(prompt)
        length = self._put_text(tokens)
        handle, sequence = self._take_places(self._max_cached != 0)
        # The prompt goes into the request's own tree only: it need not wait for the evictions.
        fed = self._run(k.START, handle, sequence, 0, length)
        if fed < 0:
            self._free_handles.append(handle)
            if sequence >= 0:
                self._free_sequences.append(sequence)
            _check_range(tokens)
        if sequence >= 0:
            if request_id in self._sequences:
                self.evict_cached_response(request_id)
            while 0 < self._max_cached <= len(self._sequences):
                self._evict(next(iter(self._sequences)), _EVICTED_AT_ONCE)
            self._sequences[request_id] = sequence
        self._handles[request_id] = handle
        if fed < length:
            try:
                self._feed(handle, tokens, fed, _PROMPT)
            except MemoryError:
                self._end(self._handles.pop(request_id))
                if sequence >= 0:
                    del self._sequences[request_id]
                    self._free_sequences.append(sequence)
                raise
        return handle

    def append(self, request_id: Hashable, tokens: Tokens) -> None:
        """Add newly accepted tokens to the request's tree and, while it is cached, the global one.

        Raises:
            UnknownRequest: the request is not active.
            BadTokenId: one of the tokens is no token id; none was added.
            CapacityExhausted: there is no memory for all of them; those that fitted were added.
            CorruptState: a bug, found while a response was evicted; see there.
        """
        if self._leaving:
            self._evict_more()
        self._feed(self._active(request_id), _checked(tokens), 0, _RESPONSE)

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
            max_spec_factor: a match of m tokens drafts at most
                `max_spec_factor * m + max_spec_offset` tokens. In default mode, where that is one
                at least, its draft goes on beyond while its probability is at least 0.8 times the
                share of drafted tokens that were right of late (0.5 in a new drafter).
            max_spec_offset: see max_spec_factor.
            min_token_prob: a draft ends before its probability falls below this; in default mode,
                below half of this.

        Raises:
            UnknownRequest: the request is not active.
            BadSetting: `max_tokens` is no whole number, or another setting no number.
        """
        handle = self._active(request_id)
        return self._speculate(
            handle, -1, max_tokens, max_spec_factor, max_spec_offset,
            min_token_prob, False,
        ).draft  # fmt: skip

    def speculate(
        self,
        request_id: Hashable,
        context: Tokens,
        max_tokens: int,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        use_tree_spec: bool = False,
    ) -> TreeDraft:
        """What probably follows a context of the caller's, as a path or as a tree of tokens.

        Args:
            request_id: an active request, whose own tree is asked beside the global one.
            context: the tokens to continue; the last `max_depth` count. Cheapest where they are the
                last ones that the request was given.
            max_tokens: most tokens of the draft.
            max_spec_factor: as in `draft`.
            max_spec_offset: as in `draft`.
            min_token_prob: as in `draft`.
            use_tree_spec: take the most probable continuation of anything taken so far, instead of
                one path. Needs `exact`.

        Raises:
            UnknownRequest: the request is not active.
            BadTokenId: the context holds something that is no token id.
            BadSetting: `use_tree_spec` without `exact`, `max_tokens` that is no whole number, or
                another setting that is no number.
        """
        if use_tree_spec and not self._exact:
            raise BadSetting("use_tree_spec needs a drafter made with exact=True")
        handle = self._active(request_id)
        known = min(len(context), self._max_depth)
        if known:
            tokens = _checked(context[len(context) - known :])
            _check_range(tokens)
            self._context[self._max_depth - known :] = tokens
        return self._speculate(
            handle, known, max_tokens, max_spec_factor, max_spec_offset,
            min_token_prob, use_tree_spec,
        )  # fmt: skip

    def stop_request(self, request_id: Hashable) -> None:
        """End a request and free its tree. Its response stays in the global tree until evicted.

        Raises:
            UnknownRequest: the request is not active.
        """
        try:
            handle = self._handles.pop(request_id)
        except KeyError:
            raise UnknownRequest(request_id, "active") from None
        self._end(handle)

    def evict_cached_response(self, request_id: Hashable) -> None:
        """Take a response out of the global tree. A request that still runs teaches it no more.

        Of a long response most leaves in parts, with the calls that follow, so that no call takes
        long; in exact mode it leaves at once, as the peer's does.

        Raises:
            UnknownRequest: there is no cached response of this id.
            CorruptState: a bug: the cache does not hold what it should. Build a new drafter.
        """
        self._evict(request_id, _EVICTED_AT_ONCE)

    def cached_response(self, request_id: Hashable) -> NDArray[np.int32]:
        """The tokens that the cache holds of a response, int32 [n]: a copy.

        In default mode the end of its prompt, up to `max_depth` tokens, comes first, each with
        2**30 added; it is left out where the prompt ends with token ids that high.

        Raises:
            UnknownRequest: there is no cached response of this id.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise UnknownRequest(request_id, "cached")
        return self._text(sequence)

    # -- snapshots

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the cached responses, running ones as far as they are, to a snapshot.

        Returns:
            How many responses it holds. The file is replaced in one go.

        Raises:
            OSError: the file cannot be written; one that was there is as it was.
        """
        texts = [self._text(sequence) for sequence in self._sequences.values()]
        texts = [text for text in texts if len(text)]
        write_snapshot(path, texts)
        return len(texts)

    def load(self, path: str | os.PathLike[str]) -> int:
        """Add the responses of a snapshot to the cache, under ids of their own.

        They count as started now; where they are more than `max_cached_requests` leaves room for
        beside those that are cached, the newest are taken. Takes about a second per million tokens.

        Returns:
            How many responses were added.

        Raises:
            SnapshotError: the file is no snapshot, damaged or newer; nothing was added.
            OSError: the file cannot be read; nothing was added.
            CapacityExhausted: there is no memory for them, or no place among the active requests;
                nothing was added.
        """
        texts = read_snapshot(path)
        if self._max_cached >= 0:
            room = max(self._max_cached - len(self._sequences), 0)
            texts = texts[max(len(texts) - room, 0) :]
        cached, evicted = len(self._sequences), self._evicted
        try:
            for text in texts:
                self._restore(text)
        except MemoryError:
            for restored in list(self._sequences)[cached:]:
                self._evict(restored, _MAX_ROWS)
            self._evicted = evicted
            raise
        return len(texts)

    def _restore(self, text: NDArray[np.int32]) -> None:
        """Add a response of a snapshot, or as much of it as there is memory for."""
        if self._exact:  # which has no use for the ends of prompts
            text = text[(text >= k.LEAD).cumprod().sum() :]
        handle, sequence = self._take_places(True)
        self._run(k.START, handle, sequence)
        self._sequences[RestoredResponse(self._restored)] = sequence
        self._restored += 1
        try:
            self._feed(handle, text, 0, _GLOBAL_ONLY)
        finally:
            self._end(handle)

    def _text(self, sequence: int) -> NDArray[np.int32]:
        """The tokens of a cached response."""
        last, length = self._tables.sequences[sequence, [k.Q_LAST, k.Q_LEN]].tolist()
        chunks = []
        for _ in range(-(-length // k.CHUNK)):
            chunks.append(last)
            last = int(self._tables.chunks[last, 1])
        rows = self._tables.texts.reshape(-1, k.CHUNK)[chunks[::-1]]
        return rows.reshape(-1)[:length]

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
        budget: int | None = None,
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
            budget: most drafted tokens of the whole step, spent on the most probable ones. Every
                drafted token costs the engine a share of a forward pass, and the more requests
                share the pass, the more a failed one costs.

        Returns:
            The drafts; see `BatchDraft.status` for requests that could not be served. They were
            fed nothing and the others are not affected.

        Raises:
            BadSetting: an array of another shape or of no integers, `max_tokens` or `budget` that
                is no whole number, or another setting that is no number; no request was fed.
            CapacityExhausted: there is no memory for what is new; the requests up to the one that
                did not fit were fed, and the next step goes on from there.
            CorruptState: a bug, found while a response was evicted; see there.
        """
        n = len(handles)
        if budget is not None:
            budget = _whole("budget", budget)
        plan = (n, max_tokens, max_spec_factor, max_spec_offset, min_token_prob)
        self._prepare(plan, rows, token_ids, num_tokens)
        try:
            if n == 1:  # twice as fast as a slice
                self._inputs.handle_view[0] = handles[0]
            else:
                self._inputs.handles[:n] = handles
        except (TypeError, ValueError, OverflowError) as error:
            raise BadSetting(f"handles are integers from start_request: {error}") from None
        batch = self._step(n).batch(n)
        if budget is not None:
            _spend(batch, budget)
            self._note_lengths(handles, batch)
        return batch

    def step_lists(
        self,
        request_ids: Collection[Hashable],
        rows: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        num_tokens: NDArray[np.int32] | NDArray[np.int64],
        max_tokens: int | NDArray[np.int32],
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
    ) -> list[list[int]]:
        """`step` for a caller that has the ids of n requests and wants lists of token ids.

        A request that could not be served gets an empty list; `step` tells why.

        Raises:
            UnknownRequest: one of them is not active; no request was fed.
            BadSetting, CapacityExhausted, CorruptState: as in `step`.
        """
        n = len(request_ids)
        plan = (n, max_tokens, max_spec_factor, max_spec_offset, min_token_prob)
        self._prepare(plan, rows, token_ids, num_tokens)
        inputs, known = self._inputs, self._handles
        try:
            if n < _MANY:
                for i, request_id in enumerate(request_ids):
                    inputs.handle_view[i] = known[request_id]
            else:
                found = map(known.__getitem__, request_ids)
                inputs.handles[:n] = np.fromiter(found, np.int64, n)
        except KeyError as error:
            raise UnknownRequest(error.args[0], "active") from None
        return self._step(n).lists(n)

    def _step(self, n: int) -> _Output:
        """Do the step that the inputs describe."""
        if self._leaving:
            self._evict_more()
        if self._output is not self._batch:
            self._write_to(self._batch)
        if self._called != n:  # else the header says so from the step before
            _CALL.pack_into(self._call, 0, k.STEP, n, 0, 0, 0, *self._settings)
            self._called = n
        done = self._kernel(self._address)
        if done != n:
            self._finish_step(n, done)
        return self._batch

    def _prepare(self, plan: _Plan, rows: Any, token_ids: Any, num_tokens: Any) -> None:
        """Tell the kernels what a step is to do; nothing where it is as it was in the step before.

        Arrays that are kept from step to step are read where they are. Of others, those that had
        to be converted, a copy is made for each step.
        """
        arrays = self._arrays
        if (
            type(plan[1]) is not np.ndarray
            and plan == self._plan
            and rows is arrays[0]
            and token_ids is arrays[1]
            and num_tokens is arrays[2]
        ):
            return
        n, max_tokens, factor, offset, min_prob = plan
        if n > len(self._inputs.handles):
            self._use_inputs(_Inputs(2 * n))
        self._plan = None  # until all of it was found to be right
        self._bind(n, rows, token_ids, num_tokens)
        settings = _numbers(factor, offset, min_prob)
        slope = _bounded(settings[0]), _bounded(settings[1])
        limits = self._inputs.limits
        for_each = np.ndim(max_tokens) > 0
        if for_each:
            each = _as(np.int32, "max_tokens", max_tokens)
            if each.ndim != 1 or len(each) < n:
                raise BadSetting(f"{n} handles need as many max_tokens, not {each.shape}")
            limits[:n] = each[:n].clip(0, _LONGEST)
        else:
            limits[:n] = min(max(_whole("max_tokens", max_tokens), 0), _LONGEST)
        if slope != self._settings[:2]:
            self._header[k.G_WIDEST] = -1
        self._settings = (*slope, settings[2])
        self._called = -1
        self._plan = None if for_each else plan

    def _bind(self, n: int, rows: Any, token_ids: Any, num_tokens: Any) -> None:
        """Tell the kernels where the arrays of a step are, and keep these as long as they do."""
        places = _as(np.int64, "rows", rows)
        ids = _as(np.int32, "token_ids", token_ids)
        counts = _as(np.int32, "num_tokens", num_tokens)
        if places.shape != (n,) or ids.ndim != 2 or counts.ndim != 1:
            raise BadSetting(
                f"a step of {n} handles takes rows [{n}], token_ids [requests, tokens] and "
                f"num_tokens [requests], not {places.shape}, {ids.shape} and {counts.shape}"
            )
        header = self._header
        header[k.G_ROWS] = places.ctypes.data
        header[k.G_IDS] = ids.ctypes.data
        header[k.G_ID_COLUMNS] = ids.shape[1]
        header[k.G_COUNTS] = counts.ctypes.data
        header[k.G_ID_ROWS] = min(len(ids), len(counts))
        self._arrays = places, ids, counts

    def _finish_step(self, n: int, done: int) -> None:
        """Make the room that a step stopped for before its request number `done`, and go on."""
        while done != n:
            if done == k.TOO_NARROW:
                done, widest = 0, int(self._inputs.limits[:n].max(initial=0))
                self._widen(n, self._width(widest, *self._settings[:2]), widest)
            else:
                self._grow()
            done = self._run(k.STEP, n, 0, done, 0, self._settings)

    def _widen(self, n: int, width: int, widest: int) -> None:
        """Make room for the drafts of n requests, of up to `width` tokens.

        That is enough for every `max_tokens` up to `widest`.
        """
        rows, columns = self._batch.shape
        if n > rows or width > columns:
            self._batch = _Output(max(n, rows), max(width, columns))
        self._write_to(self._batch)
        self._header[k.G_WIDEST] = widest
        if self._scratch.width <= width:
            self._use_scratch(_Scratch(width + 1, self._scratch.heap))

    def _note_lengths(self, handles: NDArray[np.int64], batch: BatchDraft) -> None:
        """Keep how long the drafts of a step are now, for the calibration."""
        if not self._exact:
            served = batch.status == 0
            self._tables.windows[np.asarray(handles)[served], -1] = batch.lengths[served]

    # -- inner workings

    def _width(self, max_tokens: int, factor: float, offset: float) -> int:
        """No draft is longer than this."""
        longest = self._max_depth * max(_bounded(factor), 0.0) + _bounded(offset)
        if not longest < _LONGEST:  # also where it is no number
            return max(min(max_tokens, _LONGEST), 0)
        beyond = 0 if self._exact else k.LEARNED
        return max(min(max_tokens, int(longest) + 1 + beyond), 0)

    def _write_to(self, output: _Output) -> None:
        """Tell the kernels where results go."""
        self._header[k.G_OUT : k.G_OUT + len(output.places)] = output.places
        self._output = output

    def _use_inputs(self, inputs: _Inputs) -> _Inputs:
        self._header[k.G_HANDLES : k.G_HANDLES + len(inputs.places)] = inputs.places
        self._inputs = inputs
        return inputs

    def _use_given(self, length: int) -> NDArray[np.int32]:
        self._given = np.zeros(length, np.int32)
        self._header[k.G_TEXT] = self._given.ctypes.data
        return self._given

    def _put_text(self, tokens: NDArray[Any]) -> int:
        """Copy checked tokens to where the kernels read them; return how many there are."""
        n = len(tokens)
        given = self._given if n <= len(self._given) else self._use_given(2 * n)
        given[:n] = tokens
        return n

    def _use_scratch(self, scratch: _Scratch) -> None:
        self._header[k.G_SCRATCH : k.G_SCRATCH + len(scratch.places)] = scratch.places
        self._scratch = scratch

    def _evict(self, request_id: Hashable, at_once: int) -> None:
        """Evict a response; of a longer one than `at_once`, the rest in the calls that follow."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            raise UnknownRequest(request_id, "cached")
        self._evicted += 1
        handle = self._handles.get(request_id)
        if handle is not None:
            self._tables.trees[handle, k.R_SEQ] = -1
        if not self._leaving:
            self._entered = self._left + int(self._header[k.G_TOKENS])
        self._leaving.append(sequence)
        self._evict_tokens(at_once)

    def _evict_more(self) -> None:
        """Go on with what is leaving: as many tokens as entered since, so that none pile up."""
        entered = self._left + int(self._header[k.G_TOKENS])
        most = max(_EVICTED_PER_CALL, entered - self._entered)
        self._entered = entered
        self._evict_tokens(most)

    def _evict_tokens(self, most: int) -> None:
        while self._leaving and most > 0:
            most -= self._evict_some(most)

    def _evict_some(self, most: int) -> int:
        """Take tokens of the response that has been leaving longest out of the global tree."""
        sequence = self._leaving[0]
        before = int(self._tables.sequences[sequence, k.Q_LEN])
        left = self._run(k.EVICT, sequence, most)
        if left < 0:
            raise CorruptState(
                "the global tree does not contain a response that it should; build a new drafter "
                "and report this"
            )
        self._left += before - left
        if left == 0:
            self._leaving.popleft()
            self._free_sequences.append(sequence)
        return max(before - left, 1)

    def _active(self, request_id: Hashable) -> int:
        try:
            return self._handles[request_id]
        except KeyError:
            raise UnknownRequest(request_id, "active") from None

    def _run(
        self, op: int, first: int, second: int, begin: int = 0, end: int = 0,
        settings: tuple[float, float, float] = (0.0, 0.0, 0.0),
    ) -> int:  # fmt: skip
        """One operation; see `_kernels.run`."""
        _CALL.pack_into(self._call, 0, op, first, second, begin, end, *settings)
        self._called = -1
        result: int = self._kernel(self._address)
        return result

    def _feed(self, handle: int, tokens: NDArray[Any], begin: int, part: int) -> None:
        length = self._put_text(tokens)
        while True:
            fed = self._run(k.FEED, handle, part, begin, length)
            if fed < 0:
                _check_range(tokens)
            begin += fed
            if begin == length:
                return
            self._grow()

    def _speculate(
        self, handle: int, known: int, max_tokens: int, factor: float, offset: float,
        min_prob: float, as_tree: bool,
    ) -> TreeDraft:  # fmt: skip
        """Draft for one request after its own tokens (known -1), or those of the context."""
        factor, offset, min_prob = _numbers(factor, offset, min_prob)
        width = self._width(_whole("max_tokens", max_tokens), factor, offset)
        if self._row.shape[1] < width:
            self._row = _Output(1, width)
        if self._scratch.width <= width:
            self._use_scratch(_Scratch(width + 1, self._scratch.heap))
        if self._output is not self._row:
            self._write_to(self._row)
        if not self._exact:
            factor, offset = _bounded(factor), _bounded(offset)
        settings = (factor, offset, min_prob)
        while not self._run(k.SPECULATE, handle, known, width, int(as_tree), settings):
            self._use_scratch(_Scratch(self._scratch.width, 4 * self._scratch.heap))
        row = self._row
        length = int(row.info[k.OUT_LENGTH, 0])
        return TreeDraft(
            Draft(
                row.tokens[0, :length].tolist(), row.probs[0, :length].tolist(),
                float(row.scores[0]), int(row.info[k.OUT_MATCH, 0]),
            ),
            self._scratch.parents[:length].tolist(),
        )  # fmt: skip

    def _take_places(self, cached: bool) -> tuple[int, int]:
        """A handle for a request and a sequence for its response, or -1: both or neither."""
        handle = self._take_handle()
        try:
            return handle, self._take_sequence() if cached else -1
        except CapacityExhausted:
            self._free_handles.append(handle)
            raise

    def _take_handle(self) -> int:
        if self._free_handles:
            return self._free_handles.pop()
        if self._next_handle >= self._tables.requests:
            raise CapacityExhausted(f"{len(self._handles)} requests are active; stop some first")
        self._next_handle += 1
        return self._next_handle - 1

    def _end(self, handle: int) -> None:
        """Let the next operation free the tree of a handle: a call for it alone would cost more."""
        trees, header = self._tables.tree_view, self._tables.header_view
        row = handle * k.TREE_FIELDS
        trees[row + k.R_ALIVE] = 0
        trees[row + k.R_NEXT_ENDED] = header[k.G_ENDED]
        header[k.G_ENDED] = handle
        self._free_handles.append(handle)

    def _take_sequence(self) -> int:
        if self._free_sequences:
            return self._free_sequences.pop()
        if self._next_sequence >= len(self._tables.sequences):
            raise CapacityExhausted(
                f"{len(self._sequences)} responses are cached; set max_cached_requests"
            )
        self._next_sequence += 1
        return self._next_sequence - 1

    def _measure(self) -> None:
        """Tell the kernels how large the tables are."""
        tables = self._tables
        tables.header[k.G_TREES] = tables.requests
        tables.header[k.G_WIDTH] = self._row_width
        tables.header[k.G_TABLES : k.G_TABLES + 7] = [table.ctypes.data for table in tables.all]
        tables.header[k.G_SCAP] = min(len(tables.states), len(tables.chunks) * k.CHUNK)
        tables.header[k.G_BCAP] = len(tables.blocks)
        tables.header[k.G_TCAP] = min(len(tables.texts), len(tables.chunks) * k.CHUNK)

    def _grow(self) -> None:
        """Double the tables that are full: only where address space could not be reserved."""
        tables = self._tables
        before = tables.all
        try:
            grown: dict[str, Any] = {
                name: _doubled(getattr(tables, name)) for name in tables.full()
            }
        except MemoryError as error:
            stats = self.stats()
            raise CapacityExhausted(
                f"no memory for another token: {stats.bytes_in_use:,} bytes are in use, with "
                f"{stats.cached_tokens:,} cached tokens; set a lower max_cached_requests"
            ) from error
        self._tables = replace(tables, **grown)
        self._measure()
        if all(a is b for a, b in zip(before, self._tables.all, strict=True)):
            raise CapacityExhausted("the tables have reached their largest size")


def warm_up(*, exact: bool = False) -> None:
    """Compile the kernels, or load them from the cache: call it before requests come.

    With an empty cache this takes seconds, else a fraction of one. The cache is beside the package,
    or in the user's cache directory where that cannot be written; `NUMBA_CACHE_DIR` overrides both.

    Args:
        exact: the kernels of exact mode, which `drafter_core.suffix_decoding` uses too, instead of
            those of the default mode. A program that uses both modes calls it for each.
    """
    SuffixDrafter(max_depth=1, max_cached_requests=0, exact=exact)


@dataclass(frozen=True)
class _Tables:
    """The arrays of `_kernels`."""

    states: NDArray[np.int32]
    blocks: NDArray[np.int32]
    texts: NDArray[np.int32]
    chunks: NDArray[np.int32]
    trees: NDArray[np.int64]
    sequences: NDArray[np.int64]
    windows: NDArray[np.int32]
    header: NDArray[np.int64]
    tree_view: memoryview = field(init=False)
    header_view: memoryview = field(init=False)

    def __post_init__(self) -> None:
        # An item of a memoryview is set in half the time that an array takes.
        object.__setattr__(self, "tree_view", memoryview(cast(Any, self.trees.reshape(-1))))
        object.__setattr__(self, "header_view", memoryview(cast(Any, self.header)))

    @property
    def all(self) -> list[NDArray[Any]]:
        """The tables whose addresses the header holds, in its order."""
        return [
            self.states, self.blocks, self.texts, self.chunks, self.trees, self.sequences,
            self.windows,
        ]  # fmt: skip

    @property
    def requests(self) -> int:
        """Rows for trees, the global one's among them."""
        return min(len(self.trees), len(self.windows))

    def full(self) -> list[str]:
        """The names of the tables that must double before a token is fed, those that may."""
        g, names = self.header, []
        if g[k.G_SCHUNKS] + k.SPARE_CHUNKS > g[k.G_SCAP] // k.CHUNK:
            names += ["states", "chunks"]
        if g[k.G_TCHUNKS] + k.SPARE_CHUNKS > g[k.G_TCAP] // k.CHUNK:
            names += ["texts", "chunks"]
        names = list(dict.fromkeys(names)) or ["blocks"]
        return [name for name in names if 2 * len(getattr(self, name)) <= _MAX_ROWS]


class _Inputs:
    """Where the kernels read the handles and limits of a step of up to n requests."""

    def __init__(self, n: int) -> None:
        self.handles = np.zeros(n, np.int64)
        self.handle_view = memoryview(cast(Any, self.handles))
        self.limits = np.zeros(n, np.int32)
        self.places = [self.handles.ctypes.data, self.limits.ctypes.data]


class _Output:
    """Where the kernels write drafts; reused while n requests and their drafts fit."""

    def __init__(self, n: int, width: int) -> None:
        self.shape = (n, width)
        self.tokens = np.zeros((n, width), np.int32)
        self.probs = np.zeros((n, width), np.float32)
        self.info = np.zeros((k.OUT_ROWS, n), np.int32)
        self.scores = np.zeros(n, np.float32)
        arrays = (self.tokens, self.probs, self.info, self.scores)
        self.places = [*(array.ctypes.data for array in arrays), width, n]
        self._batches: dict[int, BatchDraft] = {}
        self._flat = memoryview(cast(Any, self.tokens.reshape(-1)))
        self._lengths = memoryview(cast(Any, self.info[k.OUT_LENGTH]))

    def lists(self, n: int) -> list[list[int]]:
        """The drafts of the first n rows as lists, empty where there is none."""
        if n >= _MANY:
            return self.batch(n).tolist()
        flat, width, lists = self._flat, self.shape[1], []
        for i in range(n):
            length = self._lengths[i]
            lists.append(flat[i * width : i * width + length].tolist() if length else [])
        return lists

    def batch(self, n: int) -> BatchDraft:
        """The first n rows."""
        batch = self._batches.get(n)
        if batch is None:
            info = self.info[:, :n]
            batch = self._batches[n] = BatchDraft(
                self.tokens[:n], self.probs[:n], info[k.OUT_LENGTH], info[k.OUT_MATCH],
                self.scores[:n], info[k.OUT_STATUS],
            )  # fmt: skip
        return batch


class _Scratch:
    """What the kernels need while they draft; without a heap, they cannot draft trees."""

    def __init__(self, width: int, heap: int) -> None:
        self.width = width
        self.heap = heap
        self._ints = np.zeros((k.SCRATCH_INTS, width), np.int32)
        self.parents = self._ints[k.PARENTS]
        self._arrays = (
            self._ints, np.zeros((k.SCRATCH_PROBS, width), np.float32),
            np.zeros(heap, np.float32), np.zeros((heap, k.HEAP_FIELDS), np.int32),
        )  # fmt: skip
        self._walks = np.zeros((k.FETCH_WALKS, k.WALK_FIELDS), np.int64)
        self._trail = np.zeros((k.FETCH_ENDS + k.FETCH_WALKS, 2), np.int32)
        self.places = [
            *(array.ctypes.data for array in self._arrays), width, heap,
            self._walks.ctypes.data, self._trail.ctypes.data,
        ]  # fmt: skip


def _spend(batch: BatchDraft, budget: int) -> None:
    """Cut the drafts of a step to the `budget` most probable tokens, which are prefixes of them.

    Probabilities fall along a draft, so a threshold cuts each in one place. Ties at the threshold
    go to the requests that come first.
    """
    drafted = np.arange(batch.token_ids.shape[1]) < batch.lengths[:, None]
    if int(batch.lengths.sum()) <= budget:
        return
    probs = np.where(drafted, batch.probs, np.float32(-1.0))
    if budget <= 0:
        kept = np.zeros(len(probs), np.int64)
    else:
        threshold = np.partition(probs, probs.size - budget, axis=None)[probs.size - budget]
        kept = (probs > threshold).sum(axis=1)
        ties = (probs == threshold).sum(axis=1)
        before = np.cumsum(ties) - ties
        kept += np.clip(budget - int(kept.sum()) - before, 0, ties)
    batch.lengths[:] = kept
    batch.scores[:] = np.where(np.arange(probs.shape[1]) < kept[:, None], probs, 0.0).sum(axis=1)


def _doubled(array: NDArray[Any]) -> NDArray[Any]:
    larger = np.zeros((2 * len(array), *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger


@cache
def _columns(width: int) -> NDArray[np.int32]:
    return np.arange(width, dtype=np.int32)


def _bounded(value: float) -> float:
    """Factor and offset within what the kernels can turn into a number of tokens."""
    return min(max(value, -_HUGE), _HUGE)


def _as(dtype: type[np.signedinteger[Any]], name: str, values: Any) -> NDArray[Any]:
    """An argument of a step as the kernels read it: without a copy where it is so already."""
    array = np.asarray(values)
    if array.dtype == dtype and array.flags.c_contiguous and array.flags.aligned:
        return array
    if array.dtype.kind not in "iu" and array.size:
        raise BadSetting(f"{name} holds integers, not {array.dtype}")
    if not np.can_cast(array.dtype, dtype):  # what is too large for a step stays too large for it
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        array = array.clip(max(low, np.iinfo(array.dtype).min), high) if array.size else array
    return array.astype(dtype, order="C")


def _whole(name: str, value: Any) -> int:
    try:
        return index(value)
    except TypeError:
        raise BadSetting(f"{name} is a whole number, not {value!r}") from None


def as_number(value: Any) -> float:
    """A setting as a float. TypeError for what is no number, a number in a text among them."""
    if type(value) is float:
        return value
    try:
        if not isinstance(value, (str, bytes)):  # float would read a number in it
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"a number is expected, not {value!r}")


def _numbers(factor: Any, offset: Any, min_prob: Any) -> tuple[float, float, float]:
    """The settings of a draft that need not be whole."""
    if type(factor) is type(offset) is type(min_prob) is float:
        return factor, offset, min_prob
    given = {"max_spec_factor": factor, "max_spec_offset": offset, "min_token_prob": min_prob}
    for name, value in given.items():
        try:
            given[name] = as_number(value)
        except TypeError:
            raise BadSetting(f"{name} is a number, not {value!r}") from None
    return given["max_spec_factor"], given["max_spec_offset"], given["min_token_prob"]


def _checked(tokens: Tokens) -> NDArray[Any]:
    """Token ids as an array; the kernel refuses what is none in one of int32."""
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError) as error:  # sequences in it, of different lengths
        raise BadTokenId(f"token ids come as one sequence: {error}") from None
    if array.ndim != 1:
        raise BadTokenId(f"token ids come as one sequence, not with shape {array.shape}")
    if array.dtype != np.int32 and len(array) > 0:
        if array.dtype.kind not in "iu":
            raise BadTokenId(f"token ids are integers, not {array.dtype}")
        _check_range(array)
    return array


def _check_range(tokens: NDArray[Any]) -> None:
    if len(tokens) == 0:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high > MAX_TOKEN_ID:
        found = low if low < 0 else high
        raise BadTokenId(
            f"token ids are 0 to {MAX_TOKEN_ID}; position {int((tokens == found).argmax())} "
            f"holds {found}"
        )
