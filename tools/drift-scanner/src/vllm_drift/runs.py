"""What each command does, without a command line: read releases, have them analysed, make a report.

Joins `sources` and the analysis (`scan`, `compare`, `infer`), spreads the analysis of several
releases over processes, and keeps its results. Must not know how a report is printed or how a
program ends.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import json
import multiprocessing
import multiprocessing.util
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from packaging.version import Version

from vllm_drift.cache import Cache
from vllm_drift.errors import SourceError
from vllm_drift.findings import (
    Finding,
    Location,
    Report,
    ScannedRelease,
    Severity,
    Verdict,
    with_first_seen,
)
from vllm_drift.sources import Candidate, Sources
from vllm_drift.tree import CorruptPack, SourceTree, pack_bytes, read_summary

if TYPE_CHECKING:
    from drafter_compat.surface import Surface, Symbol

__all__ = ["Watched", "bisect", "check", "infer", "ledger", "scan", "watch"]

Step = Callable[[str, int, int], None]
"""Called with what was done, and how many of how many are done."""

_T = TypeVar("_T")
_MOST_PARTS = 8
_WORTH_SPLITTING = 40
"""A surface with fewer symbols is compared in less time than a process takes to start."""
_DOWNLOADS = 3
"""Releases that are fetched at the same time."""


def scan(
    surface: Surface,
    sources: Sources,
    candidates: Sequence[Candidate],
    *,
    assumed: Version | None = None,
    workers: int | None = None,
    step: Step | None = None,
) -> Report:
    """Check the surface against each release by itself.

    `assumed` is the version to judge a release by whose source does not say its own. Raises
    SourceError where a release cannot be read.
    """
    _need_releases(candidates)

    def run(workers: int | None) -> Report:
        with _analysis(sources.cache, len(candidates), workers) as analysis:
            releases, pending = [], []
            for release in _read(sources, candidates, analysis, assumed, step):
                releases.append(release)
                pending.append(analysis.scan(surface, release))
            findings = _gathered(pending, releases, step)
        labels = [r.label for r in releases]
        scanned = tuple(r.scanned(surface) for r in releases)
        notes = tuple(
            f"{surface.plugin} claims {surface.versions}, not {r.label}: judged by the symbols "
            f"that would apply there"
            for r in scanned
            if not r.claimed
        )
        return Report(
            command="scan",
            surface=surface.plugin,
            package=surface.package,
            releases=scanned,
            findings=tuple(with_first_seen(findings, labels)),
            notes=notes + _gaps(surface, findings, labels),
        )

    return _persisting(run, workers)


def infer(
    plugin: SourceTree, release: SourceTree | None = None, *, package: str = "vllm"
) -> Surface:
    """Write the surface of a plugin from its source; with a release of the package, exactly.

    Raises SourceError where nothing of the package is used.
    """
    from vllm_drift.infer import infer_surface

    surface = infer_surface(plugin, release, package=package)
    if not surface.symbols:
        raise SourceError(
            f"{plugin.package} uses nothing of {surface.package} that the scanner can see in its "
            f"{len(plugin)} modules"
        )
    return surface


def check(
    surface: Surface | None,
    sources: Sources,
    old: Candidate,
    new: Candidate,
    *,
    plugin: SourceTree | None = None,
    assumed: Version | None = None,
    workers: int | None = None,
    step: Step | None = None,
) -> tuple[Report, Surface]:
    """Compare what a plugin relies on in two releases; return the report and the surface.

    Without a surface, it is inferred from `plugin` with the older release. Raises SourceError
    where a release cannot be read, or nothing that the plugin relies on was found in its source.
    """

    def run(workers: int | None) -> tuple[Report, Surface]:
        with _analysis(sources.cache, _MOST_PARTS, workers, keep_trees=True) as analysis:
            older, newer = _read(sources, [old, new], analysis, assumed, step)
            notes: tuple[str, ...] = ()
            declared = surface
            if declared is None:
                assert plugin is not None
                declared = analysis.infer(plugin, older, newer, sources.package)
                notes = (
                    f"what {declared.plugin} relies on was inferred from its source "
                    f"({plugin.label}): {len(declared)} symbol{'s' * (len(declared) != 1)}",
                )
            # More parts than processes: their costs differ, and whoever is done takes the next.
            parts = _parts(declared, 3 * analysis.workers if analysis.workers > 1 else 1)
            pending = [analysis.compare(part, older, newer, plugin) for part in parts]
            findings = _in_order(declared, [f for future in pending for f in future.result()])
        report = Report(
            command="check",
            surface=declared.plugin,
            package=declared.package,
            releases=(older.scanned(declared), newer.scanned(declared)),
            findings=tuple(with_first_seen(findings, [older.label, newer.label])),
            notes=notes,
        )
        return report, declared

    return _persisting(run, workers)


def _parts(surface: Surface, count: int) -> list[Surface]:
    """Split a surface into parts that cost about the same and parse different modules.

    Each symbol is judged by itself, so the findings are those of the whole.
    """
    if count == 1 or len(surface) < _WORTH_SPLITTING:
        return [surface]
    modules: dict[str, list[Symbol]] = {}
    place_of: dict[str, str] = {}
    for symbol in surface:
        module = symbol.places[0] if symbol.places else ""
        modules.setdefault(place_of.setdefault(symbol.id, module), []).append(symbol)
    parts: list[list[Symbol]] = [[] for _ in range(count)]
    for symbols in sorted(modules.values(), key=len, reverse=True):
        min(parts, key=len).extend(symbols)
    return [dataclasses.replace(surface, symbols=tuple(part)) for part in parts if part]


def _in_order(surface: Surface, findings: Iterable[Finding]) -> list[Finding]:
    order = {symbol.id: number for number, symbol in enumerate(surface)}
    return sorted(findings, key=lambda f: order.get(f.symbol, len(order)))


def bisect(
    surface: Surface,
    sources: Sources,
    candidates: Sequence[Candidate],
    *,
    workers: int | None = None,
    step: Step | None = None,
) -> Report:
    """Compare each release with the next, and say in which one each symbol changed.

    The report holds every change, the oldest first, with `first_seen` the release that made it.
    """
    if len(candidates) < 2:
        raise SourceError(
            f"a bisection needs at least two releases, and got {len(candidates)}; give a range "
            f"such as '>=0.30'"
        )

    def run(workers: int | None) -> Report:
        with _analysis(sources.cache, len(candidates), workers) as analysis:
            releases: list[_Release] = []
            pending = []
            for release in _read(sources, candidates, analysis, None, step):
                if releases:
                    pending.append(analysis.compare(surface, releases[-1], release))
                releases.append(release)
            findings = _gathered(pending, releases[1:], step)
        return Report(
            command="bisect",
            surface=surface.plugin,
            package=surface.package,
            releases=tuple(r.scanned(surface) for r in releases),
            findings=tuple(f.replace(first_seen=f.release) for f in findings),
        )

    return _persisting(run, workers)


def ledger(
    surface: Surface,
    sources: Sources,
    candidates: Sequence[Candidate],
    *,
    workers: int | None = None,
    step: Step | None = None,
) -> Report:
    """Scan every release and compare each with the next.

    Drift is what is not as declared in a release that the plugin claims, or in one newer than
    those; what older releases lack is history (`Report.outside`).
    """
    _need_releases(candidates)

    def run(workers: int | None) -> Report:
        with _analysis(sources.cache, len(candidates), workers) as analysis:
            releases: list[_Release] = []
            scans, changes = [], []
            for release in _read(sources, candidates, analysis, None, step):
                scans.append(analysis.scan(surface, release))
                if releases:
                    changes.append(analysis.compare(surface, releases[-1], release))
                releases.append(release)
            found = _gathered(scans, releases, step)
            history = [f for future in changes for f in future.result()]
        scanned = [r.scanned(surface) for r in releases]
        last_claimed = max((i for i, r in enumerate(scanned) if r.claimed), default=-1)
        older = {r.label for r in scanned[: last_claimed + 1] if not r.claimed}
        labels = [r.label for r in releases]
        found = with_first_seen(found, labels)
        return Report(
            command="ledger",
            surface=surface.plugin,
            package=surface.package,
            releases=tuple(scanned),
            findings=tuple(f for f in found if f.release not in older),
            outside=tuple(f for f in found if f.release in older),
            changes=tuple(
                f.replace(first_seen=f.release)
                for f in history
                if f.verdict is not Verdict.UNCHANGED and not f.preexisting
            ),
            notes=_gaps(surface, found, labels),
        )

    return _persisting(run, workers)


@dataclass(frozen=True)
class Watched:
    """What a scheduled job wants to know."""

    newest: str
    """The newest release of the index."""
    known: bool
    """Whether the ledger has it already."""


def watch(sources: Sources, ledger_file: Path | None) -> tuple[Watched, Candidate]:
    """Find the newest release, and whether the ledger has it. Without a file, it has none."""
    known: set[str] = set()
    if ledger_file is not None:
        try:
            document = json.loads(ledger_file.read_text(encoding="utf-8"))
            known = {r["label"] for r in document["releases"]}
        except OSError as e:
            raise SourceError(f"the ledger {ledger_file} cannot be read: {e.strerror}") from e
        except (ValueError, KeyError, TypeError) as e:
            raise SourceError(
                f"{ledger_file} is not a ledger in JSON ({e!r}); write one with "
                f"'vllm-drift ledger --write json={ledger_file}'"
            ) from e
    (candidate,) = sources.expand(["latest"])
    return Watched(candidate.label, candidate.label in known), candidate


# reading releases


@dataclass(frozen=True)
class _Release:
    """A release that was read: where its pack is, and its tree if it is at hand."""

    label: str
    version: Version
    origin: str
    notes: tuple[str, ...]
    modules: int
    fingerprint: str
    pack: Path | None = None
    tree: SourceTree | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the tree where there is a pack: another process opens that."""
        state = dict(self.__dict__)
        if self.pack is not None:
            state["tree"] = None
        return state

    def open(self) -> SourceTree:
        """Return the source, from memory or from the pack."""
        if self.tree is not None:
            return self.tree
        assert self.pack is not None
        return SourceTree.from_pack(self.pack).relabel(self.label, self.version)

    def scanned(self, surface: Surface) -> ScannedRelease:
        """Return what a report says about the release."""
        claimed = surface.claims(str(self.version))
        return ScannedRelease(self.label, self.origin, self.modules, self.notes, claimed)


