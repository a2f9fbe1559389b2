"""Random operations on drafters of every kind, with a check of the whole structure on the way.

A history is decided by its number, so a failure can be run again: `--first N --histories 1`. What
is checked, beside the invariants of docs/drafter.md: no draft holds a token id that was never
given, is longer than asked for or less probable than asked for; refused input changes nothing; a
step serves every valid request whatever the others are. `nox -s fuzz` runs it. Figures add up in
`build/fuzz.json` until `--fresh`, so that a long run can be done in pieces.
"""

from __future__ import annotations

import json
import platform
import random
import sys
import time
from collections import Counter
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from drafter_core import BadTokenId, SuffixDrafter

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / "build" / "fuzz.json"
sys.path.insert(0, str(ROOT / "packages" / "drafter-core" / "tests"))

from integrity import check_integrity  # noqa: E402

WIDTH = 2048
"""Columns of the rows that steps read: prompts and responses stay within."""

REQUESTS = 8


class History:
    """One drafter, what it was given, and the operations on it."""

    def __init__(self, number: int, counts: Counter[str]) -> None:
        draw = self.draw = random.Random(number)
        self.counts = counts
        self.exact = draw.random() < 0.5
        self.depth = draw.choice((1, 2, 3, 4, 6, 8, 12, 24, 24, 64))
        self.limit = draw.choice((-1, -1, 0, 1, 2, 3, 5))
        self.alphabet = draw.choice((1, 2, 2, 3, 4, 8, 40, 300, 49152))
        self.repeats = draw.choice((0.1, 0.5, 0.95))
        self.lengths = draw.choice(((0, 1, 1, 2, 3), (1, 2, 5, 12), (1, 10, 70), (1, 5, 300)))
        verify = None if self.exact else draw.choice((None, None, 1, 20, 1000))
        self.drafter = SuffixDrafter(self.depth, self.limit, exact=self.exact, verify_tokens=verify)
        self.token_ids = np.zeros((REQUESTS, WIDTH), np.int32)
        self.num_tokens = np.zeros(REQUESTS, np.int32)
        self.running: dict[int, int] = {}
        self.known: set[int] = set()

    def run(self, operations: int) -> None:
        """So many random operations, the structure checked after most of them."""
        names = ("start", "append", "append", "step", "step", "draft", "stop", "evict", "refuse")
        with TemporaryDirectory() as folder:
            for number in range(operations):
                name = self.draw.choice(names) if number % 40 else "snapshot"
                if name == "snapshot":
                    self.snapshot(Path(folder) / "snapshot")
                else:
                    getattr(self, name)()
                self.counts[name] += 1
                if number == operations - 1 or self.draw.random() < 0.5:
                    given = {
                        row: self.token_ids[row, : self.num_tokens[row]].tolist()
                        for row in self.running
                    }
                    self.counts["states checked"] += check_integrity(self.drafter, given)
                    self.counts["structures checked"] += 1

    def tokens(self, length: int) -> list[int]:
        """Tokens of the alphabet, often a motif again and again, often what a row holds already."""
        draw = self.draw
        if draw.random() < 0.3 and self.running:
            row = draw.choice(list(self.running))
            end = int(self.num_tokens[row])
            begin = draw.randrange(end + 1)
            return self.token_ids[row, begin : min(end, begin + length)].tolist()
        if draw.random() < self.repeats:
            motif = [draw.randrange(self.alphabet) for _ in range(draw.randint(1, 6))]
            return (motif * length)[:length]
        return [draw.randrange(self.alphabet) for _ in range(length)]

    def more(self, row: int) -> list[int]:
        """New tokens for a row, and write them into it; they count as given."""
        begin = int(self.num_tokens[row])
        tokens = self.tokens(self.draw.choice(self.lengths))[: WIDTH - begin]
        self.token_ids[row, begin : begin + len(tokens)] = tokens
        self.num_tokens[row] += len(tokens)
        self.known.update(tokens)
        return tokens

    # -- operations

    def start(self) -> None:
        """Begin a request in a free row."""
        row = self.draw.randrange(REQUESTS)
        if row in self.running:
            return
        self.num_tokens[row] = 0
        self.running[row] = self.drafter.start_request(row, self.more(row))

    def append(self) -> None:
        """Accepted tokens, call by call."""
        if self.running:
            row = self.draw.choice(list(self.running))
            self.drafter.append(row, self.more(row))

    def step(self) -> None:
        """Append to some requests and draft for all that run, beside ones that cannot be served."""
        draw = self.draw
        rows = draw.sample(list(self.running), len(self.running))
        for row in rows:
            if draw.random() < 0.7:
                self.more(row)
        handles = [self.running[row] for row in rows]
        wanted = [0] * len(rows)
        if draw.random() < 0.2:  # one that nobody knows, one with a row that does not exist
            place = draw.randrange(len(rows) + 1)
            bad = draw.choice(((draw.choice((-1, 0, 10**6)), 0), (1, draw.choice((-1, REQUESTS)))))
            handles.insert(place, bad[0])
            rows.insert(place, bad[1])
            wanted.insert(place, 3)
        most = draw.choice((0, 1, 4, 16, 70))
        least = draw.choice((0.0, 0.1, 0.5, 1.0))
        batch = self.drafter.step(
            np.array(handles, np.int64), np.array(rows, np.int64), self.token_ids, self.num_tokens,
            most if draw.random() < 0.5 else np.full(len(rows), most, np.int32),
            draw.choice((0.0, 0.5, 1.0, 2.0, 4.0)), draw.choice((0.0, 0.0, 1.0, -1.0)), least,
            draw.choice((None, None, 0, 5, 100)),
        )  # fmt: skip
        assert batch.status.tolist() == wanted, "a request was not served, or one too many"
        for draft, probs in zip(batch.tolist(), batch.probs, strict=True):
            self.expect(draft, probs[: len(draft)].tolist(), most, least)

    def draft(self) -> None:
        """Draft for one request, after its own tokens or after others, as a tree where possible."""
        draw = self.draw
        if not self.running:
            return
        row = draw.choice(list(self.running))
        most, least = draw.choice((0, 1, 8, 40)), draw.choice((0.0, 0.1, 0.5))
        if draw.random() < 0.5:
            found = self.drafter.draft(row, most, draw.choice((0.5, 1.0, 3.0)), 0.0, least)
            self.expect(found.token_ids, found.probs, most, least)
            return
        as_tree = self.exact and draw.random() < 0.5
        context = self.tokens(draw.randrange(2 * self.depth + 1))
        tree = self.drafter.speculate(row, context, most, 2.0, 0.0, least, as_tree)
        assert all(-1 <= parent < at for at, parent in enumerate(tree.parents))
        if as_tree:
            assert len(tree.draft.token_ids) <= most, "a draft that is too long"
            assert self.known.issuperset(tree.draft.token_ids), "a token id that was never given"
        else:
            self.expect(tree.draft.token_ids, tree.draft.probs, most, least)

    def expect(self, draft: list[int], probs: list[float], most: int, least: float) -> None:
        """A path holds only known ids, and is as short and as probable as was asked for."""
        self.counts["drafted tokens"] += len(draft)
        assert self.known.issuperset(draft), "a token id that was never given"
        assert len(draft) <= most, "a draft that is too long"
        assert all(a >= b for a, b in pairwise(probs)), "probabilities rise"
        # Default mode halves what is asked for: its estimates are lower than shares of counts.
        assert not probs or probs[-1] >= (least if self.exact else least / 2) - 1e-6

    def stop(self) -> None:
        """End a request."""
        if self.running:
            row = self.draw.choice(list(self.running))
            self.drafter.stop_request(row)
            del self.running[row]

    def evict(self) -> None:
        """Take a response out of the cache."""
        cached = list(self.drafter.cached_requests)
        if cached:
            self.drafter.evict_cached_response(self.draw.choice(cached))

    def refuse(self) -> None:
        """Input that must be refused, and change nothing."""
        draw = self.draw
        bad = [*self.tokens(3), draw.choice((-1, 2**31 - 1, 2**40)), 0]
        before = self.drafter.stats()
        try:
            if self.running and draw.random() < 0.5:
                self.drafter.append(draw.choice(list(self.running)), bad)
            else:
                self.drafter.start_request("bad", bad)
        except BadTokenId:
            after = self.drafter.stats()
            assert after.active_requests == before.active_requests
            assert after.cached_tokens <= before.cached_tokens, "something was kept"
            return
        raise AssertionError("a bad token id was taken")

    def snapshot(self, path: Path) -> None:
        """Save the cache and load it into a second drafter, which is checked as well."""
        saved = self.drafter.save(path)
        other = SuffixDrafter(self.depth, exact=self.exact)
        assert other.load(path) == saved
        check_integrity(other)


