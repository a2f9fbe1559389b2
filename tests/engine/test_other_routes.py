"""Two workers, other speculative methods, and vLLM's own extension point, on a small model."""

from __future__ import annotations

import pytest
from engines import (
    CUSTOM_CLASS,
    NGRAM,
    SUFFIX,
    VLLMS_OWN,
    WHOSE,
    environment,
    run_engine,
    run_python,
)
from prompts import ALL, GREEDY, arrivals

PROMPTS = ALL[:12]
RUN = {
    "name": "greedy",
    "prompts": PROMPTS,
    "arrivals": arrivals(len(PROMPTS)),
    "sampling": {**GREEDY, "ignore_eos": True},
}
UNPATCHED = {"VLLM_DRAFTER_ROUTE": "custom_class"}
CROWDED = {"max_num_seqs": 4, "max_num_batched_tokens": 256}


def run_tiny(folder, tiny, speculative=None, workers=1, **changes):
    engine = {"model": tiny, "tensor_parallel_size": workers, **CROWDED}
    if speculative is not None:
        engine["speculative_config"] = speculative
    if workers > 1:
        changes["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(workers)))
    return run_engine(folder, engine, [RUN], **changes)


@pytest.fixture(scope="session")
def two_plain_workers(folder, tiny):
    return run_tiny(folder / "two-plain", tiny, workers=2)


@pytest.fixture(scope="session")
def two_drafting_workers(folder, tiny):
    return run_tiny(folder / "two-drafting", tiny, SUFFIX, workers=2)


@pytest.fixture(scope="session")
def ngram(folder, tiny):
    return run_tiny(folder / "ngram", tiny, NGRAM)


@pytest.fixture(scope="session")
def ngram_without_us(folder, tiny):
    return run_tiny(folder / "ngram-without-us", tiny, NGRAM, VLLM_DRAFTER="0")


@pytest.fixture(scope="session")
def custom_class(folder, tiny):
    return run_tiny(folder / "custom-class", tiny, CUSTOM_CLASS, **UNPATCHED)


def test_two_workers_give_the_outputs_that_they_give_without_speculation(
    two_plain_workers, two_drafting_workers
):
    assert two_drafting_workers.tokens("greedy") == two_plain_workers.tokens("greedy")
    assert two_drafting_workers.runs["greedy"]["counters"]["accepted_tokens"] > 0


def test_with_two_workers_four_processes_register(two_drafting_workers):
    registered = [stamp for stamp in two_drafting_workers.stamps if stamp["event"] == "registered"]
    assert two_drafting_workers.registered == {"front end": 1, "EngineCore": 1, "worker": 2}
    assert {stamp["rank"] for stamp in registered if stamp["role"] == "worker"} == {0, 1}
    assert len({stamp["pid"] for stamp in registered}) == 4


def test_each_of_two_workers_has_a_proposer_of_its_own(two_drafting_workers):
    assert two_drafting_workers.proposers == [
        ("worker", 0, "TokensPerStepProposer"),
        ("worker", 1, "TokensPerStepProposer"),
    ]


def test_ngram_is_as_it_is_without_us(ngram, ngram_without_us):
    assert ngram.registered
    assert ngram.proposers == []
    assert ngram_without_us.stamps == []
    found, expected = ngram.runs["greedy"], ngram_without_us.runs["greedy"]
    assert found["token_ids"] == expected["token_ids"]
    assert found["counters"] == expected["counters"]
    assert found["counters"]["accepted_tokens"] > 0


def test_the_custom_class_drafts_without_a_patch(custom_class, ngram_without_us):
    assert custom_class.tokens("greedy") == ngram_without_us.tokens("greedy")
    assert custom_class.runs["greedy"]["counters"]["accepted_tokens"] > 0
    assert custom_class.proposers == [("worker", 0, "CustomClassProposer")]
    assert "a fault while drafting" not in custom_class.log
    registered = [stamp for stamp in custom_class.stamps if stamp["event"] == "registered"]
    assert custom_class.registered == {"front end": 1, "EngineCore": 1, "worker": 1}
    assert all(stamp["route"] == "custom_class" for stamp in registered)
    assert all(stamp["patched"] == stamp["pending"] == [] for stamp in registered)


def test_for_the_route_custom_class_nothing_in_vllm_is_ours():
    done = run_python(WHOSE, environment(**UNPATCHED))
    assert "registered: pid" in done.stdout
    names = [line for line in done.stdout.splitlines() if line.startswith("vllm")]
    assert names == VLLMS_OWN, done.stdout[-3000:]