def _read(
    sources: Sources,
    candidates: Sequence[Candidate],
    analysis: _Analysis,
    assumed: Version | None,
    step: Step | None,
) -> Iterator[_Release]:
    """Read the releases, several at a time, and yield them in their order."""
    with ThreadPoolExecutor(min(_DOWNLOADS, len(candidates)) + 1) as threads:
        if not analysis.parallel and any(not sources.cached_pack(c) for c in candidates):
            # It takes as long as the network does, and would otherwise come after it.
            threads.submit(_preload)
        pending = [
            threads.submit(_read_one, sources, candidate, analysis, assumed)
            for candidate in candidates
        ]
        try:
            for number, future in enumerate(pending):
                release = future.result()
                if step is not None:
                    step(f"read {release.label}", number + 1, len(candidates))
                yield release
        finally:
            for future in pending:
                future.cancel()


def _read_one(
    sources: Sources, candidate: Candidate, analysis: _Analysis, assumed: Version | None
) -> _Release:
    pack = sources.cached_pack(candidate)
    if pack is not None and candidate.version is not None:
        found = read_summary(pack)
        notes = tuple(dict.fromkeys(candidate.notes + found.notes))
        return _Release(
            candidate.label,
            candidate.version,
            found.origin,
            notes,
            found.modules,
            found.fingerprint,
            pack,
        )
    tree = sources.load(candidate)
    version = tree.version or assumed
    if version is None:
        raise SourceError(
            f"{candidate.place} does not say which version it is; say it with --as VERSION, so "
            f"that the symbols of that version are checked"
        )
    if assumed is not None and candidate.kind in {"directory", "git"}:
        version = assumed
    notes = tuple(dict.fromkeys(candidate.notes + tree.notes))
    pack = None
    if analysis.parallel:
        pack = sources.cached_pack(candidate) or analysis.write_pack(tree)
    return _Release(
        tree.label,
        version,
        tree.origin,
        notes,
        len(tree),
        tree.fingerprint,
        pack,
        tree.relabel(tree.label, version) if analysis.keep_trees else None,
    )


