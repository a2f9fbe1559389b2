"""Fixtures of the scanner's tests: a local index, an empty cache, sources that read from them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_drift import _http
from vllm_drift._pipconf import IndexSettings
from vllm_drift.cache import Cache
from vllm_drift.sources import Sources

sys.path.insert(0, str(Path(__file__).parent))

from drift_local_index import LocalIndex, served


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "network: needs the package index that pip is set up with")


@pytest.fixture
def index() -> Iterator[LocalIndex]:
    """An empty index that is being served."""
    with served() as local:
        yield local


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """An empty cache."""
    return Cache(tmp_path / "cache")


@pytest.fixture
def open_sources(
    index: LocalIndex, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Sources]]:
    """Make a `Sources` on the local index; retries do not wait."""
    monkeypatch.setattr(_http, "_PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr(_http, "_LONGEST_PAUSE", 0.0)
    opened = []

    def make(**options: object) -> Sources:
        settings = IndexSettings(index_urls=(f"{index.url}/simple",), timeout=5.0)
        keywords: dict[str, object] = {"settings": settings, "cache": cache, **options}
        opened.append(Sources(**keywords))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for sources in opened:
        sources.http.close()
