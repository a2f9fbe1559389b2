"""The proposer for vLLM's own extension point, `method="custom_class"` (since 0.22): no patch is
needed, and with `VLLM_DRAFTER_ROUTE=custom_class` none is made.

vLLM passes rows of token ids and no request ids, and moves rows as requests come and go. A row is
told by its content: it continues the request whose tokens are exactly the row's tokens without the
newly sampled ones. Two rows of the same content are interchangeable, so whichever of them a request
is taken for, its drafts are right. Must not know how drafts are found; imports neither vLLM nor
torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_drafter.loop import DraftLoop, DraftSettings
from vllm_drafter.proposer import announce, keep_snapshot
from vllm_drafter.settings import SHARING, SettingError, read_settings
from vllm_drafter.stamps import logger

__all__ = ["CustomClassProposer", "RowTracker"]


class CustomClassProposer:
    """Suffix drafts through `{"method": "custom_class", "model":
    "vllm_drafter.CustomClassProposer"}`.

    vLLM's `suffix_decoding_*` settings apply here too. With `VLLM_DRAFTER=0` it proposes nothing.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Read the settings and build the drafter."""
        self.loop: DraftLoop | None = None
        settings = read_settings()
        if not settings.enabled:
            logger.warning(
                "vllm-drafter: VLLM_DRAFTER turns it off; the custom class proposes nothing"
            )
            return
        sharing = settings.sharing
        if sharing == "lora":
            raise SettingError(
                f"{SHARING}=lora: expected global or none with the custom class, which vLLM tells "
                'of no LoRA adapter. Choose one of them, or method="suffix".'
            )
        self.settings = DraftSettings.from_vllm(vllm_config, sharing, settings.verify_tokens)
        self.rows = RowTracker()
        self.loop = DraftLoop(self.settings)
        keep_snapshot(self.loop, settings)
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
        started = time.perf_counter()
        try:
            sampled = list(map(len, sampled_token_ids))
            rows = [row for row, count in enumerate(sampled) if count]
            new = [sampled[row] for row in rows]
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
            self.loop.activity.note_step(time.perf_counter() - started, sampled)
        except Exception as fault:  # noqa: BLE001 - whatever it is, the engine goes on
            self.loop.note_fault(fault)
            return [[] for _ in sampled_token_ids]
        return drafts


class _Followed:
    """What is known of one request: its key, its tokens so far, and where they were last seen."""

    __slots__ = ("key", "prompt_length", "row", "tokens")

    def __init__(self, key: int, prompt_length: int) -> None:
        self.key = key
        self.prompt_length = prompt_length
        self.row = -1
        self.tokens = b""
        """The raw bytes of the row: of all ways to keep and compare them the fastest."""


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
        lengths = num_tokens[rows].tolist()
        texts = [
            token_ids[row, :length].tobytes() for row, length in zip(rows, lengths, strict=True)
        ]
        size = token_ids.itemsize
        before = [text[: len(text) - size * count] for text, count in zip(texts, new, strict=True)]
        running = []
        for place, request in enumerate(self._match(rows, before)):
            if request is None:
                request = _Followed(self._next_key, lengths[place] - new[place])
                self._next_key += 1
            request.row = rows[place]
            request.tokens = texts[place]
            running.append(request)
        keys = [request.key for request in running]
        gone = list({request.key for request in self._followed} - set(keys))
        self._followed = running
        return keys, [request.prompt_length for request in running], gone

    def _match(self, rows: Sequence[int], before: Sequence[bytes]) -> list[_Followed | None]:
        """For each row the request that it continues, or None; a request is given once."""
        unmatched = {request.row: request for request in self._followed}
        matched: list[_Followed | None] = []
        moved: list[int] = []
        for place, row in enumerate(rows):
            request = unmatched.get(row)
            if request is not None and request.tokens == before[place]:
                del unmatched[row]
                matched.append(request)
            else:
                matched.append(None)
                moved.append(place)
        if moved and unmatched:
            by_text: dict[bytes, list[_Followed]] = {}
            for request in unmatched.values():
                by_text.setdefault(request.tokens, []).append(request)
            for place in moved:
                if candidates := by_text.get(before[place]):
                    matched[place] = candidates.pop()
        return matched
