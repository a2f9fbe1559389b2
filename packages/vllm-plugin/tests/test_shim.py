"""The route `shim`, each time in a process of its own."""

from __future__ import annotations

import json

import pytest
from synthetic import Site

REGISTER = "import vllm_drafter\nvllm_drafter.register()\n"
SHIM = {"VLLM_DRAFTER_ROUTE": "shim"}

# What a proposer that was written against arctic-inference does, on two requests.
PEER_CALLS = """
import numpy as np
from arctic_inference.suffix_decoding import SuffixDecodingCache
cache = SuffixDecodingCache(max_tree_depth=24, max_cached_requests=100)
answer = list(range(40, 60))
def ask(name, prompt, said):
    cache.start_request(name, np.array(prompt, dtype=np.int32))
    cache.add_active_response(name, said)
    context = np.array([*prompt, *said], dtype=np.int32)
    return cache.speculate(name, context, max_spec_tokens=8, max_spec_factor=4.0).token_ids
own = ask("a", answer, answer[:4])
cache.stop_request("a")
ask("b", [1, 2], answer)
cache.stop_request("b")
print(json.dumps([own, ask("c", [3], answer[:4])]))
"""


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path)
    site.add_us()
    site.add_vllm()
    return site


def run(site, code, **env):
    done = site.run("import json\n" + code, **{**SHIM, **env})
    assert done.returncode == 0, done.stderr
    return done.stdout


def add_peer(site):
    package = site.path / "arctic_inference"
    package.mkdir()
    (package / "__init__.py").write_text("")
    return package


def test_what_imports_arctic_inference_drafts_with_us(site):
    own, others = json.loads(run(site, REGISTER + PEER_CALLS))
    assert own == list(range(44, 52))
    assert others == list(range(44, 52))


def test_nothing_is_provided_unless_asked_for(site):
    done = site.run(REGISTER + "import arctic_inference\n")
    assert "No module named 'arctic_inference'" in done.stderr


def test_nothing_of_vllm_is_changed(site):
    check = (
        "import vllm.utils.import_utils as gate, vllm.v1.spec_decode.suffix_decoding as proposer\n"
        "print(gate.has_arctic_inference.__module__,"
        " proposer.SuffixDecodingProposer.__module__)\n"
    )
    expected = "vllm.utils.import_utils vllm.v1.spec_decode.suffix_decoding\n"
    assert run(site, REGISTER + check) == expected


def test_a_vllm_of_another_shape_is_no_obstacle(tmp_path):
    site = Site(tmp_path)
    site.add_us()
    change = {"utils/import_utils.py": ("def has_arctic_inference", "def has_arctic")}
    site.add_vllm("0.99.0", {**change, "config/speculative.py": ("has_arctic_inference", "has")})
    assert json.loads(run(site, REGISTER + PEER_CALLS))


def test_the_name_is_found_without_being_imported(site):
    check = (
        "import importlib.util, sys\n"
        "print(importlib.util.find_spec('arctic_inference').origin)\n"
        "print([name for name in ('numba', 'drafter_core') if name in sys.modules])\n"
    )
    assert run(site, REGISTER + check) == "vllm-drafter\n[]\n"


def test_other_modules_of_the_package_are_not_there(site):
    done = site.run(REGISTER + "import arctic_inference.vllm\n", **SHIM)
    assert "No module named 'arctic_inference.vllm'" in done.stderr


def test_beside_the_real_package_the_start_is_refused(site):
    package = add_peer(site)
    done = site.run(REGISTER, **SHIM)
    assert done.returncode != 0
    for word in ("SettingError", "VLLM_DRAFTER_ROUTE=shim", str(package), "pip uninstall"):
        assert word in done.stderr


def test_registering_again_finds_itself_and_goes_on(site):
    again = "import vllm_drafter.startup\nvllm_drafter.startup._started = False\n"
    count = "import sys\nprint(sum(type(f).__name__ == 'ShimFinder' for f in sys.meta_path))\n"
    assert run(site, REGISTER + again + REGISTER + count) == "1\n"


def test_with_sharing_none_an_answer_is_no_source_for_others(site):
    own, others = json.loads(run(site, REGISTER + PEER_CALLS, VLLM_DRAFTER_SHARING="none"))
    assert own == list(range(44, 52))
    assert others == []


def test_sharing_by_lora_is_refused(site):
    done = site.run(REGISTER, **SHIM, VLLM_DRAFTER_SHARING="lora")
    assert done.returncode != 0
    assert "VLLM_DRAFTER_SHARING=lora: expected global or none" in done.stderr


def test_the_stamps_say_the_route_and_where_the_cache_is(site, tmp_path):
    stamps = tmp_path / "stamps.jsonl"
    run(site, REGISTER + PEER_CALLS, VLLM_DRAFTER_STAMPS=str(stamps))
    registered, proposer = [json.loads(line) for line in stamps.read_text().splitlines()]
    assert (registered["route"], registered["patched"]) == ("shim", [])
    assert (proposer["event"], proposer["proposer"]) == ("proposer", "SuffixDecodingCache")
