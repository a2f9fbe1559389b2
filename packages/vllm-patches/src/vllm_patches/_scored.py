"""The suffix proposer of vllm-drafter, asked for the scores of its drafts as well.

Apart from `hybrid`, because it imports vllm-drafter, which not everybody who wants a patch has.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_drafter.loop import DraftLoop
from vllm_drafter.proposer import TokensPerStepProposer

__all__ = ["ScoredProposer"]


class ScoredProposer(TokensPerStepProposer):
    """Drafts, each with the number of its tokens that are expected to be accepted."""

    def __init__(self, vllm_config: Any) -> None:
        """Read vLLM's `suffix_decoding_*` settings, which have defaults under any method."""
        super().__init__(vllm_config)
        self._scores: dict[Hashable, float] = {}
        self._scored = {self.loop}
        _note_scores(self.loop, self._scores)

    def _loop_of(self, adapter: int) -> DraftLoop:
        loop = super()._loop_of(adapter)
        if loop not in self._scored:
            self._scored.add(loop)
            _note_scores(loop, self._scores)
        return loop

    def propose_scored(
        self,
        num_speculative_tokens: int,
        input_batch: Any,
        sampled_token_ids: Sequence[Sequence[int]],
    ) -> tuple[list[list[int]], list[float]]:
        """A draft, maybe empty, and its score for each row; never raises."""
        self._scores.clear()
        drafts = self.propose(num_speculative_tokens, input_batch, sampled_token_ids)
        rows = zip(input_batch.req_ids, drafts, strict=False)
        return drafts, [self._scores.get(request_id, 0.0) for request_id, _ in rows]


def _note_scores(loop: DraftLoop, scores: dict[Hashable, float]) -> None:
    """Put the scores of a loop's drafts down by request, at each of its calls of the drafter."""
    call = loop._call

    def noting(handles: npt.NDArray[np.int64], step: Any) -> Any:
        batch = call(handles, step)
        scores.update(zip(step.keys, batch.scores.tolist(), strict=True))
        return batch

    loop._call = noting  # type: ignore[method-assign]
