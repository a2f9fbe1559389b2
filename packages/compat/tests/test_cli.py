"""The command, run as a user runs it: output, formats and exit codes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from drafter_compat.cli import main

PLUGIN = """
    from drafter_compat.patch import Patch
    from drafter_compat.registry import Registry

    class Gate(Patch, target="lib.core", name="gate", why="open | it", upstream="https://x/pull/1"):
        @staticmethod
        def gate():
            return True

    class Old(Patch, target="lib.core", name="old", remove_when=">=1.0"):
        LIMIT = 2

    class Off(Patch, target="lib.core", name="off", default=False):
        OTHER = 2

    registry = Registry(
        "my-plugin", [Gate, Old, Off], package="lib", versions=">=1,<2", selection=True
    )
    """

RIVAL = """
    from drafter_compat.patch import Patch
    from drafter_compat.registry import Registry

    class Rival(Patch, target="lib.core", name="rival"):
        @staticmethod
        def gate():
            return False

    class Pinned(Patch, target="lib.core", name="pinned", pins=("0.9",)):
        LIMIT = 3

    registry = Registry("rival", [Rival, Pinned], package="lib")
    """


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(
    importable: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Run the command where lib 1.2 and two plugins are installed, one with an entry point."""
    importable("lib", core="def gate():\n    return False\nLIMIT = 1\nOTHER = 1\n")
    (tmp_path / "lib" / "__init__.py").write_text("raise SystemExit('lib was imported')")
    importable("my_plugin", patches=PLUGIN)
    importable("rival", patches=RIVAL)
    for name, version, points in (
        ("lib", "1.2", ""),
        ("my_plugin", "0.1", "[drafter_compat.registries]\nmine = my_plugin.patches:registry\n"),
    ):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        distribution = name.replace("_", "-")
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(points)
        (info / "top_level.txt").write_text(f"{name}\n")
    monkeypatch.delenv("VLLM_PATCHES", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    installed = importlib.metadata.entry_points
    # Registries of other distributions in this environment are none of these tests' business.
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda **wanted: [
            point
            for point in installed(**wanted)
            if (tmp_path / point.module.split(".")[0]).exists()
        ],
    )

    def run(*arguments: str, **environment: str) -> Done:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["drafter-compat", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return Done(int(ended.value.code or 0), output.out, output.err)

    return run


def test_list_shows_every_installed_patch_with_reason_and_standing(run: Run) -> None:
    done = run("list", "--format", "json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["gate"]["owner"] == "my-plugin"
    assert rows["gate"]["target"] == "lib.core"
    assert rows["gate"]["why"] == "open | it"
    assert rows["gate"]["standing"] == "on"
    assert rows["off"]["standing"] == "off"
    assert "VLLM_PATCHES=off" in rows["off"]["detail"]


def test_list_says_which_patches_the_release_has_made_needless(run: Run) -> None:
    rows = {row["name"]: row for row in json.loads(run("list", "--format", "json").stdout)}
    assert rows["old"]["standing"] == "needless"
    assert rows["old"]["detail"] == "1.2 is >=1.0: remove the patch"


def test_list_honours_the_choice(run: Run) -> None:
    done = run("list", "--format", "json", VLLM_PATCHES="off")
    rows = {row["name"]: row["standing"] for row in json.loads(done.stdout)}
    assert rows["off"] == "on"
    assert rows["gate"] == "off"


def test_list_as_a_table_does_not_cut_names_off_a_terminal(run: Run) -> None:
    done = run("list")
    assert "lib.core.gate" in done.stdout
    assert "\x1b[" not in done.stdout


def test_list_as_markdown_is_one_row_per_patch_with_bars_escaped(run: Run) -> None:
    lines = run("list", "--format", "markdown").stdout.strip().splitlines()
    assert len(lines) == 2 + 3
    assert "open \\| it" in lines[2]
    assert "https://x/pull/1" in lines[2]


def test_list_finds_conflicts_and_refused_patches_and_exits_1(run: Run) -> None:
    done = run("list", "mine", "rival.patches:registry", "--format", "json")
    assert done.returncode == 1
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["gate"]["standing"] == rows["rival"]["standing"] == "conflict"
    assert "rival of rival.patches changes gate too" in rows["gate"]["detail"]
    assert rows["pinned"]["standing"] == "refused"


def test_surface_prints_a_manifest_that_check_accepts(run: Run, tmp_path: Path) -> None:
    done = run("surface", "my-plugin")
    assert done.returncode == 0, done.stderr
    assert 'versions = ">=1,<2"' in done.stdout
    manifest = tmp_path / "surface.toml"
    manifest.write_text(done.stdout)
    checked = run("check", "--surface", str(manifest))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "symbols of lib 1.2 are as expected" in checked.stdout


def test_check_exits_1_and_explains_where_the_package_has_changed(run: Run, tmp_path: Path) -> None:
    manifest = tmp_path / "surface.toml"
    manifest.write_text(run("surface", "my-plugin").stdout)
    (tmp_path / "lib" / "core.py").write_text("def gate(strict):\n    return strict\nLIMIT = 1\n")
    done = run("check", "--surface", str(manifest))
    assert done.returncode == 1
    assert "expected   lib.core.gate()" in done.stdout
    assert "found      gate(strict)" in done.stdout


def test_check_as_json_gives_every_result(run: Run) -> None:
    done = run("check", "my_plugin", "--json")
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)
    assert report["ok"]
    assert {result["status"] for result in report["results"]} == {"ok"}


def test_check_of_a_version_that_the_plugin_does_not_claim_exits_1(
    run: Run, tmp_path: Path
) -> None:
    done = run("check", "my-plugin", "--root", str(tmp_path / "lib"), "--version", "2.0")
    assert done.returncode == 1
    assert "expected   >=1,<2" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["list", "nobody"],
            "no plugin 'nobody' with a registry is installed; there is: mine, my-plugin",
        ),
        (["surface", "my_plugin.patches:Gate"], "is a type, not a Registry"),
        (["surface", "no_module:registry"], "cannot be loaded: No module named 'no_module'"),
        (["check", "--surface", "gone.toml"], "gone.toml: cannot be read"),
        (["check", "--surface", "vllm-drafter"], "did you mean 'vllm_drafter'"),
        (["check", "--surface", "vllm_drafter"], "the package 'vllm' is not installed"),
    ],
)
def test_what_cannot_be_answered_is_one_message_and_exit_2(
    run: Run, arguments: list[str], message: str
) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_registry_that_cannot_be_loaded_is_named_and_not_left_out(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "my_plugin" / "patches.py").write_text("import gone_for_ever")
    done = run("list")
    assert done.returncode == 2
    assert "mine (my_plugin.patches:registry) cannot be loaded" in done.stderr


