"""Patches for vLLM that people ask for, each off until VLLM_PATCHES names it.

One module each: `priority`, `lm_head`, `rollout`, `hybrid`. vLLM imports this package in every
process that it starts, so neither it nor those modules import vLLM, torch or numba. How a patch is
laid over vLLM is drafter-compat's affair.
"""

from __future__ import annotations

from drafter_compat.registry import Registry
from vllm_patches.hybrid import HybridDrafting, HybridDraftingGuard
from vllm_patches.lm_head import Fp32LmHead
from vllm_patches.priority import PriorityArgument, PriorityScheduler
from vllm_patches.rollout import OutputLengths, RolloutReplay

__all__ = ["register", "registry"]

__version__ = "0.1.0"

registry = Registry(
    "vllm-drafter-patches",
    [
        PriorityArgument,
        PriorityScheduler,
        Fp32LmHead,
        OutputLengths,
        RolloutReplay,
        HybridDraftingGuard,
        HybridDrafting,
    ],
    versions=">=0.26,<0.34",
    selection=True,
)
"""What `register` applies."""


def register() -> None:
    """Entry point of `vllm.general_plugins`: apply the chosen patches in this process.

    Safe to call more than once. Raises `drafter_compat.patch.PatchError`; vLLM is then untouched.
    """
    registry.apply()
