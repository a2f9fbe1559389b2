"""The plugin that examples/patch-plugin makes works as made, and docs/write-a-patch.md shows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cookiecutter.main import cookiecutter

ROOT = Path(__file__).parents[3]
TEMPLATE = ROOT / "examples" / "patch-plugin"
GUIDE = ROOT / "docs" / "write-a-patch.md"
SCHEDULER = "class Scheduler:\n    def finish_requests(self, request_ids, finished_status): ...\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the template makes of its defaults, as the guide shows it."""
    folder = tmp_path_factory.mktemp("default")
    return Path(cookiecutter(str(TEMPLATE), no_input=True, output_dir=str(folder)))


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What it makes of other names."""
    names = {"plugin": "my-scheduler-fix", "patch": "fix"}
    folder = tmp_path_factory.mktemp("renamed")
    made = cookiecutter(str(TEMPLATE), no_input=True, extra_context=names, output_dir=str(folder))
    return Path(made)


def run(project: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(project / "src")}
    environment.pop("VLLM_PATCHES", None)
    return subprocess.run(
        [sys.executable, *command],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def compat(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(project, "-c", "from drafter_compat.cli import main; main()", *arguments)


@pytest.mark.parametrize("made", ["project", "renamed"])
def test_its_own_tests_pass(made: str, request: pytest.FixtureRequest) -> None:
    project = request.getfixturevalue(made)
    done = run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


@pytest.mark.parametrize(
    ("made", "registry"),
    [("project", "vllm_abort_log:registry"), ("renamed", "my_scheduler_fix:registry")],
)
def test_its_surface_is_what_follows_from_its_patch(
    made: str, registry: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    project = request.getfixturevalue(made)
    scheduler = tmp_path / "vllm/v1/core/sched/scheduler.py"
    scheduler.parent.mkdir(parents=True)
    scheduler.write_text(SCHEDULER)
    options = ("--root", str(tmp_path / "vllm"), "--version", "0.32.0")
    exported = compat(project, "surface", registry, *options)
    assert exported.returncode == 0, exported.stderr
    assert exported.stdout == (project / "surface.toml").read_text()
    checked = compat(project, "check", registry, *options)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "all 2 symbols of vllm 0.32.0 are as expected" in checked.stdout


def test_nothing_of_the_template_is_left_in_what_it_makes(renamed: Path) -> None:
    for path in renamed.rglob("*"):
        assert "cookiecutter" not in path.name
        if path.is_file() and path.suffix != ".pyc":
            text = path.read_text()
            assert not re.search("cookiecutter|abort_log|vllm-abort-log", text), path


def test_what_the_guide_shows_is_what_the_example_has(project: Path) -> None:
    blocks = re.findall(r"```\w+\n# (\S+)\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    assert {name for name, _ in blocks} >= {
        "pyproject.toml",
        "src/vllm_abort_log/__init__.py",
        "tests/test_patch.py",
        "noxfile.py",
    }
    for name, text in blocks:
        assert text.strip() in (project / name).read_text(), name
