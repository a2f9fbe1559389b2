"""The batch interface: what it refuses, what it spends, and what it leaves alone."""

from __future__ import annotations

import copy
import math
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest

from drafter_core import (
    BadSetting,
    BadTokenId,
    CapacityExhausted,
    RequestActive,
    SuffixDrafter,
    UnknownRequest,
)


class Rows:
    """Some requests of a runner: arrays as vLLM keeps them."""

    def __init__(self, drafter: SuffixDrafter, prompts: list[list[int]]) -> None:
        self.token_ids = np.zeros((len(prompts), 256), np.int32)
        self.num_tokens = np.array([len(p) for p in prompts], np.int32)
        self.rows = np.arange(len(prompts), dtype=np.int64)
        self.handles = np.zeros(len(prompts), np.int64)
        for i, prompt in enumerate(prompts):
            self.token_ids[i, : len(prompt)] = prompt
            self.handles[i] = drafter.start_request(i, prompt)

    def append(self, row: int, tokens: list[int]) -> None:
        n = int(self.num_tokens[row])
        self.token_ids[row, n : n + len(tokens)] = tokens
        self.num_tokens[row] = n + len(tokens)

    @property
    def arguments(self) -> tuple:
        return self.handles, self.rows, self.token_ids, self.num_tokens


COPY = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]


def test_a_row_that_does_not_continue_what_was_fed_is_refused_and_others_are_served() -> None:
    drafter = SuffixDrafter(8)
    batch = Rows(drafter, [COPY, COPY, COPY])
    batch.token_ids[0, 5] = 99
    batch.num_tokens[1] = 3
    drafts = drafter.step(*batch.arguments, 4)
    assert drafts.status.tolist() == [1, 1, 0]
    assert drafts.tolist() == [[], [], [5, 6, 7, 8]]
    assert drafter.tokens_fed(1) == len(COPY)


@pytest.mark.parametrize("bad", [-1, 2**31 - 1])
def test_a_bad_token_id_is_refused_and_nothing_of_that_row_is_fed(bad: int) -> None:
    drafter = SuffixDrafter(8)
    batch = Rows(drafter, [COPY, COPY])
    batch.append(0, [5, bad])
    drafts = drafter.step(*batch.arguments, 4)
    assert drafts.status.tolist() == [2, 0]
    assert drafter.tokens_fed(0) == len(COPY)


@pytest.mark.parametrize("n", [1, 7, 8, 30])
def test_lists_hold_what_was_drafted_and_nothing_else(n: int) -> None:
    drafter = SuffixDrafter(8)
    batch = Rows(drafter, [COPY if i % 3 else [i] for i in range(n)])
    drafts = drafter.step(*batch.arguments, 4)
    assert drafts.tolist() == [[5, 6, 7, 8] if i % 3 else [] for i in range(n)]


@pytest.mark.parametrize("n", [1, 7, 8, 30])
def test_a_step_by_ids_gives_the_same_lists(n: int) -> None:
    by_handles, by_ids = SuffixDrafter(8), SuffixDrafter(8)
    texts = [COPY if i % 3 else [i] for i in range(n)]
    batch, other = Rows(by_handles, texts), Rows(by_ids, texts)
    lists = by_handles.step(*batch.arguments, 4).tolist()
    assert by_ids.step_lists(range(n), *other.arguments[1:], 4) == lists
    with pytest.raises(UnknownRequest, match="99"):
        by_ids.step_lists([*range(n - 1), 99], *other.arguments[1:], 4)


def test_arrays_may_change_between_steps() -> None:
    drafter = SuffixDrafter(8)
    first = Rows(drafter, [COPY, [1]])
    assert drafter.step(*first.arguments, 4).tolist() == [[5, 6, 7, 8], []]
    wider = np.zeros((2, 2 * first.token_ids.shape[1]), np.int32)
    wider[:, : first.token_ids.shape[1]] = first.token_ids
    later = (first.handles, first.rows, wider, first.num_tokens.astype(np.int64))
    assert drafter.step(*later, np.array([2, 4], np.int32)).tolist() == [[5, 6], []]
    first.token_ids[1, 1:13] = [2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1]
    first.num_tokens[1] = 13
    assert drafter.step(*first.arguments, 1).tolist() == [[5], [2]]


