"""Which releases a text means, and which file of a release is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from drift_local_index import LocalIndex, wheel_bytes

from vllm_drift._pipconf import IndexSettings, read_pip_settings
from vllm_drift.errors import NetworkError, NoSuchRelease, SourceError
from vllm_drift.releases import is_release_spec
from vllm_drift.sources import Sources

OpenSources = Callable[..., Sources]
CODE = {"vllm/__init__.py": "x = 1\n"}


def labels(sources: Sources, *specs: str) -> list[str]:
    return [c.label for c in sources.expand(specs)]


@pytest.fixture
def four_releases(index: LocalIndex) -> LocalIndex:
    for version in ("0.9.0", "0.10.0", "0.11.0", "0.12.0rc1"):
        index.add_wheel(version, CODE)
    return index


@pytest.mark.parametrize("html", [False, True], ids=["json", "html"])
def test_a_range_means_every_final_release_in_it_from_old_to_new(
    four_releases: LocalIndex, open_sources: OpenSources, html: bool
) -> None:
    four_releases.html = html

    assert labels(open_sources(), ">=0.9.0") == ["0.9.0", "0.10.0", "0.11.0"]
    assert labels(open_sources(), ">0.9,<0.11") == ["0.10.0"]


def test_latest_is_the_newest_final_release(
    four_releases: LocalIndex, open_sources: OpenSources
) -> None:
    assert labels(open_sources(), "latest") == ["0.11.0"]


def test_pre_releases_count_on_request_or_when_named_exactly(
    four_releases: LocalIndex, open_sources: OpenSources
) -> None:
    assert labels(open_sources(pre=True), "latest") == ["0.12.0rc1"]
    assert labels(open_sources(pre=True), ">=0.11") == ["0.11.0", "0.12.0rc1"]
    assert labels(open_sources(), "0.12.0rc1") == ["0.12.0rc1"]


def test_a_version_may_leave_out_trailing_zeros(
    four_releases: LocalIndex, open_sources: OpenSources
) -> None:
    assert labels(open_sources(), "0.11", "==0.10") == ["0.11.0", "0.10.0"]


def test_a_release_that_is_named_twice_is_read_once(
    four_releases: LocalIndex, open_sources: OpenSources
) -> None:
    assert labels(open_sources(), "latest", ">=0.11", "0.11.0") == ["0.11.0"]


def test_a_release_that_does_not_exist_names_the_nearest(
    four_releases: LocalIndex, open_sources: OpenSources
) -> None:
    with pytest.raises(NoSuchRelease, match=r"no release 0\.10\.5.* 0\.9\.0, 0\.10\.0, 0\.11\.0"):
        open_sources().expand(["0.10.5"])


def test_an_empty_range_says_what_there_is_and_that_pre_releases_do_not_count(
    four_releases: LocalIndex, open_sources: OpenSources
) -> None:
    with pytest.raises(NoSuchRelease, match=r"newest is 0\.11\.0.*--pre"):
        open_sources().expand([">=0.12"])


def test_an_unknown_distribution_says_where_it_was_looked_for(
    index: LocalIndex, open_sources: OpenSources
) -> None:
    with pytest.raises(NoSuchRelease, match=rf"no release of vllm in {index.url}/simple"):
        open_sources().expand(["latest"])


def test_a_yanked_release_is_skipped_unless_named_exactly_and_then_noted(
    four_releases: LocalIndex, open_sources: OpenSources
) -> None:
    four_releases.add_wheel("0.11.1", CODE, yanked="broken metadata")

    assert labels(open_sources(), "latest") == ["0.11.0"]
    assert labels(open_sources(), ">=0.11") == ["0.11.0"]
    (pinned,) = open_sources().expand(["0.11.1"])
    assert pinned.notes == ("0.11.1 was yanked: broken metadata",)


def test_a_release_with_one_yanked_file_is_read_from_another(
    index: LocalIndex, open_sources: OpenSources
) -> None:
    index.add_wheel("1.0", CODE, build="1", yanked="wrong tag")
    index.add_wheel("1.0", CODE)

    (candidate,) = open_sources().expand(["latest"])

    assert candidate.release is not None
    assert [f.filename for f in candidate.release.usable] == [
        "vllm-1.0-cp38-abi3-manylinux1_x86_64.whl"
    ]


def test_the_highest_build_number_is_preferred_as_a_number(
    index: LocalIndex, open_sources: OpenSources
) -> None:
    for build in ("", "2", "10"):
        index.add_wheel("1.0", CODE, build=build)

    (candidate,) = open_sources().expand(["1.0"])

    assert candidate.release is not None
    assert [f.build[0] for f in candidate.release.files] == [10, 2, 0]


def test_any_platform_serves_and_x86_64_linux_comes_first(
    index: LocalIndex, open_sources: OpenSources
) -> None:
    index.add_wheel("1.0", CODE, tags="cp38-abi3-manylinux2014_aarch64")
    index.add_wheel("1.0", CODE, tags="cp38-abi3-macosx_11_0_arm64")
    index.add_wheel("1.0", CODE)
    index.add_wheel("2.0", CODE, tags="cp38-abi3-macosx_11_0_arm64")

    old, new = open_sources().expand([">=1.0"])

    assert old.release is not None
    assert old.release.files[0].filename.endswith("manylinux1_x86_64.whl")
    assert open_sources().load(new).label == "2.0"


def test_a_local_build_stands_for_its_release_only_where_there_is_no_other(
    index: LocalIndex, open_sources: OpenSources
) -> None:
    index.add_wheel("1.0", CODE)
    index.add_wheel("1.0+cu129", CODE)
    index.add_wheel("2.0+cpu", CODE)

    assert labels(open_sources(), ">=1.0") == ["1.0", "2.0+cpu"]
    assert labels(open_sources(), "2.0") == ["2.0+cpu"]
    assert labels(open_sources(), "1.0+cu129") == ["1.0+cu129"]


def test_files_of_all_configured_places_are_put_together(
    index: LocalIndex, open_sources: OpenSources, tmp_path: Path
) -> None:
    index.add_wheel("1.0", CODE)
    links = tmp_path / "links"
    links.mkdir()
    (links / "vllm-2.0-py3-none-any.whl").write_bytes(wheel_bytes(CODE, version="2.0"))
    folder = tmp_path / "simple" / "vllm"
    folder.mkdir(parents=True)
    (folder / "vllm-3.0-py3-none-any.whl").write_bytes(wheel_bytes(CODE, version="3.0"))
    (folder / "index.html").write_text(
        '<a href="vllm-3.0-py3-none-any.whl">vllm-3.0-py3-none-any.whl</a>'
    )
    settings = IndexSettings(
        index_urls=(f"{index.url}/simple", (tmp_path / "simple").as_uri()),
        find_links=(str(links),),
    )

    sources = open_sources(settings=settings)

    assert labels(sources, ">=0") == ["1.0", "2.0", "3.0"]
    assert [len(sources.load(c)) for c in sources.expand([">=0"])] == [1, 1, 1]


def test_an_index_page_that_has_not_changed_is_not_sent_again(
    four_releases: LocalIndex, open_sources: OpenSources
) -> None:
    labels(open_sources(), "latest")

    assert labels(open_sources(), "latest") == ["0.11.0"]
    assert [status for *_, status in four_releases.fetched("/simple/vllm/")] == [200, 304]


def test_a_new_release_is_seen_at_once(
    four_releases: LocalIndex, open_sources: OpenSources
) -> None:
    labels(open_sources(), "latest")
    four_releases.add_wheel("0.12.0", CODE)

    assert labels(open_sources(), "latest") == ["0.12.0"]


def test_a_server_that_is_busy_is_asked_again(
    four_releases: LocalIndex, open_sources: OpenSources
) -> None:
    four_releases.statuses = [503, 429]

    assert labels(open_sources(), "latest") == ["0.11.0"]


def test_a_server_that_stays_broken_is_an_error_that_shows_the_way_out(
    four_releases: LocalIndex, open_sources: OpenSources
) -> None:
    four_releases.statuses = [500] * 10

    with pytest.raises(NetworkError, match=r"answers 500.*pip config list.*--offline"):
        open_sources().expand(["latest"])


def test_a_password_in_the_index_address_is_used_and_never_shown(
    index: LocalIndex, open_sources: OpenSources
) -> None:
    index.statuses = [403]
    url = index.url.replace("http://", "http://user:s3cret@")

    with pytest.raises(NetworkError) as caught:
        open_sources(settings=IndexSettings(index_urls=(f"{url}/simple",))).expand(["latest"])

    assert "s3cret" not in str(caught.value)
    assert "****@" in str(caught.value)


def test_an_index_page_that_is_no_index_page_is_refused(
    index: LocalIndex, open_sources: OpenSources, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "application/vnd.pypi.simple.v1+json"
    monkeypatch.setattr(index, "page", lambda dist: (b'{"hello": 1}', kind))

    with pytest.raises(SourceError, match="not an index page of vllm"):
        open_sources().expand(["latest"])


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("latest", True),
        ("0.33.0", True),
        (">=0.30,<0.32", True),
        ("~=0.30", True),
        ("0.30.*", False),
        ("main", False),
        ("./vllm", False),
        ("", False),
    ],
)
def test_what_counts_as_naming_releases(text: str, is_one: bool) -> None:
    assert is_release_spec(text) is is_one


class TestPipSettings:
    """The settings are the ones that `pip install` would use."""

    def read(self, tmp_path: Path, files: dict[str, str], **environ: str) -> IndexSettings:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        base = {
            "HOME": str(tmp_path),
            "XDG_CONFIG_HOME": str(tmp_path / "user"),
            "XDG_CONFIG_DIRS": str(tmp_path / "global"),
            "VIRTUAL_ENV": str(tmp_path / "venv"),
        }
        return read_pip_settings({**base, **environ})

    def test_the_environment_wins_over_the_venv_over_the_user_over_the_system(
        self, tmp_path: Path
    ) -> None:
        files = {
            "global/pip/pip.conf": "[global]\nindex-url = https://system/simple\ntimeout = 7\n",
            "user/pip/pip.conf": "[global]\nindex-url = https://user/simple\nproxy = http://p\n",
            "venv/pip.conf": "[global]\nindex_url = https://venv/simple/\n",
        }

        from_files = self.read(tmp_path, files)
        from_variable = self.read(tmp_path, files, PIP_INDEX_URL="https://env/simple")

        assert from_files.index_urls == ("https://venv/simple",)
        assert (from_files.timeout, from_files.proxy) == (7.0, "http://p")
        assert from_variable.index_urls == ("https://env/simple",)

    def test_the_install_section_wins_over_the_global_one(self, tmp_path: Path) -> None:
        text = "[install]\nextra-index-url =\n  https://b/simple\n  https://c/simple\n"
        files = {
            "user/pip/pip.conf": text,
            "venv/pip.conf": "[global]\nextra-index-url = https://x/simple\n",
        }

        found = self.read(tmp_path, files, PIP_INDEX_URL="https://a/simple")

        assert found.index_urls == ("https://a/simple", "https://b/simple", "https://c/simple")

    def test_no_index_leaves_only_the_links(self, tmp_path: Path) -> None:
        found = self.read(tmp_path, {}, PIP_NO_INDEX="1", PIP_FIND_LINKS="/wheels /more")

        assert found.index_urls == ()
        assert found.find_links == ("/wheels", "/more")

    def test_the_null_device_as_configuration_file_switches_files_off(self, tmp_path: Path) -> None:
        import os

        files = {"user/pip/pip.conf": "[global]\nindex-url = https://user/simple\n"}

        found = self.read(tmp_path, files, PIP_CONFIG_FILE=os.devnull, PIP_INDEX_URL="https://e")

        assert found.index_urls == ("https://e",)

    def test_pip_itself_agrees_about_this_machine(self) -> None:
        import json
        import subprocess
        import sys

        code = (
            "import json; from pip._internal.commands import create_command as c;"
            "o, _ = c('install').parse_args([]);"
            "print(json.dumps([o.index_url, o.extra_index_urls, o.find_links, o.cert]))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        index_url, extra, links, cert = json.loads(done.stdout.splitlines()[-1])

        ours = read_pip_settings()

        assert list(ours.index_urls) == list(
            dict.fromkeys(u.rstrip("/") for u in [index_url, *extra])
        )
        assert list(ours.find_links) == links
        assert ours.cert == cert
