"""The proof that drafter_core drafts what arctic-inference 0.3.0 drafts.

Runs both caches side by side through the same operations, real and random, and compares every
draft: token ids, parents, probabilities, score and match length, all exactly; and after every
operation the ids of active and cached requests, and exceptions by type and message. Ends with exit
code 1 when anything differs. `nox -s parity` builds the peer from the index and runs this.
"""

from __future__ import annotations

import json
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from traces import ROOT, Request, Trace, code_edits, spec_bench

import drafter_core

Cache = Any
"""Anything with the methods of the peer's SuffixDecodingCache."""

PEER = "arctic-inference"
FIELDS = ("token_ids", "parents", "probs", "score", "match_len")


@dataclass
class Tally:
    """What one group of operations compared."""

    group: str
    path_calls: int = 0
    tree_calls: int = 0
    drafts: int = 0
    tokens: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def calls(self) -> int:
        """How many `speculate` calls were compared."""
        return self.path_calls + self.tree_calls


class Pair:
    """The peer and the subject, given the same operations."""

    def __init__(
        self,
        subject: Callable[[int, int], Cache],
        depth: int,
        cached: int,
        tally: Tally,
        label: str,
    ) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.peer = SuffixDecodingCache(depth, cached)
        self.subject = subject(depth, cached)
        self.tally = tally
        self.label = f"{label}, depth {depth}, {cached} cached"
        self.done = 0

    def do(self, operation: str, *arguments: Any) -> bool:
        """Run one operation on both; True where neither raised."""
        self.done += 1
        self.tally.operations[operation] += 1
        outcomes = [outcome(cache, operation, arguments) for cache in (self.peer, self.subject)]
        self._expect(operation, *outcomes)
        for view in ("active_requests", "cached_requests"):
            ids = [list(getattr(cache, view)) for cache in (self.peer, self.subject)]
            self._expect(f"{view} after {operation}", *ids)
        return outcomes[0] is None

    def speculate(self, request: Any, context: Any, *settings: Any) -> Any:
        """Draft with both, compare, and return the peer's draft."""
        self.done += 1
        wanted = self.peer.speculate(request, context, *settings)
        found = self.subject.speculate(request, context, *settings)
        if settings[-1]:
            self.tally.tree_calls += 1
        else:
            self.tally.path_calls += 1
        self.tally.drafts += bool(wanted.token_ids)
        self.tally.tokens += len(wanted.token_ids)
        if any(getattr(wanted, name) != getattr(found, name) for name in FIELDS):
            self._expect(f"speculate{settings}", *(fields(draft) for draft in (wanted, found)))
        return wanted

    def _expect(self, what: str, wanted: Any, found: Any) -> None:
        if wanted != found:
            self.tally.differences.append(
                f"{self.label}, operation {self.done}, {what}: peer {wanted!r}, ours {found!r}"
            )


def outcome(cache: Cache, operation: str, arguments: tuple[Any, ...]) -> str | None:
    """None, or type and text of the ValueError that the operation raised."""
    try:
        getattr(cache, operation)(*arguments)
    except ValueError as error:
        return f"ValueError: {error}"
    return None


def fields(draft: Any) -> dict[str, Any]:
    """What is compared of a draft."""
    return {name: getattr(draft, name) for name in FIELDS}


# -- random operations


@dataclass(frozen=True)
class Scenario:
    """The ranges that random operations are drawn from."""

    name: str
    alphabets: tuple[int, ...]
    depths: tuple[int, ...] = (1, 2, 3, 4, 5, 8, 12, 24, 64)
    cached: tuple[int, ...] = (-1, 0, 1, 2, 3, 5)
    lengths: tuple[int, ...] = (1, 1, 2, 3, 10)
    prompts: tuple[int, ...] = (0, 1, 3, 10, 30)
    repeats: float = 0.3
    churn: float = 0.15
    """The share of operations that start, stop or evict."""


SCENARIOS = (
    Scenario("tiny alphabets", alphabets=(1, 2, 2, 3, 4)),
    Scenario("varied tokens", alphabets=(8, 50, 49152), prompts=(0, 10, 100), lengths=(1, 5, 20)),
    Scenario(
        "long repeats",
        alphabets=(2, 5, 300),
        repeats=0.95,
        lengths=(1, 8, 60),
        prompts=(0, 50, 200),
    ),
    Scenario("eviction and reuse", alphabets=(2, 3, 6), cached=(1, 2, 3, 5, 8), churn=0.45),
)

