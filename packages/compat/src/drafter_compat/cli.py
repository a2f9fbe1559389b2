"""The command `drafter-compat`: what is patched here and why, what that relies on, and whether it
holds.

Reads declarations and source; neither the patched package nor a model is loaded. Exit codes: 0 all
is well, 1 something is not as a patch expects it, 2 the question could not be answered.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from drafter_compat._source import SourceTree
from drafter_compat.check import Report, check_surface
from drafter_compat.export import surface_of
from drafter_compat.needless import why_needless
from drafter_compat.patch import Patch, PatchError
from drafter_compat.registry import FAILED, PENDING, SKIPPED, Registry, installed_registries
from drafter_compat.surface import SurfaceError, dump_surface, load_builtin_surface, load_surface
from drafter_compat.versions import (
    InstalledPackage,
    PackageNotInstalled,
    distribution_of,
    installed_package,
    installed_vllm,
)

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Patches that state what they rely on: list them, export their surface, check it.",
)


class Format(str, Enum):
    """How to print."""

    table = "table"
    markdown = "markdown"
    json = "json"


class CannotAnswer(Exception):
    """The question cannot be answered; the message says why and what to do."""


@dataclass(frozen=True)
class Row:
    """One installed patch, as `list` prints it."""

    name: str
    owner: str
    target: str
    members: tuple[str, ...]
    why: str
    upstream: str
    remove_when: str
    standing: str
    """`on`, `off`, `refused`, `conflict`, `needless`; `unknown` if the package is not installed."""
    detail: str


Root = Annotated[
    Path | None,
    typer.Option(
        help="Source of the patched package, if it is not the installed one.", exists=True
    ),
]
Version = Annotated[
    str | None, typer.Option(help="Its version; needed with --root if nothing is installed.")
]


@app.command("list")
def list_patches(
    plugins: Annotated[
        list[str] | None,
        typer.Argument(help="Plugins to show: entry point, distribution, or module:registry."),
    ] = None,
    format: Annotated[Format, typer.Option(help="table, markdown or json.")] = Format.table,
    root: Root = None,
    version: Version = None,
) -> None:
    """Show every installed patch with its owner, target, reason and standing.

    Plugins are found by their entry points in the group drafter_compat.registries. `needless` marks
    what the running release has made superfluous. Exit code 1 if a patch is refused or two are in
    conflict.
    """
    registries = _registries(plugins)
    rows = list(_rows(registries, root, version))
    if format is Format.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    elif format is Format.markdown:
        print(_markdown(rows))
    else:
        _print_table(rows)
    if any(row.standing in ("refused", "conflict") for row in rows):
        raise typer.Exit(1)


@app.command("surface")
def export_surface(
    plugin: Annotated[str, typer.Argument(help="Entry point, distribution, or module:registry.")],
    root: Root = None,
    version: Version = None,
) -> None:
    """Print the surface manifest that follows from a plugin's patches.

    drafter-compat surface my-plugin > surface.toml

    Then `vllm-drift scan --surface surface.toml latest` says what a release changes of it.
    """
    (registry,) = _registries([plugin]).values()
    installed = _package(registry.package, root, version)
    sys.stdout.write(
        dump_surface(surface_of(registry, version=installed.version, root=installed.root))
    )


@app.command("check")
def check(
    plugins: Annotated[
        list[str] | None,
        typer.Argument(help="Plugins to check; all installed ones by default."),
    ] = None,
    surface: Annotated[
        list[str] | None,
        typer.Option(help="Check a manifest instead: a file, or the name of a built-in one."),
    ] = None,
    root: Root = None,
    version: Version = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every result as JSON.")] = False,
) -> None:
    """Compare what patches and manifests rely on with the source that is installed here."""
    reports = []
    for name in surface or []:
        manifest = (
            load_surface(name) if Path(name).suffix == ".toml" else load_builtin_surface(name)
        )
        installed = _package(manifest.package, root, version)
        reports.append(check_surface(manifest, version=installed.version, root=installed.root))
    if plugins or not surface:
        for registry in _registries(plugins).values():
            installed = _package(registry.package, root, version)
            manifest = surface_of(registry, version=installed.version, root=installed.root)
            reports.append(
                check_surface(
                    manifest,
                    version=installed.version,
                    root=installed.root,
                    accept_unclaimed=not registry.versions,
                )
            )
    if as_json:
        print(json.dumps([_report_as_json(report) for report in reports], indent=2))
    else:
        for report in reports:
            print(report.explain())
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


def main() -> None:
    """Run the command; errors that a user can act on become one message and exit code 2."""
    try:
        app()
    except (CannotAnswer, PatchError, SurfaceError, PackageNotInstalled) as error:
        Console(stderr=True, highlight=False).print(f"drafter-compat: {error}", soft_wrap=True)
        sys.exit(2)


# --- finding ----------------------------------------------------------------------------------


def _registries(plugins: list[str] | None) -> dict[str, Registry]:
    """The registries of the named plugins, or every installed one."""
    installed = installed_registries()
    if not plugins:
        if not installed:
            raise CannotAnswer(
                "no installed plugin names a registry in the entry-point group "
                "drafter_compat.registries; name one as module:registry"
            )
        return installed
    return {name: _find_registry(name, installed) for name in plugins}


def _find_registry(name: str, installed: dict[str, Registry]) -> Registry:
    module, colon, attribute = name.partition(":")
    if colon:
        try:
            registry: Any = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise CannotAnswer(f"{name} cannot be loaded: {error}") from error
        if isinstance(registry, Registry):
            return registry
        raise CannotAnswer(f"{name} is a {type(registry).__name__}, not a Registry")
    for point, candidate in installed.items():
        if _plain(name) in (_plain(point), _plain(candidate.owner)):
            return candidate
    known = ", ".join(sorted({*installed, *(r.owner for r in installed.values())})) or "none"
    raise CannotAnswer(f"no plugin {name!r} with a registry is installed; there is: {known}")


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _package(package: str, root: Path | None, version: str | None) -> InstalledPackage:
    if root is not None and version is not None:
        return InstalledPackage(package, version, root, package)
    found = installed_vllm() if package == "vllm" else installed_package(package)
    return InstalledPackage(
        package, version or found.version, root or found.root, found.distribution
    )


# --- listing ----------------------------------------------------------------------------------


def _rows(registries: dict[str, Registry], root: Path | None, version: str | None) -> Iterator[Row]:
    conflicts = _conflicts([p for r in registries.values() for p in r.patches])
    for registry in registries.values():
        try:
            package = _package(registry.package, root, version)
        except PackageNotInstalled as error:
            yield from (_row(registry, patch, "unknown", str(error)) for patch in registry.patches)
            continue
        tree = SourceTree(registry.package, package.root)
        plan = registry.plan(version=package.version)
        for patch in registry.patches:
            planned = plan[patch.spec.name]
            standing = {PENDING: "on", SKIPPED: "off", FAILED: "refused"}[planned.state]
            detail = "" if planned.state == PENDING else planned.detail
            needless = why_needless(patch, version=package.version, tree=tree)
            if needless is not None and standing != "refused":
                standing, detail = "needless", f"{needless}: remove the patch"
            if patch in conflicts and planned.state == PENDING:
                standing, detail = "conflict", conflicts[patch]
            yield _row(registry, patch, standing, detail)


def _row(registry: Registry, patch: type[Patch], standing: str, detail: str) -> Row:
    spec = patch.spec
    return Row(
        name=spec.name,
        owner=distribution_of(spec.module) or registry.owner,
        target=str(spec.target),
        members=tuple(spec.members),
        why=spec.why,
        upstream=spec.upstream,
        remove_when=spec.remove_when,
        standing=standing,
        detail=detail,
    )


def _conflicts(patches: list[type[Patch]]) -> dict[type[Patch], str]:
    """Patches that declare one member of one target in no order, each with the other's name."""
    found: dict[type[Patch], str] = {}
    for place, patch in enumerate(patches):
        for other in patches[place + 1 :]:
            shared = set(patch.spec.members) & set(other.spec.members)
            if not shared or patch.spec.target != other.spec.target or _in_order(patch, other):
                continue
            for one, two in ((patch, other), (other, patch)):
                found[one] = (
                    f"{two.spec.name} of {two.spec.module} changes {', '.join(sorted(shared))} "
                    f"too: "
                    f"one must say after=(the other,)"
                )
    return found


