"""A drop-in for `arctic_inference.suffix_decoding` 0.3.0: change the import, keep the code.

    from drafter_core.suffix_decoding import SuffixDecodingCache

Public methods, arguments, defaults and exception types are the peer's, and so are the drafts: token
ids, parents, probabilities, score and match length (docs/parity.md). What differs, on purpose:

- `max_spec_tokens=None`, the default, means `max_tree_depth`; in the peer it raises AttributeError.
- Negative token ids and 2**31 - 1 raise ValueError; the peer takes them.
- Any sequence of ints will do that `array.array` takes, not every object with a length and items.
- A call that raises changes nothing; the peer may be left with a request that is active but not
  cached.
- `max_tree_depth` is at most 4096, and `max_cached_requests` a whole number.
- `SuffixDecodingDraft.from_native` is not there: it converts an object of the peer's compiled
  module, and there is none here.

Its kernels are those of exact mode: `drafter_core.warm_up(exact=True)` compiles them ahead of time.

Knows only the peer's interface and `SuffixDrafter`. New code is better served by the latter: one
call per batch, and by default drafts that are accepted more often.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, KeysView, Sequence
from dataclasses import dataclass, field
from operator import index

import numpy as np
from numpy.typing import NDArray

from drafter_core.drafter import SuffixDrafter, as_number

__all__ = ["SuffixDecodingCache", "SuffixDecodingDraft"]

TokenIds = NDArray[np.int32] | Sequence[int]


@dataclass
class SuffixDecodingDraft:
    """One draft.

    Attributes:
        token_ids: the drafted token ids.
        parents: for each token the index of the one before it; -1 for the end of the context.
        probs: for each token the estimated probability of the path up to it.
        score: the sum of `probs`.
        match_len: how many tokens of the context the draft rests on; without a draft, the longest
            match.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    score: float = 0.0
    match_len: int = 0


