"""A plugin for vLLM that mends the sampler of its CPU build where that is in the way of a test.

- The function that spreads each request's temperature, top-k and top-p over its draft tokens
  returns memory that nothing was written to, and the logits of all requests are divided by that
  (https://github.com/vllm-project/vllm/issues/55005). Seen in 0.27.1 to 0.32.0;
  `tests/traffic/test_temperatures.py` says when this can go.
- 0.30.0 cannot speculate at all: its sampler takes its kernels from dispatchers, while its CPU
  runner still replaces the module's kernels by those for the CPU. 0.31.0 fills the dispatchers.
  `tests/engine/test_mended.py` says what happens without this.

On PYTHONPATH, this directory is a distribution, so that every process of vLLM loads it. No vLLM
that is not under test should.
"""

from __future__ import annotations

from typing import Any

KERNELS = ("rejection_greedy_sample", "rejection_random_sample", "sample_recovered_tokens")


def expand(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """One value for each draft token, [num_tokens], from one for each request, [batch]."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)


def register() -> None:
    import vllm
    import vllm.v1.sample.rejection_sampler as sampler

    sampler.expand_batch_to_tokens = expand
    if vllm.__version__.startswith("0.30."):
        import vllm.utils.cpu_triton_utils as cpu

        for name in KERNELS:
            getattr(sampler, f"_{name}").kernel = getattr(cpu, f"{name}_kernel")
