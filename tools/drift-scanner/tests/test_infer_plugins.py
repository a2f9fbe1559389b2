"""Public plugins from the index, inferred and checked: what a reader of their source counted.

The counts were made by hand, from the plugins' source: every assignment onto a class or module of
vLLM, every method in a `Patch[Target]` class whose target has it, every subclass. Nothing of a
plugin or of vLLM is kept here but names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from drafter_compat.surface import (
    ClassShape,
    Constant,
    FromImport,
    FunctionShape,
    ReplacedClass,
    Surface,
    dump_surface,
    parse_surface,
)
from vllm_drift.check import check_plugin
from vllm_drift.findings import Report, Verdict
from vllm_drift.infer import infer_surface
from vllm_drift.sources import Sources
from vllm_drift.tree import SourceTree

pytestmark = pytest.mark.network


@pytest.fixture(scope="module")
def sources() -> Iterator[Sources]:
    with Sources() as opened:
        yield opened


@pytest.fixture(scope="module")
def release(sources: Sources) -> Callable[[str], SourceTree]:
    def read(version: str) -> SourceTree:
        (candidate,) = sources.expand([version])
        return sources.load(candidate)

    return read


@pytest.fixture(scope="module")
def infer(sources: Sources, release: Callable[[str], SourceTree]) -> Callable[[str, str], Surface]:
    def run(plugin: str, version: str) -> Surface:
        surface = infer_surface(sources.load_plugin(plugin), release(version))
        assert parse_surface(dump_surface(surface)) == surface
        return surface

    return run


@pytest.fixture(scope="module")
def check(sources: Sources, release: Callable[[str], SourceTree]) -> Callable[..., Report]:
    def run(plugin: str, old: str, new: str) -> Report:
        tree = sources.load_plugin(plugin)
        return check_plugin(tree, release(old), release(new), cache=sources.cache)

    return run


def patched(surface: Surface) -> set[str]:
    """What the plugin puts its own thing in the place of."""
    return {
        f"{s.module}:{s.name}"
        for s in surface
        if isinstance(s, (FunctionShape, ReplacedClass, FromImport, Constant))
        and "patched" in s.why
    }


def subclassed(surface: Surface) -> set[str]:
    return {s.name for s in surface if isinstance(s, ClassShape) and "subclassed" in s.why}


def drifted(report: Report) -> dict[str, str]:
    return {f.symbol: f.verdict.value for f in report.drift}


Infer = Callable[[str, str], Surface]
Check = Callable[..., Report]


def test_the_patches_of_vllm_lens_are_found_and_its_additions_are_not_taken_for_any(infer: Infer):
    serving = "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat"
    assert patched(infer("vllm-lens==1.3.0", "0.30.0")) == {
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        "vllm:LLM.generate",
        "vllm:LLM.chat",
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion"
        ".request_output_to_completion_response",
        f"{serving}.chat_completion_full_generator",
        f"{serving}.chat_completion_stream_generator",
        "vllm.entrypoints.serve:register_vllm_serve_api_routers",
    }


def test_the_patches_of_vllm_beam_search_are_found_on_classes_modules_and_one_object(infer: Infer):
    state = "vllm.v1.worker.gpu.model_states.interface:ModelState"
    surface = infer("vllm-beam-search-plugin==0.1.5", "0.31.0")
    assert patched(surface) == {
        "vllm.v1.worker.gpu.async_utils:AsyncOutput",
        "vllm.v1.worker.gpu.model_runner:AsyncOutput",
        "vllm.v1.worker.gpu.model_runner:init_model_state",
        "vllm.v1.worker.gpu.model_states:init_model_state",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache",
        "vllm.entrypoints.openai.completion.protocol:CompletionRequest.to_sampling_params",
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest.to_sampling_params",
        "vllm.entrypoints.openai.responses.protocol:ResponsesRequest.to_sampling_params",
        f"{state}.custom_sampler",
        f"{state}.add_request",
        f"{state}.remove_request",
        f"{state}.postprocess_state",
    }
    assert subclassed(surface) == {"AsyncScheduler", "SamplerOutput", "AsyncOutput"}


def test_the_patches_of_arctic_inference_are_found_in_its_patch_classes(infer: Infer):
    surface = infer("arctic-inference==0.3.0", "0.26.0")
    members = {p for p in patched(surface) if "." in p.partition(":")[2]}
    # 77 distinct methods in patch classes: 24 exist nowhere in 0.26.0, 4 are object's __new__, 2
    # are functions of the patched module parallel_state.
    assert len(members) == 77 - 24 - 4 - 2
    runner = "vllm.v1.worker.gpu_model_runner:GPUModelRunner."
    assert {m.removeprefix(runner) for m in members if m.startswith(runner)} == {
        "__init__",
        "_bookkeeping_sync",
        "_build_attention_metadata",
        "_capture_cudagraphs",
        "_dummy_run",
        "_pad_for_sequence_parallelism",
        "_sample",
        "execute_model",
        "initialize_kv_cache",
        "load_model",
        "profile_run",
        "propose_draft_token_ids",
        "reload_weights",
        "sample_tokens",
    }
    functions = patched(surface) - members
    assert {
        "vllm.distributed.parallel_state:initialize_model_parallel",
        "vllm.distributed.parallel_state:graph_capture",
        "vllm.v1.attention.backends.flash_attn:FlashAttentionBackend",
        "vllm.config.vllm:EagleModelTypes",
    } <= functions
    assert subclassed(surface) == {
        "AsyncEngineArgs",
        "AttentionBackend",
        "AttentionImpl",
        "AttentionMetadataBuilder",
        "EngineArgs",
        "FlashAttentionBackend",
        "Fp8Config",
        "LinearMethodBase",
        "LlamaAttention",
        "ParallelConfig",
        "QuantizeMethodBase",
        "SpeculativeConfig",
        "StatLoggerBase",
    }


def test_the_classes_of_vllm_spyre_and_their_overrides_are_found(infer: Infer):
    surface = infer("vllm-spyre==1.10.0", "0.18.0")
    assert subclassed(surface) == {
        "LogitsProcessor",
        "ModelRunnerOutput",
        "Platform",
        "Scheduler",
        "StatLoggerBase",
        "WorkerBase",
    }
    overridden = {
        s.name.removeprefix("WorkerBase.")
        for s in surface
        if isinstance(s, FunctionShape)
        and "overridden" in s.why
        and s.name.startswith("WorkerBase.")
    }
    assert overridden == {
        "__init__",
        "check_health",
        "compile_or_warm_up_model",
        "execute_model",
        "get_kv_cache_spec",
        "init_device",
        "load_model",
        "sample_tokens",
    }


def test_going_to_0_27_1_breaks_an_import_of_arctic_inference_and_nothing_else(check: Check):
    report = check("arctic-inference==0.3.0", "0.26.0", "0.27.1")
    assert drifted(report) == {"vllm.model_executor.layers.fused_moe:FusedMoE": "moved"}


def test_what_arctic_inference_0_2_0_had_to_change_for_0_26_0_is_found(check: Check):
    """Each of these is a change that 0.3.0 made for that release."""
    found = drifted(check("arctic-inference==0.2.0", "0.18.0", "0.26.0"))
    runner = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
    assert found["vllm.distributed.parallel_state:graph_capture"] == Verdict.NEW_DEMAND.value
    assert found[f"{runner}.initialize_kv_cache"] == Verdict.NEW_DEMAND.value
    assert found[f"{runner}._capture_cudagraphs"] == Verdict.NEW_DEMAND.value
    assert found["vllm.v1.engine.core:EngineCore.log_iteration_details"] == Verdict.REMOVED.value
    assert f"{runner}._bookkeeping_sync" in found
    assert f"{runner}._get_cumsum_and_arange" in found


@pytest.mark.parametrize(
    ("plugin", "old", "new"),
    [
        ("arctic-inference==0.3.0", "0.25.1", "0.26.0"),
        ("vllm-beam-search-plugin==0.1.5", "0.30.0", "0.31.0"),
        ("vllm-lens==1.3.0", "0.30.0", "0.31.0"),
    ],
)
def test_bumps_that_a_plugin_claims_to_survive_are_no_drift(
    check: Check, plugin: str, old: str, new: str
):
    report = check(plugin, old, new)
    assert drifted(report) == {}
    assert report.exit_code == 0


def test_a_dataclass_of_vllm_spyre_needs_another_argument_in_0_19_1(check: Check):
    found = check("vllm-spyre==1.10.0", "0.18.0", "0.19.1").drift
    (finding,) = [f for f in found if f.symbol == "vllm.v1.pool.metadata:PoolingMetadata"]
    assert finding.verdict is Verdict.CHANGED_SHAPE
    assert "prompt_token_ids_cpu" in finding.message
