"""`register` against a synthetic vLLM, each time in a process of its own."""

from __future__ import annotations

import json

import pytest
from synthetic import Site

REGISTER = "import vllm_drafter\nvllm_drafter.register()\n"

WHOSE = """
import vllm.config.speculative as config, vllm.utils.import_utils as gate
import vllm.v1.spec_decode.suffix_decoding as proposer, vllm.v1.worker.gpu_model_runner as runner
print(config.has_arctic_inference.__module__, gate.has_arctic_inference.__module__)
print(proposer.SuffixDecodingProposer.__module__, runner.SuffixDecodingProposer.__module__)
"""

OURS = "vllm_drafter.patches vllm_drafter.patches\nvllm_drafter.proposer vllm_drafter.proposer\n"
THEIRS = (
    "vllm.utils.import_utils vllm.utils.import_utils\n"
    "vllm.v1.spec_decode.suffix_decoding vllm.v1.spec_decode.suffix_decoding\n"
)


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path)
    site.add_us()
    site.add_vllm()
    return site


def run(site, code, **env):
    done = site.run(code, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_modules_imported_later_get_our_gate_and_our_class(site):
    assert run(site, REGISTER + WHOSE) == OURS


def test_modules_imported_earlier_get_our_gate_and_our_class(site):
    assert run(site, WHOSE + REGISTER + WHOSE) == THEIRS + OURS


def test_registering_again_changes_nothing(site):
    assert run(site, REGISTER + REGISTER + WHOSE + REGISTER + WHOSE) == OURS + OURS


def test_turned_off_nothing_is_ours(site):
    assert run(site, REGISTER + WHOSE, VLLM_DRAFTER="0") == THEIRS


def test_it_imports_neither_vllm_nor_numba_nor_the_drafter(site):
    check = (
        "import sys\n"
        "print([n for n in ('vllm', 'torch', 'numba', 'drafter_core') if n in sys.modules])"
    )
    assert run(site, REGISTER + check) == "[]\n"


def test_the_package_itself_imports_nothing_but_the_standard_library(site):
    check = (
        "import sys, vllm_drafter\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "print(names - {'__main__'} - sys.stdlib_module_names)"
    )
    assert run(site, check) == "{'vllm_drafter'}\n"


def test_the_suffix_method_is_let_in(site):
    check = (
        "from vllm.config.speculative import SpeculativeConfig\n"
        "SpeculativeConfig()._validate_suffix_decoding()\n"
    )
    refused = site.run(check)
    assert "ImportError: refused" in refused.stderr
    run(site, REGISTER + check)


def test_each_process_stamps_once(site, tmp_path):
    stamps = tmp_path / "stamps.jsonl"
    run(site, REGISTER + REGISTER, VLLM_DRAFTER_STAMPS=str(stamps))
    [stamp] = [json.loads(line) for line in stamps.read_text().splitlines()]
    assert stamp["event"] == "registered"
    assert stamp["vllm_version"] == "0.32.0"
    assert stamp["patched"] == []
    assert stamp["pending"] == ["vllm.utils.import_utils", "vllm.v1.spec_decode.suffix_decoding"]


def test_the_stamp_says_what_was_patched(site, tmp_path):
    stamps = tmp_path / "stamps.jsonl"
    run(site, "import vllm.config.speculative\n" + REGISTER, VLLM_DRAFTER_STAMPS=str(stamps))
    stamp = json.loads(stamps.read_text())
    assert sorted(stamp["patched"]) == [
        "vllm.config.speculative.has_arctic_inference",
        "vllm.utils.import_utils.has_arctic_inference",
    ]


def test_the_line_is_seen_also_before_vllm_has_set_up_its_logging(site):
    assert "registered: pid" in site.run(REGISTER).stderr
    assert "registered" not in site.run(REGISTER, VLLM_LOGGING_LEVEL="ERROR").stderr


def test_a_process_forked_by_vllm_stamps_under_its_own_name(site, tmp_path):
    stamps = tmp_path / "stamps.jsonl"
    fork = (
        "import multiprocessing\n"
        "context = multiprocessing.get_context('fork')\n"
        "for name in ('EngineCore', 'VllmWorker-1', 'SomethingElse'):\n"
        "    child = context.Process(target=print, name=name)\n"
        "    child.start(); child.join()\n"
    )
    run(site, REGISTER + fork, VLLM_DRAFTER_STAMPS=str(stamps))
    found = [json.loads(line) for line in stamps.read_text().splitlines()]
    assert [(stamp["role"], stamp["rank"]) for stamp in found[1:]] == [
        ("EngineCore", None),
        ("worker", 1),
    ]
    assert len({stamp["pid"] for stamp in found}) == 3


SABOTAGES = {
    "renamed class": (
        "v1/spec_decode/suffix_decoding.py",
        ("class SuffixDecodingProposer", "class Renamed"),
        "proposer",
    ),
    "renamed gate": (
        "utils/import_utils.py",
        ("def has_arctic_inference", "def has_arctic"),
        "gate-function",
    ),
    "another call": (
        "v1/worker/gpu_model_runner.py",
        ("num_spec_tokens_to_schedule,\n", "\n"),
        "proposer-propose",
    ),
}


@pytest.mark.parametrize(("file", "change", "symbol"), SABOTAGES.values(), ids=SABOTAGES)
def test_a_vllm_of_another_shape_stops_the_start_and_nothing_is_patched(
    tmp_path, file, change, symbol
):
    site = Site(tmp_path)
    site.add_us()
    site.add_vllm(changes={file: change})
    code = (
        "import vllm_drafter\n"
        "try:\n"
        "    vllm_drafter.register()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__); print(error)\n"
        "from vllm_drafter.patches import registry\n"
        "print([item.state for item in registry.report()])\n"
    )
    said = run(site, code)
    assert said.startswith("SurfaceMismatch\n")
    assert f"  {symbol} (" in said
    for word in ("expected", "found", "way out", "VLLM_DRAFTER=0"):
        assert word in said
    assert said.endswith("['idle', 'idle']\n")


@pytest.mark.parametrize("version", ["0.11.0", "0.34.0"])
def test_a_vllm_that_is_not_claimed_stops_the_start(tmp_path, version):
    site = Site(tmp_path)
    site.add_us()
    site.add_vllm(version)
    done = site.run(REGISTER)
    assert done.returncode != 0
    assert "SurfaceMismatch" in done.stderr
    assert version in done.stderr


def test_without_vllm_it_says_so(tmp_path):
    site = Site(tmp_path)
    site.add_us()
    done = site.run(REGISTER)
    assert "PackageNotInstalled" in done.stderr


def test_a_wrong_setting_stops_the_start(site):
    done = site.run(REGISTER, VLLM_DRAFTER_STAMP="x")
    assert done.returncode != 0
    assert "SettingError" in done.stderr


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("0.11.1", "InputBatchProposer"),
        ("0.14.1", "InputBatchProposer"),
        ("0.15.1", "SlotMappingsProposer"),
        ("0.23.0", "SlotMappingsProposer"),
        ("0.24.0", "TokensPerStepProposer"),
        ("0.33.0", "TokensPerStepProposer"),
    ],
)
def test_the_class_fits_the_call_of_the_installed_release(version, name):
    from vllm_drafter.proposer import proposer_class

    assert proposer_class(version).__name__ == name


