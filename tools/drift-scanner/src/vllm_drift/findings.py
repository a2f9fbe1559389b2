"""What a scan says: verdicts, findings with their witnesses, and the report that gathers them.

Plain values only: hashable, picklable (they cross process boundaries), without any knowledge of
where source comes from, how it is analysed or how a report is printed.

The contract between the analysis (`scan`, `compare`, `check`) and everything that prints:

* The analysis returns **at least one finding for every symbol it looked at**. A symbol that is as
  it should be yields one finding with `Verdict.UNCHANGED` whose `new` location is the witness. A
  symbol without any finding did not apply to that release.
* A finding of any other verdict carries a witness in the source: `old`, `new` or both are set.
  `Verdict.REMOVED` has `old` where there was an older release, else `new` at the place where the
  name was looked for (line 1 of the module, or the enclosing class).
* `release` is the label of the release that the finding is about (the newer one of a comparison).
  `first_seen` is the first release, in the order given, in which the verdict held; the analysis of
  one pair leaves it `None`, and `with_first_seen` fills it in over a sequence.
* `preexisting` marks what was already wrong at the older release of a comparison. Such findings are
  reported apart and never count as drift.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "DEFAULT_SEVERITY",
    "Finding",
    "Location",
    "Report",
    "ScannedRelease",
    "Severity",
    "Verdict",
    "with_first_seen",
]


class Severity(str, enum.Enum):
    """How much a finding matters to somebody who maintains the plugin."""

    ERROR = "error"
    """The plugin breaks, or its patch does nothing."""
    WARNING = "warning"
    """Somebody should look: it may break, or the scanner cannot tell."""
    INFO = "info"
    """Good to know; nothing to do."""

    @property
    def rank(self) -> int:
        """0 for information, 1 for a warning, 2 for an error."""
        return ("info", "warning", "error").index(self.value)


class Verdict(str, enum.Enum):
    """What happened to one symbol of the surface."""

    UNCHANGED = "unchanged"
    COMPATIBLE = "compatible"
    CHANGED_SHAPE = "changed-shape"
    MOVED = "moved"
    REMOVED = "removed"
    CALLER_CHANGED = "caller-changed"
    NEW_DEMAND = "new-demand"
    INEFFECTIVE = "ineffective"
    NEW_CALL_SITE = "new-call-site"
    LOST_CALL_SITE = "lost-call-site"
    BODY_CHANGED = "body-changed"
    UPSTREAMED = "upstreamed"
    CANNOT_TELL = "cannot-tell"
    MISMATCH = "mismatch"
    """A single release does not have what the surface declares, in a way that none of the other
    verdicts names.
    """


DEFAULT_SEVERITY: dict[Verdict, Severity] = {
    Verdict.UNCHANGED: Severity.INFO,
    Verdict.COMPATIBLE: Severity.INFO,
    Verdict.CHANGED_SHAPE: Severity.ERROR,
    Verdict.MOVED: Severity.ERROR,
    Verdict.REMOVED: Severity.ERROR,
    Verdict.CALLER_CHANGED: Severity.ERROR,
    Verdict.NEW_DEMAND: Severity.ERROR,
    Verdict.INEFFECTIVE: Severity.ERROR,
    Verdict.NEW_CALL_SITE: Severity.WARNING,
    Verdict.LOST_CALL_SITE: Severity.ERROR,
    Verdict.BODY_CHANGED: Severity.INFO,
    Verdict.UPSTREAMED: Severity.INFO,
    Verdict.CANNOT_TELL: Severity.WARNING,
    Verdict.MISMATCH: Severity.ERROR,
}
"""The severity of a verdict where the analysis has no reason to say otherwise."""


@dataclass(frozen=True, order=True)
class Location:
    """A place in one release's source.

    `path` is relative to the root that holds the package (`vllm/v1/worker/gpu_model_runner.py`),
    with forward slashes; `line` counts from 1.
    """

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class Finding:
    """One thing the scanner says about one symbol in one release."""

    symbol: str
    """The symbol's `id` in the surface."""
    kind: str
    """The symbol's kind in the surface (`function`, `method-call`, ...)."""
    verdict: Verdict
    severity: Severity
    message: str
    """One or two sentences in plain words: what was expected, what was found, where to look."""
    old: Location | None = None
    new: Location | None = None
    first_seen: str | None = None
    detail: str = ""
    """Evidence in more than one line, for instance a normalised unified diff. May be empty."""
    preexisting: bool = False
    release: str = ""
    """Label of the release that this is about; filled in by whoever calls the analysis where it is
    empty.
    """
    compared_with: str = ""
    """Label of the older release of a comparison; empty for a scan of one release. Filled in by
    whoever calls the analysis.
    """
    target: str = ""
    """What of vLLM it is about, as `module:qualified.name`, where there is one such name."""

    @property
    def is_drift(self) -> bool:
        """Whether it makes a run end with exit code 1: a new error or warning that the scanner is
        sure of.
        """
        return (
            not self.preexisting
            and self.severity is not Severity.INFO
            and self.verdict is not Verdict.CANNOT_TELL
        )

    def replace(self, **changes: object) -> Finding:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ScannedRelease:
    """One release that was read, and what is worth saying about how."""

    label: str
    """`0.33.0`, or what the user called it."""
    source: str
    """How it was read, in words: `index`, `index (sdist)`, `installed`, `directory`, `git`."""
    modules: int
    """How many Python modules were read. Never 0: a release without any is an error."""
    notes: tuple[str, ...] = ()
    """For instance `0.2.1 was yanked: broken metadata`."""
    claimed: bool = True
    """Whether the surface says that the plugin works with this release."""


