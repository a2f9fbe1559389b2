"""What the default mode does beyond exact drafts: it learns, remembers prompts and minds load."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from drafter_core import BadSetting, SuffixDrafter
from drafter_core import _kernels as k

QUESTION = [11, 12, 13, 14, 15, 16]
ANSWER = [*range(100, 112)]


def answered(drafter: SuffixDrafter, request_id: object) -> None:
    drafter.start_request(request_id, QUESTION)
    drafter.append(request_id, ANSWER)
    drafter.stop_request(request_id)


def test_the_same_question_is_answered_from_its_first_tokens_on() -> None:
    default, exact = SuffixDrafter(24), SuffixDrafter(24, exact=True)
    drafts = []
    for drafter in (default, exact):
        answered(drafter, "before")
        drafter.start_request("again", QUESTION)
        drafter.append("again", ANSWER[:1])
        drafts.append(drafter.draft("again", 12).token_ids)
    assert drafts[0][:6] == ANSWER[1:7]
    assert drafts[1] == ANSWER[1:2]


def test_a_prompt_is_remembered_by_its_end_only_and_once_it_was_answered() -> None:
    drafter = SuffixDrafter(4)
    drafter.start_request("a", [7, 7, *QUESTION])
    assert drafter.stats().cached_tokens == 0
    drafter.append("a", ANSWER[:2])
    drafter.append("a", ANSWER[2:3])
    marked = [token + 2**30 for token in QUESTION[-4:]]
    assert drafter.cached_response("a").tolist() == [*marked, *ANSWER[:3]]
    drafter.evict_cached_response("a")
    assert drafter.stats().cached_tokens == 0


def test_what_only_prompts_contain_is_not_drafted_from_the_global_tree() -> None:
    drafter = SuffixDrafter(8)
    for number in range(5):
        answered(drafter, number)
    drafter.start_request("new", [])
    drafter.append("new", QUESTION[:2])
    assert drafter.draft("new", 8).token_ids == []
    drafter.append("new", ANSWER[:2])
    assert drafter.draft("new", 8).token_ids[:1] == ANSWER[2:3]


@pytest.mark.parametrize("last", [2**30 - 2, 2**30 - 1, 2**30, 2**31 - 2])
def test_prompts_that_end_with_the_highest_ids_are_not_remembered(last: int) -> None:
    drafter = SuffixDrafter(8)
    drafter.start_request("a", [*QUESTION, last])
    drafter.append("a", ANSWER)
    remembered = drafter.cached_response("a")[: -len(ANSWER)].tolist()
    assert remembered == ([] if last > 2**30 - 2 else [t + 2**30 for t in [*QUESTION, last]][-8:])


def test_exact_mode_takes_no_prompts_from_a_snapshot(tmp_path: Path) -> None:
    default, exact = SuffixDrafter(8), SuffixDrafter(8, exact=True)
    answered(default, "a")
    default.save(tmp_path / "snapshot")
    exact.load(tmp_path / "snapshot")
    assert exact.stats().cached_tokens == len(ANSWER)
    again = SuffixDrafter(8)
    again.load(tmp_path / "snapshot")
    assert again.stats().cached_tokens == default.stats().cached_tokens


def test_among_equals_the_successor_that_came_first_is_drafted() -> None:
    drafter = SuffixDrafter(8)
    drafter.start_request("a", [1, 2, 3, 1, 2, 4, 1, 2])
    assert drafter.draft("a", 1).token_ids == [3]


def after_a_pair(drafter: SuffixDrafter, rng: random.Random, right: bool) -> tuple[float, bool]:
    """Repeat something, see what is drafted, and let it be right or not."""
    text = [rng.randrange(1000, 10**6) for _ in range(4)]
    name = tuple(text)
    drafter.start_request(name, [*text, *text[:2]])
    draft = drafter.draft(name, 1)
    drafter.append(name, [text[2] if right else 7])
    drafter.stop_request(name)
    return draft.score, bool(draft.token_ids)


def test_what_keeps_failing_is_believed_less_and_then_not_drafted() -> None:
    rng = random.Random(1)
    drafter = SuffixDrafter(8, 0)
    scores = [after_a_pair(drafter, rng, right=False) for _ in range(400)]
    assert scores[0][0] > 0.3
    assert scores[50][0] < scores[5][0] < scores[0][0]
    assert scores[0][1]
    assert not scores[-1][1]


def test_what_keeps_succeeding_is_believed_more() -> None:
    rng = random.Random(1)
    drafter = SuffixDrafter(8, 0)
    scores = [after_a_pair(drafter, rng, right=True)[0] for _ in range(60)]
    assert scores[0] < scores[20] < scores[59]
    assert scores[59] > 0.9


def test_a_draft_that_is_nearly_certain_goes_beyond_the_factor() -> None:
    drafter = SuffixDrafter(8, 0)
    text = list(range(100, 160))
    drafter.start_request("a", text)
    for token in [*text, *text, *text]:
        drafter.draft("a", 16)
        drafter.append("a", [token])
    assert len(drafter.draft("a", 16, 0.5).token_ids) > 8
    assert drafter.draft("a", 16, 0.0).token_ids == []


def test_a_draft_goes_on_beyond_the_depth() -> None:
    text = list(range(100, 160))
    matches, lengths = [], []
    for exact in (False, True):
        drafter = SuffixDrafter(8, 0, exact=exact)
        drafter.start_request("a", [*text, *text[:20]])
        draft = drafter.draft("a", 16, 9.0)
        matches.append(draft.match_length)
        lengths.append(draft.match_length + len(draft.token_ids))
    assert matches[0] == 7
    assert lengths[0] > 8 >= lengths[1]


def test_a_draft_ends_at_half_of_the_least_probability() -> None:
    drafter = SuffixDrafter(8, 0)
    drafter.start_request("a", [1, 2, 3, 4, 1, 2])
    probs = drafter.draft("a", 8, min_token_prob=0.0).probs
    assert len(probs) == 2
    assert drafter.draft("a", 8, min_token_prob=2 * probs[1] - 0.01).probs == probs
    assert drafter.draft("a", 8, min_token_prob=2 * probs[1] + 0.01).probs == probs[:1]


# -- load


class Crowd:
    """Requests that each have something to draft, of different probability."""

    def __init__(self, count: int, verify_tokens: int | None) -> None:
        rng = random.Random(3)
        self.drafter = SuffixDrafter(8, 0, verify_tokens=verify_tokens)
        self.block = np.zeros((count, 256), np.int32)
        self.ends = np.zeros(count, np.int64)
        self.rows = np.arange(count)
        handles = []
        for row in range(count):
            words = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 8, 9], [3, 4, 8, 2]]
            text = [t for _ in range(9) for t in rng.choice(words[: 1 + row % 3])]
            prompt = [*text[:50], 1, 2]
            self.block[row, : len(prompt)] = prompt
            self.ends[row] = len(prompt)
            handles.append(self.drafter.start_request(row, prompt))
        self.handles = np.array(handles)

    def step(self, **settings: int):
        return self.drafter.step(self.handles, self.rows, self.block, self.ends, 8, 4.0, **settings)


@pytest.mark.parametrize("count", [1, 3, 16, 64])
@pytest.mark.parametrize("verify_tokens", [4, 64, 1024])
def test_what_is_drafted_yields_the_most_tokens_per_time(count: int, verify_tokens: int) -> None:
    everything = Crowd(count, None).step()
    probs = np.sort(
        [p for row, n in enumerate(everything.lengths) for p in everything.probs[row, :n]]
    )[::-1]
    gains = np.concatenate([[0], np.cumsum(probs)])
    rates = (count + gains) / (verify_tokens + count + np.arange(len(gains)))
    drafts = Crowd(count, verify_tokens).step()
    drafted, gain = int(drafts.lengths.sum()), float(drafts.scores.sum())
    rate = (count + gain) / (verify_tokens + count + drafted)
    assert rate >= rates[0] - 1e-6, "slower than without drafts"
    assert rate >= 0.98 * rates.max()
    for row, n in enumerate(drafts.lengths):
        assert drafts.token_ids[row, :n].tolist() == everything.token_ids[row, :n].tolist()
        assert drafts.scores[row] == pytest.approx(drafts.probs[row, :n].sum(), abs=1e-5)


def test_the_more_requests_the_fewer_tokens_for_each() -> None:
    each = [Crowd(count, 64).step().lengths.sum() / count for count in (3, 24, 192)]
    assert each[0] > each[1] > each[2]


def test_requests_that_are_refused_do_not_count_as_load() -> None:
    crowd, alone = Crowd(60, 8), Crowd(1, 8)
    crowd.rows[1:] = -1
    assert crowd.step().tolist()[0] == alone.step().tolist()[0]


@pytest.mark.parametrize("shorten", [{"budget": 1}, {}], ids=["budget", "load"])
def test_tokens_that_were_cut_off_do_not_count_as_drafted(shorten: dict[str, int]) -> None:
    crowd = Crowd(12, None if shorten else 4)
    lengths = crowd.step(**shorten).lengths.copy()
    header = crowd.drafter._tables.header
    before = int(header[k.G_DRAFTED])
    crowd.block[crowd.rows, crowd.ends] = 99
    crowd.ends += 1
    crowd.step(**shorten)
    assert header[k.G_DRAFTED] - before == lengths.sum()


def test_a_load_that_means_nothing_is_refused() -> None:
    for wrong in (0, -1):
        with pytest.raises(BadSetting, match="verify_tokens"):
            SuffixDrafter(verify_tokens=wrong)
    with pytest.raises(BadSetting, match="exact"):
        SuffixDrafter(verify_tokens=64, exact=True)