# --- the route custom_class ---------------------------------------------------------------------

UNPATCHED = {"VLLM_DRAFTER_ROUTE": "custom_class"}


def test_with_the_route_custom_class_nothing_is_patched(site, tmp_path):
    stamps = tmp_path / "stamps.jsonl"
    code = WHOSE + REGISTER + WHOSE
    assert run(site, code, **UNPATCHED, VLLM_DRAFTER_STAMPS=str(stamps)) == THEIRS + THEIRS
    assert run(site, REGISTER + WHOSE, **UNPATCHED) == THEIRS
    stamp = json.loads(stamps.read_text())
    assert stamp["route"] == "custom_class"
    assert stamp["vllm_version"] == "0.32.0"
    assert (stamp["patched"], stamp["pending"]) == ([], [])


def test_with_the_route_custom_class_vllm_refuses_the_suffix_method_as_without_us(site):
    check = (
        "from vllm.config.speculative import SpeculativeConfig\n"
        "SpeculativeConfig()._validate_suffix_decoding()\n"
    )
    assert "ImportError: refused" in site.run(REGISTER + check, **UNPATCHED).stderr


def test_with_the_route_custom_class_the_front_end_still_serves_the_metrics(site):
    serve = (
        "import vllm_drafter.metrics as metrics\n"
        "metrics.serve = lambda: print('served')\n"
        "from vllm_drafter import startup\n"
        "from vllm_drafter.stamps import Role\n"
        "startup.current_role = lambda: Role('front end')\n"
    )
    assert run(site, serve + REGISTER, **UNPATCHED) == "served\n"


@pytest.mark.parametrize("sabotage", ["renamed class", "renamed gate", "another call"])
def test_the_route_custom_class_asks_nothing_of_what_only_the_patches_need(tmp_path, sabotage):
    file, change, _ = SABOTAGES[sabotage]
    site = Site(tmp_path)
    site.add_us()
    site.add_vllm(changes={file: change})
    run(site, REGISTER, **UNPATCHED)


def test_the_route_custom_class_stops_where_vllm_asks_a_custom_class_otherwise(tmp_path):
    site = Site(tmp_path)
    site.add_us()
    call = ("self.input_batch.num_tokens_no_spec,", "self.input_batch.num_tokens,")
    site.add_vllm(changes={"v1/worker/gpu_model_runner.py": call})
    done = site.run(REGISTER, **UNPATCHED)
    assert done.returncode != 0
    assert "SurfaceMismatch" in done.stderr
    assert "  custom-class-propose (" in done.stderr


def test_the_route_custom_class_needs_a_vllm_that_has_it(tmp_path):
    site = Site(tmp_path)
    site.add_us()
    site.add_vllm("0.21.0")
    done = site.run(REGISTER, **UNPATCHED)
    assert done.returncode != 0
    assert "SettingError: VLLM_DRAFTER_ROUTE=custom_class: expected vLLM >=0.22" in done.stderr
    assert "found 0.21.0" in done.stderr


def test_what_is_only_for_the_patches_is_in_the_surface():
    from drafter_compat.surface import load_builtin_surface
    from vllm_drafter.routes import ONLY_FOR_THE_PATCHES

    assert {symbol.id for symbol in load_builtin_surface("vllm_drafter")} > ONLY_FOR_THE_PATCHES
