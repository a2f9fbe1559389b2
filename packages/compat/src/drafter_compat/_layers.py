"""What this library has laid over names of classes and modules, and what was there before.

One table for the whole process: every patch of every registry goes through it, so that two plugins
see each other, `original` finds the layer beneath, and removing any layer, in any order, leaves
exactly the others. Knows neither versions nor reports.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

__all__ = [
    "MISSING",
    "Layer",
    "Stack",
    "add_layer",
    "before",
    "beneath",
    "beneath_all",
    "remove_layer",
    "stacks",
    "unpatched",
]

Owner = type | ModuleType


class _Missing:
    def __repr__(self) -> str:
        return "<nothing>"


MISSING = _Missing()
"""No value: the name was not there."""


@dataclass(eq=False)
class Layer:
    """One value laid over a name, and who did it."""

    patch: Any
    """The patch that the layer belongs to; only its identity matters here."""
    value: Any


@dataclass(eq=False)
class Stack:
    """All layers over one name of one class or module, lowest first."""

    owner: Owner
    name: str
    base: Any
    """What the owner's own dict held before the first layer; MISSING if absent or inherited."""
    layers: list[Layer] = field(default_factory=list)

    @property
    def top(self) -> Any:
        """The value that the name should have now."""
        return self.layers[-1].value if self.layers else self.base


_stacks: dict[tuple[int, str], Stack] = {}
_lock = threading.RLock()


def add_layer(owner: Owner, name: str, layer: Layer, *, below: Sequence[Any] = ()) -> None:
    """Put a layer on top, or right below the layers of the patches in `below`.

    The owner keeps its identity; existing instances see the change at once.
    """
    with _lock:
        key = (id(owner), name)
        stack = _stacks.get(key)
        if stack is None:
            # The stack holds the owner, so its id cannot be used again while the stack lives.
            stack = Stack(owner, name, vars(owner).get(name, MISSING))
        lowest = [place for place, other in enumerate(stack.layers) if other.patch in below]
        if lowest:
            stack.layers.insert(lowest[0], layer)
            return
        setattr(owner, name, layer.value)
        stack.layers.append(layer)
        _stacks[key] = stack


def remove_layer(owner: Owner, name: str, layer: Layer) -> Any:
    """Take a layer away, wherever it lies. Returns what the name held if that was not ours, else
    MISSING.

    A name that something else has changed since is left as it is.
    """
    with _lock:
        stack = _stacks[(id(owner), name)]
        was_top = stack.layers[-1] is layer
        stack.layers.remove(layer)
        if not stack.layers:
            del _stacks[(id(owner), name)]
        if not was_top:
            return MISSING
        current = vars(owner).get(name, MISSING)
        if current is not layer.value:
            return current
        _write(owner, name, stack.top)
        return MISSING


def _write(owner: Owner, name: str, value: Any) -> None:
    if value is not MISSING:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


def stacks(name: str | None = None) -> list[Stack]:
    """The stacks that hold at least one layer now, of one name or of all."""
    with _lock:
        return [stack for stack in _stacks.values() if name is None or stack.name == name]


def before(owner: Owner, name: str) -> Any:
    """What the owner's own dict held before the first layer; MISSING if the name was not there."""
    stack = _stacks.get((id(owner), name))
    return vars(owner).get(name, MISSING) if stack is None else stack.base


def unpatched(value: Any) -> Any:
    """What was there before any layer, if `value` is what a layer put in place; else `value`."""
    for stack in stacks():
        if stack.base is not MISSING and any(layer.value is value for layer in stack.layers):
            return stack.base
    return value


def beneath(owner: Owner, name: str, patch: Any) -> Any:
    """The raw value (descriptors unbound) under the layer of `patch`, inherited ones included, or
    MISSING."""
    stack = _stacks.get((id(owner), name))
    value = before(owner, name)
    for layer in stack.layers if stack is not None else ():
        if layer.patch is patch:
            break
        value = layer.value
    return _inherited(owner, name) if value is MISSING else value


def beneath_all(owner: Owner, name: str) -> Any:
    """As `beneath`, under every layer, those of the classes it is inherited from included: what the
    patched package itself has."""
    value = before(owner, name)
    if value is MISSING and isinstance(owner, type):
        for base in owner.__mro__[1:]:
            value = before(base, name)
            if value is not MISSING:
                break
    return value


def _inherited(owner: Owner, name: str) -> Any:
    if isinstance(owner, type):
        for base in owner.__mro__[1:]:
            if name in vars(base):
                return vars(base)[name]
    return MISSING