SPEC_TOKENS = (-1, 0, 1, 3, 8, 16, 64)
FACTORS = (0.0, 0.1, 0.3, 0.7, 1.0, 1.0, 1.1, 2.0, 4.0, -1.0, 1e10)
OFFSETS = (0, 0, 0, 1, -1, 0.5, 1.9999999, 0.999999)
PROBABILITIES = (0.0, 0.1, 0.1, 0.25, 0.5, 1 / 3, 0.3, 1.0, 1.5, -1.0, float("nan"))


def run_scenario(
    subject: Callable[[int, int], Cache], scenario: Scenario, seed: int, t: Tally
) -> None:
    """Some hundred random operations, all decided by the seed."""
    draw = random.Random(f"{scenario.name} {seed}")
    pair = Pair(
        subject, draw.choice(scenario.depths), draw.choice(scenario.cached), t,
        f"{scenario.name}, seed {seed}",
    )  # fmt: skip
    alphabet = draw.choice(scenario.alphabets)
    contexts: dict[int, list[int]] = {}

    def some(length: int) -> list[int]:
        if draw.random() < scenario.repeats:
            motif = [draw.randrange(alphabet) for _ in range(draw.randint(1, 6))]
            tokens = (motif * length)[:length]
            if tokens and draw.random() < 0.2:
                tokens[draw.randrange(length)] = draw.randrange(alphabet)
            return tokens
        return [draw.randrange(alphabet) for _ in range(length)]

    for _ in range(500):
        kind = draw.random()
        if kind < scenario.churn * 0.55 or not contexts:
            request, prompt = draw.randrange(6), some(draw.choice(scenario.prompts))
            if pair.do("start_request", request, prompt):
                contexts[request] = prompt
        elif kind < scenario.churn * 0.8:
            request = draw.randrange(6)
            pair.do("stop_request", request)
            contexts.pop(request, None)
        elif kind < scenario.churn:
            pair.do("evict_cached_response", draw.randrange(6))
        elif kind < scenario.churn + (1 - scenario.churn) * 0.4:
            request, tokens = draw.choice(list(contexts)), some(draw.choice(scenario.lengths))
            pair.do("add_active_response", request, as_given(draw, tokens))
            contexts[request] += tokens
        else:
            request = draw.choice(list(contexts))
            context = contexts[request] if draw.random() < 0.8 else some(draw.randint(0, 12))
            if draw.random() < 0.3:
                context = context[-draw.randint(1, 10) :]
            factor = draw.choice(FACTORS) if draw.random() < 0.7 else draw.randint(1, 40) / 7
            least = draw.choice(PROBABILITIES) if draw.random() < 0.7 else draw.random()
            pair.speculate(
                request, as_given(draw, context), draw.choice(SPEC_TOKENS), factor,
                draw.choice(OFFSETS), least, draw.random() < 0.5,
            )  # fmt: skip


def as_given(draw: random.Random, tokens: list[int]) -> Any:
    """The tokens as a list or as an int32 array: both interfaces take either."""
    return tokens if draw.random() < 0.5 else np.array(tokens, np.int32)


# -- real text


def run_trace(
    subject: Callable[[int, int], Cache], trace: Trace, batch: int, cached: int, t: Tally
) -> Iterator[int]:
    """Serve a trace in batches as a runner would, drafting in path and tree mode at every step.

    Yields the calls made so far after every step.
    """
    pair = Pair(subject, trace.max_tree_depth, cached, t, trace.name)
    for turn in range(trace.passes):
        waiting = list(trace.requests)[::-1]
        running: list[tuple[str, Request, int]] = []
        while waiting or running:
            while waiting and len(running) < batch:
                request = waiting.pop()
                # Every third id comes back in the next pass, as ids do that a client chooses.
                name = request.name if len(waiting) % 3 == 0 else f"{request.name} {turn}"
                if pair.do("start_request", name, request.prompt):
                    running.append((name, request, 0))
            stepped = [step(pair, trace, *one) for one in running]
            running = [one for one in stepped if one is not None]
            yield t.calls


def step(
    pair: Pair, trace: Trace, name: str, request: Request, at: int
) -> tuple[str, Request, int] | None:
    """Draft, accept what the response confirms, append; None when the response is complete."""
    context = np.concatenate([request.prompt, request.response[:at]])[-trace.max_tree_depth - 1 :]
    settings = (trace.max_spec_tokens, trace.max_spec_factor, 0.0, trace.min_token_prob)
    pair.speculate(name, context, *settings, True)
    draft = pair.speculate(name, context, *settings, False)
    rest = request.response[at:].tolist()
    accepted = 0
    while accepted < min(len(draft.token_ids), len(rest) - 1):
        if draft.token_ids[accepted] != rest[accepted]:
            break
        accepted += 1
    pair.do("add_active_response", name, rest[: accepted + 1])
    if accepted + 1 < len(rest):
        return name, request, at + accepted + 1
    pair.do("stop_request", name)
    return None