def _persisting(run: Callable[[int | None], _T], workers: int | None) -> _T:
    """Run, and once more without the damaged packs that it comes across; in this process alone if
    another one of the analysis died (for want of memory, most of the time).
    """
    for _ in range(8):
        try:
            return run(workers)
        except CorruptPack as e:
            if e.path is None:
                raise SourceError(str(e)) from e
            e.path.unlink(missing_ok=True)
        except BrokenProcessPool as e:
            if workers == 1:
                raise SourceError(f"a process of the analysis died: {e}") from e
            workers = 1
    raise SourceError("the cache keeps being damaged; clear it with 'vllm-drift cache clear'")


# analysing them


class _Analysis:
    """Runs the analysis here, or in processes where there is more than one release."""

    def __init__(
        self,
        cache: Cache,
        directory: Path,
        executor: ProcessPoolExecutor | None,
        workers: int,
        keep_trees: bool,
    ) -> None:
        self.keep_trees = keep_trees or executor is None
        self._cache = cache
        self._directory = directory
        self._executor = executor
        self.workers = workers

    @property
    def parallel(self) -> bool:
        """Whether releases are analysed by other processes, which need packs."""
        return self._executor is not None

    def write_pack(self, tree: SourceTree) -> Path:
        """Put a tree where another process can open it, until the run ends."""
        path = self._directory / f"{tree.fingerprint}.pack"
        path.write_bytes(pack_bytes(tree))
        return path

    def scan(self, surface: Surface, release: _Release) -> Future[list[Finding]]:
        """Start the scan of one release."""
        key = _result_key("scan", surface, release)
        return self._kept(key) or self._start(_scan, key, surface, release)

    def compare(
        self, surface: Surface, old: _Release, new: _Release, plugin: SourceTree | None = None
    ) -> Future[list[Finding]]:
        """Start the comparison of two releases."""
        key = _result_key("compare", surface, old, new, plugin)
        here = self.keep_trees and len(surface) < _WORTH_SPLITTING
        return self._kept(key) or self._start(_compare, key, surface, old, new, plugin, here=here)

    def infer(
        self, plugin: SourceTree, release: _Release, newer: _Release, package: str
    ) -> Surface:
        """Infer a plugin's surface, or return the one that was inferred before.

        `newer` is what `release` will be compared with.
        """
        from drafter_compat.surface import SurfaceError, dump_surface, parse_surface

        extras = json.dumps(plugin.extras, sort_keys=True)
        parts = (package, _code_digest(), plugin.fingerprint, plugin.label, release.fingerprint)
        key = "\n".join(("infer", *parts, str(release.version), extras))
        origin = f"inferred from {plugin.label}"
        stored = self._cache.get("results", key)
        if stored is not None:
            return parse_surface(stored.decode(), source=origin)
        if self._executor is not None:
            # The comparison that follows needs its processes; they start while this one infers.
            for _ in range(self.workers):
                self._executor.submit(_prepare, self._cache, release, newer)
        surface = infer(plugin, release.open(), package=package)
        text = dump_surface(surface)
        try:
            exact = parse_surface(text, source=origin) == surface
        except SurfaceError:
            exact = False
        if exact:
            self._cache.put("results", key, text.encode())
        return surface

    def _kept(self, key: str) -> Future[list[Finding]] | None:
        stored = self._cache.get("results", key)
        if stored is None:
            return None
        future: Future[list[Finding]] = Future()
        future.set_result(_findings_from_json(stored))
        return future

    def _start(
        self, function: Callable[..., list[Finding]], key: str, *arguments: Any, here: bool = False
    ) -> Future[list[Finding]]:
        if self._executor is not None and not here:
            return self._executor.submit(_keep, self._cache, function, key, *arguments)
        future: Future[list[Finding]] = Future()
        future.set_result(_keep(self._cache, function, key, *arguments))
        return future


