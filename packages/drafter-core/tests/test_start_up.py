"""The kernels load wherever the package is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import drafter_core

NO_CACHE_DIRECTORY = """
from numba import njit
from numba.core import caching

caching.CacheImpl._locator_classes = []
try:
    njit(cache=True)(lambda: 0)
except RuntimeError:
    print("nowhere to keep compiled code")
from drafter_core import SuffixDrafter
drafter = SuffixDrafter(8)
drafter.start_request("a", [1, 2, 3, 4, 1, 2])
print(drafter.draft("a", 1).token_ids)
"""


def test_without_any_cache_directory_the_kernels_are_compiled_in_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_CACHE_DIRECTORY],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["nowhere to keep compiled code", "[3]"]


def test_importing_the_package_compiles_nothing() -> None:
    code = (
        "import sys, drafter_core; from drafter_core import _kernels; "
        "assert not getattr(_kernels.run, 'signatures', ()); print('ok')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "ok\n"


FIRST_DRAFT = """
from drafter_core import SuffixDrafter, _kernels
drafter = SuffixDrafter(8)
drafter.start_request("a", [1, 2, 3, 4, 1, 2])
print(drafter.draft("a", 1).token_ids, sum(_kernels.run.stats.cache_hits.values()))
print(_kernels.run.stats.cache_path)
"""


def test_many_processes_at_once_fill_a_user_cache_where_the_package_is_read_only(
    tmp_path: Path,
) -> None:
    package = tmp_path / "packages" / "drafter_core"
    source = Path(drafter_core.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    # Not even root can make a directory of that name now.
    (package / "__pycache__").write_text("")
    environment = {
        name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"
    } | {"PYTHONPATH": str(package.parent), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", FIRST_DRAFT]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    together = [process.communicate()[0].splitlines() for process in [start() for _ in range(3)]]
    assert [lines[0].split("] ")[0] for lines in together] == ["[3"] * 3
    assert {Path(lines[1]).is_relative_to(tmp_path / "cache") for lines in together} == {True}
    assert start().communicate()[0].splitlines()[0] == "[3] 1"  # nothing was left to compile


WITHOUT_NUMBAS_COMPILER = """
from numba.core.cpu import CPUContext
def refuse(self):
    raise AssertionError("Numba made its compiler ready")
CPUContext.load_additional_registries = refuse
"""


def test_a_kernel_in_the_cache_is_loaded_without_making_the_compiler_ready(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )

    assert "Numba made its compiler ready" in run(WITHOUT_NUMBAS_COMPILER + FIRST_DRAFT).stderr
    assert run(FIRST_DRAFT).stdout.startswith("[3] 0")
    assert run(WITHOUT_NUMBAS_COMPILER + FIRST_DRAFT).stdout.startswith("[3] 1")


def test_what_a_caller_compiles_after_a_kernel_was_loaded_compiles(tmp_path: Path) -> None:
    code = (
        FIRST_DRAFT
        + "import numba, numpy\n"
        + "print(numba.njit(lambda a: a.cumsum())(numpy.ones(3)))"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "[3] 1"  # from the cache
    assert lines[-1] == "[1. 2. 3.]"


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}

    def drafts() -> str:
        done = subprocess.run(
            [sys.executable, "-c", FIRST_DRAFT], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert drafts().startswith("[3] 0")
    for kind, text in (("nbi", b""), ("nbc", b"no code")):
        [path] = tmp_path.rglob(f"*.{kind}*")
        path.write_bytes(text)
        assert drafts().startswith("[3] 0")
    assert drafts().startswith("[3] 1")