def markdown(state: dict[str, Any]) -> str:
    """The committed page."""
    lines = [
        "# Fuzzing the drafter",
        "",
        f"Written by `nox -s fuzz` with numba {version('numba')}, Python "
        f"{platform.python_version()}, {platform.machine()}: {state['histories']:,} histories of "
        f"{state['operations']} operations, {state['seconds'] / 60:.0f} minutes of processor time, "
        f"**{len(state['failures'])} failures**.",
        "",
        "Each history is one drafter: exact or default mode, depth 1 to 64, a cache of 0 to 5 "
        "responses or without limit, an alphabet of 1 to 49,152 tokens, texts that repeat more or "
        "less, load-aware or not. Half of the operations are followed by a check of every "
        "invariant of [drafter.md](drafter.md) in every tree, block, text and free list: among "
        "others, every word's occurrences are counted anew from the texts "
        "(`packages/drafter-core/tests/integrity.py`). Every draft is checked for ids that were "
        "never given, and for its length; a path also for its probabilities. Refused input must "
        "leave requests and texts as they are; a step must serve every valid request whatever the "
        "others are.",
        "",
        "| what | how often |",
        "| --- | ---: |",
        *(f"| {name} | {count:,} |" for name, count in sorted(state["counts"].items())),
    ]
    if state["failures"]:
        lines += ["", "Failures:", "", *(f"- `{failure}`" for failure in state["failures"])]
    return "\n".join(lines) + "\n"


