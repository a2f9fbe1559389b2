"""The surface of vllm-drafter against the source of real releases, read from the package index.

Needs the network and fails without it: a surface that was compared with nothing says nothing. Only
the files that the surface names are fetched, by byte ranges of the wheels. PIP_INDEX_URL counts.
"""

from __future__ import annotations

import ast
import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pypi_simple import PYPI_SIMPLE_ENDPOINT, PyPISimple
from remotezip import RemoteZip

from drafter_compat.check import check_surface
from drafter_compat.surface import Surface, load_builtin_surface
from drafter_compat.versions import applies

pytestmark = pytest.mark.network

RELEASES = ("0.11.1", "0.15.1", "0.22.1", "0.24.0", "0.32.0", "0.33.0")
"""One release on each side of every change of shape, and the newest."""

SHAPES = ("<0.15", ">=0.15,<0.24", ">=0.24")

SURFACE = load_builtin_surface("vllm_drafter")


def modules_of(surface: Surface) -> set[str]:
    """The files in a wheel that hold the modules a surface names."""
    names = {place for symbol in surface for place in symbol.places}
    return {f"{name.replace('.', '/')}{end}" for name in names for end in (".py", "/__init__.py")}


def fetch(version: str, url: str, folder: Path) -> Path:
    with RemoteZip(url) as wheel:
        for name in modules_of(SURFACE) & set(wheel.namelist()):
            wheel.extract(name, folder / version)
    return folder / version / "vllm"


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source directories of the releases."""
    folder = tmp_path_factory.mktemp("vllm")
    with PyPISimple(os.environ.get("PIP_INDEX_URL", PYPI_SIMPLE_ENDPOINT)) as index:
        packages = index.get_project_page("vllm").packages
    urls = {
        package.version: package.url
        for package in packages
        if package.version in RELEASES
        and package.package_type == "wheel"
        and "x86_64" in package.filename
    }
    assert set(urls) == set(RELEASES)
    with ThreadPoolExecutor(len(RELEASES)) as pool:
        found = pool.map(lambda version: fetch(version, urls[version], folder), RELEASES)
        return dict(zip(RELEASES, found, strict=True))


@pytest.mark.parametrize("version", RELEASES)
def test_every_symbol_is_as_the_manifest_says(version: str, roots: dict[str, Path]) -> None:
    report = check_surface(SURFACE, version=version, root=roots[version])
    assert report.ok, report.explain()
    assert len(report.results) == 1 + len(SURFACE.for_version(version))


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("other", RELEASES)
def test_the_source_of_a_release_of_another_shape_is_recognised(
    version: str, other: str, roots: dict[str, Path]
) -> None:
    """The shapes differ exactly where the manifest says so: a call variant fits no other range."""
    variants = tuple(symbol for symbol in SURFACE if symbol.id == "proposer-propose")
    surface = dataclasses.replace(SURFACE, symbols=variants)
    (call,) = check_surface(surface, version=version, root=roots[other], accept_unclaimed=True)
    same_shape = [applies(s, version) for s in SHAPES] == [applies(s, other) for s in SHAPES]
    assert call.ok is same_shape
    if not same_shape:
        assert "two versions are mixed" in call.way_out


def sabotage(root: Path, copy: Path, module: str, old: str, new: str) -> Path:
    for path in root.rglob("*.py"):
        target = copy / "vllm" / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text("utf-8")
        if path == root / module:
            assert old in text
            text = text.replace(old, new)
        target.write_text(text, "utf-8")
    return copy / "vllm"


@pytest.mark.parametrize(
    ("module", "old", "new", "symbol"),
    [
        (
            "v1/spec_decode/suffix_decoding.py",
            "SuffixDecodingProposer",
            "SuffixProposer",
            "proposer",
        ),
        ("v1/worker/gpu_model_runner.py", "SuffixDecodingProposer", "SuffixProposer", "proposer"),
        ("v1/worker/gpu_input_batch.py", "token_ids_cpu", "token_ids_host", "input-batch"),
        ("config/speculative.py", "has_arctic_inference", "has_arctic", "gate-config"),
        (
            "config/speculative.py",
            "suffix_decoding_max_spec_factor",
            "spec_factor",
            "speculative-config",
        ),
        ("v1/worker/worker_base.py", "load_general_plugins()", "pass", "load-general-plugins"),
        ("plugins/__init__.py", '"vllm.general_plugins"', '"vllm.plugins"', "entry-point-group"),
    ],
)
def test_a_renamed_symbol_is_found_in_real_source(
    module: str, old: str, new: str, symbol: str, roots: dict[str, Path], tmp_path: Path
) -> None:
    root = sabotage(roots["0.32.0"], tmp_path, module, old, new)
    report = check_surface(SURFACE, version="0.32.0", root=root)
    assert symbol in {result.id for result in report.mismatches}


def test_reformatted_real_source_is_still_as_expected(
    roots: dict[str, Path], tmp_path: Path
) -> None:
    root = sabotage(roots["0.33.0"], tmp_path, "plugins/__init__.py", "import", "import")
    for path in root.rglob("*.py"):
        path.write_text(ast.unparse(ast.parse(path.read_text("utf-8"))), "utf-8")
    report = check_surface(SURFACE, version="0.33.0", root=root)
    # An anchor is a piece of source text: it alone depends on how that is formatted.
    assert {result.kind for result in report.mismatches} <= {"anchor"}, report.explain()
