"""A snapshot brings the cached responses back, and a bad file changes nothing."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from drafter_core import SnapshotError, SuffixDrafter


def filled(responses: int, **settings: int) -> SuffixDrafter:
    rng = random.Random(2)
    drafter = SuffixDrafter(8, **settings)
    for request in range(responses):
        drafter.start_request(request, [1, 2])
        drafter.append(request, [rng.randrange(9) for _ in range(rng.choice([1, 63, 64, 200]))])
        drafter.stop_request(request)
    return drafter


def drafts(drafter: SuffixDrafter) -> list[list[int]]:
    rng = random.Random(3)
    found = []
    for _ in range(30):
        drafter.start_request("ask", [rng.randrange(9) for _ in range(6)])
        found.append(drafter.draft("ask", 8, 2.0).token_ids)
        drafter.stop_request("ask")
    return found


def test_a_loaded_snapshot_gives_the_drafts_of_the_cache_it_was_made_from(
    tmp_path: Path,
) -> None:
    old, new = filled(20), SuffixDrafter(8)
    assert old.save(tmp_path / "warm") == 20
    assert new.load(tmp_path / "warm") == 20
    assert new.stats().cached_tokens == old.stats().cached_tokens
    assert any(drafts(old))
    assert drafts(new) == drafts(old)


def test_restored_responses_are_evicted_like_others(tmp_path: Path) -> None:
    filled(5).save(tmp_path / "warm")
    drafter = SuffixDrafter(8, 5)
    drafter.load(tmp_path / "warm")
    for request in range(5):
        drafter.start_request(request, [])
    assert list(drafter.cached_requests) == list(range(5))
    assert drafter.stats().cached_tokens == 0


def test_only_the_newest_responses_are_loaded_into_a_small_cache(
    tmp_path: Path,
) -> None:
    old = filled(5)
    old.save(tmp_path / "warm")
    drafter = SuffixDrafter(8, 2)
    assert drafter.load(tmp_path / "warm") == 2
    expected = SuffixDrafter(8, 2)
    filled(5, max_cached_requests=2).save(tmp_path / "small")
    expected.load(tmp_path / "small")
    assert drafter.stats() == expected.stats()


def test_an_empty_cache_makes_an_empty_snapshot(tmp_path: Path) -> None:
    assert SuffixDrafter().save(tmp_path / "empty") == 0
    assert SuffixDrafter().load(tmp_path / "empty") == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"something else", "no snapshot"),
        (lambda data: data[:30], "truncated"),
        (lambda data: data[:-7], "truncated"),
        (lambda data: data + b"more", "truncated"),
        (lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:], "damaged"),
        (lambda data: data[:22] + b"\x02" + data[23:], "format 2"),
    ],
)
def test_a_bad_file_is_refused_and_changes_nothing(tmp_path: Path, damage, message: str) -> None:
    filled(3).save(tmp_path / "warm")
    (tmp_path / "bad").write_bytes(damage((tmp_path / "warm").read_bytes()))
    drafter = filled(4)
    before = drafter.stats()
    with pytest.raises(SnapshotError, match=message):
        drafter.load(tmp_path / "bad")
    assert drafter.stats() == before


def test_a_failed_save_leaves_the_old_snapshot(tmp_path: Path, monkeypatch) -> None:
    filled(3).save(tmp_path / "warm")
    before = (tmp_path / "warm").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        filled(4).save(tmp_path / "warm")
    assert (tmp_path / "warm").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["warm"]


def test_what_is_no_file_is_left_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="regular file"):
        filled(2).save(pipe)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "warm")
    filled(2).save(tmp_path / "link")
    filled(3).save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert SuffixDrafter(8).load(tmp_path / "warm") == 3


def test_a_snapshot_has_the_permissions_of_other_files_and_keeps_its_own(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    filled(2).save(tmp_path / "warm")
    assert (tmp_path / "warm").stat().st_mode == (tmp_path / "other").stat().st_mode
    (tmp_path / "warm").chmod(0o640)
    filled(2).save(tmp_path / "warm")
    assert (tmp_path / "warm").stat().st_mode & 0o777 == 0o640


def test_what_a_killed_process_left_a_day_ago_is_removed(tmp_path: Path) -> None:
    old, new, other = (tmp_path / f"{name}.part" for name in ("warm.1a", "warm.2b", "warmer.3c"))
    for part in (old, new, other):
        part.touch()
    for part in (old, other):
        os.utime(part, (0, 0))
    filled(2).save(tmp_path / "warm")
    assert set(tmp_path.iterdir()) == {tmp_path / "warm", new, other}


def test_a_restored_response_is_equal_to_no_id_of_a_request(tmp_path: Path) -> None:
    filled(2).save(tmp_path / "warm")
    drafter = SuffixDrafter(8)
    drafter.load(tmp_path / "warm")
    [first, _] = drafter.cached_requests
    drafter.start_request(type(first)(first.number), [])
    assert len(drafter.cached_requests) == 3
