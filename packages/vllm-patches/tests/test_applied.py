"""The patches on stand-ins for their targets: what each call then does. The engine's own are in
tests/patches.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_patches import registry

FLOAT32, BFLOAT16 = object(), object()


class InputProcessor:
    model_config = SimpleNamespace(max_model_len=32)

    def process_inputs(
        self,
        request_id,
        prompt,
        params,
        supported_tasks,
        arrival_time=None,
        lora_request=None,
        tokenization_kwargs=None,
        trace_headers=None,
        priority=0,
        data_parallel_rank=None,
        resumable=False,
        session_id=None,
        kv_hints=None,
    ):
        return SimpleNamespace(
            prompt_token_ids=prompt, priority=priority, params=params, sampling_params=params
        )


class ParentRequest:
    def __init__(self, params: Any) -> None:
        self.params = params

    def _get_child_sampling_params(self, index):
        return self.params


class ModelConfig:
    def __init__(self, **configured: Any) -> None:
        self.hf_config = SimpleNamespace(**configured)

    @property
    def head_dtype(self):
        return getattr(self.hf_config, "head_dtype", BFLOAT16)


class GPUModelRunner:
    def __init__(self, vllm_config, device):
        self.started = True


class Params(SimpleNamespace):
    def clone(self) -> Params:
        return Params(**vars(self))


def sampling(**given: Any) -> Params:
    return Params(**{"n": 1, "max_tokens": 16, "ignore_eos": False, "extra_args": None, **given})


PLACES = {
    "vllm.v1.engine.input_processor": {"InputProcessor": InputProcessor},
    "vllm.v1.engine.parallel_sampling": {"ParentRequest": ParentRequest},
    "vllm.config.model": {"ModelConfig": ModelConfig},
    "vllm.v1.worker.gpu.model_runner": {"GPUModelRunner": GPUModelRunner},
    "vllm.platforms": {"current_platform": SimpleNamespace(supported_dtypes=[FLOAT32])},
    "torch": {"float32": FLOAT32},
}


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, members in PLACES.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    yield
    registry.revert()


def choose(*names: str) -> None:
    registry.apply(version="0.32.0", select=names)


def process(params: Params, **given: Any) -> Any:
    return InputProcessor().process_inputs("a request", [1, 2, 3], params, (), **given)


def test_a_higher_priority_in_the_extra_arguments_is_a_lower_one_for_vllm() -> None:
    choose("priority-argument")
    assert process(sampling(extra_args={"priority": 7})).priority == -7
    assert process(sampling(), priority=4).priority == 4


def test_with_output_lengths_nothing_else_ends_a_sequence_and_the_callers_object_is_left() -> None:
    choose("output-lengths")
    given = sampling(n=2, stop=["x"], extra_args={"output_lengths": [3, 9]})
    used = process(given).params
    assert (used.max_tokens, used.min_tokens, used.ignore_eos) == (9, 0, True)
    assert (used.stop, used.stop_token_ids, used.repetition_detection) == ([], [], None)
    assert (given.max_tokens, given.stop, given.ignore_eos) == (16, ["x"], False)


def test_a_length_for_which_there_is_no_room_is_refused() -> None:
    choose("output-lengths")
    process(sampling(extra_args={"output_lengths": [29]}))
    with pytest.raises(ValueError, match="after this prompt there is room for 29"):
        process(sampling(extra_args={"output_lengths": [30]}))


def test_both_arguments_can_be_given_at_once() -> None:
    choose("priority-argument", "output-lengths")
    request = process(sampling(extra_args={"priority": 2, "output_lengths": [5]}))
    assert (request.priority, request.params.max_tokens) == (-2, 5)


def test_each_sequence_gets_parameters_of_its_own() -> None:
    choose("rollout-replay")
    shared = sampling(n=2, extra_args={"output_lengths": [3, 9]})
    parent = ParentRequest(shared)
    children = [parent._get_child_sampling_params(index) for index in range(2)]
    assert [child.max_tokens for child in children] == [3, 9]
    assert shared.max_tokens == 16
    plain = sampling(n=2)
    assert ParentRequest(plain)._get_child_sampling_params(1) is plain


def test_the_head_is_computed_in_float32_unless_the_model_says_otherwise() -> None:
    assert ModelConfig().head_dtype is BFLOAT16
    choose("fp32-lm-head")
    assert ModelConfig().head_dtype is FLOAT32
    assert ModelConfig(head_dtype=BFLOAT16).head_dtype is BFLOAT16
    registry.revert()
    assert ModelConfig().head_dtype is BFLOAT16


def test_a_platform_without_float32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    choose("fp32-lm-head")
    platform = SimpleNamespace(supported_dtypes=[])
    monkeypatch.setattr(sys.modules["vllm.platforms"], "current_platform", platform)
    with pytest.raises(ValueError, match="this platform has no float32"):
        ModelConfig().head_dtype


def test_the_second_model_runner_is_refused_with_the_way_out() -> None:
    choose("hybrid-drafting-guard")
    with pytest.raises(RuntimeError, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
        GPUModelRunner(None, None)
