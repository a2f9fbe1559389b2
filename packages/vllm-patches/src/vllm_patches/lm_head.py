"""`fp32-lm-head`: the LM head's matrix product in float32, its weights left as they are.

In bfloat16 the product is rounded to 8 significant bits, which moves log-probabilities enough to
hurt reinforcement learning, whose trainer computes them in float32. vLLM can do this itself since
0.26, if a `head_dtype` says so; the patch answers float32 where vLLM asks for it, so that a
deployment can choose it with a variable. Quantised heads are refused, by vLLM, at start-up.
"""

from __future__ import annotations

from typing import Any

from drafter_compat.patch import Patch
from drafter_compat.surface import FunctionShape

__all__ = ["Fp32LmHead"]


class Fp32LmHead(
    Patch,
    target="vllm.config.model:ModelConfig",
    name="fp32-lm-head",
    why="compute logits in float32, as trainers do, with the weights unchanged",
    upstream="https://github.com/vllm-project/vllm/pull/48390",
    remove_when='the model can be started with --hf-overrides \'{"head_dtype": "float32"}\'',
    versions=">=0.26,<0.34",
    default=False,
    relies_on=(
        FunctionShape(
            id="fp32-lm-head:apply-head",
            why="have the head's product computed in head_dtype",
            module="vllm.model_executor.layers.logits_processor",
            name="LogitsProcessor._apply_head",
            signature="(self, lm_head, hidden_states, embedding_bias)",
        ),
    ),
):
    """The one place that says in which type the head is computed."""

    @property
    def head_dtype(self) -> Any:
        """float32, unless the model's own configuration names a type."""
        import torch

        # Read from the class's layer, not from `self`: that would be this property again.
        own = Fp32LmHead.original("head_dtype").fget(self)
        if getattr(self.hf_config, "head_dtype", None) is not None:  # type: ignore[attr-defined]
            return own
        from vllm.platforms import current_platform

        if torch.float32 not in current_platform.supported_dtypes:
            raise ValueError(
                "fp32-lm-head: this platform has no float32; take the patch out of VLLM_PATCHES"
            )
        return torch.float32
