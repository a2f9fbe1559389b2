"""What the plugin promises for one real vLLM release, on that release's own package.

Run by `nox -s "contract(vllm='0.15.1')"` in an interpreter that imports this release, which
DRAFTER_CONTRACT_VLLM names.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

RELEASE = os.environ["DRAFTER_CONTRACT_VLLM"]

SPECULATION: dict[str, dict[str, Any]] = {"suffix": {"method": "suffix"}}
"""What is given to the release as its speculative config, for each method that drafts with us."""
if Version(RELEASE) >= Version("0.22"):
    SPECULATION["custom_class"] = {
        "method": "custom_class",
        "model": "vllm_drafter.CustomClassProposer",
        "num_speculative_tokens": 24,
    }

# The release's own proposer, asked as its runner asks it.
DRAFT_WITH_THE_RELEASES_OWN_PROPOSER = """
import earlier_torch
from vllm.plugins import load_general_plugins
load_general_plugins()
import json
from types import SimpleNamespace
import vllm.v1.worker.gpu_model_runner as module
from vllm.config.speculative import SpeculativeConfig
from batch import MAX_MODEL_LEN, Batch
from runner import construct, propose
batch = Batch()
this = SimpleNamespace(
    vllm_config=SimpleNamespace(
        speculative_config=SpeculativeConfig(method="suffix"),
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
        device_config=SimpleNamespace(device_type="cuda"),
    ),
    input_batch=batch.input_batch,
)
this.drafter = construct(module, this)
text = list(range(100, 140))
batch.add("a", [*text, 7])
[draft] = propose(module, this, batch.sample({"a": text[:5]}), 24)
batch.remove("a")
batch.add("b", [1, 2])
[other] = propose(module, this, batch.sample({"b": text[:5]}), 24)
cache = type(this.drafter.suffix_cache).__module__
print(json.dumps([type(this.drafter).__module__, cache, list(draft), list(other)]))
"""

# Whether the release is as it came, in the names that the other route replaces, and drafts with us.
DRAFT_WITH_THE_CUSTOM_CLASS = """
import earlier_torch
from vllm.plugins import load_general_plugins
load_general_plugins()
import json
from types import SimpleNamespace
import vllm.config.speculative, vllm.v1.worker.gpu_model_runner as module
from vllm.config.speculative import SpeculativeConfig
from batch import MAX_MODEL_LEN, Batch
from runner import construct, propose
batch = Batch()
this = SimpleNamespace(
    vllm_config=SimpleNamespace(
        speculative_config=SpeculativeConfig(
            method="custom_class",
            model="vllm_drafter.CustomClassProposer",
            num_speculative_tokens=24,
        ),
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
        device_config=SimpleNamespace(device_type="cuda"),
    ),
    input_batch=batch.input_batch,
)
this.drafter = construct(module, this, "custom_class")
text = list(range(100, 140))
batch.add("a", [*text, 7])
[draft] = propose(module, this, batch.sample({"a": text[:5]}), 24, "custom_class")
gate = vllm.config.speculative.has_arctic_inference
print(json.dumps([gate.__module__, module.SuffixDecodingProposer.__module__, list(draft)]))
"""


def in_new_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    here = str(Path(__file__).parent)
    path = {"PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **path, **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.fixture(scope="session")
def stamps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stamps") / "stamps.jsonl"


@pytest.fixture(scope="session")
def refusal() -> str:
    """What the release says to method="suffix" before the plugin is loaded."""
    from vllm.config.speculative import SpeculativeConfig

    with pytest.raises(Exception, match="Arctic Inference") as caught:
        SpeculativeConfig(method="suffix")
    return str(caught.value)


@pytest.fixture(scope="session")
def runner_module(stamps: Path, refusal: str) -> Any:
    """The release's model runner, in a process in which vLLM itself has loaded the plugin."""
    os.environ["VLLM_DRAFTER_STAMPS"] = str(stamps)
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    import vllm.v1.worker.gpu_model_runner as module

    return module


@pytest.fixture
def batch(runner_module: Any) -> Any:
    from batch import Batch

    return Batch()


@pytest.fixture(params=SPECULATION)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def runner(runner_module: Any, batch: Any, method: str) -> Any:
    """What the runner's statements read of `self`: a real batch and config, and our drafter."""
    from batch import MAX_MODEL_LEN
    from runner import construct
    from vllm.config.speculative import SpeculativeConfig

    this = SimpleNamespace(
        vllm_config=SimpleNamespace(
            speculative_config=SpeculativeConfig(**SPECULATION[method]),
            model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
            device_config=SimpleNamespace(device_type="cuda"),
        ),
        input_batch=batch.input_batch,
    )
    this.drafter = construct(runner_module, this, method)
    return this


