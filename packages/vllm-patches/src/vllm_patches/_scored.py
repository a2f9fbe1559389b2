"""The suffix proposer of vllm-drafter, asked for the scores of its drafts as well.

Apart from `hybrid`, because it imports vllm-drafter, which not everybody who wants a patch has.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from vllm_drafter.loop import DraftLoop, DraftSettings
from vllm_drafter.proposer import TokensPerStepProposer, announce

__all__ = ["ScoredProposer"]


class _ScoredLoop(DraftLoop):
    """Keeps the score of each request's last draft."""

    def __init__(self, settings: DraftSettings) -> None:
        self.scores: dict[Hashable, float] = {}
        super().__init__(settings)

    def _call(self, handles: Sequence[int], step: Any) -> Any:
        batch = super()._call(handles, step)
        self.scores.update(zip(step.keys, batch.scores.tolist(), strict=True))
        return batch


class ScoredProposer(TokensPerStepProposer):
    """Drafts, each with the number of its tokens that are expected to be accepted."""

    def __init__(self, vllm_config: Any) -> None:
        """Read vLLM's `suffix_decoding_*` settings, which have defaults under any method."""
        self.settings = DraftSettings.from_vllm(vllm_config)
        self.num_speculative_tokens = self.settings.num_speculative_tokens
        self.scored_loop = _ScoredLoop(self.settings)
        self.loop = self.scored_loop
        announce(self, self.loop)

    def propose_scored(
        self,
        num_speculative_tokens: int,
        input_batch: Any,
        sampled_token_ids: Sequence[Sequence[int]],
    ) -> tuple[list[list[int]], list[float]]:
        """A draft, maybe empty, and its score for each row; never raises."""
        self.scored_loop.scores.clear()
        drafts = self.propose(num_speculative_tokens, input_batch, sampled_token_ids)
        scores = self.scored_loop.scores
        return drafts, [
            scores.get(request_id, 0.0)
            for request_id, _ in zip(input_batch.req_ids, drafts, strict=False)
        ]
