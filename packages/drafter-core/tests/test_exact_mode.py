"""The exact mode drafts what arctic-inference drafts, after the restatement in reference_peer."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from drafter_core import SuffixDrafter


def _peer() -> ModuleType:
    path = Path(__file__).parent / "reference_peer.py"
    spec = importlib.util.spec_from_file_location("drafter_reference_peer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


peer = _peer()


def check_history(seed: str, alphabet: int, count: int) -> int:
    """Play random operations on both; compare drafts of every active request after each."""
    rng = random.Random(seed)
    depth = rng.choice([1, 2, 3, 6, 24])
    limit = rng.choice([-1, 0, 1, 2, 5])
    fast = SuffixDrafter(depth, limit, exact=True)
    slow = peer.ReferenceCache(depth, limit)
    context: dict[int, list[int]] = {}
    drafted = 0
    for _ in range(count):
        name = rng.choice(["start", "append", "append", "append", "append", "stop", "evict"])
        request = rng.randrange(6)
        text = [rng.randrange(alphabet) for _ in range(rng.choice([0, 1, 2, 5, 30]))]
        if rng.random() < 0.3:
            text = text[:3] * 6
        active = request in context
        if name == "start" and not active:
            fast.start_request(request, text)
            slow.start_request(request, text)
            context[request] = text
        elif name == "append" and active:
            fast.append(request, text)
            slow.add_active_response(request, text)
            context[request] = context[request] + text
        elif name == "stop" and active:
            fast.stop_request(request)
            slow.stop_request(request)
            del context[request]
        elif name == "evict" and request in slow.cached:
            fast.evict_cached_response(request)
            slow.evict_cached_response(request)
        for request, tokens in context.items():
            as_tree = rng.random() < 0.5
            spec = (
                rng.choice([0, 3, 10, 40]), rng.choice([0.0, 0.7, 1.0, 2.0, 4.0]),
                rng.choice([-1.0, 0.0, 3.0]), rng.choice([0.0, 0.1, 0.3, 1.0]),
            )  # fmt: skip
            if rng.random() < 0.3:  # a context of its own
                tokens = tokens[-rng.randrange(1, 30) :] if rng.random() < 0.5 else list(text)
            expected = slow.speculate(request, tokens, *spec, use_tree_spec=as_tree)
            found = fast.speculate(request, tokens, *spec, use_tree_spec=as_tree)
            assert found.draft.token_ids == expected.token_ids
            assert found.parents == expected.parents
            assert found.draft.probs == expected.probs
            assert found.draft.score == expected.score
            assert found.draft.match_length == expected.match_len
            drafted += bool(expected.token_ids)
    return drafted


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("alphabet", [1, 2, 4, 30, 300])
def test_random_histories_give_the_peers_drafts(seed: int, alphabet: int) -> None:
    check_history(f"exact {seed} {alphabet}", alphabet, 60)
