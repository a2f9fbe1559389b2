"""`rollout-replay`: an output length for each of the `n` sequences of a request.

    SamplingParams(n=4, extra_args={"output_lengths": [312, 87, 1024, 540]})

Replays the shape of a reinforcement-learning rollout (who ends when, and so how the batch empties)
without the weights that made it. Each sequence gets exactly its length: it does not end at the end
of text, at stop strings or at stop tokens, and nothing is masked, so what is sampled is what would
have been sampled.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from drafter_compat.patch import Patch
from drafter_compat.surface import Attributes
from vllm_patches.priority import PROCESS_INPUTS, VERSIONS

__all__ = ["OutputLengths", "RolloutReplay", "read_output_lengths"]

ARGUMENT = "output_lengths"


def read_output_lengths(params: Any) -> list[int] | None:
    """One length for each of the request's `n` sequences, or None if it gives none. ValueError."""
    lengths = (getattr(params, "extra_args", None) or {}).get(ARGUMENT)
    if lengths is None:
        return None
    if isinstance(lengths, (str, bytes)) or not hasattr(lengths, "__iter__"):
        raise ValueError(f"the extra argument {ARGUMENT!r} is a list of lengths, not {lengths!r}")
    read = [_length(value) for value in lengths]
    if len(read) != params.n:
        raise ValueError(
            f"the extra argument {ARGUMENT!r} gives {len(read)} lengths for n={params.n} "
            f"sequences; give one for each"
        )
    return read


def _length(value: Any) -> int:
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(whole, bool) or not isinstance(whole, int) or whole < 1:
        raise ValueError(f"a length in {ARGUMENT!r} is a positive integer, not {value!r}")
    return whole


class OutputLengths(
    Patch,
    target="vllm.v1.engine.input_processor:InputProcessor",
    name="output-lengths",
    why="check a request's output lengths, and let nothing else end its sequences",
    remove_when="vLLM takes an output length for each sequence",
    versions=VERSIONS,
    expects={"process_inputs": PROCESS_INPUTS},
    after=("priority-argument",),
    default=False,
    relies_on=(
        Attributes(
            id="output-lengths:params",
            why="keep a sequence from ending early",
            module="vllm.sampling_params",
            name="SamplingParams",
            reads=(
                "extra_args",
                "ignore_eos",
                "max_tokens",
                "min_tokens",
                "n",
                "repetition_detection",
                "stop",
                "stop_token_ids",
            ),
        ),
    ),
):
    """In the front end, where a wrong argument is the answer to the client who sent it."""

    def process_inputs(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As vLLM's, of parameters under which every sequence goes on for its length."""
        lengths = read_output_lengths(params)
        if lengths is not None:
            params = params.clone()
            params.ignore_eos = True
            params.max_tokens = max(lengths)
            params.min_tokens = 0
            params.repetition_detection = None
            params.stop = []
            params.stop_token_ids = []
        original = OutputLengths.original("process_inputs")
        request = original(self, request_id, prompt, params, *args, **kwargs)
        if lengths is not None and request.prompt_token_ids is not None:
            room = self.model_config.max_model_len - len(request.prompt_token_ids)  # type: ignore[attr-defined]
            if max(lengths) > room:
                raise ValueError(
                    f"{ARGUMENT!r} asks for {max(lengths)} tokens, but after this prompt there is "
                    f"room for {room}: raise max_model_len, or shorten the sequence"
                )
        return request


class RolloutReplay(
    Patch,
    target="vllm.v1.engine.parallel_sampling:ParentRequest",
    name="rollout-replay",
    why="give each sequence of a request an output length of its own",
    remove_when="vLLM takes an output length for each sequence",
    versions=VERSIONS,
    expects={"_get_child_sampling_params": "(self, index)"},
    requires=("output-lengths",),
    default=False,
):
    """In the front end, where a request with n > 1 becomes n requests."""

    def _get_child_sampling_params(self, index: int) -> Any:
        params = RolloutReplay.original("_get_child_sampling_params")(self, index)
        lengths = (params.extra_args or {}).get(ARGUMENT)
        if lengths is None:
            return params
        # vLLM gives every sequence without a seed the same object.
        params = copy(params)
        params.max_tokens = int(lengths[index])
        return params