@dataclass(frozen=True)
class Report:
    """The outcome of one command."""

    command: str
    """`scan`, `check`, `bisect` or `ledger`."""
    surface: str
    """The surface's plugin name, or the path or distribution that it was inferred from."""
    package: str
    releases: tuple[ScannedRelease, ...]
    findings: tuple[Finding, ...]
    """Every finding, unchanged symbols and preexisting ones included."""
    notes: tuple[str, ...] = ()
    """What the reader must know about the whole run."""
    changes: tuple[Finding, ...] = ()
    """Of a ledger: what changed from each release to the next, whether the surface copes with it
    or not. History, never drift.
    """
    outside: tuple[Finding, ...] = ()
    """Of a ledger: what is not as declared in releases that the plugin does not claim and that are
    older than one that it claims. Never drift.
    """

    @property
    def drift(self) -> tuple[Finding, ...]:
        """The findings that make the exit code 1."""
        return tuple(f for f in self.findings if f.is_drift)

    @property
    def preexisting(self) -> tuple[Finding, ...]:
        """What was already wrong at the older release."""
        return tuple(f for f in self.findings if f.preexisting)

    @property
    def current(self) -> tuple[Finding, ...]:
        """Everything that is not preexisting."""
        return tuple(f for f in self.findings if not f.preexisting)

    @property
    def looked_at_something(self) -> bool:
        """Whether at least one symbol could be judged; otherwise the run must not end with 0."""
        return any(f.verdict is not Verdict.CANNOT_TELL for f in self.findings)

    @property
    def exit_code(self) -> int:
        """0 no drift, 1 drift, 2 nothing could be judged."""
        if self.drift:
            return 1
        return 0 if self.looked_at_something else 2

    def verdict_counts(self) -> dict[str, int]:
        """Count the findings that are not preexisting, by verdict, in the order of `Verdict`."""
        counts = Counter(f.verdict for f in self.current)
        return {v.value: counts[v] for v in Verdict if counts[v]}


def with_first_seen(findings: Iterable[Finding], releases: Sequence[str]) -> list[Finding]:
    """Fill in `first_seen`: where the unbroken run of that verdict up to the finding began.

    `releases` are the labels from old to new. A verdict that went away and came back counts from
    its return. Findings that have a `first_seen` already keep it.
    """
    findings = list(findings)
    order = {label: i for i, label in enumerate(releases)}
    seen: dict[tuple[str, Verdict], set[int]] = {}
    for f in findings:
        if f.release in order:
            seen.setdefault((f.symbol, f.verdict), set()).add(order[f.release])
    result = []
    for f in findings:
        if f.first_seen is None and f.release in order and f.verdict is not Verdict.UNCHANGED:
            held = seen[f.symbol, f.verdict]
            i = order[f.release]
            while i - 1 in held:
                i -= 1
            f = f.replace(first_seen=releases[i])
        result.append(f)
    return result