def test_handles_rows_and_limits_of_other_numbers_are_refused() -> None:
    drafter = SuffixDrafter(8)
    batch = Rows(drafter, [COPY, COPY])
    handles, rows, token_ids, num_tokens = batch.arguments
    for wrong in (
        (handles, rows[:1], token_ids, num_tokens, 4),
        (handles, rows, token_ids, num_tokens, np.array([4], np.int32)),
        (handles, rows, token_ids[0], num_tokens, 4),
    ):
        with pytest.raises(BadSetting):
            drafter.step(*wrong)
    assert drafter.step(*batch.arguments, 4).tolist() == [[5, 6, 7, 8]] * 2


def test_what_was_refused_once_is_refused_again() -> None:
    drafter = SuffixDrafter(8)
    batch = Rows(drafter, [COPY])
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            drafter.step(*batch.arguments, 4, 1.0, 0.0, "much")  # type: ignore[arg-type]


def test_handles_come_in_the_order_of_the_ids_and_only_of_active_requests() -> None:
    drafter = SuffixDrafter(8)
    given = {name: drafter.start_request(name, [1]) for name in "abc"}
    assert drafter.handles("cab").tolist() == [given["c"], given["a"], given["b"]]
    drafter.stop_request("a")
    with pytest.raises(UnknownRequest):
        drafter.handles("ca")


def test_handles_and_rows_that_do_not_exist_are_refused() -> None:
    drafter = SuffixDrafter(8)
    batch = Rows(drafter, [COPY] * 4)
    drafter.stop_request(0)
    batch.handles[1] = 10**9
    batch.handles[2] = 0
    batch.rows[3] = 4
    assert drafter.step(*batch.arguments, 4).status.tolist() == [3, 3, 3, 3]


def test_a_budget_goes_to_the_most_probable_tokens() -> None:
    drafter = SuffixDrafter(8)
    often = [1, 2, 3, 4, 5, 6] * 4 + [1, 2, 3]
    batch = Rows(drafter, [COPY, often, COPY])
    full = drafter.step(*batch.arguments, 4)
    lists, probs = full.tolist(), full.probs.copy()
    assert [len(draft) for draft in lists] == [4, 4, 4]
    assert probs[1, 3] > probs[0, 0]
    spent = drafter.step(*batch.arguments, 4, budget=6)
    assert spent.tolist() == [lists[0][:1], lists[1], lists[2][:1]]
    assert spent.scores.tolist() == [probs[0, 0], probs[1].sum(), probs[2, 0]]
    assert drafter.step(*batch.arguments, 4, budget=12).tolist() == lists
    assert drafter.step(*batch.arguments, 4, budget=0).tolist() == [[], [], []]


def test_an_empty_batch_gives_an_empty_answer() -> None:
    nothing = np.zeros(0, np.int64)
    drafts = SuffixDrafter().step(
        nothing, nothing, np.zeros((0, 8), np.int32), np.zeros(0, np.int32), 4
    )
    assert drafts.tolist() == []


def test_other_integer_types_and_strides_are_taken_too() -> None:
    drafter = SuffixDrafter(8)
    batch = Rows(drafter, [COPY])
    drafts = drafter.step(
        batch.handles.astype(np.int32), batch.rows.astype(np.int32),
        np.asfortranarray(batch.token_ids), batch.num_tokens.astype(np.int64), 4,
    )  # fmt: skip
    assert drafts.tolist() == [[5, 6, 7, 8]]


@pytest.mark.parametrize(
    "tokens", [[1, -1], [2**31 - 1], np.array([2**40]), [1.5], ["a"], [[1, 2]]], ids=str
)
def test_what_is_no_token_id_is_refused_at_the_edge(tokens) -> None:
    drafter = SuffixDrafter(8)
    with pytest.raises(BadTokenId):
        drafter.start_request("a", tokens)
    assert not drafter.active_requests
    drafter.start_request("a", [1])
    with pytest.raises(BadTokenId):
        drafter.append("a", tokens)
    assert drafter.tokens_fed("a") == 1