def test_the_package_itself_is_never_imported(run: Run) -> None:
    for command in (["list"], ["surface", "mine"], ["check"]):
        done = run(*command)
        assert done.returncode == 0, done.stderr
        assert "lib was imported" not in done.stderr


def test_applying_patches_imports_neither_vllm_nor_torch(tmp_path: Path) -> None:
    """What a front end that registers patches may cost: nothing is loaded before vLLM loads it."""
    for name in ("vllm", "torch", "numpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('{name} was imported')")
    program = textwrap.dedent("""
        import sys
        from drafter_compat.check import check_live
        from drafter_compat.patch import Patch
        from drafter_compat.registry import Registry
        from drafter_compat.surface import load_builtin_surface
        class A(Patch, target="vllm.v1.worker.gpu_model_runner:GPUModelRunner"):
            def step(self): ...
        class B(Patch, target="vllm.v1.worker.worker_base", when="worker"):
            x = 1
        print(Registry("p", [A, B]).apply(version="0.32.0").names("pending"))
        check_live(load_builtin_surface("vllm_drafter"), version="0.32.0")
        print([name for name in ("vllm", "torch", "numpy", "rich", "typer") if name in sys.modules])
        """)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.stdout.splitlines() == ["('A', 'B')", "[]"], done.stderr
