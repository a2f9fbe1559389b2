"""The class that takes the place of vLLM's `SuffixDecodingProposer`, in each shape in which vLLM
has called it.

The runner constructs it with its `VllmConfig` and calls `propose` at each decode step. Which of the
classes is right for the installed vLLM is what the surface manifest says. Must not know how drafts
are found or how the class gets in place; imports neither vLLM nor torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_drafter.loop import DraftLoop, DraftSettings
from vllm_drafter.metrics import publish
from vllm_drafter.settings import Settings, read_settings
from vllm_drafter.stamps import append_stamp, current_role, logger

__all__ = [
    "PROPOSERS",
    "InputBatchProposer",
    "SlotMappingsProposer",
    "SuffixProposer",
    "TokensPerStepProposer",
    "proposer_class",
]

NO_ADAPTER = 0
"""vLLM's LoRA id of a request without one."""
MAX_ADAPTERS = 64
"""With sharing `lora`: how many adapters' answers are kept."""


class SuffixProposer:
    """What the shapes have in common."""

    def __init__(self, vllm_config: Any) -> None:
        """Read vLLM's `suffix_decoding_*` settings and build the drafter."""
        settings = read_settings()
        self.sharing = settings.sharing
        self.settings = DraftSettings.from_vllm(vllm_config, self.sharing, settings.verify_tokens)
        self.num_speculative_tokens = self.settings.num_speculative_tokens
        self.loop = DraftLoop(self.settings)
        self._loops = {NO_ADAPTER: self.loop}
        keep_snapshot(self.loop, settings)
        announce(self, self.loop)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load: the runner calls this of every drafter."""

    def _propose(
        self,
        num_speculative_tokens: int,
        input_batch: Any,
        sampled_token_ids: Sequence[Sequence[int]],
    ) -> list[list[int]]:
        """One draft for each row, empty for a row that sampled nothing (a partial prefill)."""
        started = time.perf_counter()
        try:
            sampled = list(map(len, sampled_token_ids))
            drafts = self._propose_rows(num_speculative_tokens, input_batch, sampled)
            self.loop.activity.note_step(time.perf_counter() - started, sampled)
        except Exception as fault:  # noqa: BLE001 - whatever it is, the engine goes on
            self.loop.note_fault(fault)
            return [[] for _ in sampled_token_ids]
        return drafts

    def _propose_rows(
        self,
        num_speculative_tokens: int,
        input_batch: Any,
        sampled: list[int],
    ) -> list[list[int]]:
        """The same; `sampled` is how many tokens each row sampled."""
        drafts: list[list[int]] = [[] for _ in sampled]
        ids = input_batch.req_ids
        running = input_batch.req_id_to_index.keys()
        for loop in self._loops.values():
            loop.retire(loop.not_running(running))
        rows = self._rows_to_draft(input_batch, sampled)
        for adapter, its_rows in self._by_adapter(input_batch, rows).items():
            places = np.asarray(its_rows, dtype=np.int64)
            drafted = self._loop_of(adapter).step(
                list(map(ids.__getitem__, its_rows)),
                places,
                input_batch.num_prompt_tokens[places].tolist(),
                input_batch.token_ids_cpu,
                input_batch.num_tokens_no_spec,
                num_speculative_tokens,
            )
            if len(its_rows) == len(drafts):
                return drafted
            for row, draft in zip(its_rows, drafted, strict=True):
                drafts[row] = draft
        return drafts

    def _by_adapter(self, input_batch: Any, rows: list[int]) -> dict[int, list[int]]:
        """The rows of those who share answers: all, or by the id of their LoRA adapter."""
        if self.sharing != "lora":
            return {NO_ADAPTER: rows} if rows else {}
        found: dict[int, list[int]] = {}
        for row in rows:
            found.setdefault(int(input_batch.request_lora_mapping[row]), []).append(row)
        return found

    def _loop_of(self, adapter: int) -> DraftLoop:
        """The loop of an adapter; past MAX_ADAPTERS the one not used for longest is forgotten."""
        loop = self._loops.pop(adapter, None)
        if loop is None:
            loop = self.loop.new_sibling()
        self._loops[adapter] = loop  # the last in order is the last used
        if len(self._loops) > MAX_ADAPTERS:
            oldest = next(other for other in self._loops if other != NO_ADAPTER)
            self.loop.drop_sibling(self._loops.pop(oldest))
        return loop

    def _rows_to_draft(self, input_batch: Any, sampled: list[int]) -> list[int]:
        # The ids of a prompt given as embeddings are not in the row: what is there is someone
        # else's.
        unreadable = input_batch.req_prompt_embeds
        if not unreadable and all(sampled):
            return list(range(len(sampled)))
        return [row for row, count in enumerate(sampled) if count and row not in unreadable]


class InputBatchProposer(SuffixProposer):
    """Called with the batch and what it sampled (0.11.1 to 0.14)."""

    def propose(
        self, input_batch: Any, sampled_token_ids: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """One draft, maybe empty, for each row."""
        return self._propose(self.num_speculative_tokens, input_batch, sampled_token_ids)

    def _rows_to_draft(self, input_batch: Any, sampled: list[int]) -> list[int]:
        rows = super()._rows_to_draft(input_batch, sampled)
        # Up to 0.13 the rejection sampler cannot do penalties, min_p or logprobs, and the batch
        # lists such requests.
        refused = getattr(input_batch, "spec_decode_unsupported_reqs", ())
        return [row for row in rows if input_batch.req_ids[row] not in refused] if refused else rows


class SlotMappingsProposer(SuffixProposer):
    """Called with slot mappings as well (0.15 to 0.23), which drafting from text does not need."""

    def propose(
        self,
        input_batch: Any,
        sampled_token_ids: Sequence[Sequence[int]],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """One draft, maybe empty, for each row."""
        return self._propose(self.num_speculative_tokens, input_batch, sampled_token_ids)


class TokensPerStepProposer(SuffixProposer):
    """Called with the number of tokens that the scheduler takes at this step (since 0.24)."""

    def propose(
        self,
        num_speculative_tokens: int,
        input_batch: Any,
        sampled_token_ids: Sequence[Sequence[int]],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """One draft, maybe empty, of at most `num_speculative_tokens` for each row."""
        return self._propose(num_speculative_tokens, input_batch, sampled_token_ids)


PROPOSERS: dict[tuple[int, tuple[str, ...]], type[SuffixProposer]] = {
    (2, ()): InputBatchProposer,
    (2, ("slot_mappings",)): SlotMappingsProposer,
    (3, ("slot_mappings",)): TokensPerStepProposer,
}
"""By the runner's call of `propose`: the number of positional arguments and the keywords."""