@contextmanager
def _analysis(
    cache: Cache, tasks: int, workers: int | None, *, keep_trees: bool = False
) -> Iterator[_Analysis]:
    """Prepare the analysis of up to `tasks` things at the same time.

    With `keep_trees`, this process keeps the source of what it reads, to look at it itself.
    """
    count = min(workers or os.cpu_count() or 1, tasks)
    with tempfile.TemporaryDirectory(prefix="vllm-drift-") as name:
        if count <= 1:
            yield _Analysis(cache, Path(name), None, 1, keep_trees)
            return
        # Forking while threads run (the downloads) can deadlock; a fresh interpreter cannot.
        context = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(count, context, initializer=_begin_worker)
        try:
            yield _Analysis(cache, Path(name), executor, count, keep_trees)
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def _begin_worker() -> None:
    gc.disable()
    # Taking the syntax trees of two releases down object by object takes longer than a second, for
    # which the command would wait: leave them to the system, after all that is to be finalised.
    multiprocessing.util.Finalize(None, os._exit, args=(0,), exitpriority=-100)


def _preload() -> None:
    """Import what every analysis needs."""
    import vllm_drift.compare
    import vllm_drift.scan  # noqa: F401


def _prepare(cache: Cache, *releases: _Release) -> None:
    """Import what an analysis of these releases needs, and open them."""
    _preload()
    for release in releases:
        _opened(release, cache)


