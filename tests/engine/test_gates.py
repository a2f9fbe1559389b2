"""Who is let in at start-up: with us, without us, and when vLLM is not the one we know."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from engines import SUFFIX, VLLMS_OWN, WHOSE, environment, run_python, start_engine

ACCEPT = """
from vllm import EngineArgs
args = EngineArgs(model={model!r}, speculative_config={{"method": "suffix"}})
config = args.create_engine_config()
print("accepted", config.speculative_config.method)
"""

DOCTOR = """
import sys
from vllm_drafter.cli import main
sys.argv = ["vllm-drafter", "doctor", "--json"]
main()
"""

REFUSAL = "Arctic Inference is required"


def doctor(env):
    done = run_python(DOCTOR, env)
    return done.returncode, json.loads(done.stdout)


def failures(diagnosis):
    return {check["id"]: check for check in diagnosis["checks"] if check["status"] == "failure"}


def test_with_us_vllm_accepts_the_suffix_method(tiny):
    done = run_python(ACCEPT.format(model=tiny), environment())
    assert "accepted suffix" in done.stdout, done.stdout[-3000:]


def test_doctor_says_that_it_works(tiny):
    code, diagnosis = doctor(environment())
    assert failures(diagnosis) == {}
    assert code == 0
    assert diagnosis["works"]


def test_left_out_of_vllm_plugins_vllm_refuses_and_doctor_says_why(tiny):
    env = environment(VLLM_PLUGINS="other")
    done = run_python(ACCEPT.format(model=tiny), env)
    assert done.returncode != 0
    assert REFUSAL in done.stdout
    code, diagnosis = doctor(env)
    assert code == 1
    assert failures(diagnosis).keys() == {"VLLM_PLUGINS"}
    assert "leaves out suffix_drafter" in failures(diagnosis)["VLLM_PLUGINS"]["found"]


def test_turned_off_vllm_refuses_and_doctor_says_why(tiny):
    env = environment(VLLM_DRAFTER="0")
    done = run_python(ACCEPT.format(model=tiny), env)
    assert done.returncode != 0
    assert REFUSAL in done.stdout
    code, diagnosis = doctor(env)
    assert code == 1
    assert failures(diagnosis).keys() == {"settings"}


def test_turned_off_nothing_in_vllm_is_ours():
    done = run_python(WHOSE, environment(VLLM_DRAFTER="0"))
    names = [line for line in done.stdout.splitlines() if line.startswith("vllm.")]
    assert names == VLLMS_OWN, done.stdout[-3000:]


def test_turned_on_both_names_of_both_gates_are_ours():
    done = run_python(WHOSE, environment())
    names = [line for line in done.stdout.splitlines() if line.startswith("vllm_drafter.")]
    assert names == [
        "vllm_drafter.patches",
        "vllm_drafter.patches",
        "vllm_drafter.proposer",
        "vllm_drafter.proposer",
    ], done.stdout[-3000:]


def test_a_misspelt_setting_stops_the_start(tiny):
    done = run_python(ACCEPT.format(model=tiny), environment(VLLM_DRAFTER_STAMP="x"))
    assert done.returncode != 0
    assert "Did you mean VLLM_DRAFTER_STAMPS?" in done.stdout


# --- a vLLM that is not the one we know -----------------------------------------


def overlay(installed: Path, target: Path, changed: str) -> Path:
    """A copy of the package in which only the file `changed` is a real file; the rest are links."""
    first, _, rest = changed.partition("/")
    target.mkdir(parents=True)
    for item in installed.iterdir():
        if item.name == "__pycache__":
            continue
        if item.name != first:
            (target / item.name).symlink_to(item)
        elif rest:
            overlay(item, target / item.name, rest)
        else:
            shutil.copy(item, target / item.name)
    return target


@pytest.fixture
def sabotaged(tmp_path):
    """A vLLM whose suffix proposer has another name; returns the directory to put first."""
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    package = overlay(Path(spec.origin).parent, tmp_path / "site" / "vllm", FILE)
    file = package / FILE
    file.write_text(file.read_text().replace("class SuffixDecodingProposer", "class Renamed"))
    return tmp_path / "site"


FILE = "v1/spec_decode/suffix_decoding.py"


def test_a_vllm_with_another_class_name_is_refused_before_a_model_is_loaded(
    sabotaged, tiny, tmp_path
):
    done, result = start_engine(
        tmp_path / "engine",
        {"model": tiny, "speculative_config": SUFFIX},
        [],
        PYTHONPATH=str(sabotaged),
    )
    assert done.returncode != 0
    assert not result.exists()
    assert "SurfaceMismatch" in done.stdout
    for expected in (
        "vllm-drafter does not fit",
        "SuffixDecodingProposer",
        "way out",
        "VLLM_DRAFTER=0",
    ):
        assert expected in done.stdout
    assert "Starting to load model" not in done.stdout
    assert not (tmp_path / "engine" / "stamps.jsonl").exists()


def test_a_mismatch_stops_the_start_whatever_the_method(sabotaged):
    env = environment(PYTHONPATH=str(sabotaged))
    done = run_python("from vllm.plugins import load_general_plugins as f; f()", env)
    assert done.returncode != 0
    assert "SurfaceMismatch" in done.stdout


def test_doctor_names_the_symbol_that_is_not_as_expected(sabotaged):
    code, diagnosis = doctor(environment(PYTHONPATH=str(sabotaged)))
    assert code == 1
    assert "surface:proposer" in failures(diagnosis)
    assert diagnosis["vllm"]["root"] == str(sabotaged / "vllm")


def test_register_imports_neither_vllm_nor_torch_nor_numba():
    done = run_python(
        "import sys, vllm_drafter\n"
        "vllm_drafter.register(); vllm_drafter.register()\n"
        "names = ('vllm', 'torch', 'numba', 'drafter_core')\n"
        "print([name for name in names if name in sys.modules])",
        environment(),
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stdout
