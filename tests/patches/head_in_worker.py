"""What a worker does for the tests of the LM head.

A module of its own: a function of the script that was started cannot be sent to a worker, where
that script has another name.
"""

from __future__ import annotations

from typing import Any


def keep_head(model: Any) -> None:
    """In the worker: from now on keep what goes into the LM head and what comes out."""
    model.kept = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        # Ranks above 0 get no logits where they are gathered on the first.
        if output is not None:
            model.kept.append((inputs[1].clone(), output.clone()))

    model.logits_processor.register_forward_hook(keep)


def kept_head(model: Any) -> dict[str, Any]:
    """In the worker: what was kept, as float64 (exact), and the types it had."""
    import torch

    if not model.kept:
        return {"logits": []}
    hidden = torch.cat([one for one, _ in model.kept]).double()
    logits = torch.cat([one for _, one in model.kept])
    return {
        "hidden": hidden.numpy(),
        "logits": logits.double().numpy(),
        "weights": str(model.lm_head.weight.dtype),
        "computed": str(logits.dtype),
    }
