"""The command: what it prints, what it writes, and above all how it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from drift_local_index import LocalIndex

from drafter_compat.surface import KINDS, parse_surface
from vllm_drift import _http, cli, runs
from vllm_drift.findings import DEFAULT_SEVERITY, Finding, Report, Severity, Verdict
from vllm_drift.reports import FORMATS

OLD = {
    "vllm/__init__.py": "",
    "vllm/drafts.py": "def draft(tokens, k):\n    return tokens[:k]\n",
    "vllm/run.py": "from vllm.drafts import draft\n\n\ndef step(t):\n    return draft(t, 3)\n",
}
NEW = {**OLD, "vllm/drafts.py": "def draft(k, tokens):\n    return tokens[:k]\n"}

SURFACE = """\
schema = 1
plugin = "my-plugin"
package = "vllm"
versions = ">=1,<2"

[[symbol]]
id = "draft"
kind = "function"
module = "vllm.drafts"
name = "draft"
signature = "(tokens, k)"
why = "replace it"
"""
PLUGIN = """\
from vllm.drafts import draft


def ours(tokens):
    return draft(tokens, k=2)


def theirs(tokens):
    return draft(tokens, 2)
"""


@pytest.fixture(autouse=True)
def here(index: LocalIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with a manifest; pip is set up with the local index."""
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/simple")
    monkeypatch.setenv("VLLM_DRIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_http, "_PAUSES", (0.0, 0.0, 0.0))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "surface.toml").write_text(SURFACE)
    index.add_wheel("1.0", OLD)
    index.add_wheel("1.1", OLD)
    index.add_wheel("2.0", NEW)
    return work


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


SCAN = ("scan", "--surface", "surface.toml")


class TestExitCodes:
    """0 no drift, 1 drift, 2 could not look; nothing else ever looks like 0 or 1."""

    def test_a_release_that_is_as_declared_is_0(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(*SCAN, "1.0") == 0
        assert "my-plugin: no drift in 1 symbol in vllm 1.0" in capsys.readouterr().out

    def test_a_release_that_drifted_is_1(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(*SCAN, "2.0") == 1
        assert "vllm/drafts.py:1" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [
            (("1.7",), "no release 1.7; the nearest are 1.0, 1.1, 2.0"),
            (("./nowhere",), "not an existing directory"),
            (("1.0", "--dist", "nothing"), "no release of nothing"),
            (("1.0", "--format", "yaml"), "unknown format 'yaml'"),
            (("1.0", "--write", "page.html"), "should be FORMAT=FILE"),
            (("1.0", "--offline"), "never read before"),
            (("1.0", "--offline", "--no-cache"), "--offline reads the cache"),
            (("--wrong",), "No such option"),
        ],
    )
    def test_what_cannot_be_looked_at_is_2_and_says_why(
        self, arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(*SCAN, *arguments) == 2
        assert why in " ".join(capsys.readouterr().err.split())

    def test_a_manifest_that_is_wrong_is_2(
        self, here: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (here / "surface.toml").write_text(SURFACE.replace('"function"', '"functoin"'))

        assert run(*SCAN, "1.0") == 2
        assert "functoin" in capsys.readouterr().err

    def test_a_dead_server_is_2(
        self, index: LocalIndex, capsys: pytest.CaptureFixture[str]
    ) -> None:
        index.statuses = [500] * 20

        assert run(*SCAN, "1.0") == 2
        assert "could not be read after" in capsys.readouterr().err

    def test_a_surface_of_which_nothing_applies_is_2(
        self, here: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (here / "surface.toml").write_text(SURFACE + 'versions = "<1"\n')

        assert run(*SCAN, "1.0") == 2
        captured = capsys.readouterr()
        assert "nothing could be judged" in captured.err
        assert "nothing of my-plugin's surface applies to 1.0" in captured.out

    def test_a_defect_of_the_scanner_is_2(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(runs, "scan", broken)

        assert run(*SCAN, "1.0") == 2
        assert "a bug" in capsys.readouterr().err

    def test_warnings_count_unless_only_errors_are_asked_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        warning = Finding("x", "call-sites", Verdict.NEW_CALL_SITE, Severity.WARNING, "called too")
        told = Report("scan", "my-plugin", "vllm", (), (warning,))
        monkeypatch.setattr(runs, "scan", lambda *_, **__: told)

        assert run(*SCAN, "1.0") == 1
        assert run(*SCAN, "1.0", "--fail-on", "error") == 0


class TestScan:
    """One release or several."""

    def test_without_a_version_it_scans_the_newest(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(*SCAN) == 1
        assert "vllm 2.0" in capsys.readouterr().out

    def test_several_releases_are_scanned_in_processes_and_say_since_when(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(*SCAN, ">=1", "--json", "--jobs", "2") == 1
        document = json.loads(capsys.readouterr().out)
        assert [r["label"] for r in document["releases"]] == ["1.0", "1.1", "2.0"]
        assert {(f["release"], f["first_seen"]) for f in document["findings"]} == {("2.0", "2.0")}

    def test_a_release_that_is_not_claimed_is_noted(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(*SCAN, "2.0", "--json")

        (note,) = json.loads(capsys.readouterr().out)["notes"]
        assert note.startswith("my-plugin claims >=1,<2, not 2.0")

    def test_a_directory_is_scanned_as_the_version_that_it_is_said_to_be(
        self, here: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name, text in NEW.items():
            path = here / "checkout" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

        assert run(*SCAN, "./checkout") == 2
        assert "--as VERSION" in capsys.readouterr().err
        assert run(*SCAN, "./checkout", "--as", "1.5") == 1

    def test_the_surface_can_be_named_in_pyproject(
        self, here: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run("scan", "1.0") == 2
        assert "[tool.vllm-drift]" in capsys.readouterr().err
        (here / "pyproject.toml").write_text('[tool.vllm-drift]\nsurface = "surface.toml"\n')
        assert run("scan", "1.0") == 0

    def test_a_report_is_written_in_other_formats_beside_the_printed_one(
        self, here: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(*SCAN, "2.0", "--write", "html=out/drift.html", "--write", "sarif=drift.sarif")

        assert (here / "out" / "drift.html").read_text().startswith("<!doctype html>")
        (result,) = json.loads((here / "drift.sarif").read_text())["runs"][0]["results"]
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == "surface.toml"
        assert place["region"]["startLine"] == 7
        assert "drifted" in capsys.readouterr().out

    def test_a_second_run_gives_the_same_report_without_the_network(
        self, index: LocalIndex, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(*SCAN, "2.0", "--json")
        first, asked = capsys.readouterr().out, len(index.requests)

        run(*SCAN, "2.0", "--json")

        assert capsys.readouterr().out == first
        assert len(index.requests) == asked

    def test_a_changed_manifest_is_judged_anew(self, here: Path) -> None:
        assert run(*SCAN, "2.0") == 1
        (here / "surface.toml").write_text(SURFACE.replace("(tokens, k)", "(k, tokens)"))

        assert run(*SCAN, "2.0") == 0

    def test_a_cache_that_was_damaged_between_two_runs_heals(self, tmp_path: Path) -> None:
        run(*SCAN, "1.0", "1.1")
        for kind in ("results", "facts"):
            for path in (tmp_path / "cache" / kind).rglob("*"):
                if path.is_file():
                    path.write_bytes(b"damaged")
        for pack in (tmp_path / "cache" / "packs").iterdir():
            data = bytearray(pack.read_bytes())
            data[-20] ^= 0xFF
            pack.write_bytes(bytes(data))

        assert run(*SCAN, "1.0", "1.1") == 0
        assert run(*SCAN, "2.0") == 1


class TestCheck:
    """What a bump breaks."""

    @pytest.fixture
    def plugin(self, here: Path) -> Path:
        (here / "plug" / "my_plugin").mkdir(parents=True)
        (here / "plug" / "my_plugin" / "__init__.py").write_text(PLUGIN)
        return here / "plug"

    def test_a_plugin_is_inferred_and_compared(
        self, plugin: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run("check", "plug", "--from", "1.0", "--to", "2.0", "--json") == 1
        document = json.loads(capsys.readouterr().out)
        assert {f["verdict"] for f in document["findings"]} == {"changed-shape"}
        assert document["findings"][0]["compared_with"] == "1.0"
        assert "my_plugin/__init__.py" in document["findings"][0]["why"]

    def test_a_second_check_says_the_same_and_infers_nothing_anew(
        self, plugin: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bump = ("check", "plug", "--from", "1.0", "--to", "2.0", "--json")
        run(*bump)
        first = capsys.readouterr().out
        monkeypatch.setattr(runs, "infer", lambda *_, **__: pytest.fail("inferred again"))

        assert run(*bump) == 1
        assert capsys.readouterr().out == first

    def test_a_plugin_that_changed_is_read_anew(
        self, plugin: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        bump = ("check", "plug", "--from", "1.0", "--to", "2.0")
        assert run(*bump) == 1
        code = "from vllm.drafts import draft\n\nuse = draft(k=2, tokens=[1])\n"
        (plugin / "my_plugin" / "__init__.py").write_text(code)

        assert run(*bump) == 0

    def test_annotations_stand_in_the_plugins_source(
        self, plugin: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run("check", "plug", "--from", "1.0", "--to", "2.0", "--format", "github")

        assert "file=plug/my_plugin/__init__.py,line=" in capsys.readouterr().out

    def test_a_bump_that_changes_nothing_is_0(self, plugin: Path) -> None:
        assert run("check", "plug", "--from", "1.0", "--to", "1.1") == 0

    def test_a_plugin_on_the_index_is_read_from_there(self, index: LocalIndex) -> None:
        index.add_wheel("3.0", {"plug/__init__.py": PLUGIN}, dist="plug", tags="py3-none-any")

        assert run("check", "plug", "--from", "1.0", "--to", "2.0") == 1

    def test_a_manifest_can_be_compared_as_well(self) -> None:
        comparison = ("check", "--surface", "surface.toml", "--from", "1.0", "--to")

        assert run(*comparison, "1.1") == 0
        assert run(*comparison, "2.0") == 1

    def test_a_plugin_that_uses_nothing_is_2(
        self, plugin: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (plugin / "my_plugin" / "__init__.py").write_text("x = 1\n")

        assert run("check", "plug", "--from", "1.0", "--to", "2.0") == 2
        assert "uses nothing of vllm" in capsys.readouterr().err

    def test_a_range_where_one_release_is_meant_is_2(
        self, plugin: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run("check", "plug", "--from", ">=1,<2", "--to", "2.0") == 2
        assert "means 2 releases (1.0, 1.1); name one" in capsys.readouterr().err


def test_infer_writes_a_manifest_that_scan_reads(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "plug.py").write_text(PLUGIN)

    assert run("infer", "plug.py", "--against", "1.0", "-o", "inferred.toml") == 0
    assert run("scan", "--surface", "inferred.toml", "1.1") == 0
    capsys.readouterr()
    assert run("infer", "plug.py", "--against", "1.0", "--json") == 0
    symbols = json.loads(capsys.readouterr().out)["symbol"]
    assert ("vllm.drafts", "draft") in {(s["module"], s["name"]) for s in symbols}


def test_bisect_names_the_release_that_changed_a_symbol(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("bisect", "--surface", "surface.toml", ">=1", "--json", "--jobs", "1") == 1
    document = json.loads(capsys.readouterr().out)
    assert [(f["symbol"], f["first_seen"]) for f in document["findings"]] == [("draft", "2.0")]


def test_a_bisection_of_one_release_is_2() -> None:
    assert run("bisect", "--surface", "surface.toml", "1.0") == 2


class TestLedgerAndWatch:
    """The matrix, and the job that looks whether it is up to date."""

    LEDGER = ("ledger", "--surface", "surface.toml", "--jobs", "1")

    def test_a_release_newer_than_what_is_claimed_drifts(
        self, here: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(*self.LEDGER, "--write", "json=ledger.json") == 1
        document = json.loads((here / "ledger.json").read_text())
        assert [(f["symbol"], f["release"]) for f in document["findings"]] == [("draft", "2.0")]
        assert [r["claimed"] for r in document["releases"]] == [True, True, False]

    def test_what_older_releases_lack_is_history(self, here: Path, index: LocalIndex) -> None:
        index.add_wheel("0.9", NEW)

        assert run(*self.LEDGER, "<2") == 0

    def test_a_new_release_is_scanned_and_a_known_one_is_not(
        self, here: Path, index: LocalIndex, capsys: pytest.CaptureFixture[str]
    ) -> None:
        watch = ("watch", "--surface", "surface.toml", "--ledger", "ledger.json")
        run(*self.LEDGER, "<2", "--write", "json=ledger.json")
        assert run(*watch) == 1

        run(*self.LEDGER, "--write", "json=ledger.json")
        capsys.readouterr()
        assert run(*watch) == 0
        assert "vllm 2.0 is the newest release, and the ledger has it" in capsys.readouterr().out
        assert run(*watch, "--always", "--json") == 1
        document = json.loads(capsys.readouterr().out)
        assert (document["newest"], document["known"]) == ("2.0", True)
        assert document["report"]["summary"]["drift"] is True

    def test_watching_offline_is_2(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run("watch", "--surface", "surface.toml", "--offline") == 2
        assert "which --offline forbids" in capsys.readouterr().err

    def test_a_ledger_that_is_missing_or_broken_is_2(self, here: Path) -> None:
        (here / "broken.json").write_text("[]")

        assert run("watch", "--surface", "surface.toml", "--ledger", "none.json") == 2
        assert run("watch", "--surface", "surface.toml", "--ledger", "broken.json") == 2

    def test_facts_only_leaves_no_source_in_the_report(self, here: Path, index: LocalIndex) -> None:
        body = {**OLD, "vllm/drafts.py": "def draft(tokens, k):\n    return list(tokens[:k])\n"}
        index.add_wheel("1.2", body)

        run(*self.LEDGER, "<2", "--write", "json=all.json")
        run(*self.LEDGER, "<2", "--facts-only", "--write", "json=facts.json")

        def details(name: str) -> list[str | None]:
            document = json.loads((here / name).read_text())
            return [f["detail"] for f in document["findings"] + document["changes"]]

        assert any(details("all.json"))
        assert not any(details("facts.json"))


def test_the_cache_tells_its_size_and_can_be_cleared(capsys: pytest.CaptureFixture[str]) -> None:
    run(*SCAN, "1.0")
    capsys.readouterr()

    assert run("cache", "info", "--json") == 0
    assert json.loads(capsys.readouterr().out)["kinds"]["packs"]["files"] == 1
    assert run("cache", "clear") == 0
    capsys.readouterr()
    assert run("cache", "info", "--json") == 0
    kinds = json.loads(capsys.readouterr().out)["kinds"]
    assert all(kind["files"] == 0 for kind in kinds.values())


def test_a_process_of_the_analysis_that_dies_is_done_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dying(count: int, context: object, **_: object) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(count, context, initializer=os._exit, initargs=(3,))  # type: ignore[arg-type]

    monkeypatch.setattr(runs, "ProcessPoolExecutor", dying)

    assert run("scan", "--surface", "surface.toml", ">=1", "--json", "--jobs", "2") == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["findings"]
    assert "Traceback" not in captured.err


def test_a_reader_that_goes_away_does_not_change_the_exit_code() -> None:
    code = "import sys; from vllm_drift.__main__ import main; main()"
    command = [sys.executable, "-c", code, "scan", "--surface", "surface.toml", "2.0"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)

    assert done.returncode == 1, done.stderr


@pytest.mark.parametrize(
    "command", ["", "scan", "check", "infer", "bisect", "ledger", "watch", "cache"]
)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*([command] if command else []), "--help") == 0
    assert "Usage: " in capsys.readouterr().out


class TestDocumentation:
    """What the pages for maintainers say is true."""

    PAGES = Path(__file__).parents[3] / "docs" / "drift"

    def page(self, name: str) -> str:
        return (self.PAGES / name).read_text(encoding="utf-8")

    def test_the_manifests_in_the_reference_are_read(self) -> None:
        texts = re.findall(r"```toml\n(schema.*?)```", self.page("manifest.md"), re.S)

        assert [len(parse_surface(text)) for text in texts] == [1, 2]

    def test_the_reference_has_every_kind_and_every_key(self) -> None:
        text = self.page("manifest.md")

        for kind, cls in KINDS.items():
            assert f"### `{kind}`" in text
            for field in dataclasses.fields(cls):
                key = field.metadata["toml"] or field.name
                assert f"`{key}`" in text, (kind, key)

    def test_every_verdict_is_explained_with_its_severity(self) -> None:
        text = self.page("verdicts.md")
        words = {"error": "error", "warning": "warning", "info": "information"}

        for verdict, severity in DEFAULT_SEVERITY.items():
            assert f"| `{verdict.value}` | {words[severity.value]}" in text

    def test_the_json_page_names_every_key_of_a_report(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(*SCAN, "2.0", "--json")
        document = json.loads(capsys.readouterr().out)
        keys = {*document, *document["summary"], *document["releases"][0], *document["findings"][0]}

        text = self.page("json.md")

        assert not [key for key in keys if f"`{key}`" not in text]

    def test_the_formats_are_the_ones_that_the_start_page_lists(self) -> None:
        text = self.page("README.md")

        assert all(f"`{name}`" in text for name in FORMATS)