@pytest.fixture
def step(runner_module: Any, runner: Any, batch: Any, method: str) -> Any:
    """One step of the engine: requests sample these ids, the runner asks for drafts, by request."""
    from runner import propose

    def run(sampled: dict[str, list[int]], *, num_tokens: int = 24) -> dict[str, list[int]]:
        if Version(RELEASE) < Version("0.24"):
            num_tokens = 24  # the number was fixed at construction
        drafts = propose(runner_module, runner, batch.sample(sampled), num_tokens, method)
        assert isinstance(drafts, list)
        assert len(drafts) == len(batch.input_batch.req_ids)
        assert all(type(token) is int for draft in drafts for token in draft)
        assert runner.drafter.loop.faults == 0
        return dict(zip(batch.input_batch.req_ids, drafts, strict=True))

    return run


def test_the_release_under_test_is_the_one_that_runs() -> None:
    import vllm

    assert Version(Version(vllm.__version__).base_version) == Version(RELEASE)


def test_without_the_plugin_the_suffix_method_is_refused(refusal: str) -> None:
    assert "Arctic Inference is required" in refusal


def test_with_the_plugin_the_suffix_method_is_accepted(runner_module: Any) -> None:
    from vllm.config.speculative import SpeculativeConfig

    assert SpeculativeConfig(method="suffix").num_speculative_tokens == 24


def test_the_gates_are_where_the_surface_says() -> None:
    from drafter_compat.check import check_surface
    from drafter_compat.surface import load_builtin_surface
    from drafter_compat.versions import installed_vllm

    installed = installed_vllm()
    report = check_surface(
        load_builtin_surface("vllm_drafter"), version=installed.version, root=installed.root
    )
    assert report.results
    assert report.ok, str(report)


def test_every_gate_is_patched_and_the_stamp_says_so(runner_module: Any, stamps: Path) -> None:
    import vllm.config.speculative
    import vllm.utils.import_utils
    import vllm.v1.spec_decode.suffix_decoding as definition

    (stamp,) = [
        s for s in map(json.loads, stamps.read_text().splitlines()) if s["pid"] == os.getpid()
    ][:1]
    assert Version(Version(stamp["vllm_version"]).base_version) == Version(RELEASE)
    assert vllm.config.speculative.has_arctic_inference() is True
    assert vllm.utils.import_utils.has_arctic_inference() is True
    assert runner_module.SuffixDecodingProposer.__module__.startswith("vllm_drafter")
    assert definition.SuffixDecodingProposer is runner_module.SuffixDecodingProposer
    assert "arctic_inference" not in sys.modules


def test_with_the_shim_the_releases_own_proposer_drafts_with_ours() -> None:
    done = in_new_process(DRAFT_WITH_THE_RELEASES_OWN_PROPOSER, VLLM_DRAFTER_ROUTE="shim")
    assert done.returncode == 0, done.stderr
    proposer, cache, draft, of_another = json.loads(done.stdout.splitlines()[-1])
    assert proposer == "vllm.v1.spec_decode.suffix_decoding"
    assert cache == "vllm_drafter.shim_cache"
    assert draft == list(range(105, 110))
    assert of_another == []  # the first one's response is short; its prompt is nobody else's


def test_with_the_route_custom_class_it_drafts_and_nothing_is_patched(tmp_path: Path) -> None:
    stamps = tmp_path / "stamps.jsonl"
    route = {"VLLM_DRAFTER_ROUTE": "custom_class", "VLLM_DRAFTER_STAMPS": str(stamps)}
    done = in_new_process(DRAFT_WITH_THE_CUSTOM_CLASS, **route)
    if Version(RELEASE) < Version("0.22"):
        assert done.returncode != 0
        assert "VLLM_DRAFTER_ROUTE=custom_class: expected vLLM >=0.22" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    gate, proposer, draft = json.loads(done.stdout.splitlines()[-1])
    assert gate == "vllm.utils.import_utils"
    assert proposer == "vllm.v1.spec_decode.suffix_decoding"
    assert draft[:5] == list(range(105, 110))
    stamp = json.loads(stamps.read_text().splitlines()[0])
    assert stamp["patched"] == stamp["pending"] == []


def test_the_runner_builds_the_drafter_of_the_method(runner: Any, method: str) -> None:
    home = {"suffix": "vllm_drafter.proposer", "custom_class": "vllm_drafter.custom_class"}
    assert type(runner.drafter).__module__ == home[method]


def test_a_prompt_that_is_copied_is_drafted(step: Any, batch: Any) -> None:
    text = list(range(100, 140))
    batch.add("a", [*text, 7])
    assert step({"a": text[:5]})["a"] == text[5:10]


def test_a_partial_prefill_gets_an_empty_draft(step: Any, batch: Any) -> None:
    text = list(range(100, 140))
    batch.add("a", [*text, 7])
    batch.add("b", [*text, 8])
    drafts = step({"a": text[:4], "b": []})
    assert drafts["b"] == []
    assert drafts["a"]


