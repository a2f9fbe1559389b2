"""`hybrid-drafting`: for each request and step, our suffix draft or that of the configured method.

    VLLM_PATCHES=hybrid-drafting vllm serve MODEL \\
        --speculative-config '{"method": "ngram", "num_speculative_tokens": 8, ...}'

A suffix draft is best where the text repeats, the configured method (`ngram`, a draft model, EAGLE)
may be best elsewhere, and one request can need both. The suffix draft comes with a score, the
number of its tokens expected to be accepted; where it beats a threshold, or where the other method
has nothing, it is taken. Drafts are only ever proposals: what vLLM accepts, and so what is
generated, is the same whatever is proposed.

Drafting from text needs the sampled ids on the host at each step, which asynchronous scheduling
does not give: a draft model and EAGLE need `--no-async-scheduling`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from drafter_compat.patch import Patch
from drafter_compat.surface import Attributes

__all__ = [
    "THRESHOLD_VARIABLE",
    "HybridDrafter",
    "HybridDrafting",
    "HybridDraftingGuard",
    "NotedBatch",
    "better_draft",
    "overlay",
    "read_threshold",
    "valid_ids",
]

THRESHOLD_VARIABLE = "VLLM_HYBRID_DRAFTING_THRESHOLD"
DEFAULT_THRESHOLD = 2.0
VERSIONS = ">=0.30,<0.34"


def read_threshold(environ: Mapping[str, str] | None = None) -> float:
    """The score from which on a suffix draft is taken. ValueError for what is no number >= 0."""
    text = (os.environ if environ is None else environ).get(THRESHOLD_VARIABLE, "")
    if not text:
        return DEFAULT_THRESHOLD
    try:
        threshold = float(text)
    except ValueError:
        threshold = -1.0
    if not threshold >= 0:
        raise ValueError(
            f"{THRESHOLD_VARIABLE}={text!r}: expected a number >= 0, the expected number of "
            f"accepted tokens from which on the suffix draft is taken; unset it for "
            f"{DEFAULT_THRESHOLD}"
        )
    return threshold


def better_draft(
    suffix: Sequence[int], score: float, other: Sequence[int], threshold: float
) -> tuple[str, Sequence[int]]:
    """Which draft to propose, and whose it is: `suffix` or `proposer`.

    Where one begins with the other, they agree, and the longer one can only gain.
    """
    shared = min(len(suffix), len(other))
    if shared and suffix[:shared] == other[:shared]:
        return ("suffix", suffix) if len(suffix) >= len(other) else ("proposer", other)
    if suffix and (score >= threshold or not other):
        return "suffix", suffix
    return "proposer", other


class HybridDrafter:
    """Drafts from suffixes beside a runner's own proposer, and chooses between the two."""

    def __init__(self, vllm_config: Any) -> None:
        """Build the suffix drafter with vLLM's `suffix_decoding_*` settings.

        ValueError where the configured method leaves nothing to choose, or keeps the sampled ids
        on the device.
        """
        _check_configured(vllm_config)
        try:
            from vllm_patches._scored import ScoredProposer
        except ImportError as error:
            raise ValueError(
                f"hybrid-drafting: the suffix drafter is not installed ({error}); "
                f"pip install 'vllm-drafter-patches[hybrid]'"
            ) from error
        self.threshold = read_threshold()
        self.proposer = ScoredProposer(vllm_config)
        self.taken = {"suffix": 0, "proposer": 0}
        """How many drafts, empty ones left out, came from which."""

    def choose(
        self,
        num_speculative_tokens: int,
        input_batch: Any,
        sampled_token_ids: Sequence[Sequence[int]],
        others: Sequence[Sequence[int]],
    ) -> list[list[int]]:
        """The better of each row's two drafts.

        Args:
            num_speculative_tokens: most tokens in a draft.
            input_batch: the runner's, with what was sampled in its rows.
            sampled_token_ids: for each row the newly sampled ids; empty for a partial prefill.
            others: for each row the draft of the configured method.
        """
        drafts, scores = self.proposer.propose_scored(
            num_speculative_tokens, input_batch, sampled_token_ids
        )
        chosen: list[list[int]] = []
        for suffix, score, other in zip(drafts, scores, others, strict=True):
            source, draft = better_draft(suffix, score, list(other), self.threshold)
            self.taken[source] += bool(draft)
            chosen.append(list(draft))
        return chosen


def _check_configured(vllm_config: Any) -> None:
    speculative = vllm_config.speculative_config
    if speculative is None:
        raise ValueError(
            "hybrid-drafting chooses between two drafts, but no speculative method is configured: "
            "add --speculative-config, or take the patch out of VLLM_PATCHES"
        )
    method = speculative.method
    if method in ("suffix", "ngram_gpu", "extract_hidden_states"):
        raise ValueError(
            f"hybrid-drafting chooses between suffix drafts and those of another method; it does "
            f"not work with method {method!r}. Use ngram, draft_model or eagle, or take the patch "
            f"out of VLLM_PATCHES"
        )
    if vllm_config.scheduler_config.async_scheduling:
        raise ValueError(
            f"hybrid-drafting needs the sampled ids on the host at each step: with method "
            f"{method!r} add --no-async-scheduling"
        )


