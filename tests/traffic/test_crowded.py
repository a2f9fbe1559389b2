"""Too little memory for all requests, prompts in parts, and every size of request that there is."""

from __future__ import annotations

import random

import pytest
from engines import CUSTOM_CLASS, SUFFIX
from traffic import HEAD, TABLE, Pair, Phase, Request, run_traffic

LENGTH = 512
ROOM = 30
# 24 blocks of 32 tokens hold four or five of the requests at their full length, and twelve may run.
# A step takes 64 tokens, so that most prompts come in parts.
CROWDED = {
    "max_model_len": LENGTH,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 64,
    "block_size": 32,
    "num_gpu_blocks_override": 24,
}
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def prompt(seed: int, length: int) -> list[int]:
    """Token ids, in which phrases come again."""
    rng = random.Random(seed)
    phrases = [[rng.randrange(1000, 40000) for _ in range(6)] for _ in range(4)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += rng.choice(phrases)
    return tokens[:length]


def greedy(key: str, tokens: list[int], most: int, **more: object) -> Request:
    return {"key": key, "prompt": tokens, "sampling": {**GREEDY, "max_tokens": most}, **more}


PREEMPTED = [
    greedy(f"p{place}", prompt(place, 40 + 7 * place), 120, arrive=2 * place) for place in range(16)
]
THOUSAND = [
    greedy(f"t{place}", prompt(place % 60, 3 + place % 12), 4 + place % 5, id=f"again-{place % 40}")
    for place in range(1000)
]
ONE_TOKEN = [greedy(f"o{place}", [1000 + 17 * place], 60) for place in range(12)]
FULL = [
    *[greedy(f"f{place}", prompt(place, LENGTH - 1), 8) for place in range(4)],
    *[greedy(f"n{place}", prompt(place, LENGTH - ROOM), 50) for place in range(4)],
    # Drafted from the answers of before, which end where the room does.
    *[greedy(f"m{place}", prompt(place, LENGTH - ROOM), 50) for place in range(4)],
]
ONE_PREFIX = [
    greedy(f"s{place}", prompt(50, 96) + prompt(place, 20), 40, arrive=3 * place)
    for place in range(8)
]
ABORTED = [
    greedy(f"a{place}", prompt(place, 30), 90, **({"abort_after": 9} if place % 2 else {}))
    for place in range(16)
]
PHASES = {
    "preempted": PREEMPTED,
    "one token": ONE_TOKEN,
    "full": FULL,
    "one prefix": ONE_PREFIX,
    "aborted": ABORTED,
    # The same ids again, and the answers of before are there to draft from.
    "again": PREEMPTED,
    "thousand": THOUSAND,
}


@pytest.fixture(scope="module")
def plain(folder, tiny) -> dict[str, Phase]:
    """Without speculation, and with prefix caching, which changes no token either."""
    phases, _ = run_traffic(folder / "crowded-plain", {"model": tiny, **CROWDED}, PHASES)
    return phases


DRAFTING = {
    "prefix-caching": (True, SUFFIX),
    "no-prefix-caching": (False, SUFFIX),
    # No ids are passed: the drafter knows a request by its tokens, wherever its row has got to.
    "custom-class": (True, CUSTOM_CLASS),
}


@pytest.fixture(scope="module", params=DRAFTING)
def pair(request, folder, tiny, plain) -> Pair:
    caching, speculation = DRAFTING[request.param]
    changes = {"enable_prefix_caching": caching, "speculative_config": speculation}
    engine = {"model": tiny, **CROWDED, **changes}
    pair = Pair(plain, *run_traffic(folder / f"crowded-{request.param}", engine, PHASES))
    rows = [pair.row(*phase) for phase in PHASES.items()]
    request.config.stash[TABLE] += [f"{request.param}:", HEAD, *rows]
    return pair


def test_requests_that_are_preempted_and_resumed_say_the_same(pair):
    assert pair.plain["preempted"].preemptions > 0
    assert pair.drafting["preempted"].preemptions > 0
    pair.check("preempted")


def test_preempted_requests_whose_ids_were_used_before_say_the_same(pair):
    assert pair.drafting["again"].preemptions > 0
    pair.check("again")


def test_the_answers_of_before_help_although_requests_are_preempted(pair):
    assert pair.drafting["again"].accepted > pair.drafting["preempted"].accepted


def test_prompts_of_one_token_are_answered_the_same(pair):
    pair.check("one token")


def test_no_draft_reaches_beyond_the_model_s_length(pair):
    pair.check("full")
    lengths = {
        key: len(samples[0]["token_ids"]) for key, samples in pair.drafting["full"].samples.items()
    }
    assert lengths == {
        **{f"f{place}": 1 for place in range(4)},
        **{f"{kind}{place}": ROOM for kind in "nm" for place in range(4)},
    }


def test_a_thousand_short_requests_under_forty_ids_say_the_same(pair):
    pair.check("thousand")
    assert len(pair.drafting["thousand"].samples) == 1000


def test_aborted_requests_change_no_other(pair):
    plain, drafting = (run["aborted"].samples for run in (pair.plain, pair.drafting))
    for place in range(16):
        whole, found = (s[f"a{place}"][0]["token_ids"] for s in (plain, drafting))
        if place % 2:
            # Each was cut at the first step that brought it to nine tokens.
            most = min(len(whole), len(found))
            assert found[:most] == whole[:most]
            assert 9 <= most < 90
        else:
            assert found == whole


def test_prompts_whose_beginning_is_in_the_prefix_cache_say_the_same(pair, request):
    pair.check("one prefix")
    on = "no-prefix-caching" not in request.node.callspec.id
    hits = pair.drafting["one prefix"].counters.get("vllm:prefix_cache_hits", 0)
    assert (hits > 0) == on


def test_nothing_went_wrong_while_drafting(pair):
    assert "a fault while drafting" not in pair.log
    assert "0 faults" in pair.log