@pytest.mark.parametrize("method", ["suffix"], indirect=True)  # the custom class is not told
def test_a_draft_stays_within_the_tokens_wanted_at_this_step(step: Any, batch: Any) -> None:
    if Version(RELEASE) < Version("0.24"):
        pytest.skip("the number is given per step since 0.24.0")
    text = list(range(100, 160))
    batch.add("a", [*text, 7])
    assert len(step({"a": text[:10]}, num_tokens=3)["a"]) == 3
    assert step({"a": text[10:12]}, num_tokens=0)["a"] == []


def test_a_draft_stays_within_the_model_length(step: Any, batch: Any) -> None:
    from batch import MAX_MODEL_LEN

    text = list(range(100, 300))
    batch.add("a", text)
    room = MAX_MODEL_LEN - 200
    drafts = step({"a": text[: room - 4]})["a"]
    assert len(drafts) <= 3
    assert step({"a": text[room - 4 : room]})["a"] == []


def test_rows_that_are_swapped_keep_their_own_drafts(step: Any, batch: Any) -> None:
    first, second = list(range(100, 140)), list(range(300, 340))
    batch.add("a", [*first, 7])
    batch.add("b", [*second, 7])
    step({"a": first[:3], "b": second[:3]})
    batch.swap("a", "b")
    assert step({"a": first[3:6], "b": second[3:6]}) == {"a": first[6:12], "b": second[6:12]}


def test_rows_that_are_condensed_keep_their_own_drafts(step: Any, batch: Any) -> None:
    texts = {
        name: list(range(base, base + 40)) for name, base in (("a", 100), ("b", 300), ("c", 500))
    }
    for name, text in texts.items():
        batch.add(name, [*text, 7])
    step({name: text[:3] for name, text in texts.items()})
    batch.remove("a")
    drafts = step({name: texts[name][3:6] for name in ("b", "c")})
    assert drafts == {name: texts[name][6:12] for name in ("b", "c")}


def test_a_preempted_request_goes_on_where_it_was(step: Any, batch: Any) -> None:
    text = list(range(100, 140))
    batch.add("a", [*text, 7])
    batch.add("other", [1, 2, 3])
    step({"a": text[:3], "other": [4]})
    output = list(batch.states["a"].output_token_ids)
    batch.remove("a")
    step({"other": [5]})
    batch.add("a", [*text, 7], output)
    assert step({"a": text[3:6], "other": [6]})["a"] == text[6:12]


def test_a_request_id_that_is_used_again_drafts_from_the_new_request(step: Any, batch: Any) -> None:
    old, new = list(range(100, 140)), list(range(300, 340))
    batch.add("a", [*old, 7])
    step({"a": old[:6]})
    batch.remove("a")
    batch.add("a", [*new, 7])
    assert step({"a": new[:4]})["a"] == new[4:8]


def test_a_finished_response_is_drafted_for_a_later_request(step: Any, batch: Any) -> None:
    response = list(range(600, 640))
    batch.add("a", [1, 2, 3])
    for start in range(0, 40, 8):
        step({"a": response[start : start + 8]})
    batch.remove("a")
    batch.add("b", [4, 5, 6])
    assert step({"b": response[:6]})["b"] == response[6:12]


def test_an_aborted_request_does_not_disturb_the_others(step: Any, batch: Any) -> None:
    text = list(range(100, 140))
    batch.add("a", [*text, 7])
    batch.add("b", [*text, 8])
    step({"a": text[:3], "b": []})
    batch.remove("b")
    assert step({"a": text[3:6]})["a"] == text[6:12]


@pytest.fixture
def shared_by_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DRAFTER_SHARING", "lora")


@pytest.mark.parametrize("method", ["suffix"], indirect=True)  # the custom class is not told
def test_with_sharing_by_lora_a_response_stays_with_its_adapter(
    shared_by_adapter: None, step: Any, batch: Any
) -> None:
    response = list(range(600, 640))
    batch.add("a", [1, 2, 3], lora=1)
    for start in range(0, 40, 8):
        step({"a": response[start : start + 8]})
    batch.remove("a")
    batch.add("b", [4, 5, 6], lora=2)
    batch.add("c", [7, 8], lora=1)
    assert step({"b": response[:6], "c": response[:6]}) == {"b": [], "c": response[6:12]}


@pytest.fixture
def nothing_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DRAFTER_SHARING", "none")


def test_with_nothing_shared_a_response_is_its_requests_own(
    nothing_shared: None, step: Any, batch: Any
) -> None:
    response = list(range(600, 640))
    batch.add("a", [1, 2, 3])
    for start in range(0, 40, 8):
        step({"a": response[start : start + 8]})
    batch.add("b", [4, 5, 6])
    assert step({"a": response[:6], "b": response[:6]}) == {"a": response[6:12], "b": []}


def test_a_worker_is_told_of_no_tenant_but_the_lora_adapter() -> None:
    # Where this fails, answers could be shared within more than an adapter: docs/knobs.md.
    from vllm.v1.core.sched.output import NewRequestData

    told = {field.name for field in dataclasses.fields(NewRequestData)}
    assert "lora_request" in told
    assert [name for name in told if any(w in name for w in ("salt", "tenant", "user"))] == []
