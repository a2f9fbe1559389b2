"""How good is the scanner? Change real modules of a release mechanically, and count.

    python tools/drift-scanner/mutation --modules 60 --output docs/drift/mutation.md

Fetches the release from the index that pip is set up with, picks modules and symbols with a seed,
changes one thing at a time, and compares the changed release with the real one. A change that
breaks a plugin must be detected; a meaningless one must give nothing. Ends with 1 where less than
99 % are detected or one meaningless change gives a finding.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from edits import Source
from mutators import MEANINGLESS, SAME, Mutant, mutants_of
from subjects import Subject, subjects_of

from drafter_compat.surface import Surface, Symbol
from vllm_drift.cache import Cache, default_cache_dir
from vllm_drift.compare import compare_surface
from vllm_drift.findings import Finding, Severity
from vllm_drift.judging import forget_facts
from vllm_drift.scan import scan_surface
from vllm_drift.sources import Sources
from vllm_drift.tree import SourceTree


class Overlay(SourceTree):
    """A release with some modules changed or added."""

    def __init__(self, base: SourceTree, files: dict[str, bytes]) -> None:
        changed = SourceTree.from_files(
            {name.replace(".", "/") + ".py": data for name, data in files.items()},
            label=f"{base.label} changed",
            package=base.package,
            version=base.version,
        )
        self.__dict__.update(base.__dict__)
        self.label = changed.label
        self._base, self._changed = base, changed

    def _of(self, dotted: str) -> SourceTree:
        return self._changed if dotted in self._changed else self._base

    def modules(self) -> Iterator[str]:
        """The base's modules and the new ones."""
        return iter(dict.fromkeys((*self._base.modules(), *self._changed.modules())))

    def __contains__(self, dotted: object) -> bool:
        return dotted in self._base or dotted in self._changed

    def data(self, dotted: str) -> bytes | None:
        """The changed bytes where there are some."""
        return self._of(dotted).data(dotted)

    def path(self, dotted: str) -> str:
        """As in the base, where it has the module."""
        if dotted in self._base:
            return self._base.path(dotted)
        return self._changed.path(dotted)

    def is_package(self, dotted: str) -> bool:
        """As in the base."""
        return self._base.is_package(dotted) if dotted in self._base else False

    def digest(self, dotted: str) -> str:
        """Of the changed bytes where there are some."""
        return self._of(dotted).digest(dotted)

    def files_containing(self, *substrings: str, any_of: bool = False) -> list[str]:
        """As in `SourceTree`, of the changed bytes where there are some."""
        found = self._base.files_containing(*substrings, any_of=any_of)
        kept = [m for m in found if m not in self._changed]
        return kept + self._changed.files_containing(*substrings, any_of=any_of)


@dataclass
class Score:
    """What came of one mutation over all subjects."""

    breaks: bool
    applied: int = 0
    right: int = 0
    """Detected, or silent where it is meaningless."""
    named: int = 0
    """Detected with a verdict that names the change."""
    scan_right: int = 0
    """The same, of a scan of the changed release alone."""
    wrong: list[str] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)


