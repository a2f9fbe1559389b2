"""Versions and specifiers, and what is installed, all without importing anything."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_compat.versions import (
    PackageNotInstalled,
    applies,
    installed_package,
    specifiers_overlap,
)


@pytest.mark.parametrize(
    ("specifier", "version", "covered"),
    [
        (">=0.15,<0.24", "0.15.0", True),
        (">=0.15,<0.24", "0.24.0", False),
        # The local part of a build does not count ...
        ("==0.32.0", "0.32.0+cpu", True),
        ("<=0.32.0", "0.32.0+cu129", True),
        (">0.32.0", "0.32.0+cpu", False),
        # ... unless the specifier asks for it.
        ("==0.32.0+cpu", "0.32.0+cpu", True),
        ("==0.32.0+cpu", "0.32.0+cu129", False),
        # A pre-release has the shape of the release that it leads to.
        (">=0.24", "0.24.0rc1", True),
        ("<0.24", "0.24.0rc1", False),
        (">=0.24", "0.24.0.dev7+gabc", True),
        (">=0.24", "0.24.0rc1+cpu", True),
        # A specifier that names pre-releases means them.
        (">=0.24.0rc2", "0.24.0rc1", False),
        (">=0.24.0rc2", "0.24.0rc3", True),
        (">=0.11.1", "0.11.1.post1", True),
        ("<=0.11.1", "0.11.1.post1", False),
    ],
)
def test_a_specifier_covers_a_version(specifier: str, version: str, covered: bool) -> None:
    assert applies(specifier, version) is covered


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [
        (">=0.11.1,<0.15", ">=0.15,<0.24", False),
        ("<0.15", ">=0.15", False),
        ("<=0.15", ">=0.15", True),
        (">=0.15,<0.24", ">=0.23.5", True),
        ("==0.15.*", "==0.15.1", True),
        ("==0.15.*", ">=0.16", False),
        (">0.15,<0.15.1", ">=0.15", True),
        ("!=0.15.0", "==0.15.0", False),
        ("", "==1.0", True),
    ],
)
def test_overlap_of_specifiers(first: str, second: str, overlap: bool) -> None:
    assert (specifiers_overlap(first, second) is not None) is overlap
    assert (specifiers_overlap(second, first) is not None) is overlap


releases = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)).map(
    lambda parts: ".".join(map(str, parts))
)
specifiers = st.lists(
    st.tuples(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), releases), max_size=2
).map(lambda items: ",".join(operator + version for operator, version in items))


@given(specifiers, specifiers, releases)
def test_a_version_that_both_cover_means_that_they_overlap(a: str, b: str, version: str) -> None:
    if applies(a, version) and applies(b, version):
        assert specifiers_overlap(a, b) is not None


@given(specifiers, specifiers)
def test_an_overlap_is_witnessed_by_a_version_that_both_cover(a: str, b: str) -> None:
    witness = specifiers_overlap(a, b)
    if witness is not None:
        assert applies(a, witness)
        assert applies(b, witness)


def add_metadata(folder: Path, distribution: str, version: str) -> None:
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )


def test_the_installed_version_and_root_are_found_without_importing(
    importable: Callable[..., None], tmp_path: Path
) -> None:
    importable("never_imported", m="raise SystemExit")
    (tmp_path / "never_imported" / "__init__.py").write_text("raise SystemExit('was imported')")
    add_metadata(tmp_path, "never-imported-cpu", "0.32.0+cpu")
    importlib.invalidate_caches()
    found = installed_package("never_imported", ("never-imported", "never-imported-cpu"))
    assert (found.version, found.distribution) == ("0.32.0+cpu", "never-imported-cpu")
    assert found.root == tmp_path / "never_imported"
    assert "never_imported" not in sys.modules


def test_the_first_distribution_that_has_metadata_counts(
    importable: Callable[..., None], tmp_path: Path
) -> None:
    importable("some_lib")
    add_metadata(tmp_path, "some-lib", "1.0")
    add_metadata(tmp_path, "some-lib-cpu", "2.0")
    assert installed_package("some_lib", ("some-lib", "some-lib-cpu")).version == "1.0"


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(PackageNotInstalled, match="'surely_not_here' is not installed in this"):
        installed_package("surely_not_here")


def test_a_package_without_metadata_names_the_distributions_that_were_asked(
    importable: Callable[..., None],
) -> None:
    importable("bare_lib")
    with pytest.raises(PackageNotInstalled, match="none of the distributions bare-lib, bare-cpu"):
        installed_package("bare_lib", ("bare-lib", "bare-cpu"))