def test_errors_name_the_request() -> None:
    drafter = SuffixDrafter(8)
    drafter.start_request("mine", [1])
    with pytest.raises(RequestActive, match="'mine'"):
        drafter.start_request("mine", [1])
    for call in (drafter.stop_request, drafter.handle, drafter.evict_cached_response):
        with pytest.raises(UnknownRequest, match="'other'"):
            call("other")
    with pytest.raises(BadSetting):
        SuffixDrafter(0)
    with pytest.raises(BadSetting):
        SuffixDrafter(8, -2)


TWO_ROWS = np.array([[1, 2, 1, 2, 1, 2], [7, 8, 9, 7, 8, 9]], np.int32)


@pytest.mark.parametrize(
    "arrange",
    [np.asfortranarray, lambda a: np.ascontiguousarray(a.T).T, lambda a: a.astype(np.int64, "F"),
     lambda a: a.astype(np.uint32), lambda a: a.astype(">i4"), lambda a: a.tolist()],
)  # fmt: skip
def test_rows_are_rows_however_the_array_lies_in_memory(arrange) -> None:
    drafter = SuffixDrafter(8)
    handles = [drafter.start_request(i, []) for i in (0, 1)]
    batch = drafter.step(handles, [0, 1], arrange(TWO_ROWS), [6, 6], 4)
    assert batch.tolist() == [[1, 2], [7, 8, 9]]
    assert drafter.cached_response(1).tolist() == [7, 8, 9, 7, 8, 9]


@pytest.mark.parametrize(("tokens", "count", "status"), [(2**32 + 3, 6, 2), (1, 2**32 + 6, 1)])
def test_numbers_that_are_too_large_are_refused_and_not_wrapped(tokens, count, status) -> None:
    drafter = SuffixDrafter(8)
    handle = drafter.start_request("a", [])
    ids = TWO_ROWS.astype(np.int64)
    ids[0, 2] = tokens
    batch = drafter.step([handle], [0], ids, np.array([count, 0], np.int64), 4)
    assert batch.status.tolist() == [status]
    assert drafter.tokens_fed("a") == 0


@pytest.mark.parametrize("name", ["rows", "token_ids", "num_tokens"])
def test_what_is_no_integer_is_refused_by_its_name(name) -> None:
    drafter = SuffixDrafter(8)
    handle = drafter.start_request("a", [])
    given = {"rows": [0], "token_ids": TWO_ROWS, "num_tokens": [6, 6]}
    given[name] = np.asarray(given[name]) + 0.7
    with pytest.raises(BadSetting, match=name):
        drafter.step([handle], max_tokens=4, **given)
    assert drafter.tokens_fed("a") == 0


@pytest.mark.parametrize("exact", [False, True])
def test_a_request_longer_than_a_row_is_refused_without_a_look_behind_the_array(exact) -> None:
    drafter = SuffixDrafter(4, exact=exact)
    long = np.arange(1_000_000, dtype=np.int32) % 1000
    handles = [drafter.start_request("long", long), drafter.start_request("short", [])]
    counts = np.array([len(long) + 1, 6], np.int64)
    batch = drafter.step(np.array(handles), np.array([0, 1]), TWO_ROWS, counts, 8)
    assert batch.status.tolist() == [1, 0]
    assert batch.tolist()[1] == [7, 8, 9][: batch.lengths[1]]


def test_more_requests_than_there_are_places_are_refused_and_cost_nothing(monkeypatch) -> None:
    from drafter_core import drafter as module

    reserve = module.reserve

    def few_windows(rows: int, columns: int, dtype, minimum: int = 1024):
        return reserve(3 if columns == 8 + 2 + 2 * 64 else rows, columns, dtype, minimum)

    monkeypatch.setattr(module, "reserve", few_windows)
    drafter = SuffixDrafter(8)
    drafter.start_request("a", [1])
    drafter.start_request("b", [1])
    before = drafter.stats()
    with pytest.raises(CapacityExhausted):
        drafter.start_request("c", [1])
    assert drafter.stats() == before
    drafter.stop_request("a")
    drafter.start_request("c", [1])


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_drafter_is_neither_pickled_nor_copied(take) -> None:
    with pytest.raises(TypeError, match="save"):
        take(SuffixDrafter(4))