def main() -> int:
    """Run the test and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--release", default="0.33.0", help="the release to change (default 0.33.0)"
    )
    parser.add_argument(
        "--modules", type=int, default=60, help="how many modules to pick (default 60)"
    )
    parser.add_argument(
        "--also", nargs="*", default=[], metavar="MODULE", help="modules to change besides those"
    )
    parser.add_argument("--seed", type=int, default=0, help="which modules and symbols (default 0)")
    parser.add_argument(
        "--output", type=Path, help="where to write the report (default: the terminal)"
    )
    parser.add_argument("--verbose", action="store_true", help="print every mutant that went wrong")
    options = parser.parse_args()
    sources = Sources(cache=Cache(default_cache_dir()))
    tree = sources.load(sources.expand([options.release])[0])
    chosen = [*_chosen(tree, random.Random(options.seed), options.modules), *options.also]
    known = {s.module: s for s in _sources(tree, list(tree.modules()), limit=400_000)}
    scores: dict[str, Score] = {}
    subjects: Counter[str] = Counter()
    for number, module in enumerate(chosen):
        source = known[module]
        try:
            rng = random.Random(f"{options.seed} {module}")
            found = list(subjects_of(source, rng, known))
        except SyntaxError:
            continue  # in a newer syntax than this interpreter's
        for subject in found:
            subjects[subject.symbol.kind] += 1
            for mutant in mutants_of(subject):
                _judge(mutant, subject, tree, scores)
        _judge_meaningless(source, found, tree, scores)
        forget_facts()
        done = sum(s.applied for s in scores.values())
        print(f"\r{number + 1}/{len(chosen)} modules, {done} mutants", end="", file=sys.stderr)
        if options.output is not None:
            # After every module, so that a run that is stopped leaves what it found.
            options.output.parent.mkdir(parents=True, exist_ok=True)
            read = chosen[: number + 1]
            report = _report(tree, options, read, subjects, scores)
            options.output.write_text(report, encoding="utf-8")
    print(file=sys.stderr)
    if options.verbose:
        for name, score in scores.items():
            for line in score.wrong:
                print(f"{name}: {line}")
    if options.output is None:
        print(_report(tree, options, chosen, subjects, scores))
    detected, applied, alarms, harmless = _totals(scores)
    print(
        f"detected {detected} of {applied} ({detected / max(applied, 1):.2%}), "
        f"{alarms} false alarms in {harmless} meaningless changes"
    )
    return 0 if applied and harmless and detected / applied >= 0.99 and not alarms else 1


def _sources(tree: SourceTree, modules: Iterable[str], limit: int) -> Iterator[Source]:
    for module in modules:
        data = tree.data(module)
        if data is None or len(data) > limit:
            continue
        yield Source(module, tree.path(module), data)


def _chosen(tree: SourceTree, rng: random.Random, count: int) -> list[str]:
    """Modules of a fair size, picked by the seed: the first `count` of one order."""
    fair = [
        m
        for m in tree.modules()
        if 4_000 < len(tree.data(m) or b"") < 60_000
        and not tree.is_package(m)
        and ".third_party." not in m
    ]
    order = sorted(fair)
    rng.shuffle(order)
    return order[:count]


def _findings(symbols: list[Symbol], old: SourceTree, new: SourceTree) -> list[Finding]:
    surface = Surface("mutants", old.package, ">=0", tuple(symbols))
    return [f for f in compare_surface(surface, old, new) if not f.preexisting]


def _alarms(findings: list[Finding]) -> list[Finding]:
    return [f for f in findings if f.severity is not Severity.INFO]


def _judge(mutant: Mutant, subject: Subject, tree: SourceTree, scores: dict[str, Score]) -> None:
    score = scores.setdefault(mutant.name, Score(mutant.breaks))
    symbol = mutant.symbol or subject.symbol
    changed = Overlay(tree, mutant.files)
    findings = _findings([symbol], tree, changed)
    score.applied += 1
    alarms = _alarms(findings)
    score.verdicts.update(f.verdict.value for f in (alarms or findings))
    words = "; ".join(f"{f.verdict.value} {f.message[:160]}" for f in findings)
    if mutant.breaks:
        score.right += bool(alarms)
        named = any(f.verdict.value in mutant.verdicts for f in alarms)
        score.named += named
        if not named:
            score.wrong.append(f"{symbol.id}: {words}")
    else:
        silent = not alarms and {f.verdict.value for f in findings} <= mutant.verdicts
        score.right += silent
        if not silent:
            score.wrong.append(f"{symbol.id}: {words}")
    surface = Surface("mutants", tree.package, ">=0", (symbol,))
    alone = _alarms(scan_surface(surface, changed))
    score.scan_right += bool(alone) == mutant.breaks


def _judge_meaningless(
    source: Source, subjects: list[Subject], tree: SourceTree, scores: dict[str, Score]
) -> None:
    """Change the whole module in ways that mean nothing, and look at all of its symbols."""
    symbols = [s.symbol for s in subjects]
    for name, change in MEANINGLESS.items():
        # An anchor is text: laying the text out otherwise does break it.
        concerned = [s for s in symbols if s.kind != "anchor"]
        try:
            data = change(source)
        except (ValueError, SyntaxError):
            continue
        if data == source.data or not concerned:
            continue
        changed = Overlay(tree, {source.module: data})
        findings = _findings(concerned, tree, changed)
        score = scores.setdefault(name, Score(breaks=False))
        for symbol in concerned:
            mine = [f for f in findings if f.symbol == symbol.id]
            score.applied += 1
            score.verdicts.update(f.verdict.value for f in mine)
            silent = bool(mine) and {f.verdict.value for f in mine} <= SAME
            score.right += silent
            if not silent:
                words = "; ".join(
                    f"{f.verdict.value} {f.message[:160]} {f.detail[:200]}" for f in mine
                )
                score.wrong.append(f"{symbol.id}: {words}")
        surface = Surface("mutants", tree.package, ">=0", tuple(concerned))
        alarmed = {f.symbol for f in _alarms(scan_surface(surface, changed))}
        score.scan_right += sum(s.id not in alarmed for s in concerned)


def _totals(scores: dict[str, Score]) -> tuple[int, int, int, int]:
    breaking = [s for s in scores.values() if s.breaks]
    harmless = [s for s in scores.values() if not s.breaks]
    return (
        sum(s.right for s in breaking),
        sum(s.applied for s in breaking),
        sum(s.applied - s.right for s in harmless),
        sum(s.applied for s in harmless),
    )


def _also(options: argparse.Namespace, chosen: list[str]) -> str:
    extra = chosen[options.modules :]
    return f" --also {' '.join(extra)}" if extra else ""


def _report(
    tree: SourceTree,
    options: argparse.Namespace,
    chosen: list[str],
    subjects: Counter[str],
    scores: dict[str, Score],
) -> str:
    detected, applied, alarms, harmless = _totals(scores)
    named = sum(s.named for s in scores.values() if s.breaks)
    alone = sum(s.scan_right for s in scores.values() if s.breaks)
    lines = [
        "# Mutation test of the scanner",
        "",
        f"{len(chosen)} modules of vLLM {tree.label}, fetched from the package index, and "
        f"{sum(subjects.values())} symbols of them, picked with seed {options.seed}. Each "
        "symbol's shape was "
        "written down with `ast`, apart from the scanner; then one thing at a time was changed "
        "in the source, "
        "and the changed release compared with the real one.",
        "",
        f"- **{detected} of {applied}** changes that break a plugin were detected "
        f"(**{detected / max(applied, 1):.2%}**); {named} ({named / max(applied, 1):.2%}) under "
        "a verdict that "
        "names the change. A scan of the changed release alone, against the declared shapes, "
        f"detected {alone} ({alone / max(applied, 1):.2%}).",
        f"- **{alarms} false alarms** in {harmless} meaningless changes.",
        "",
        "Detected: at least one finding that is an error or a warning. False alarm: any finding "
        "but "
        "`unchanged` (and `compatible`, where something optional was added or a name is handed "
        "on).",
        "",
        f"    python tools/drift-scanner/mutation --release {tree.label} --modules "
        f"{options.modules} "
        f"--seed {options.seed} --output docs/drift/mutation.md",
        "",
        "| symbols | number |",
        "| --- | --- |",
        *(f"| `{kind}` | {count} |" for kind, count in sorted(subjects.items())),
        "",
        "| a change that breaks | applied | detected | named | by a scan alone | verdicts |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, score in sorted(scores.items()):
        if score.breaks:
            verdicts = ", ".join(f"`{v}` {n}" for v, n in score.verdicts.most_common())
            lines.append(
                f"| {name} | {score.applied} | {score.right} | {score.named} | "
                f"{score.scan_right} | {verdicts} |"
            )
    lines += [
        "",
        "| a meaningless change | applied | silent | silent in a scan alone | verdicts |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, score in sorted(scores.items()):
        if not score.breaks:
            verdicts = ", ".join(f"`{v}` {n}" for v, n in score.verdicts.most_common())
            lines.append(
                f"| {name} | {score.applied} | {score.right} | {score.scan_right} | {verdicts} |"
            )
    missed = [
        f"- {name}: {line}"
        for name, s in sorted(scores.items())
        for line in s.wrong
        if s.applied != s.right
    ]
    if missed:
        lines += ["", "## What went wrong", "", *missed[:40]]
    lines += [
        "",
        "What a scan alone cannot see: what the surface does not declare (a return annotation, a "
        "required "
        "field that is new), and a binding that turned lazy, which a declaration allows.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