def _in_order(one: type[Patch], two: type[Patch]) -> bool:
    return one.spec.name in (*two.spec.after, *two.spec.requires) or two.spec.name in (
        *one.spec.after,
        *one.spec.requires,
    )


_COLUMNS = ("patch", "owner", "changes", "why", "goes when", "standing")


def _cells(row: Row) -> tuple[str, ...]:
    goes = "; ".join(filter(None, (row.remove_when, row.upstream)))
    changes = ", ".join(f"{row.target}.{name}" for name in row.members)
    standing = row.standing + (f": {row.detail}" if row.detail else "")
    return row.name, row.owner, changes, row.why, goes, standing


def _markdown(rows: list[Row]) -> str:
    lines = [f"| {' | '.join(_COLUMNS)} |", f"|{' --- |' * len(_COLUMNS)}"]
    for row in rows:
        cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in _cells(row))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_STYLES = {"on": "green", "off": "dim", "refused": "red", "conflict": "red", "needless": "yellow"}


def _print_table(rows: list[Row]) -> None:
    table = Table(show_lines=True)
    for name in _COLUMNS:
        table.add_column(name, overflow="fold")
    for row in rows:
        *cells, standing = _cells(row)
        style = _STYLES.get(row.standing, "")
        table.add_row(*cells, f"[{style}]{standing}[/]" if style else standing)
    # Not on a terminal there is no width to fit into, and cutting names would lose them.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)


def _report_as_json(report: Report) -> dict[str, Any]:
    return {
        "plugin": report.plugin,
        "package": report.package,
        "version": report.version,
        "ok": report.ok,
        "results": [asdict(result) for result in report],
    }