@pytest.mark.parametrize("error", [UnknownRequest("a", "active"), RequestActive("a")])
def test_errors_can_be_sent_to_another_process(error) -> None:
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("setting", [{"max_depth": 2.5}, {"max_cached_requests": math.nan},
                                     {"verify_tokens": 2.5}])  # fmt: skip
def test_settings_are_whole_numbers(setting) -> None:
    with pytest.raises(BadSetting, match=next(iter(setting))):
        SuffixDrafter(**setting)


WRONG = [("max_tokens", "8"), ("max_tokens", 2.5), ("max_tokens", None), ("max_spec_factor", "x"),
         ("max_spec_factor", "1"), ("max_spec_offset", None), ("min_token_prob", [0.1]),
         ("min_token_prob", 1j)]  # fmt: skip
WRONG_IN_STEPS = [("max_tokens", [2.5]), ("max_tokens", [[8]]), ("budget", "8"), ("budget", 2.5),
                  ("handles", ["a"]), ("handles", [None, None])]  # fmt: skip


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("name", "wrong"), WRONG, ids=str)
def test_a_setting_that_is_no_number_is_refused_by_its_name(exact, name, wrong) -> None:
    drafter = SuffixDrafter(8, exact=exact)
    handle = drafter.start_request("a", [])
    settings = {"max_tokens": 4, name: wrong}
    arrays = ([0], TWO_ROWS, [6, 6])
    for draft in (
        lambda: drafter.draft("a", **settings),
        lambda: drafter.speculate("a", [1, 2], **settings),
        lambda: drafter.step([handle], *arrays, **settings),
        lambda: drafter.step_lists(["a"], *arrays, **settings),
    ):
        with pytest.raises(BadSetting, match=f"{name} "):
            draft()
    assert drafter.tokens_fed("a") == 0


@pytest.mark.parametrize(("name", "wrong"), WRONG_IN_STEPS, ids=str)
def test_what_a_step_cannot_use_is_refused_by_its_name(name, wrong) -> None:
    drafter = SuffixDrafter(8)
    handles = [drafter.start_request(i, []) for i in range(2)]
    given = {"handles": handles, "max_tokens": 4, name: wrong}
    given["handles"] = given["handles"][: len(wrong) if isinstance(wrong, list) else 2]
    rows = [0, 1][: len(given["handles"])]
    with pytest.raises(BadSetting, match=name):
        drafter.step(rows=rows, token_ids=TWO_ROWS, num_tokens=[6, 6], **given)
    assert [drafter.tokens_fed(i) for i in range(2)] == [0, 0]


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from drafter_core import SuffixDrafter
drafter = SuffixDrafter(8)
drafter.start_request("a", list(range(9000)) * 30)
drafter.append("a", [5, 6, 7])
print(drafter.draft("a", 4).token_ids)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address space is limited there")
def test_where_address_space_is_limited_tables_grow_instead_of_being_reserved() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert done.stdout == "[8, 9, 10, 11]\n", done.stderr


def test_tables_that_cannot_be_reserved_grow(monkeypatch) -> None:
    from drafter_core import drafter as module

    reserve = module.reserve

    def small(rows: int, columns: int, dtype, minimum: int = 1024):
        return reserve(2048 if rows >= 1 << 20 else rows, columns, dtype, minimum)

    monkeypatch.setattr(module, "reserve", small)
    rng = random.Random(1)
    grown, ample = SuffixDrafter(4), SuffixDrafter(4)
    monkeypatch.undo()
    ample = SuffixDrafter(4)
    for request in range(20):
        text = [rng.randrange(50) for _ in range(400)]
        for drafter in (grown, ample):
            drafter.start_request(request, text[:9])
            drafter.append(request, text)
        assert grown.draft(request, 4) == ample.draft(request, 4)
    assert len(grown._tables.states) > 2048
    assert grown.stats() == ample.stats()
