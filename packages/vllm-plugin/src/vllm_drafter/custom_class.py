"""The proposer for vLLM's own extension point, `method="custom_class"` (since 0.22): no patch is
needed.

vLLM passes rows of token ids and no request ids, and moves rows as requests come and go. A row is
told by its content: it continues the request whose tokens are exactly the row's tokens without the
newly sampled ones. Two rows of the same content are interchangeable, so whichever of them a request
is taken for, its drafts are right. Must not know how drafts are found; imports neither vLLM nor
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_drafter.loop import DraftLoop, DraftSettings
from vllm_drafter.proposer import announce
from vllm_drafter.settings import is_switched_off
from vllm_drafter.stamps import logger

__all__ = ["CustomClassProposer", "RowTracker"]


class CustomClassProposer:
    """Suffix drafts through `{"method": "custom_class", "model":
    "vllm_drafter.CustomClassProposer"}`.

    vLLM's `suffix_decoding_*` settings apply here too. With `VLLM_DRAFTER=0` it proposes nothing.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Read the settings and build the drafter."""
        self.settings = DraftSettings.from_vllm(vllm_config)
        self.rows = RowTracker()
        self.loop: DraftLoop | None = None
        if is_switched_off():
            logger.warning(
                "vllm-drafter: VLLM_DRAFTER turns it off; the custom class proposes nothing"
            )
            return
        self.loop = DraftLoop(self.settings)
        announce(self, self.loop)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load: the runner calls this of every drafter."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: npt.NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """One draft, maybe empty, for each row of `sampled_token_ids`; never raises.

        Args:
            sampled_token_ids: for each of n rows the newly sampled ids; empty for a partial
            prefill. num_tokens_no_spec: int32 [max_num_reqs], how much of each row is filled,
            sampled ids included. token_ids_cpu: int32 [max_num_reqs, max_model_len]. slot_mappings:
            not used.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self.loop is None:
            return drafts
        try:
            rows = [row for row, sampled in enumerate(sampled_token_ids) if len(sampled) > 0]
            new = [len(sampled_token_ids[row]) for row in rows]
            keys, prompt_lengths, gone = self.rows.follow(
                rows, new, num_tokens_no_spec, token_ids_cpu
            )
            self.loop.retire(gone)
            if rows:
                drafted = self.loop.step(
                    keys,
                    np.asarray(rows, dtype=np.int64),
                    prompt_lengths,
                    token_ids_cpu,
                    num_tokens_no_spec,
                    self.settings.num_speculative_tokens,
                )
                for row, draft in zip(rows, drafted, strict=True):
                    drafts[row] = draft
        except Exception as fault:  # noqa: BLE001 - whatever it is, the engine goes on
            self.loop.note_fault(fault)
            return [[] for _ in sampled_token_ids]
        return drafts


class _Followed:
    """What is known of one request: its key, its tokens so far, and where they were last seen."""

    __slots__ = ("key", "length", "prompt_length", "row", "tokens")

    def __init__(self, key: int, row: int, prompt_length: int) -> None:
        self.key = key
        self.row = row
        self.prompt_length = prompt_length
        self.tokens: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self.length = 0

    def extend(self, row: int, tokens: npt.NDArray[np.int32]) -> None:
        """Take over the tokens of a row, of which the first `length` are known already."""
        if len(tokens) > len(self.tokens):
            grown = np.empty(max(256, 2 * len(tokens)), dtype=np.int32)
            grown[: self.length] = self.tokens[: self.length]
            self.tokens = grown
        self.tokens[self.length : len(tokens)] = tokens[self.length :]
        self.length = len(tokens)
        self.row = row

    def is_continued_by(self, tokens: npt.NDArray[np.int32]) -> bool:
        return self.length == len(tokens) and bool(
            np.array_equal(self.tokens[: self.length], tokens)
        )


class RowTracker:
    """Tells which request each row holds, by content alone, and gives each request a key."""

    def __init__(self) -> None:
        self._followed: list[_Followed] = []
        self._next_key = 0

    def follow(
        self,
        rows: Sequence[int],
        new: Sequence[int],
        num_tokens: npt.NDArray[np.int32],
        token_ids: npt.NDArray[np.int32],
    ) -> tuple[list[int], list[int], list[int]]:
        """Match the rows that sampled something with the requests of the step before.

        Args:
            rows: the rows, n of them.
            new: how many tokens each has sampled, n of them, each at least 1.
            num_tokens: int32 [max_num_reqs], the length of each row, sampled tokens included.
            token_ids: int32 [max_num_reqs, max_model_len].

        Returns:
            The key and the prompt length of each row's request, and the keys of the requests that
            are gone.
        """
        lengths = [int(num_tokens[row]) for row in rows]
        before = [
            token_ids[row, : length - count]
            for row, length, count in zip(rows, lengths, new, strict=True)
        ]
        matched = self._match(rows, before)
        for place, row in enumerate(rows):
            request = matched[place]
            if request is None:
                request = matched[place] = _Followed(
                    self._next_key, row, lengths[place] - new[place]
                )
                self._next_key += 1
            request.extend(row, token_ids[row, : lengths[place]])
        running = [request for request in matched if request is not None]
        keys = [request.key for request in running]
        gone = list({request.key for request in self._followed} - set(keys))
        self._followed = running
        return keys, [request.prompt_length for request in running], gone

    def _match(
        self, rows: Sequence[int], before: Sequence[npt.NDArray[np.int32]]
    ) -> list[_Followed | None]:
        """For each row the request that it continues, or None; a request is given once."""
        by_row = {request.row: request for request in self._followed}
        matched: list[_Followed | None] = []
        moved: list[int] = []
        for place, row in enumerate(rows):
            request = by_row.get(row)
            if request is not None and request.is_continued_by(before[place]):
                del by_row[row]
                matched.append(request)
            else:
                matched.append(None)
                moved.append(place)
        by_length: dict[int, list[_Followed]] = {}
        if moved:
            for request in by_row.values():
                by_length.setdefault(request.length, []).append(request)
        for place in moved:
            candidates = by_length.get(len(before[place]), [])
            for request in candidates:
                if request.is_continued_by(before[place]):
                    matched[place] = request
                    candidates.remove(request)
                    break
        return matched
