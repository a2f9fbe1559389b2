"""SuffixDecoding drafts from generated tokens; knows nothing of vLLM."""

from drafter_core.drafter import (
    BatchDraft,
    Draft,
    DrafterStats,
    SuffixDrafter,
    TreeDraft,
    warm_up,
)
from drafter_core.errors import (
    BadSetting,
    BadTokenId,
    CapacityExhausted,
    CorruptState,
    DrafterError,
    RequestActive,
    UnknownRequest,
)

__all__ = [
    "BadSetting",
    "BadTokenId",
    "BatchDraft",
    "CapacityExhausted",
    "CorruptState",
    "Draft",
    "DrafterError",
    "DrafterStats",
    "RequestActive",
    "SuffixDrafter",
    "TreeDraft",
    "UnknownRequest",
    "warm_up",
]