# -- the subjects


def subject_factory(name: str) -> Callable[[int, int], Cache]:
    """`facade`: the drop-in cache of drafter_core. `reference`: the slow yardstick of its tests."""
    if name == "reference":
        sys.path.insert(0, str(ROOT / "packages" / "drafter-core" / "tests"))
        from reference_peer import ReferenceCache

        return ReferenceCache
    from drafter_core.suffix_decoding import SuffixDecodingCache

    return SuffixDecodingCache


def run_all(
    subject: Callable[[int, int], Cache], calls: int, real: bool, console: Console, finished: Path
) -> list[Tally]:
    """Compare at least `calls` drafts, real traces first, then random operations in equal parts.

    Groups of operations that an earlier run finished are read from the file `finished`.
    """
    tallies: list[Tally] = []
    kept = read_tallies(finished)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("speculate calls", total=calls)

        def done() -> int:
            return sum(tally.calls for tally in tallies)

        traces = [*spec_bench(), code_edits()] if real else []
        for at, trace in enumerate(traces):
            enough = done() + (calls // 2 - done()) // (len(traces) - at)
            if trace.name in kept:
                tallies.append(kept[trace.name])
                continue
            tally = Tally(trace.name)
            tallies.append(tally)
            started = time.perf_counter()
            progress.update(bar, description=trace.name)
            # Fewer responses are kept than there are requests, so that real text is evicted too.
            for _ in run_trace(subject, trace, 16, len(trace.requests) // 2, tally):
                progress.update(bar, completed=done())
                if done() > enough:
                    break
            tally.seconds = time.perf_counter() - started
            write_tallies(finished, tallies)
        each = max(0, calls - done()) // len(SCENARIOS) + 1
        for scenario in SCENARIOS:
            if scenario.name in kept:
                tallies.append(kept[scenario.name])
                continue
            tally = Tally(scenario.name)
            tallies.append(tally)
            started, seed = time.perf_counter(), 0
            progress.update(bar, description=scenario.name)
            while tally.calls < each:
                run_scenario(subject, scenario, seed, tally)
                seed += 1
                progress.update(bar, completed=done())
            tally.seconds = time.perf_counter() - started
            write_tallies(finished, tallies)
    return tallies


def kept_file(subject: str, calls: int, real: bool) -> Path:
    """Where the groups of a run are kept that are finished: for this code, and no other."""
    digest = sha256(version("numba").encode())
    tests = ROOT / "packages" / "drafter-core" / "tests" / "reference_peer.py"
    package = Path(drafter_core.__file__).parent
    for path in (*sorted(package.glob("*.py")), tests, Path(__file__)):
        digest.update(path.read_bytes())
    name = f"{subject}-{calls}-{'real' if real else 'random'}-{digest.hexdigest()[:16]}.json"
    return ROOT / "build" / "parity" / name


def plain(tally: Tally) -> dict[str, Any]:
    """A tally as JSON (`asdict` would make a Counter of pairs)."""
    return vars(tally) | {"operations": dict(tally.operations)}


def read_tallies(path: Path) -> dict[str, Tally]:
    """The finished groups of an earlier run, by name."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {row["group"]: Tally(**row | {"operations": Counter(row["operations"])}) for row in rows}


def write_tallies(path: Path, tallies: list[Tally]) -> None:
    """Keep the groups that are finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([plain(tally) for tally in tallies]), encoding="utf-8")


# -- the report


EXPLANATION = """
Both run through the same operations. Every `speculate` call compares token ids, parents,
probabilities (float32), score and match length, in path and in tree mode; every other operation
compares the ids of active and cached requests and, where the peer raises ValueError, type and
message. Nothing is rounded. `drafter_core.suffix_decoding` is the drop-in cache on the exact mode;
the reference is the plain restatement of the peer's rules that the tests use where the peer is not
installed (`packages/drafter-core/tests/reference_peer.py`).

The random operations start, append to, stop and evict six request ids over and over, with depths
from 1 to 64, caches of 0 to 8 responses or without limit, alphabets from 1 token up, motifs
repeated for hundreds of tokens, contexts that are the request's own or not, and settings on and
beside the edges (factors from -1 to 1e10, limits from -1, probabilities from -1 over nan to 1.5).
The real traces keep half as many responses as there are requests, so that real text is evicted
too, and use every third request id again.

## What decides between continuations that occur equally often

The peer keeps the continuations of a text in order of falling count, and the order within equal
counts depends on history: a new one goes last; one whose count rises goes to the end of the group
above, unless it led its own group, in which case it leads the group above; one whose count falls
leads the group below. Exact mode follows this. Default mode does not; what that changes in
acceptance is in [acceptance.md](acceptance.md), what following it costs is what `nox -s bench`
measures.

In tree mode the order among equal probabilities is that of a binary heap in which a place where the
text branches or may end waits for a turn of its own before its continuations join.

## What differs on purpose

- `max_spec_tokens=None`, the default, drafts up to `max_tree_depth` tokens; the peer raises
  AttributeError.
- Negative token ids and 2**31 - 1 raise ValueError; the peer takes them.
- A call that raises changes nothing. In the peer, `start_request` with a list that holds something
  else than ints raises TypeError and leaves the request active but not cached.
- `max_tree_depth` is at most 4096, and `max_cached_requests` a whole number.
- Token ids are a sequence of ints or an int32 array; the peer also takes other objects that have a
  length and items.
"""


def markdown(runs: dict[str, list[Tally]]) -> str:
    """The committed report."""
    lines = [
        "# Equality with arctic-inference",
        "",
        f"Written by `nox -s parity` with {PEER} {version(PEER)} (built from its sdist), Python "
        f"{platform.python_version()}, {platform.machine()}.",
        "",
        EXPLANATION.strip(),
    ]
    for subject, tallies in runs.items():
        lines += ["", f"## {subject}", ""]
        lines += ["| operations | path | tree | with a draft | drafted tokens | starts | appends "
                  "| stops | evictions asked for | differences |",
                  "| --- " + "| ---: " * 9 + "|"]  # fmt: skip
        for tally in tallies:
            lines.append("| " + " | ".join(cells(tally)) + " |")
        lines.append(
            "| **all** | " + " | ".join(f"**{c}**" for c in cells(total(tallies))[1:]) + " |"
        )
        different = [text for tally in tallies for text in tally.differences]
        if different:
            lines += ["", "First differences:", "", *(f"- `{text}`" for text in different[:10])]
    return "\n".join(lines) + "\n"


def cells(tally: Tally) -> list[str]:
    """One row of the report."""
    asked = tally.operations
    numbers = (
        tally.path_calls, tally.tree_calls, tally.drafts, tally.tokens, asked["start_request"],
        asked["add_active_response"], asked["stop_request"], asked["evict_cached_response"],
        len(tally.differences),
    )  # fmt: skip
    return [tally.group, *(f"{number:,}" for number in numbers)]


def total(tallies: list[Tally]) -> Tally:
    """The sum of all groups."""
    whole = Tally("all")
    for tally in tallies:
        whole.path_calls += tally.path_calls
        whole.tree_calls += tally.tree_calls
        whole.drafts += tally.drafts
        whole.tokens += tally.tokens
        whole.operations += tally.operations
        whole.differences += tally.differences
        whole.seconds += tally.seconds
    return whole


def table(subject: str, tallies: list[Tally]) -> Table:
    """The same for a terminal."""
    shown = Table("operations", title=f"{subject} against {PEER} {version(PEER)}")
    for column in ("path", "tree", "with a draft", "drafted tokens", "differences"):
        shown.add_column(column, justify="right")
    for tally in [*tallies, total(tallies)]:
        row = cells(tally)
        shown.add_row(*row[:5], row[-1], style="bold" if tally.group == "all" else None)
    return shown


def main(
    calls: Annotated[int, typer.Option(help="Drafts to compare at least.")] = 1_000_000,
    reference_calls: Annotated[
        int, typer.Option(help="Drafts for which the tests' reference is compared too.")
    ] = 100_000,
    real: Annotated[bool, typer.Option(help="Replay code edits and Spec-Bench too.")] = True,
    report: Annotated[Path | None, typer.Option(help="Write the report as Markdown.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare drafter_core's exact mode, and the reference of its tests, with arctic-inference.

    A run that is stopped goes on where it was, as long as the code stays as it is.
    """
    console = Console(stderr=True)
    runs: dict[str, list[Tally]] = {}
    if calls:
        runs["drafter_core.suffix_decoding"] = run_all(
            subject_factory("facade"), calls, real, console, kept_file("facade", calls, real)
        )
    if reference_calls:
        runs["the reference of the tests"] = run_all(
            subject_factory("reference"), reference_calls, real, console,
            kept_file("reference", reference_calls, real),
        )  # fmt: skip
    if report is not None:
        report.write_text(markdown(runs), encoding="utf-8")
    if as_json:
        print(json.dumps({name: [plain(t) for t in tallies] for name, tallies in runs.items()}))
    else:
        for name, tallies in runs.items():
            Console().print(table(name, tallies))
    different = sum(len(tally.differences) for tallies in runs.values() for tally in tallies)
    if different:
        first = next(t.differences[0] for ts in runs.values() for t in ts if t.differences)
        console.print(f"[red]{different} differences, the first: {first}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
