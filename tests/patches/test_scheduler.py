"""`priority-scheduler` in vLLM's own scheduler, step by step, without a model.

The load of test_priority.py; every request that is scheduled gets one token, whatever it is. Steps
and computed tokens are exact here, so the table in docs/patches.md is this test's.
"""

from __future__ import annotations

from typing import Any

import pytest
from test_priority import ARRIVES, LENGTHS, PRIORITY, SHORT

from vllm_patches import registry


def scheduler(tiny: str, policy: str) -> Any:
    import torch
    from vllm import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    arguments = EngineArgs(
        model=tiny,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=2,
        scheduling_policy=policy,
        enable_prefix_caching=False,
    )
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = 200
    layer = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=200, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)]
    )
    return Scheduler(config, cache, StructuredOutputManager(config), 16, hash_block_size=16)


def serve(tiny: str, way: str) -> dict[str, Any]:
    """The step at which each request finished, and how many tokens were computed in all."""
    from vllm import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    own = scheduler(tiny, "priority" if way == "built-in" else "fcfs")
    arriving = [(f"bulk-{place}", 0, length) for place, length in enumerate(LENGTHS)]
    arriving += [(name, step, SHORT) for name, step in ARRIVES.items()]
    finished: dict[str, int] = {}
    computed = step = 0
    while len(finished) < len(arriving):
        for place, (name, arrives, length) in enumerate(arriving):
            if arrives == step:
                request = Request(
                    request_id=name,
                    prompt_token_ids=[1] * 12,
                    sampling_params=SamplingParams(max_tokens=length, ignore_eos=True),
                    pooling_params=None,
                    arrival_time=float(place),
                    priority=0 if way == "default" else -PRIORITY.get(name, 0),
                )
                own.add_request(request)
        step += 1
        scheduled = own.schedule()
        computed += scheduled.total_num_scheduled_tokens
        names = list(scheduled.num_scheduled_tokens)
        sampled = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
        )
        for outputs in own.update_from_output(scheduled, sampled).values():
            for output in outputs.outputs:
                if output.finish_reason is not None:
                    finished[output.request_id] = step
    return {"finished": finished, "computed": computed, "steps": step}


@pytest.fixture(scope="module")
def served(tiny) -> dict[str, dict[str, Any]]:
    found = {way: serve(tiny, way) for way in ("default", "built-in")}
    registry.apply(select=["priority-scheduler"])
    try:
        found["patch"] = serve(tiny, "patch")
    finally:
        registry.revert()
    return found


def waits(one: dict[str, Any]) -> dict[str, int]:
    return {name: one["finished"][name] - ARRIVES[name] for name in ("top", "middle", "low")}


def test_steps_from_arrival_to_end(served):
    assert {way: waits(one) for way, one in served.items()} == {
        "default": {"top": 165, "middle": 176, "low": 166},
        "built-in": {"top": 45, "middle": 44, "low": 58},
        "patch": {"top": SHORT, "middle": SHORT, "low": 23},
    }


def test_a_lost_seat_costs_a_second_prefill_and_no_step(served):
    assert {way: one["computed"] for way, one in served.items()} == {
        "default": 455,
        "built-in": 455,
        "patch": 503,
    }
    assert max(one["steps"] for one in served.values()) <= 184
