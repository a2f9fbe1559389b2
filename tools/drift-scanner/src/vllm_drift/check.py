"""Infer a plugin's surface and compare two releases of the package in one: what does a bump break?

`check_plugin` is the library's door to it; the command `vllm-drift check` adds sources, caches and
progress (`runs`). Knows neither where trees come from nor how a report is printed.
"""

from __future__ import annotations

from drafter_compat.surface import Surface
from vllm_drift.cache import Cache
from vllm_drift.compare import compare_surface
from vllm_drift.findings import Report, ScannedRelease, with_first_seen
from vllm_drift.infer import infer_surface, unreadable_modules
from vllm_drift.tree import SourceTree

__all__ = ["check_plugin"]


def check_plugin(
    plugin_sources: SourceTree,
    old_tree: SourceTree,
    new_tree: SourceTree,
    *,
    cache: Cache | None = None,
) -> Report:
    """Say what going from one release to another breaks for a plugin.

    Args:
        plugin_sources: The plugin's source.
        old_tree: The release that the plugin works with; its surface is inferred against it.
        new_tree: The release to go to.
        cache: Where parsed facts of releases are kept, or None.

    Returns:
        A report with at least one finding for each inferred symbol. Its exit code is 2 where the
        plugin uses nothing of the package.
    """
    surface = infer_surface(plugin_sources, old_tree, package=old_tree.package)
    findings = [
        f if f.release else f.replace(release=new_tree.label)
        for f in compare_surface(surface, old_tree, new_tree, plugin=plugin_sources, cache=cache)
    ]
    return Report(
        command="check",
        surface=surface.plugin,
        package=surface.package,
        releases=(_scanned(old_tree), _scanned(new_tree)),
        findings=tuple(with_first_seen(findings, [old_tree.label, new_tree.label])),
        notes=_notes(surface, plugin_sources),
    )


def _scanned(tree: SourceTree) -> ScannedRelease:
    return ScannedRelease(tree.label, tree.origin or "source", len(tree), tree.notes)


def _notes(surface: Surface, plugin: SourceTree) -> tuple[str, ...]:
    notes = [
        f"the surface ({len(surface)} symbols) was inferred from the source of "
        f"{plugin.package} {plugin.label}"
    ]
    unreadable = unreadable_modules(plugin)
    if unreadable:
        notes.append(f"not read, because they are no Python that parses: {', '.join(unreadable)}")
    return tuple(notes)
