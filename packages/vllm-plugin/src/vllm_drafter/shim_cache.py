"""What `arctic_inference.suffix_decoding` holds on the route `shim`: drafter-core's drop-in.

The caller's proposer is in charge here, so its errors are its own to handle. Imports drafter-core,
hence numba; must not know vLLM.
"""

from __future__ import annotations

import time

import drafter_core
from drafter_core.suffix_decoding import SuffixDecodingCache as DropIn
from drafter_core.suffix_decoding import SuffixDecodingDraft
from vllm_drafter.settings import read_settings
from vllm_drafter.stamps import append_stamp, current_role, logger

__all__ = ["SuffixDecodingCache", "SuffixDecodingDraft"]


class SuffixDecodingCache(DropIn):
    """The drop-in, ready before the first request, and within what may be shared."""

    def __init__(self, max_tree_depth: int = 64, max_cached_requests: int = -1) -> None:
        settings = read_settings()
        started = time.perf_counter()
        logger.info(
            "vllm-drafter: preparing the drafter's kernels; the first start on a machine "
            "compiles them, which can take a minute"
        )
        drafter_core.warm_up(exact=True)
        shared = 0 if settings.sharing == "none" else max_cached_requests
        super().__init__(max_tree_depth, shared)
        seconds = time.perf_counter() - started
        role = current_role()
        logger.info(
            "vllm-drafter: the shim's SuffixDecodingCache ready in %s, depth %d, in %.1f s",
            role,
            max_tree_depth,
            seconds,
        )
        append_stamp(
            settings.stamps,
            "proposer",
            role,
            proposer=type(self).__name__,
            warm_up_seconds=round(seconds, 3),
        )
