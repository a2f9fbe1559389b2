"""Any sequence of putting layers down and taking them off leaves what the remaining ones give."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from drafter_compat._layers import MISSING, Layer, add_layer, before, beneath, remove_layer, stacks

PATCHES = ("a", "b", "c", "d")


@given(st.lists(st.sampled_from(PATCHES), max_size=30), st.booleans())
def test_layers_in_a_declared_order_are_what_a_list_of_them_would_be(
    toggles: list[str], has_own: bool
) -> None:
    class Base:
        x: Any = "inherited"

    class Target(Base):
        if has_own:
            x = "own"

    bottom = "own" if has_own else "inherited"
    down: dict[str, Layer] = {}
    for patch in toggles:
        if patch in down:
            assert remove_layer(Target, "x", down.pop(patch)) is MISSING
        else:
            down[patch] = Layer(patch, patch)
            above = [other for other in PATCHES if other > patch]
            add_layer(Target, "x", down[patch], below=above)
        order = sorted(down)
        assert Target.x == (order[-1] if order else bottom)
        for place, name in enumerate(order):
            assert beneath(Target, "x", name) == (order[place - 1] if place else bottom)
        assert before(Target, "x") == ("own" if has_own else MISSING)
    for layer in down.values():
        remove_layer(Target, "x", layer)
    assert ("x" in vars(Target)) is has_own
    assert Target.x == bottom
    assert not [stack for stack in stacks("x") if stack.owner is Target]
