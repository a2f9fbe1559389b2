"""The installed runner's own call of a drafter, of the suffix proposer and of the custom class.

Imports vLLM; must not know how drafts are found.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.v1.worker import gpu_model_runner

if TYPE_CHECKING:
    from batch import Batch


class _Config:
    """A speculative config of one method: every `use_...()` question of the runner is a no."""

    def __init__(self, method: str) -> None:
        self.method = method

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("use_", "uses_")):
            return lambda: False
        raise AttributeError(name)


def ask_as_the_runner(
    drafter: object, real: Batch, sampled: list[list[int]], k: int, method: str = "suffix"
) -> Any:
    """Run the installed runner's own `propose_draft_token_ids` with this drafter and batch."""
    runner = SimpleNamespace(
        speculative_config=_Config(method), drafter=drafter, input_batch=real.input_batch
    )
    scheduled = SimpleNamespace(
        total_num_scheduled_tokens=sum(map(len, sampled)), num_spec_tokens_to_schedule=k
    )
    function = gpu_model_runner.GPUModelRunner.propose_draft_token_ids
    given = {"scheduler_output": scheduled, "sampled_token_ids": sampled}
    rest = [name for name in inspect.signature(function).parameters if name != "self"]
    return function(runner, **{name: given.get(name) for name in rest})
