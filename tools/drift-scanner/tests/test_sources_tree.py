"""The source of a release as text, and the cache that keeps it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from packaging.version import Version

from vllm_drift.cache import Cache, default_cache_dir
from vllm_drift.tree import CorruptPack, SourceTree, dotted_name, pack_bytes, read_summary

FILES = {
    "vllm/__init__.py": b"from vllm.a import f\n",
    "vllm/a.py": "def f():\n    return 'grüße'\n".encode(),
    "vllm/b/__init__.py": b"needle = 1\n",
    "vllm/latin.py": b"# -*- coding: latin-1 -*-\nx = '\xfc'\n",
    "vllm/dos.py": b"\xef\xbb\xbfx = 1\r\ny = 2\r\n",
    "vllm/odd.py": b"x = '\xff'\n",
}


@pytest.fixture
def tree() -> SourceTree:
    return SourceTree.from_files(
        FILES, label="1.0", package="vllm", version=Version("1.0"), extras={"METADATA": "Name: x"}
    )


@pytest.fixture
def pack(tree: SourceTree, tmp_path: Path) -> Path:
    path = tmp_path / "release.pack"
    path.write_bytes(pack_bytes(tree))
    return path


def test_modules_have_the_names_that_they_are_imported_by(tree: SourceTree) -> None:
    assert set(tree.modules()) == {"vllm", "vllm.a", "vllm.b", "vllm.dos", "vllm.latin", "vllm.odd"}
    assert tree.path("vllm.b") == "vllm/b/__init__.py"
    assert tree.is_package("vllm.b")
    assert not tree.is_package("vllm.a")
    assert dotted_name("__init__.py") == "__init__"


def test_a_package_wins_over_a_module_of_the_same_name() -> None:
    files = {"vllm/x.py": b"module\n", "vllm/x/__init__.py": b"package\n"}

    assert SourceTree.from_files(files, label="", package="vllm").text("vllm.x") == "package\n"


def test_text_is_decoded_as_python_would(tree: SourceTree) -> None:
    assert tree.text("vllm.a") == "def f():\n    return 'grüße'\n"
    assert tree.text("vllm.latin") == "# -*- coding: latin-1 -*-\nx = 'ü'\n"
    assert tree.text("vllm.dos") == "x = 1\ny = 2\n"
    assert tree.text("vllm.odd") == "x = '\ufffd'\n"
    assert tree.text("vllm.nowhere") is None


def test_a_text_search_finds_modules_with_all_or_any_of_the_texts(tree: SourceTree) -> None:
    assert tree.files_containing("def f", "grüße") == ["vllm.a"]
    assert tree.files_containing("def f", "needle") == []
    assert tree.files_containing("def f", "needle", any_of=True) == ["vllm.a", "vllm.b"]


def test_a_kept_search_is_answered_without_the_source(
    tree: SourceTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.keep_searches(Cache(tmp_path / "cache"))
    first = tree.files_containing("needle")
    monkeypatch.setattr(SourceTree, "data", lambda *_: pytest.fail("the source was read"))

    assert tree.files_containing("needle") == first == ["vllm.b"]


def test_a_pack_holds_all_that_the_tree_says(tree: SourceTree, pack: Path) -> None:
    opened = SourceTree.from_pack(pack)

    assert {m: opened.text(m) for m in opened.modules()} == {
        m: tree.text(m) for m in tree.modules()
    }
    assert opened.fingerprint == tree.fingerprint
    assert [opened.digest(m) for m in opened.modules()] == [tree.digest(m) for m in tree.modules()]
    assert (opened.label, opened.version, opened.extras) == ("1.0", Version("1.0"), tree.extras)
    summary = read_summary(pack)
    assert (summary.label, summary.modules, summary.fingerprint) == ("1.0", 6, tree.fingerprint)


def test_trees_with_the_same_source_have_the_same_fingerprint(tree: SourceTree) -> None:
    other = SourceTree.from_files(dict(reversed(FILES.items())), label="else", package="vllm")
    changed = SourceTree.from_files({**FILES, "vllm/a.py": b""}, label="1.0", package="vllm")

    assert other.fingerprint == tree.fingerprint != changed.fingerprint


def read_all(pack: Path) -> list[str | None]:
    opened = SourceTree.from_pack(pack)
    return [opened.text(module) for module in opened.modules()]


def test_damage_anywhere_in_a_pack_is_noticed(pack: Path) -> None:
    whole = pack.read_bytes()

    for at in range(0, len(whole), 7):
        pack.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with pytest.raises(CorruptPack):
            read_all(pack)
    pack.write_bytes(whole[:-1])
    with pytest.raises(CorruptPack, match="damaged"):
        SourceTree.from_pack(pack)


class TestCache:
    """Entries are whole or absent."""

    def test_what_was_stored_is_found_and_the_rest_is_not(self, cache: Cache) -> None:
        cache.put("facts", "key", b"value")

        assert cache.get("facts", "key") == b"value"
        assert cache.get("facts", "other") is None
        assert cache.get("index", "key") is None

    def test_a_damaged_entry_is_absent_and_goes_away(self, cache: Cache) -> None:
        cache.put("facts", "key", b"value")
        assert cache.directory is not None
        (path,) = [p for p in (cache.directory / "facts").rglob("*") if p.is_file()]
        for damaged in (b"", b"short", path.read_bytes()[:-1]):
            path.write_bytes(damaged)
            assert cache.get("facts", "key") is None
            assert not path.exists()

    def test_facts_are_computed_once(self, cache: Cache) -> None:
        asked = []

        def compute() -> bytes:
            asked.append(1)
            return b"facts"

        assert [cache.facts("m", compute) for _ in range(3)] == [b"facts"] * 3
        assert len(asked) == 1

    def test_clearing_leaves_what_is_not_ours(self, cache: Cache) -> None:
        cache.put("facts", "key", b"value")
        assert cache.directory is not None
        (cache.directory / "mine.txt").write_text("keep")

        assert cache.clear().files == 1
        assert (cache.directory / "mine.txt").read_text() == "keep"

    @pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
    def test_a_cache_that_cannot_be_written_to_is_no_error(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        Cache(tmp_path / "cache").put("facts", "key", b"value")

    def test_a_file_in_the_way_is_no_error(self, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("not a directory")
        cache = Cache(tmp_path / "cache")

        cache.put("facts", "key", b"value")

        assert cache.get("facts", "key") is None

    def test_its_place_can_be_chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_DRIFT_CACHE", "/somewhere/else")

        assert default_cache_dir() == Path("/somewhere/else")
