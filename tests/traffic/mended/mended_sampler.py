"""A plugin for vLLM that mends its CPU build's sampler, so that drafts can be tested beside
requests at a temperature.

There, the function that spreads each request's temperature, top-k and top-p over its draft tokens
returns memory that nothing was written to, and the logits of all requests are divided by that
(https://github.com/vllm-project/vllm/issues/55005). Seen in 0.27.1 to 0.32.0;
`test_temperatures.py` says when this can go.

On PYTHONPATH, this directory is a distribution, so that every process of vLLM loads it.
"""

from __future__ import annotations

from typing import Any


def expand(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """One value for each draft token, [num_tokens], from one for each request, [batch]."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)


def register() -> None:
    import vllm.v1.sample.rejection_sampler as sampler

    sampler.expand_batch_to_tokens = expand