def proposer_class(version: str) -> type[SuffixProposer]:
    """The class that the runner of that vLLM can call, as the surface manifest states the call."""
    from drafter_compat.surface import MethodCall, load_builtin_surface

    call = load_builtin_surface("vllm_drafter").get("proposer-propose", version)
    assert isinstance(call, MethodCall)
    shape = (len(call.args), tuple(name for name, _ in call.keywords))
    return PROPOSERS[shape]


def __getattr__(name: str) -> Any:
    # The class under vLLM's own name: the one for the installed vLLM.
    if name == "SuffixDecodingProposer":
        from drafter_compat.versions import installed_vllm

        return proposer_class(installed_vllm().version)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def keep_snapshot(loop: DraftLoop, settings: Settings) -> None:
    """Load and save the loop's cache as the settings say; of several workers the first saves."""
    if settings.snapshot is not None:
        first = not current_role().rank
        loop.keep(settings.snapshot, 60 * settings.snapshot_minutes, write=first)


def announce(proposer: object, loop: DraftLoop) -> None:
    """Say in the log and in the file of stamps that this process drafts; publish what it does."""
    role = current_role()
    settings = read_settings()
    publish(loop, role, settings.log_seconds)
    logger.info(
        "vllm-drafter: %s ready in %s, pid %d: depth %d, up to %d tokens a draft, kernels "
        "ready in %.1f s",
        type(proposer).__name__,
        role,
        os.getpid(),
        loop.settings.max_tree_depth,
        loop.settings.num_speculative_tokens,
        loop.warm_up_seconds,
    )
    append_stamp(
        settings.stamps,
        "proposer",
        role,
        proposer=type(proposer).__name__,
        warm_up_seconds=round(loop.warm_up_seconds, 3),
    )
