"""The mutation test itself, on a release in a few lines: everything applies and is judged right."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from drift_small_tree import release

MUTATION = Path(__file__).parents[1] / "mutation"

SMALL = {
    "runner": """
        import os
        from typing import Literal
        from vllm.proposer import Proposer, Unused
        from vllm.gate import has_it, load_all

        METHODS = Literal["ngram", "suffix"]

        class Runner:
            def __init__(self, config: "Config", size: int = 3) -> None:
                self.drafter = Proposer(config, size=size, more=1)
                self.batch = config
                self.size = size

            def propose(self, tokens, limit=None):
                assert isinstance(self.drafter, Proposer)
                scheduled = tokens[:limit]
                return self.drafter.propose(self.batch, scheduled, slots=limit, other=2)

            def report(self, first, second):
                text = f"the longest line of this whole function, {first}"
                self.log.write_line(text, second, flush=True, end=None)
                if has_it():
                    return second
                return first

        def start(first, second, third=1):
            load_all()
            return first + second + third

        async def stop(first: int, second: str = "x") -> int:
            return 1
        """,
    "proposer": """
        from dataclasses import dataclass

        class Proposer:
            def propose(self, batch, tokens, slots=None, other=0): pass

        class Unused: pass

        @dataclass
        class Settings:
            depth: int
            factor: float = 1.0
            method: str | None = None

            def check(self, depth, factor):
                return depth > factor

            def resolve(self, depth, factor=2):
                return depth
        """,
    "gate": """
        def has_it(): return True
        def load_all(): return None
        """,
}


@pytest.fixture(scope="module")
def harness() -> Iterator[ModuleType]:
    sys.path.insert(0, str(MUTATION))
    spec = importlib.util.spec_from_file_location("drift_mutation", MUTATION / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["drift_mutation"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(MUTATION))


@pytest.fixture(scope="module")
def scores(harness: Any) -> dict[str, Any]:
    tree = release("1.0", **SMALL)
    known = {s.module: s for s in harness._sources(tree, tree.modules(), limit=100_000)}
    found: dict[str, Any] = {}
    for seed in range(3):
        rng = random.Random(seed)
        for source in known.values():
            subjects = list(harness.subjects_of(source, rng, known))
            for subject in subjects:
                for mutant in harness.mutants_of(subject):
                    harness._judge(mutant, subject, tree, found)
            harness._judge_meaningless(source, subjects, tree, found)
    return found


def test_every_change_that_breaks_is_detected_under_its_name(scores: dict[str, Any]) -> None:
    assert {n: s.wrong for n, s in scores.items() if s.breaks and s.named != s.applied} == {}


def test_no_meaningless_change_gives_a_finding(scores: dict[str, Any]) -> None:
    assert {n: s.wrong for n, s in scores.items() if not s.breaks and s.right != s.applied} == {}


def test_the_kinds_of_changes_that_the_scanner_promises_are_all_applied(
    scores: dict[str, Any],
) -> None:
    promised = {
        "rename a function",
        "move a function",
        "reorder parameters",
        "add a required parameter",
        "change a default",
        "drop a call site",
        "pass one more argument",
        "wrap an import in a conditional",
        "re-export a patched function from elsewhere",
        "leave a shim in the module's place",
        "reformat",
        "comments and blank lines",
        "annotations in quotes",
        "import order",
    }
    assert promised <= scores.keys()
    assert all(scores[name].applied for name in promised)


def test_an_edit_that_would_not_parse_is_refused(harness: Any) -> None:
    source = harness.Source("m", "m.py", b"def f(a):\n    pass\n")
    with pytest.raises(ValueError):
        source.edited((0, 3, "deff"))
