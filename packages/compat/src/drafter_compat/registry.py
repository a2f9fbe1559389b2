"""The patches of one plugin: in which order, for which version, chosen by whom, applied when.

A registry applies its patches to targets that are imported already at once, and to the others right
after their import, before anybody can take a name out of them. It is all or nothing: where a patch
fails, everything that the registry has applied is taken off again and the error goes up, unless
that patch is optional. Knows patches as declared in `drafter_compat.patch`, and of vLLM only the
function after which a worker has started.
"""

from __future__ import annotations

import importlib
import importlib.abc
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import wrapt
from packaging.version import Version

from drafter_compat._words import nearest
from drafter_compat.patch import AppliedPatch, Patch, PatchError, PatchSpec, lay_over
from drafter_compat.versions import (
    InstalledPackage,
    PackageNotInstalled,
    applies,
    installed_package,
    installed_vllm,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "SELECTION_VARIABLE",
    "PatchReport",
    "Registry",
    "Standing",
    "installed_registries",
    "lone_registry",
]

logger = logging.getLogger(__name__)

SELECTION_VARIABLE = "VLLM_PATCHES"
"""Names of patches, separated by commas; `all`; or `none`. vLLM's processes inherit it."""

ENTRY_POINT_GROUP = "drafter_compat.registries"
"""Plugins name their registries in this entry-point group, so that one command finds them all."""

APPLIED, PENDING, SKIPPED, FAILED, IDLE = "applied", "pending", "skipped", "failed", "idle"


_Decision = tuple[str, str]
"""A state and its detail."""


@dataclass(frozen=True)
class Standing:
    """How one patch stands in this process."""

    name: str
    state: str
    """`applied`, `pending`, `skipped`, `failed`, or `idle` before the registry has been applied."""
    detail: str
    """What was changed, until when it waits, why it was skipped, or what went wrong."""
    target: str

    def __str__(self) -> str:
        return f"{self.name} {self.state}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True)
class PatchReport:
    """How every patch of a registry stands, in the order of application."""

    owner: str
    standings: tuple[Standing, ...]

    def __iter__(self) -> Iterator[Standing]:
        return iter(self.standings)

    def __getitem__(self, name: str) -> Standing:
        for standing in self.standings:
            if standing.name == name:
                return standing
        raise KeyError(name)

    def names(self, state: str) -> tuple[str, ...]:
        """The patches in that state."""
        return tuple(item.name for item in self.standings if item.state == state)

    def __str__(self) -> str:
        return "; ".join(map(str, self.standings))


@dataclass(eq=False)
class _Entry:
    """A patch and where it stands. Mutable: imports move it on."""

    patch: type[Patch]
    state: str = IDLE
    detail: str = ""
    applied: AppliedPatch | None = None

    @property
    def spec(self) -> PatchSpec:
        return self.patch.spec

    def standing(self) -> Standing:
        detail = self.detail
        if self.state == APPLIED and self.applied is not None:
            detail = ", ".join(self.applied.places)
        return Standing(self.spec.name, self.state, detail, str(self.spec.target))


