"""Which of two drafts is proposed, and what the hybrid drafter refuses at start-up."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_patches.hybrid import (
    THRESHOLD_VARIABLE,
    HybridDrafter,
    NotedBatch,
    better_draft,
    overlay,
    read_threshold,
    valid_ids,
)


@pytest.mark.parametrize(
    ("suffix", "score", "other", "chosen"),
    [
        ([1, 2], 1.9, [3, 4], ("suffix", [1, 2])),
        ([1, 2], 0.9, [3, 4], ("proposer", [3, 4])),
        ([1, 2], 0.9, [], ("suffix", [1, 2])),
        ([], 0.0, [3, 4], ("proposer", [3, 4])),
        ([], 0.0, [], ("proposer", [])),
        # They agree: the longer one.
        ([1, 2], 1.9, [1, 2, 3], ("proposer", [1, 2, 3])),
        ([1, 2, 3], 0.1, [1, 2], ("suffix", [1, 2, 3])),
    ],
)
def test_the_better_draft_is_proposed(suffix, score, other, chosen) -> None:
    assert better_draft(suffix, score, other, threshold=1.0) == chosen


def test_the_threshold_is_read_from_the_environment() -> None:
    assert read_threshold({}) == read_threshold({THRESHOLD_VARIABLE: ""}) > 0
    assert read_threshold({THRESHOLD_VARIABLE: "0.5"}) == 0.5


@pytest.mark.parametrize("text", ["high", "-1", "nan"])
def test_a_wrong_threshold_names_the_variable(text) -> None:
    with pytest.raises(ValueError, match=f"{THRESHOLD_VARIABLE}='{text}'"):
        read_threshold({THRESHOLD_VARIABLE: text})


def config(method: str | None, asynchronous: bool = False) -> SimpleNamespace:
    speculative = SimpleNamespace(
        method=method,
        num_speculative_tokens=4,
        suffix_decoding_max_tree_depth=24,
        suffix_decoding_max_cached_requests=100,
        suffix_decoding_max_spec_factor=1.0,
        suffix_decoding_min_token_prob=0.1,
    )
    return SimpleNamespace(
        speculative_config=speculative if method else None,
        model_config=SimpleNamespace(max_model_len=64),
        device_config=SimpleNamespace(device_type="cuda"),
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config(None), "no speculative method is configured"),
        (config("suffix"), "does not work with method 'suffix'"),
        (config("eagle", asynchronous=True), "with method 'eagle' add --no-async-scheduling"),
    ],
)
def test_what_leaves_nothing_to_choose_is_refused(given, message) -> None:
    with pytest.raises(ValueError, match=message):
        HybridDrafter(given)


def batch(rows: list[list[int]], prompt: int) -> SimpleNamespace:
    token_ids = np.zeros((len(rows), 64), dtype=np.int32)
    for place, row in enumerate(rows):
        token_ids[place, : len(row)] = row
    names = [f"request-{place}" for place in range(len(rows))]
    return SimpleNamespace(
        req_ids=names,
        req_id_to_index={name: place for place, name in enumerate(names)},
        req_prompt_embeds={},
        num_prompt_tokens=np.full(len(rows), prompt, dtype=np.int32),
        num_tokens_no_spec=np.array([len(row) for row in rows], dtype=np.int32),
        token_ids_cpu=token_ids,
    )


def test_each_row_gets_the_better_of_its_two_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THRESHOLD_VARIABLE, "1.0")
    drafter = HybridDrafter(config("ngram"))
    repeating = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]
    new = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]
    rows = batch([repeating, new, new], prompt=10)
    chosen = drafter.choose(4, rows, [[4], [21], []], [[9, 9], [8, 8], []])
    assert chosen == [[5, 6, 7, 1], [8, 8], []]
    assert drafter.taken == {"suffix": 1, "proposer": 1}


def test_ids_of_rejected_drafts_and_of_partial_prefills_are_left_out() -> None:
    sampled = [[5, 6, -1], [7, -1, -1], [8, -1, -1]]
    assert valid_ids(sampled, 100, [False, False, True, False]) == [[5, 6], [7], []]
    assert valid_ids([[5, 100]], 100, [False]) == [[5]]


def test_a_row_has_what_was_sampled_before_the_runner_notes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(THRESHOLD_VARIABLE, "1.0")
    rows = batch([[1, 2, 3, 4, 5, 6, 7, 1, 2], [9] * 63], prompt=9)
    noted = NotedBatch(rows, [[3, 4], [8, 8]])
    assert noted.num_tokens_no_spec.tolist() == [11, 64]
    assert rows.num_tokens_no_spec.tolist() == [9, 63]
    assert noted.token_ids_cpu[0, :11].tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]
    chosen = HybridDrafter(config("draft_model")).choose(4, noted, [[3, 4], []], [[9, 9], []])
    assert chosen == [[5, 6, 7, 1], []]


class Tensor(np.ndarray):
    """As much of a tensor as is needed here."""

    def new_tensor(self, rows: list[list[int]]) -> Tensor:
        return np.array(rows).view(Tensor)


def test_in_a_tensor_a_short_draft_goes_on_with_what_was_there() -> None:
    others = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]]).view(Tensor)
    mixed = overlay(others, [[10], [4, 5, 6], [11, 12, 13, 14]])
    assert mixed.tolist() == [[10, 2, 3], [4, 5, 6], [11, 12, 13]]
