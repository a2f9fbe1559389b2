"""Pairs of engines, with and without drafts, and one server. A start takes up to a minute."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from engines import model_path

sys.path.insert(0, str(Path(__file__).parent))  # for `import traffic` under importlib mode

from traffic import TABLE


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = []


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for line in config.stash[TABLE]:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def smollm() -> str:
    """A real model, for what depends on its words."""
    return model_path("DRAFTER_MODEL", "smollm2-135m")


@pytest.fixture(scope="session")
def tiny() -> str:
    """A model of random weights that says few different tokens, for masses of them."""
    return model_path("DRAFTER_MODEL_TP", "tiny-llama")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traffic")