class Registry:
    """An ordered set of patches that belong together.

    `owner` is the distribution they come with, `package` the import package they change. With
    `selection=True` users choose among them with VLLM_PATCHES; without, they are applied as
    declared.
    """

    def __init__(
        self,
        owner: str,
        patches: Iterable[type[Patch]] = (),
        *,
        package: str = "vllm",
        versions: str = "",
        selection: bool = False,
    ) -> None:
        self.owner = owner
        self.versions = versions
        self.package = package
        self.selection = selection
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.RLock()
        self._refused: _RefusedImports | None = None
        for patch in patches:
            self.add(patch)

    # --- declaring ---------------------------------------------------------------------

    def add(self, patch: type[Patch]) -> type[Patch]:
        """Add a patch; usable as a decorator.

        Raises PatchError if the name is taken, or if the registry is applied already: the patch
        would never be.
        """
        if self._is_applied():
            raise PatchError(
                f"{self.owner} is applied already, and would never apply {patch.spec.name!r}: add "
                f"it before apply(), or revert() first"
            )
        if patch.spec.name in self._entries:
            raise PatchError(f"{self.owner} has two patches called {patch.spec.name!r}; rename one")
        self._entries[patch.spec.name] = _Entry(patch)
        return patch

    def _is_applied(self) -> bool:
        return any(entry.state in (APPLIED, PENDING) for entry in self._entries.values())

    @property
    def patches(self) -> tuple[type[Patch], ...]:
        """The patches in the order of application."""
        return tuple(entry.patch for entry in self._ordered())

    def _ordered(self) -> list[_Entry]:
        """By declaration, with requirements and `after` first. Raises PatchError for a circle."""
        ordered: list[_Entry] = []
        visiting: list[str] = []

        def visit(entry: _Entry) -> None:
            if entry in ordered:
                return
            if entry.spec.name in visiting:
                circle = " -> ".join(
                    [*visiting[visiting.index(entry.spec.name) :], entry.spec.name]
                )
                raise PatchError(f"{self.owner}: patches wait for each other in a circle: {circle}")
            visiting.append(entry.spec.name)
            for name in (*entry.spec.requires, *entry.spec.after):
                if name in self._entries:
                    visit(self._entries[name])
            visiting.pop()
            ordered.append(entry)

        for entry in self._entries.values():
            for name in entry.spec.requires:
                if name not in self._entries:
                    raise PatchError(
                        f"{self.owner}: patch {entry.spec.name} requires {name!r}, which is no "
                        f"patch of "
                        f"{self.owner}{nearest(name, self._entries)}"
                    )
            visit(entry)
        return ordered

    # --- applying ----------------------------------------------------------------------

    def apply(
        self, *, version: str | None = None, select: Sequence[str] | None = None
    ) -> PatchReport:
        """Apply what is chosen, now or when its target is imported. A second call changes nothing.

        `version` is the package's, by default the installed one's; `select` names the patches, by
        default those of VLLM_PATCHES or those that are on by default. Raises PatchError; then
        nothing of this registry is applied.
        """
        with self._lock:
            if self._is_applied():
                return self.report()
            ordered = self._ordered()
            chosen = self._chosen(select)
            version = version or self._installed_version(ordered)
            decided: dict[str, _Decision] = {}
            for entry in ordered:
                decided[entry.spec.name] = self._decide(entry.spec, chosen, version, decided)
            for state, detail in decided.values():
                if state == FAILED:
                    raise PatchError(detail)
            for entry in ordered:
                if decided[entry.spec.name][0] == PENDING:
                    decided[entry.spec.name] = self._rely(entry.spec, version, decided)
            for entry in ordered:
                entry.state, entry.detail = decided[entry.spec.name]
            try:
                for entry in ordered:
                    if entry.state == PENDING:
                        self._start(entry)
            except BaseException:
                self._take_off()
                raise
            return self.report()

    def _installed_version(self, ordered: list[_Entry]) -> str:
        if not any(entry.spec.versions or entry.spec.pins for entry in ordered):
            return ""
        return self._installed().version

    def _chosen(self, select: Sequence[str] | None) -> set[str] | None:
        """The names that somebody chose, or None where nobody did."""
        source = "select"
        if select is None:
            if not self.selection or SELECTION_VARIABLE not in os.environ:
                return None
            source = SELECTION_VARIABLE
            select = [part.strip() for part in os.environ[SELECTION_VARIABLE].split(",")]
            select = [part for part in select if part]
            if select in ([], ["none"]):
                return set()
            if select == ["all"]:
                return set(self._entries)
        known = {*self._entries}
        if source == SELECTION_VARIABLE and not known.issuperset(select):
            # Only now: finding the names of other plugins imports their declarations.
            known |= _names_elsewhere(self)
        for name in select:
            if name not in known:
                raise PatchError(
                    f"{source} names {name!r}{nearest(name, known)}; the patches are "
                    f"{', '.join(sorted(known))}"
                )
        chosen = {name for name in select if name in self._entries}
        todo = list(chosen)
        while todo:
            for name in self._entries[todo.pop()].spec.requires:
                if name not in chosen:
                    chosen.add(name)
                    todo.append(name)
        return chosen

    def _decide(
        self,
        spec: PatchSpec,
        chosen: set[str] | None,
        version: str,
        decided: Mapping[str, _Decision],
    ) -> _Decision:
        """Whether to apply a patch, given what was decided about those before it."""
        if chosen is None and not spec.default:
            return SKIPPED, f"off by default; choose it with {SELECTION_VARIABLE}={spec.name}"
        if chosen is not None and spec.name not in chosen:
            return SKIPPED, "not chosen"
        if spec.versions and not applies(spec.versions, version):
            return SKIPPED, f"{self.package} {version} is outside {spec.versions}"
        if spec.pins and not _is_pinned(version, spec.pins):
            return (SKIPPED if spec.optional else FAILED), (
                f"patch {spec.name} was verified on {self.package} {', '.join(spec.pins)} only, "
                f"not on {version}: verify it and add the version to its 'pins', or leave it out"
            )
        for name in spec.requires:
            if decided[name][0] == SKIPPED:
                return SKIPPED, f"requires {name}, which is skipped: {decided[name][1]}"
        return PENDING, _waiting_for(spec)

    def _rely(self, spec: PatchSpec, version: str, decided: Mapping[str, _Decision]) -> _Decision:
        """Whether what a patch `relies_on` is there, as the installed source shows it.

        Raises PatchError if it is not, unless the patch is optional.
        """
        for name in spec.requires:
            if decided[name][0] == FAILED:
                if not spec.optional:
                    raise PatchError(f"patch {spec.name} requires {name}, which failed")
                return FAILED, f"requires {name}, which failed"
        if not spec.relies_on:
            return decided[spec.name]
        from drafter_compat.check import check_surface
        from drafter_compat.surface import Surface

        try:
            package = self._installed()
        except PackageNotInstalled:
            # Nothing to look at: a stand-in, as tests of a patch have it.
            return decided[spec.name]
        surface = Surface(
            plugin=f"patch {spec.name}",
            package=self.package,
            versions=spec.versions or ">=0",
            symbols=spec.relies_on,
            source=spec.module,
        )
        report = check_surface(
            surface, version=version or package.version, root=package.root, accept_unclaimed=True
        )
        if report.ok:
            return decided[spec.name]
        message = report.explain(
            turn_off=f"leave {spec.name} out with {SELECTION_VARIABLE}"
            if self.selection
            else f"uninstall {self.owner}"
        )
        if not spec.optional:
            raise PatchError(message)
        logger.warning("optional patch %s is left out: %s", spec.name, message)
        return FAILED, message

    def _installed(self) -> InstalledPackage:
        return installed_vllm() if self.package == "vllm" else installed_package(self.package)

    def _start(self, entry: _Entry) -> None:
        """Apply a patch now, or arrange that it will be."""
        module = entry.spec.target.module
        if entry.spec.when == "worker":
            _when_worker_starts(self, entry)
            return
        if entry.spec.target.given is not None:
            self._on_import(entry)
            return
        if entry.spec.when == "registration":
            importlib.import_module(module)
        if _is_initializing(sys.modules.get(module)):
            raise PatchError(
                f"patch {entry.spec.name}: {module} is being imported right now and already half "
                f"there; "
                f"apply the registry before or after that import"
            )
        _when_imported(self, entry)

    def _apply_in_worker(self, entry: _Entry) -> None:
        with self._lock:
            if entry.state == PENDING:
                importlib.import_module(entry.spec.target.module)
                self._on_import(entry)

    def _on_import(self, entry: _Entry) -> None:
        with self._lock:
            if entry.state != PENDING:
                return
            try:
                missing = [n for n in entry.spec.requires if self._entries[n].state == FAILED]
                if missing:
                    raise PatchError(f"patch {entry.spec.name} requires {missing[0]}, which failed")
                entry.applied = lay_over(entry.patch, logger.warning)
            except Exception as error:
                entry.state, entry.detail = FAILED, f"{type(error).__name__}: {error}"
                if entry.spec.optional:
                    logger.warning(
                        "optional patch %s is left out: %s", entry.spec.name, entry.detail
                    )
                    return
                self._take_off()
                self._refuse(entry.spec.target.module, error)
                raise
            entry.state, entry.detail = APPLIED, ""

    def _wait_again(self, entry: _Entry) -> bool:
        """Whether a patch still waits for its module, whose import has failed.

        What was laid over the module in that import went with it.
        """
        with self._lock:
            if entry.state == APPLIED and entry.applied is not None:
                entry.applied.revert()
                entry.applied = None
                entry.state, entry.detail = PENDING, _waiting_for(entry.spec)
            return entry.state == PENDING

    def _refuse(self, module: str, error: Exception) -> None:
        """Make a second import fail too: the module would come unpatched, and unnoticed."""
        if not _is_initializing(sys.modules.get(module)):
            return
        if self._refused is None:
            self._refused = _RefusedImports()
            sys.meta_path.insert(0, self._refused)
        self._refused.errors[module] = error

    # --- taking off --------------------------------------------------------------------

    def revert(self) -> None:
        """Take every patch off and wait for no import any more; exactly what was there is there
        again.

        Raises PatchError, after having done the rest, where something else has changed a patched
        name since.
        """
        with self._lock:
            foreign = self._take_off()
            for entry in self._entries.values():
                entry.state, entry.detail = IDLE, ""
            _no_longer_in_workers(self)
            if self._refused is not None:
                sys.meta_path.remove(self._refused)
                self._refused = None
        if foreign:
            raise PatchError(
                f"{self.owner}: {', '.join(foreign)} was changed by something else after we "
                f"patched it, "
                f"and is left as it is; take that off first"
            )

    def _take_off(self) -> list[str]:
        foreign: list[str] = []
        for entry in reversed(self._entries.values()):
            if entry.applied is not None:
                foreign += entry.applied.revert()
                entry.applied = None
            if entry.state in (APPLIED, PENDING):
                entry.state, entry.detail = SKIPPED, "taken off because another patch failed"
        return foreign

    # --- telling -----------------------------------------------------------------------

    def report(self) -> PatchReport:
        """How every patch stands now."""
        return PatchReport(self.owner, tuple(entry.standing() for entry in self._ordered()))

    def plan(self, *, version: str, select: Sequence[str] | None = None) -> PatchReport:
        """How every patch would stand right after `apply`, changing and importing nothing.

        A patch that would stop the start-up stands as `failed`. PatchError for a wrong choice.
        """
        chosen = self._chosen(select)
        decided: dict[str, _Decision] = {}
        standings = []
        for entry in self._ordered():
            name = entry.spec.name
            decided[name] = self._decide(entry.spec, chosen, version, decided)
            standings.append(Standing(name, *decided[name], str(entry.spec.target)))
        return PatchReport(self.owner, tuple(standings))


