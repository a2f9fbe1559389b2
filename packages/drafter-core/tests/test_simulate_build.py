"""`drafter-core build` makes a snapshot from which a replay starts warm."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer", reason="the command is the extra drafter-core[simulate]")

from typer.testing import CliRunner

from drafter_core import SuffixDrafter, commands
from drafter_core.commands import app


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    draw = np.random.default_rng(1)
    lines = [
        {"prompt": draw.integers(0, 30_000, 40).tolist(),
         "response": draw.integers(0, 30_000, 80).tolist()}
        for _ in range(4)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{}\n")
    return path


def words(output: str) -> str:
    """What is said, without the frame and the line breaks of a terminal."""
    return " ".join(output.replace("│", " ").split())


def build(log: Path, *arguments: str) -> dict[str, object]:
    snapshot = log.with_name("warm.snapshot")
    command = ["build", str(log), "-o", str(snapshot), "--json", *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    report: dict[str, object] = json.loads(result.stdout)
    return report


def test_the_snapshot_holds_every_usable_response_and_the_end_of_its_prompt(log: Path) -> None:
    report = build(log)
    assert (report["responses"], report["tokens"]) == (4, 4 * (24 + 80))
    assert [one["line"] for one in report["skipped"]] == [5]  # type: ignore[attr-defined]
    assert SuffixDrafter(24).load(str(report["snapshot"])) == 4


def test_a_snapshot_that_was_built_is_the_one_that_a_server_would_have_saved(log: Path) -> None:
    served = SuffixDrafter(24)
    requests = [json.loads(line) for line in log.read_text().splitlines()[:4]]
    for number, request in enumerate(requests):
        served.start_request(number, request["prompt"])
        for token in request["response"]:
            served.append(number, [token])
        served.stop_request(number)
    served.save(log.with_name("served.snapshot"))
    built = Path(str(build(log)["snapshot"]))
    assert built.read_bytes() == log.with_name("served.snapshot").read_bytes()
    drafter = SuffixDrafter(24)
    drafter.load(built)
    drafter.start_request("again", requests[0]["prompt"])
    drafter.append("again", requests[0]["response"][:1])
    draft = drafter.draft("again", 8).token_ids
    assert draft == requests[0]["response"][1 : 1 + len(draft)]
    assert len(draft) > 1  # one match of one token allows no more


def test_as_much_of_a_prompt_is_kept_as_the_depth(log: Path) -> None:
    assert build(log, "--max-depth", "8")["tokens"] == 4 * (8 + 80)
    assert build(log, "--max-depth", "64")["tokens"] == 4 * (40 + 80)


def test_the_last_responses_are_kept_where_there_is_a_limit(log: Path) -> None:
    assert build(log, "--max-cached-requests", "2")["responses"] == 2


def test_a_replay_from_a_snapshot_is_warm(log: Path) -> None:
    snapshot = str(build(log)["snapshot"])
    rates = []
    for extra in ([], ["--snapshot", snapshot]):
        result = CliRunner().invoke(app, ["simulate", str(log), "--json", *extra])
        assert result.exit_code == 0, result.output
        rates.append(json.loads(result.stdout)["tokens_per_step"])
    assert rates[0] < 1.1
    assert rates[1] > 5


def test_a_budget_limits_what_a_step_drafts(log: Path) -> None:
    snapshot = str(build(log)["snapshot"])
    command = ["simulate", str(log), "--json", "--snapshot", snapshot, "--budget", "4"]
    report = json.loads(CliRunner().invoke(app, command).stdout)
    assert 0 < report["drafted"] <= 4 * report["steps"]


def test_a_damaged_snapshot_is_an_error_that_names_it(log: Path) -> None:
    bad = log.with_name("bad.snapshot")
    bad.write_bytes(b"nonsense")
    result = CliRunner().invoke(app, ["simulate", str(log), "--snapshot", str(bad)])
    assert result.exit_code == 1
    assert "bad.snapshot" in result.output.replace("\n", "")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("missing/warm.snapshot", "there is no directory"),
        (".", "is a directory"),
        ("log.jsonl", "is what is read"),
        ("/dev/full", "is no regular file"),
    ],
)
def test_a_snapshot_that_cannot_be_written_is_known_before_anything_is_read(
    log: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: str
) -> None:
    monkeypatch.setattr(commands, "_read", None)
    result = CliRunner().invoke(app, ["build", str(log), "-o", str(log.parent / name)])
    assert result.exit_code == 2
    assert expected in words(result.output)
    assert ".part" not in result.output


def test_a_disk_that_is_full_is_an_error_that_names_the_snapshot(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = CliRunner().invoke(app, ["build", str(log), "-o", str(log.with_name("w.snap"))])
    assert result.exit_code == 1
    assert "w.snap could not be written: No space left" in words(result.output)
    assert ".part" not in result.output
    assert [one.name for one in log.parent.iterdir()] == ["log.jsonl"]


def test_a_path_is_reported_as_it_is(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(log.parent)
    for name in ("o[bold].snap", "o[", "o[_b].snap"):
        result = CliRunner().invoke(app, ["build", "log.jsonl", "-o", name])
        assert result.exit_code == 0, result.output
        assert f"{name}: 4 responses" in result.output
