"""What the tests of compat share: packages written on the fly, and imported as if installed."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "network: reads released vLLM sources from the package index; fails without it"
    )


@pytest.fixture
def write_package(tmp_path: Path) -> Callable[..., Path]:
    """write_package("name", **{"a": source, "b.c": source}) -> the package's directory."""

    def write(package: str, **modules: str) -> Path:
        root = tmp_path / package
        root.mkdir(exist_ok=True)
        (root / "__init__.py").touch()
        for name, source in modules.items():
            path = root.joinpath(*name.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in path.relative_to(root).parents:
                (root / folder / "__init__.py").touch()
            path.write_text(textwrap.dedent(source), "utf-8")
        return root

    return write


@pytest.fixture
def importable(
    tmp_path: Path, write_package: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., None]]:
    """As write_package, and the package can be imported until the test ends."""
    monkeypatch.syspath_prepend(tmp_path)
    packages: list[str] = []

    def write(package: str, **modules: str) -> None:
        packages.append(package)
        write_package(package, **modules)
        importlib.invalidate_caches()

    yield write
    for name in list(sys.modules):
        if name.partition(".")[0] in packages:
            del sys.modules[name]
