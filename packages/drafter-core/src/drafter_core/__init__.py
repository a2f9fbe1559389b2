"""SuffixDecoding drafts from generated tokens; knows nothing of vLLM."""

from drafter_core.drafter import (
    BatchDraft,
    Draft,
    DrafterStats,
    RestoredResponse,
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
    SnapshotError,
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
    "RestoredResponse",
    "SnapshotError",
    "SuffixDrafter",
    "TreeDraft",
    "UnknownRequest",
    "warm_up",
]
