"""What `register` does in a process: settings, surface, what the route asks for, and the stamp.

Loud: whatever is not as expected is an error before vLLM is changed and before it loads a model.
Must not import vLLM, torch or numba: it runs in every process, most of which never draft.
"""

from __future__ import annotations

import multiprocessing.util
import os
from typing import Any

import vllm_drafter
from vllm_drafter.settings import SWITCH, Settings, read_settings
from vllm_drafter.stamps import Role, append_stamp, current_role, log_line

__all__ = ["start"]

_started = False


def start() -> None:
    """Swap the drafter in this process, once. Raises SettingError, SurfaceMismatch, PatchError."""
    global _started
    if _started:
        return
    settings = read_settings()
    role = current_role()
    if not settings.enabled:
        log_line("vllm-drafter: %s=%s: vLLM is untouched", SWITCH, os.environ[SWITCH])
        return
    fields = {
        "plugin_version": vllm_drafter.__version__,
        "route": settings.route,
        **_take(settings),
    }
    _stamp(settings, role, fields)
    # A forked process inherits what was done and never gets here; vLLM forks where it can.
    multiprocessing.util.register_after_fork(
        vllm_drafter, lambda _module: _stamp_forked(settings, fields)
    )
    if role.name in ("front end", "API server"):
        from vllm_drafter.metrics import serve

        serve()
    _started = True


def _take(settings: Settings) -> dict[str, Any]:
    """Do what the route asks for, and say what was done."""
    if settings.route == "shim":
        return _provide_shim(settings)
    version = _check_vllm(settings.route)
    if settings.route == "custom_class":
        return {"vllm_version": version, "patched": [], "pending": []}
    return _patch(version)


def _patch(version: str) -> dict[str, Any]:
    """Patch a vLLM that was checked."""
    from vllm_drafter.patches import registry

    report = registry.apply(version=version)
    return {
        "vllm_version": version,
        "patched": [
            place for item in report if item.state == "applied" for place in item.detail.split(", ")
        ],
        "pending": [item.target for item in report if item.state == "pending"],
    }


def _provide_shim(settings: Settings) -> dict[str, Any]:
    """Provide `arctic_inference`. vLLM is not changed, so nothing of it is relied on or checked."""
    from drafter_compat.versions import PackageNotInstalled, installed_vllm
    from vllm_drafter.shim import install

    install(settings)
    try:
        version = installed_vllm().version
    except PackageNotInstalled:  # a fork of another name
        version = None
    return {"vllm_version": version, "patched": [], "pending": []}


def _check_vllm(route: str) -> str:
    """The version of the installed vLLM, if all that the route relies on is as expected."""
    from drafter_compat.check import check_live, check_surface
    from drafter_compat.versions import installed_vllm
    from vllm_drafter.proposer import proposer_class
    from vllm_drafter.routes import check_version, surface_of

    vllm = installed_vllm()
    check_version(route, vllm.version)
    surface = surface_of(route)
    report = check_surface(surface, version=vllm.version, root=vllm.root)
    report += check_live(surface, version=vllm.version)
    report.raise_for_mismatch(turn_off=f"set {SWITCH}=0, or pip uninstall vllm-drafter")
    if route == "patch":
        proposer_class(vllm.version)
    return vllm.version


def _stamp(settings: Settings, role: Role, fields: dict[str, Any]) -> None:
    log_line(
        "vllm-drafter %s registered: pid %d, %s, vLLM %s; route %s; patched %s; pending %s",
        fields["plugin_version"],
        os.getpid(),
        role,
        fields["vllm_version"],
        fields["route"],
        ", ".join(fields["patched"]) or ("nothing yet" if fields["pending"] else "nothing"),
        ", ".join(fields["pending"]) or "nothing",
    )
    append_stamp(settings.stamps, "registered", role, **fields)


def _stamp_forked(settings: Settings, fields: dict[str, Any]) -> None:
    role = current_role()
    if role.name != "unknown":
        _stamp(settings, role, {**fields, "forked": True})
