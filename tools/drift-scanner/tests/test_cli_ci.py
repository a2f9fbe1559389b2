"""The scripts around the command that another repository's CI runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or shutil.which("bash") is None, reason="the scripts are for bash"
)


@pytest.fixture
def bin_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "bin"
    directory.mkdir()
    return directory


def program(directory: Path, name: str, text: str) -> None:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def bash(script: str, bin_directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{bin_directory}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(TOOL / script)],
        env={**os.environ, **environment, "PATH": path},
        capture_output=True,
        text=True,
    )


class TestIssue:
    """There is one issue about drift: opened, updated, closed, or left alone."""

    def calls(self, tmp_path: Path, bin_directory: Path, *, code: int, open_issue: str) -> str:
        log = tmp_path / "gh.log"
        answer = f'[ "$2" = list ] && echo "{open_issue}"; echo "$*" >> "{log}"; exit 0'
        program(bin_directory, "gh", answer)
        report = tmp_path / "drift.md"
        report.write_text("## my-plugin: 1 symbol of 2 drifted\n\nmore\n")
        done = bash(
            "issue.sh",
            bin_directory,
            CODE=str(code),
            REPORT=str(report),
            RUN="https://example.org/run/1",
            REPOSITORY="me/mine",
        )
        assert done.returncode == 0, done.stderr
        return log.read_text()

    def test_drift_opens_an_issue_titled_with_the_outcome(
        self, tmp_path: Path, bin_directory: Path
    ) -> None:
        calls = self.calls(tmp_path, bin_directory, code=1, open_issue="")

        assert "issue create --repo me/mine --label vllm-drift" in calls
        assert "--title my-plugin: 1 symbol of 2 drifted" in calls

    def test_drift_updates_the_issue_that_is_open(
        self, tmp_path: Path, bin_directory: Path
    ) -> None:
        calls = self.calls(tmp_path, bin_directory, code=1, open_issue="42")

        assert "issue edit 42" in calls
        assert "create" not in calls

    def test_the_issue_is_closed_when_the_drift_is_gone(
        self, tmp_path: Path, bin_directory: Path
    ) -> None:
        assert "issue close 42" in self.calls(tmp_path, bin_directory, code=0, open_issue="42")

    def test_a_blind_run_leaves_the_issue_alone(self, tmp_path: Path, bin_directory: Path) -> None:
        calls = self.calls(tmp_path, bin_directory, code=2, open_issue="42")

        assert calls.splitlines() == [calls.splitlines()[0]]
        assert "issue list" in calls


class TestAction:
    """The step of the composite action."""

    def step(
        self, tmp_path: Path, bin_directory: Path, *, ends: int, **inputs: str
    ) -> tuple[subprocess.CompletedProcess[str], str, str]:
        work = tmp_path / "work"
        log = tmp_path / "arguments"
        scanner = (
            f'printf "%s\\n" "$@" > "{log}"; '
            'for a in "$@"; do case "$a" in *=*) echo "# report" > "${a#*=}";; esac; done; '
            f"exit {ends}"
        )
        program(work / "venv" / "bin", "vllm-drift", scanner)
        given = {"PLUGIN": ".", "SURFACE": "", "FROM": "", "TO": "latest", "ARGUMENTS": ""}
        done = bash(
            "action.sh",
            bin_directory,
            **{**given, **inputs},
            FAIL_ON="warning",
            PYTHON="python3",
            WORK=str(work),
            ACTION=str(TOOL.parents[1]),
            GITHUB_OUTPUT=str(tmp_path / "output"),
            GITHUB_STEP_SUMMARY=str(tmp_path / "summary"),
        )
        output = tmp_path / "output"
        told = output.read_text() if output.exists() else ""
        return done, log.read_text() if log.exists() else "", told

    @pytest.mark.parametrize("ends", [0, 1, 2])
    def test_it_ends_as_the_command_does_and_says_so(
        self, tmp_path: Path, bin_directory: Path, ends: int
    ) -> None:
        done, _, told = self.step(tmp_path, bin_directory, ends=ends, FROM="0.32.0")

        assert done.returncode == ends
        assert f"exit-code={ends}\n" in told
        assert (tmp_path / "summary").read_text() == "# report\n"

    def test_a_plugin_is_checked_and_a_surface_is_scanned(
        self, tmp_path: Path, bin_directory: Path
    ) -> None:
        _, checked, _ = self.step(tmp_path, bin_directory, ends=0, FROM="0.32.0")
        _, scanned, _ = self.step(tmp_path, bin_directory, ends=0, SURFACE="s.toml")

        assert checked.split()[:6] == ["check", "--from", "0.32.0", "--to", "latest", "."]
        assert scanned.split()[:4] == ["scan", "latest", "--surface", "s.toml"]

    def test_an_input_is_never_run(self, tmp_path: Path, bin_directory: Path) -> None:
        evil = f"$(touch {tmp_path}/owned); touch {tmp_path}/owned"

        _, arguments, _ = self.step(tmp_path, bin_directory, ends=0, FROM=evil, TO=evil)

        assert evil in arguments.splitlines()
        assert not (tmp_path / "owned").exists()

    def test_with_neither_it_says_what_to_give(self, tmp_path: Path, bin_directory: Path) -> None:
        done, arguments, _ = self.step(tmp_path, bin_directory, ends=0)

        assert (done.returncode, arguments) == (2, "")
        assert "give 'from'" in done.stdout