def _keep(
    cache: Cache, function: Callable[..., list[Finding]], key: str, *arguments: Any
) -> list[Finding]:
    found = function(cache, *arguments)
    cache.put("results", key, _findings_to_json(found))
    return found


@functools.lru_cache(maxsize=2)
def _opened(release: _Release, cache: Cache) -> SourceTree:
    """Open a release; a process keeps the last two, as each is compared with both neighbours."""
    tree = release.open()
    tree.keep_searches(cache)
    return tree


def _scan(cache: Cache, surface: Surface, release: _Release) -> list[Finding]:
    from vllm_drift.scan import scan_surface

    found = scan_surface(surface, _opened(release, cache), cache=cache)
    return [f.replace(release=release.label) for f in found]


def _compare(
    cache: Cache, surface: Surface, old: _Release, new: _Release, plugin: SourceTree | None
) -> list[Finding]:
    from vllm_drift.compare import compare_surface

    found = compare_surface(
        surface, _opened(old, cache), _opened(new, cache), plugin=plugin, cache=cache
    )
    return [f.replace(release=new.label, compared_with=old.label) for f in found]


def _gathered(
    pending: Sequence[Future[list[Finding]]], releases: Sequence[_Release], step: Step | None
) -> list[Finding]:
    findings: list[Finding] = []
    for number, (future, release) in enumerate(zip(pending, releases, strict=True)):
        findings += future.result()
        if step is not None:
            step(f"analysed {release.label}", number + 1, len(pending))
    return findings


# keeping results


def _result_key(what: str, surface: Surface, *parts: _Release | SourceTree | None) -> str:
    """Name a result by everything that it depends on, the scanner's own code included."""
    from drafter_compat.surface import dump_surface

    named = [what, _code_digest(), hashlib.blake2b(dump_surface(surface).encode()).hexdigest()]
    for part in parts:
        if isinstance(part, _Release):
            named.append(f"{part.label} {part.version} {part.fingerprint}")
        else:
            named.append("" if part is None else part.fingerprint)
    return "\n".join(named)


@functools.cache
def _code_digest() -> str:
    import drafter_compat
    import vllm_drift

    digest = hashlib.blake2b()
    for module in (vllm_drift, drafter_compat):
        for directory in module.__path__:
            for path in sorted(Path(directory).glob("*.py")):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _findings_to_json(findings: Iterable[Finding]) -> bytes:
    return json.dumps([dataclasses.asdict(f) for f in findings]).encode()


def _findings_from_json(data: bytes) -> list[Finding]:
    def place(value: dict[str, Any] | None) -> Location | None:
        return None if value is None else Location(**value)

    found = []
    for fields in json.loads(data):
        fields["verdict"] = Verdict(fields["verdict"])
        fields["severity"] = Severity(fields["severity"])
        fields["old"], fields["new"] = place(fields["old"]), place(fields["new"])
        found.append(Finding(**fields))
    return found


# what to say beside findings


def _need_releases(candidates: Sequence[Candidate]) -> None:
    if not candidates:
        raise SourceError("no release to look at; name one, for instance 'latest'")


def _gaps(surface: Surface, findings: Iterable[Finding], labels: Sequence[str]) -> tuple[str, ...]:
    """Say in which releases nothing of the surface applies: no finding there means nothing."""
    judged = {f.release for f in findings}
    return tuple(
        f"nothing of {surface.plugin}'s surface applies to {label}"
        for label in labels
        if label not in judged
    )
