"""The plugin that docs/write-a-patch.md builds works as written, its own tests included."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[3] / "docs" / "write-a-patch.md"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The guide's files, written where it says."""
    blocks = re.findall(r"```\w+\n# (\S+)\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    for name, text in blocks:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    assert (tmp_path / "src/vllm_abort_log/__init__.py").exists()
    return tmp_path


def run(project: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(project / "src"), **environment},
    )


def test_its_own_tests_pass(project: Path) -> None:
    done = run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_its_surface_can_be_exported_from_a_release(project: Path) -> None:
    scheduler = project / "vllm/v1/core/sched/scheduler.py"
    scheduler.parent.mkdir(parents=True)
    scheduler.write_text(
        "class Scheduler:\n    def finish_requests(self, request_ids, finished_status): ...\n"
    )
    command = "from drafter_compat.cli import main; main()"
    options = ("vllm_abort_log:registry", "--root", str(project / "vllm"), "--version", "0.32.0")
    exported = run(project, "-c", command, "surface", *options)
    assert exported.returncode == 0, exported.stderr
    assert 'name = "Scheduler.finish_requests"' in exported.stdout
    checked = run(project, "-c", command, "check", *options)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "vllm-abort-log: all 2 symbols of vllm 0.32.0 are as expected" in checked.stdout