def _waiting_for(spec: PatchSpec) -> str:
    if spec.when == "worker":
        return "until vLLM has started a worker in this process"
    if spec.when == "registration":
        return "until it is registered"
    return f"until {spec.target.module} is imported"


def _is_pinned(version: str, pins: tuple[str, ...]) -> bool:
    parsed = Version(version)
    return any(Version(pin) == (parsed if "+" in pin else Version(parsed.public)) for pin in pins)


def _is_initializing(module: ModuleType | None) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _RefusedImports(importlib.abc.MetaPathFinder):
    """Raises the error of a failed patch when its target is imported again."""

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As every finder; finds nothing itself."""
        error = self.errors.get(fullname)
        if error is not None:
            raise PatchError(
                f"{fullname} is not imported, because a patch of it failed: {error}"
            ) from error
        return None


# --- imports --------------------------------------------------------------------------------

_awaited: dict[str, list[tuple[Registry, _Entry]]] = {}
"""By module, the patches that wait for its import, of all registries: they share its fate."""
_awaited_lock = threading.RLock()


def _when_imported(registry: Registry, entry: _Entry) -> None:
    """Apply a patch when its module is imported; at once if it is already."""
    module = entry.spec.target.module
    if module in sys.modules:
        registry._on_import(entry)
    else:
        _await(module, [(registry, entry)])


def _await(module: str, waiting: list[tuple[Registry, _Entry]]) -> None:
    with _awaited_lock:
        if module not in _awaited:
            wrapt.register_post_import_hook(_imported, module)
        known = _awaited.setdefault(module, [])
        known += [one for one in waiting if one not in known]


def _imported(module: ModuleType) -> None:
    """Apply what waited for a module. If a patch fails, its import fails; the others wait again."""
    name = module.__name__
    with _awaited_lock:
        waiting = _awaited.pop(name, [])
    try:
        for registry, entry in waiting:
            registry._on_import(entry)
    except BaseException:
        # The import system would do it after us; to be called at the next import, we must see that
        # the module is not there.
        sys.modules.pop(name, None)
        again = [one for one in reversed(waiting) if one[0]._wait_again(one[1])]
        if again:
            _await(name, again[::-1])
        raise


# --- workers --------------------------------------------------------------------------------

WORKER_MODULE = "vllm.v1.worker.worker_base"
WORKER_CLASS = "WorkerWrapperBase"
WORKER_START = "init_device"
"""What a worker does first in its own process after it has loaded the plugins: a process that was
spawned, not forked, hears of them only then."""

_in_workers: list[tuple[Registry, _Entry]] = []
"""The patches that wait for a worker or were applied in one."""
_worker_lock = threading.RLock()


class _WorkerStart(Patch, target=f"{WORKER_MODULE}:{WORKER_CLASS}", name="worker-start"):
    """Applies what waits for a worker. Is there only as long as a patch with when="worker" is."""

    def init_device(self, *args: Any, **kwargs: Any) -> Any:
        for registry, entry in list(_in_workers):
            registry._apply_in_worker(entry)
        return _WorkerStart.original(WORKER_START)(self, *args, **kwargs)


def _when_worker_starts(registry: Registry, entry: _Entry) -> None:
    with _worker_lock:
        if (registry, entry) not in _in_workers:
            _in_workers.append((registry, entry))
    _WorkerStart.apply()


def _no_longer_in_workers(registry: Registry) -> None:
    with _worker_lock:
        if not any(one is registry for one, _ in _in_workers):
            return
        _in_workers[:] = [one for one in _in_workers if one[0] is not registry]
        if _in_workers:
            return
    _WorkerStart.revert()


# --- patches by themselves, and registries of others ----------------------------------------

_lone: dict[type[Patch], Registry] = {}


def lone_registry(patch: type[Patch]) -> Registry:
    """The registry of one patch that is applied by itself."""
    if patch not in _lone:
        _lone[patch] = Registry(patch.spec.module, [patch])
    return _lone[patch]


def installed_registries() -> dict[str, Registry]:
    """The registries that installed plugins name in the entry-point group, by entry-point name.

    Raises PatchError for one that cannot be loaded: a plugin that is silently left out would look
    like none.
    """
    from importlib.metadata import entry_points

    found: dict[str, Registry] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            registry = point.load()
        except Exception as error:
            raise PatchError(
                f"the registry {point.name} ({point.value}) cannot be loaded: {error!r}"
            ) from error
        if not isinstance(registry, Registry):
            raise PatchError(f"{point.value} is a {type(registry).__name__}, not a Registry")
        found[point.name] = registry
    return found


def _names_elsewhere(registry: Registry) -> set[str]:
    return {
        name
        for other in installed_registries().values()
        if other is not registry and other.selection
        for name in other._entries
    }
