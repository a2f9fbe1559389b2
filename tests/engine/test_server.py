"""The OpenAI-compatible server with our drafter, used by the OpenAI client."""

from __future__ import annotations

import concurrent.futures
import json

import pytest
from engines import start_server
from prompts import NOTES


@pytest.fixture(scope="module")
def server(folder, smollm):
    server = start_server(
        folder / "server",
        smollm,
        "--speculative-config",
        json.dumps({"method": "suffix"}),
        "--max-num-seqs",
        "16",
    )
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(server):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


def ask(client, text, **options):
    options = {"max_tokens": 48, "temperature": 0.0, **options}
    return client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": text}], **options
    )


def copy(name):
    return f"Repeat this text word by word:\n\n{NOTES[name]}"


def test_a_streamed_answer_is_the_answer(client):
    whole = ask(client, copy("harbour")).choices[0].message.content
    parts = [
        chunk.choices[0].delta.content or ""
        for chunk in ask(client, copy("harbour"), stream=True)
        if chunk.choices
    ]
    assert "".join(parts) == whole
    assert whole


def test_an_aborted_stream_ends_its_request_and_harms_no_other(client, server):
    expected = ask(client, copy("garden")).choices[0].message.content
    stream = ask(client, copy("train"), stream=True, max_tokens=1500)
    for _ in range(3):
        next(stream)
    stream.close()
    assert ask(client, copy("garden")).choices[0].message.content == expected
    server.wait_until_idle()


def test_sixteen_clients_at_once_get_the_answers_that_they_get_alone(client, server):
    names = list(NOTES)
    alone = {name: ask(client, copy(name)).choices[0].message.content for name in names}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        asked = [names[place % len(names)] for place in range(16)]
        answers = list(pool.map(lambda name: ask(client, copy(name)), asked))
    assert [answer.choices[0].message.content for answer in answers] == [
        alone[name] for name in asked
    ]


def test_requests_with_seeds_of_their_own_are_sampled_at_temperature_0_8(client, server):
    before = server.metric("vllm:spec_decode_num_draft_tokens_total")
    answers = [ask(client, copy("train"), temperature=0.8, seed=seed) for seed in (1, 2, 3, 4)]
    assert all(answer.choices[0].message.content for answer in answers)
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") > before


def test_the_metrics_show_accepted_draft_tokens(client, server):
    before = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    ask(client, copy("library"))
    ask(client, copy("library"))
    drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert before < accepted <= drafted


def test_server_engine_core_and_worker_registered(server):
    roles = sorted(stamp["role"] for stamp in server.stamps if stamp["event"] == "registered")
    assert roles == ["API server", "EngineCore", "worker"]
    assert [stamp["role"] for stamp in server.stamps if stamp["event"] == "proposer"] == ["worker"]


def test_no_fault_was_met(server):
    assert "a fault while drafting" not in server.log.read_text()
