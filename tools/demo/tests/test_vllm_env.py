"""Finding what an environment with real vLLM is made of, and the pins."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import vllm_env
from packaging.version import Version
from vllm_env import (
    TORCH_CPU_INDEX,
    Environment,
    EnvironmentUnavailable,
    Pin,
    torch_options,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
PIN = {"vllm": "1.2.3", "python": "3.11", "torch": "2.0.0", "level": "engine"}


def test_the_pins_file_lists_each_release_once_newest_first() -> None:
    pins, default = vllm_env.load_pins()
    versions = [Version(release) for release in pins]
    assert versions == sorted(set(versions), reverse=True)
    assert pins[default].level == "engine"


def test_each_release_is_one_line_of_the_pins_file() -> None:
    lines = [line.strip() for line in vllm_env.PINS.read_text().splitlines()]
    rows = [tomllib.loads(f"pin = [{line}]")["pin"] for line in lines if line.startswith("{")]
    pins, _ = vllm_env.load_pins()
    assert vllm_env.read_pins({"pin": [pin for row in rows for pin in row]}) == pins
    assert all(len(row) == 1 for row in rows)


def test_the_running_interpreter_serves_its_own_version() -> None:
    assert vllm_env.find_python(RUNNING) == Path(sys.executable)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({**PIN, "tourch": "2"}, "unknown keys ['tourch']"),
        ({key: PIN[key] for key in PIN if key != "torch"}, "lacks ['torch']"),
        ({**PIN, "level": "full"}, "'full'"),
        ({**PIN, "vllm": "1.2.o"}, "'1.2.o', not a version"),
        ({**PIN, "python": 3.11}, "3.11, not a version in quotes"),
        ({**PIN, "cpu_wheel": "no"}, "'no', not true or false"),
        ({**PIN, "sampling": "no"}, "'no', not true or false"),
        ({**PIN, "verified": "contract"}, "'contract', not a list of contract, engine"),
        ({**PIN, "verified": ["contrct"]}, "['contrct'], not a list of contract, engine"),
        ({**PIN, "cpu_wheel": False}, "its level can only be 'contract'"),
    ],
)
def test_a_wrong_pin_is_named(row: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        vllm_env.read_pins({"pin": [row]})
    assert words in str(caught.value)


def test_a_release_that_is_listed_twice_is_named() -> None:
    with pytest.raises(ValueError, match=r"1\.2\.3 is listed twice"):
        vllm_env.read_pins({"pin": [PIN, PIN]})


@pytest.mark.parametrize("defaults", [{}, {"engine": "9.9.9"}, {"engine": "1.2.2"}])
def test_a_default_that_is_no_pin_with_an_engine_is_named(defaults: dict[str, str]) -> None:
    table = {"defaults": defaults, "pin": [PIN, {**PIN, "vllm": "1.2.2", "level": "contract"}]}
    with pytest.raises(ValueError, match=r"engine of \[defaults\] is .* not a pin of level"):
        vllm_env.default_pin(table)


def test_a_release_without_a_cpu_build_is_refused_with_a_way_out(tmp_path: Path) -> None:
    pin = Pin(**{**PIN, "cpu_wheel": False})
    with pytest.raises(EnvironmentUnavailable, match="choose a pin of level 'engine'"):
        Environment(pin, tmp_path).ensure()


@pytest.fixture
def dry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Environment, list[list[str]]]:
    """An environment that runs nothing and keeps the commands it would run."""
    environment = Environment(Pin(**PIN), tmp_path)
    commands: list[list[str]] = []
    monkeypatch.setattr(environment, "_logged", lambda command: commands.append(command) or 1)
    return environment, commands


def test_the_configured_index_is_asked_before_pytorchs_own() -> None:
    commands: list[list[str]] = []

    def run(command: Sequence[str]) -> int:
        commands.append(list(command))
        return int(TORCH_CPU_INDEX not in command)

    found = torch_options(Path("python"), "2.0.0", run)
    assert found == ["--extra-index-url", TORCH_CPU_INDEX]
    assert [TORCH_CPU_INDEX in command for command in commands] == [False, True]


def test_where_pip_finds_a_cpu_build_no_index_is_added() -> None:
    commands: list[Sequence[str]] = []
    assert (
        torch_options(Path("python"), "2.0.0", lambda command: commands.append(command) or 0) == []
    )
    assert len(commands) == 1


def test_where_no_index_has_a_cpu_build_the_error_says_what_to_do() -> None:
    with pytest.raises(EnvironmentUnavailable, match="PIP_FIND_LINKS"):
        torch_options(Path(sys.executable), "2.0.0", lambda command: 1)


def test_torch_is_pinned_in_every_installation(
    dry: tuple[Environment, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, commands = dry
    monkeypatch.setattr(
        environment, "_run", lambda what, command, hint: commands.append(list(command))
    )
    environment._pip("something", ["something==1"], [])
    assert "torch==2.0.0+cpu" in commands[0]


def test_only_companions_that_do_not_import_are_removed(
    dry: tuple[Environment, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, commands = dry

    def logged(command: list[str]) -> int:
        commands.append(command)
        return int("import torchvision" in command)

    monkeypatch.setattr(environment, "_logged", logged)
    environment._remove_misfits()
    removed = [command[-1] for command in commands if "uninstall" in command]
    assert removed == ["torchvision"]