class NotedBatch:
    """A runner's batch whose rows have got what was sampled, before the runner has noted it.

    Methods that draft on the device are asked for drafts first. What is written here is what the
    runner writes right after.
    """

    def __init__(self, batch: Any, sampled: Sequence[Sequence[int]]) -> None:
        """Note what was sampled: for each row its ids, none for a partial prefill."""
        self._batch = batch
        self.num_tokens_no_spec = batch.num_tokens_no_spec.copy()
        for row, ids in enumerate(sampled):
            start = int(self.num_tokens_no_spec[row])
            room = batch.token_ids_cpu.shape[1] - start
            batch.token_ids_cpu[row, start : start + len(ids)] = ids[:room]
            self.num_tokens_no_spec[row] += min(len(ids), room)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


def valid_ids(
    sampled: Sequence[Sequence[int]], vocabulary: int, partial: Sequence[bool]
) -> list[list[int]]:
    """Each row's ids without those that stand for a rejected draft; none for a partial prefill."""
    return [
        [] if unfinished else [token for token in row if 0 <= token < vocabulary]
        for row, unfinished in zip(sampled, partial, strict=False)
    ]


def overlay(others: Any, chosen: Sequence[Sequence[int]]) -> Any:
    """A tensor of drafts, int [n, k], with each row's first tokens replaced by those chosen.

    A row's length is fixed there, so a shorter draft goes on with what the row had.
    """
    rows = others.tolist()
    width = others.shape[1]
    mixed = [[*draft, *row[len(draft) :]][:width] for row, draft in zip(rows, chosen, strict=True)]
    return others.new_tensor(mixed) if mixed else others


class HybridDraftingGuard(
    Patch,
    target="vllm.v1.worker.gpu.model_runner:GPUModelRunner",
    name="hybrid-drafting-guard",
    why="refuse a model runner in which hybrid-drafting would do nothing",
    remove_when="hybrid-drafting knows vLLM's second model runner",
    versions=VERSIONS,
    expects={"__init__": "(self, vllm_config, device)"},
    default=False,
):
    """vLLM's second model runner drafts on the device."""

    def __init__(self, vllm_config: Any, device: Any) -> None:
        """Refuse."""
        raise RuntimeError(
            "hybrid-drafting works in vLLM's first model runner, and this is the second: set "
            "VLLM_USE_V2_MODEL_RUNNER=0, or take the patch out of VLLM_PATCHES"
        )


class HybridDrafting(
    Patch,
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner",
    name="hybrid-drafting",
    why="propose whichever is better, our suffix draft or that of the configured method",
    upstream="https://github.com/vllm-project/vllm/pull/24344",
    remove_when="vLLM combines suffix decoding with another method",
    versions=VERSIONS,
    expects={
        "__init__": "(self, vllm_config, device)",
        "propose_draft_token_ids": "(self, scheduler_output, sampled_token_ids, "
        "sampling_metadata, hidden_states, sample_hidden_states, aux_hidden_states, "
        "spec_decode_metadata, common_attn_metadata, slot_mappings)",
    },
    requires=("hybrid-drafting-guard",),
    default=False,
    relies_on=(
        Attributes(
            id="hybrid-drafting:runner",
            why="read the rows, and say that drafts have no probabilities",
            module="vllm.v1.worker.gpu_model_runner",
            name="GPUModelRunner",
            reads=("input_batch", "discard_request_mask", "_draft_probs", "_draft_prob_req_ids"),
        ),
        Attributes(
            id="hybrid-drafting:step",
            why="know how many tokens the scheduler takes",
            module="vllm.v1.core.sched.output",
            name="SchedulerOutput",
            reads=("num_spec_tokens_to_schedule",),
        ),
    ),
):
    """In the worker, where drafts are made."""

    def __init__(self, vllm_config: Any, device: Any) -> None:
        """As vLLM's, with a hybrid drafter."""
        HybridDrafting.original("__init__")(self, vllm_config, device)
        self.hybrid_drafter = HybridDrafter(vllm_config)

    def propose_draft_token_ids(
        self, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As vLLM's, and for each row the better draft."""
        original = HybridDrafting.original("propose_draft_token_ids")
        drafts = original(self, scheduler_output, sampled_token_ids, *args, **kwargs)
        # The probabilities are those of the method's own drafts. Without them vLLM treats every
        # draft as certain, which leaves the distribution of what is generated as it is.
        self._draft_probs = None
        self._draft_prob_req_ids = None
        batch: Any = self.input_batch  # type: ignore[attr-defined]
        if not isinstance(sampled_token_ids, list):
            partial = self.discard_request_mask.np  # type: ignore[attr-defined]
            sampled_token_ids = valid_ids(sampled_token_ids.tolist(), batch.vocab_size, partial)
            batch = NotedBatch(batch, sampled_token_ids)
        in_lists = isinstance(drafts, list)
        chosen = self.hybrid_drafter.choose(
            scheduler_output.num_spec_tokens_to_schedule,
            batch,
            sampled_token_ids,
            drafts if in_lists else drafts.tolist(),
        )
        return chosen if in_lists else overlay(drafts, chosen)