def main(
    seconds: Annotated[
        float, typer.Option(help="Processor time: stop after the history that passes this.")
    ] = 3600,
    histories: Annotated[int, typer.Option(help="At most so many; 0: as time allows.")] = 0,
    operations: Annotated[int, typer.Option(help="Operations in a history.")] = 200,
    first: Annotated[int | None, typer.Option(help="Number of the first history.")] = None,
    fresh: Annotated[bool, typer.Option(help="Forget the figures of earlier runs.")] = False,
    state_file: Annotated[Path, typer.Option("--state", help="Where figures add up.")] = STATE,
    report: Annotated[Path | None, typer.Option(help="Write the page as Markdown.")] = None,
) -> None:
    """Run random histories; exit code 1 when one of them fails."""
    state: dict[str, Any] = {
        "operations": operations, "histories": 0, "seconds": 0.0, "counts": {}, "failures": [],
    }  # fmt: skip
    if state_file.exists() and not fresh:
        kept = json.loads(state_file.read_text(encoding="utf-8"))
        if kept["operations"] == operations:
            state = kept
    number = state["histories"] if first is None else first
    counts: Counter[str] = Counter(state["counts"])
    console = Console(stderr=True)
    started = time.process_time()
    before = state["seconds"]
    done = 0
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("histories", total=None)
        while time.process_time() - started < seconds and not (histories and done >= histories):
            try:
                History(number, counts).run(operations)
            except KeyboardInterrupt:  # what was done until now is kept
                break
            except Exception as failure:  # noqa: BLE001 - whatever it is, it is one
                state["failures"].append(f"history {number}: {type(failure).__name__}: {failure}")
                console.print(f"[red]{state['failures'][-1]}")
            number, done = number + 1, done + 1
            progress.update(bar, description=f"{done} histories, {sum(counts.values()):,} counted")
    state.update(
        histories=state["histories"] + done, counts=dict(counts),
        seconds=before + time.process_time() - started,
    )  # fmt: skip
    state_file.parent.mkdir(parents=True, exist_ok=True)
    state_file.write_text(json.dumps(state, indent=1), encoding="utf-8")
    if report is not None:
        report.write_text(markdown(state), encoding="utf-8")
    console.print(f"{state['histories']:,} histories so far, {len(state['failures'])} failures")
    if state["failures"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
