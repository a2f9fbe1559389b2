"""The two changes to vLLM, as declarations. How they are laid over vLLM is drafter-compat's affair.

Each is made where the name is defined; drafter-compat rebinds it wherever it was from-imported
already (`vllm.config.speculative`, `vllm.v1.worker.gpu_model_runner`), and whoever from-imports it
later gets ours. Must not import vLLM: both targets are patched when vLLM imports them.
"""

from __future__ import annotations

from drafter_compat.patch import Patch, lazy
from drafter_compat.registry import Registry

__all__ = ["registry"]


class SuffixGate(
    Patch,
    target="vllm.utils.import_utils",
    name="suffix-gate",
    why='let method="suffix" pass without arctic-inference, which it does not need with us',
    remove_when="vLLM lets a plugin bring a suffix drafter",
):
    """vLLM refuses the method unless this says that arctic-inference can be imported."""

    @staticmethod
    def has_arctic_inference() -> bool:
        """True: the drafter is there."""
        return True


class SuffixProposer(
    Patch,
    target="vllm.v1.spec_decode.suffix_decoding",
    name="suffix-proposer",
    why="draft with drafter-core where vLLM would draft with arctic-inference",
    remove_when="vLLM lets a plugin bring a suffix drafter",
    requires=("suffix-gate",),
):
    """The class that the runner constructs, and tests with isinstance before it calls it."""

    SuffixDecodingProposer = lazy("vllm_drafter.proposer:SuffixDecodingProposer")


registry = Registry("vllm-drafter", [SuffixGate, SuffixProposer])
"""What `register` applies."""
