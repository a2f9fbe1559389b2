"""The kernels load wherever the package is installed."""

from __future__ import annotations

import subprocess
import sys

NO_CACHE_DIRECTORY = """
from numba import njit
from numba.core import caching

caching.CacheImpl._locator_classes = []
try:
    njit(cache=True)(lambda: 0)
except RuntimeError:
    print("nowhere to keep compiled code")
from drafter_core import _kernels
print(_kernels.run.__name__)
"""


def test_without_any_cache_directory_the_kernels_are_compiled_in_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_CACHE_DIRECTORY],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["nowhere to keep compiled code", "run"]


def test_importing_the_package_compiles_nothing() -> None:
    code = (
        "import sys, drafter_core; from drafter_core import _kernels; "
        "assert not getattr(_kernels.run, 'signatures', ()); print('ok')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "ok\n"
