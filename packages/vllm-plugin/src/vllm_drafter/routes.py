"""What of vLLM each route relies on. Must not know what a route does."""

from __future__ import annotations

import dataclasses

from drafter_compat.surface import Surface, load_builtin_surface
from vllm_drafter.settings import ROUTE, SettingError

__all__ = ["ONLY_FOR_THE_PATCHES", "check_version", "has_custom_class", "surface_of"]

ONLY_FOR_THE_PATCHES = frozenset(
    {
        "gate-config",
        "gate-function",
        "input-batch",
        "input-batch-unsupported",
        "proposer",
        "proposer-constructed",
        "proposer-propose",
        "speculative-method",
    }
)
"""Symbols of the surface that a custom class does without, by id. A new one is checked for both."""

_EXTENSION_POINT = "custom-class-propose"
"""The symbol that says which releases ask a custom class for drafts."""


def surface_of(route: str) -> Surface:
    """The surface as far as the route `patch` or `custom_class` relies on it."""
    surface = load_builtin_surface("vllm_drafter")
    if route != "custom_class":
        return surface
    needed = (symbol for symbol in surface if symbol.id not in ONLY_FOR_THE_PATCHES)
    return dataclasses.replace(surface, symbols=tuple(needed))


def has_custom_class(version: str) -> bool:
    """Whether that vLLM has `method="custom_class"`."""
    return load_builtin_surface("vllm_drafter").get(_EXTENSION_POINT).applies_to(version)


def check_version(route: str, version: str) -> None:
    """Whether that vLLM has what the route goes through.

    Raises:
        SettingError: it has no custom class.
    """
    if route == "custom_class" and not has_custom_class(version):
        since = load_builtin_surface("vllm_drafter").get(_EXTENSION_POINT).versions
        raise SettingError(
            f'{ROUTE}=custom_class: expected vLLM {since}, which has method="custom_class", '
            f"found {version}. Install a later vLLM, or unset {ROUTE}: the route patch drafts for "
            'method="suffix" there.'
        )