class SuffixDecodingCache:
    """Drafts from the prompt of a request and from the responses to this and earlier ones.

    Args:
        max_tree_depth: longest match plus draft, in tokens. Without at least 2 nothing is drafted.
        max_cached_requests: how many responses are kept, running ones included; the one that was
            started first goes first. 0 keeps none, a negative number all.

    Raises:
        ValueError: `max_cached_requests` is above 2**31 - 1, or `max_tree_depth` above 4096.
        TypeError: a number that is not whole.
    """

    def __init__(self, max_tree_depth: int = 64, max_cached_requests: int = -1) -> None:
        if max_cached_requests > 2**31 - 1:
            raise ValueError(f"max_cached_requests is at most 2**31 - 1, not {max_cached_requests}")
        self._max_tree_depth = index(max_tree_depth)
        self._max_cached_requests = index(max_cached_requests)
        self._drafter = SuffixDrafter(
            max(1, self._max_tree_depth), max(-1, self._max_cached_requests), exact=True
        )

    @property
    def max_tree_depth(self) -> int:
        """Longest match plus draft, in tokens, as given."""
        return self._max_tree_depth

    @property
    def max_cached_requests(self) -> int:
        """How many responses are kept, as given."""
        return self._max_cached_requests

    @property
    def active_requests(self) -> KeysView[Hashable]:
        """The ids of the requests that were started and not stopped."""
        return self._drafter.active_requests

    @property
    def cached_requests(self) -> KeysView[Hashable]:
        """The ids whose responses are kept, running ones included, oldest first."""
        return self._drafter.cached_requests

    def start_request(self, req_id: Hashable, prompt_token_ids: TokenIds) -> None:
        """Begin a request. A response that is kept under the same id is forgotten first.

        Args:
            req_id: names the request.
            prompt_token_ids: a sequence of ints, or a contiguous int32 array [n].

        Raises:
            ValueError: the request is active already, or the array is of another kind.
        """
        if req_id in self._drafter.active_requests:
            raise ValueError(f"Request '{req_id}' is already active")
        self._drafter.start_request(req_id, _tokens(prompt_token_ids))

    def stop_request(self, req_id: Hashable) -> None:
        """End a request and forget its prompt. Its response is kept until it is evicted.

        Raises:
            ValueError: the request is not active.
        """
        self._expect_active(req_id)
        self._drafter.stop_request(req_id)

    def add_active_response(self, req_id: Hashable, token_ids: TokenIds) -> None:
        """Append to the response of a request.

        Args:
            req_id: an active request.
            token_ids: a sequence of ints, or a contiguous int32 array [n].

        Raises:
            ValueError: the request is not active, or the array is of another kind.
        """
        self._expect_active(req_id)
        self._drafter.append(req_id, _tokens(token_ids))

    def evict_cached_response(self, req_id: Hashable) -> None:
        """Forget a response. A request that still runs keeps drafting from its own text.

        Raises:
            ValueError: no response is kept under this id.
        """
        if req_id not in self._drafter.cached_requests:
            raise ValueError(f"Request '{req_id}' is not cached")
        self._drafter.evict_cached_response(req_id)

    def speculate(
        self,
        req_id: Hashable,
        context: TokenIds,
        max_spec_tokens: int | None = None,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        use_tree_spec: bool = False,
    ) -> SuffixDecodingDraft:
        """Draft what probably follows the context.

        Args:
            req_id: an active request.
            context: the tokens to continue: a sequence of ints, or a contiguous int32 array [n].
                Its last `max_tree_depth` tokens count; a match is shorter than that.
            max_spec_tokens: most tokens of the draft. None: `max_tree_depth`.
            max_spec_factor: a match of m tokens allows a draft of
                `max_spec_factor * m + max_spec_offset` tokens.
            max_spec_offset: see max_spec_factor.
            min_token_prob: least probability of a drafted token.
            use_tree_spec: draft a tree of tokens instead of one path.

        Raises:
            ValueError: the request is not active, or the array is of another kind.
            TypeError: an argument of another type.
        """
        self._expect_active(req_id)
        if not isinstance(use_tree_spec, bool):
            raise TypeError(f"use_tree_spec is True or False, not {use_tree_spec!r}")
        most = self._max_tree_depth if max_spec_tokens is None else index(max_spec_tokens)
        if most > 2**31 - 1:
            raise TypeError(f"max_spec_tokens is at most 2**31 - 1, not {most}")
        if isinstance(context, Sequence):  # only the end counts: do not read the rest
            context = context[-max(1, self._max_tree_depth) :]
        found = self._drafter.speculate(
            req_id, _tokens(context), max(0, most), as_number(max_spec_factor),
            as_number(max_spec_offset), as_number(min_token_prob), use_tree_spec,
        )  # fmt: skip
        draft = found.draft
        return SuffixDecodingDraft(
            draft.token_ids, found.parents, draft.probs, draft.score, draft.match_length
        )

    def _expect_active(self, req_id: Hashable) -> None:
        if req_id not in self._drafter.active_requests:
            raise ValueError(f"Request '{req_id}' is not active")


def _tokens(given: TokenIds) -> NDArray[np.int32]:
    """The tokens as int32 [n], once it is sure that the peer would take them."""
    if isinstance(given, np.ndarray):
        if given.ndim != 1:
            raise ValueError(f"an array of token ids has one dimension, not {given.ndim}")
        if given.dtype.type is not np.int32 or not given.dtype.isnative:
            raise ValueError(f"an array of token ids is of native int32, not {given.dtype}")
        if not given.flags.c_contiguous:
            raise ValueError("an array of token ids is contiguous; pass numpy.ascontiguousarray(a)")
        return given
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise TypeError(f"token ids come as a sequence of ints, not as {type(given).__name__}")
    try:
        # An array of C ints refuses a float where numpy would round it.
        return np.asarray(array("i", given))
    except OverflowError:
        found = max(given, key=abs)
        raise TypeError(f"token ids are 0 to {2**31 - 2}; found {found}") from None
