"""One patch: what it may change, what lies beneath it, and that taking it off restores exactly."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from drafter_compat.patch import (
    Patch,
    PatchConflict,
    PatchError,
    ShapeChanged,
    TargetName,
    body_hash,
    lazy,
)


class Base:
    inherited_value = "base"

    def inherited(self) -> str:
        return "base"


def target_class() -> type[Any]:
    """A new class for each test, so that no test sees what another left."""

    class Target(Base):
        value = 1
        hidden: int

        def __init__(self) -> None:
            self.made = True

        def method(self, x: int) -> int:
            return x

        @classmethod
        def create(cls) -> Any:
            return cls, "created"

        @staticmethod
        def helper(x: int) -> int:
            return x

        @property
        def size(self) -> int:
            return 1

    return Target


def test_every_kind_of_member_is_replaced_and_finds_its_original() -> None:
    Target = target_class()
    child = type("Child", (Target,), {})
    existing = Target()

    class P(Patch[Target]):
        value = 2

        def method(self, x):
            return P.original("method")(self, x) + 100

        @classmethod
        def create(cls):
            return (*P.original("create")(cls), "patched")

        @staticmethod
        def helper(x):
            return P.original("helper")(x) + 10

        @property
        def size(self):
            return P.original("size").fget(self) + 1

    P.apply()
    assert existing.method(1) == 101
    assert child.create() == (child, "created", "patched")
    assert Target.helper(1) == 11
    assert existing.size == 2
    assert (Target.value, P.original("value")) == (2, 1)
    P.revert()


def test_a_special_method_is_a_member_like_any_other() -> None:
    Target = target_class()

    class P(Patch[Target]):
        def __init__(self):
            P.original("__init__")(self)
            self.patched = True

        def __len__(self):
            return 7

    with pytest.raises(PatchError, match=r"'__len__' of .* has no such attribute"):
        P.apply()

    class Q(Patch[Target], adds=("__len__",)):
        def __init__(self):
            Q.original("__init__")(self)
            self.patched = True

        def __len__(self):
            return 7

    Q.apply()
    made = Target()
    assert made.made
    assert made.patched
    assert len(made) == 7
    Q.revert()


def snapshot(cls: type) -> dict[str, Any]:
    return dict(vars(cls))


def test_taking_off_restores_the_class_exactly_inherited_attributes_included() -> None:
    Target = target_class()
    before = snapshot(Target)

    class P(Patch[Target], adds=("brand_new",)):
        value = 2
        inherited_value = "patched"

        def inherited(self):
            return P.original("inherited")(self) + "+"

        def brand_new(self):
            return 1

        @classmethod
        def create(cls):
            return None

    P.apply()
    assert Target().inherited() == "base+"
    assert Target().brand_new() == 1
    assert Base.inherited_value == "base"
    P.revert()
    assert snapshot(Target) == before
    assert "inherited" not in vars(Target)


def test_applying_twice_is_applying_once() -> None:
    Target = target_class()

    class P(Patch[Target]):
        def method(self, x):
            return P.original("method")(self, x) + 1

    P.apply()
    P.apply()
    assert Target().method(1) == 2
    P.revert()
    assert Target().method(1) == 1


def test_a_patch_can_be_applied_again_after_it_was_taken_off() -> None:
    Target = target_class()

    class P(Patch[Target]):
        value = 2

    for _ in range(3):
        P.apply()
        assert Target.value == 2
        P.revert()
        assert Target.value == 1


def three_layers(Target: type[Any]) -> list[Any]:
    class A(Patch[Target]):
        def method(self, x):
            return [*A.original("method")(self, x), "A"]

    class B(Patch[Target], after=("A",)):
        def method(self, x):
            return [*B.original("method")(self, x), "B"]

    class C(Patch[Target], after=("A", "B")):
        def method(self, x):
            return [*C.original("method")(self, x), "C"]

    Target.method = lambda self, x: [x]
    return [A, B, C]


@pytest.mark.parametrize("apply_order", ["ABC", "CBA", "BCA", "CAB"])
@pytest.mark.parametrize("revert_order", ["ABC", "CBA", "BAC"])
def test_layers_lie_in_declared_order_whatever_the_order_of_applying_and_reverting(
    apply_order: str, revert_order: str
) -> None:
    Target = target_class()
    patches = dict(zip("ABC", three_layers(Target), strict=True))
    base = vars(Target)["method"]
    for name in apply_order:
        patches[name].apply()
    assert Target().method(0) == [0, "A", "B", "C"]
    left = ["A", "B", "C"]
    for name in revert_order:
        patches[name].revert()
        left.remove(name)
        assert Target().method(0) == [0, *left]
    assert vars(Target)["method"] is base


def test_two_patches_of_one_attribute_refuse_and_name_both_owners() -> None:
    Target = target_class()

    class First(Patch[Target]):
        value = 2

    class Second(Patch[Target]):
        value = 3

    First.apply()
    with pytest.raises(PatchConflict) as caught:
        Second.apply()
    message = str(caught.value)
    assert f"First of {__name__}" in message
    assert f"Second of {__name__}" in message
    assert "after=('First',)" in message
    assert Target.value == 2
    First.revert()


def test_a_conflict_names_the_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    Target = target_class()
    monkeypatch.setattr(
        importlib.metadata,
        "packages_distributions",
        lambda: {__name__.partition(".")[0]: ["my-dist"]},
    )

    class First(Patch[Target]):
        value = 2

    class Second(Patch[Target]):
        value = 3

    First.apply()
    with pytest.raises(PatchConflict, match=r"distribution my-dist.*distribution my-dist"):
        Second.apply()
    First.revert()


@pytest.mark.parametrize("base_first", [True, False])
def test_a_patch_of_an_inherited_attribute_conflicts_with_one_of_the_base(base_first: bool) -> None:
    Target = target_class()
    Child = type("Child", (Target,), {})

    class OnBase(Patch[Target]):
        def method(self, x):
            return "base"

    class OnChild(Patch[Child]):
        def method(self, x):
            return "child"

    first, second = (OnBase, OnChild) if base_first else (OnChild, OnBase)
    first.apply()
    with pytest.raises(PatchConflict):
        second.apply()
    first.revert()


def test_a_subclass_with_a_method_of_its_own_does_not_conflict() -> None:
    Target = target_class()
    Child = type("Child", (Target,), {"method": lambda self, x: "own"})

    class OnBase(Patch[Target]):
        def method(self, x):
            return "base"

    class OnChild(Patch[Child]):
        def method(self, x):
            return "child"

    OnBase.apply()
    OnChild.apply()
    assert (Target().method(1), Child().method(1)) == ("base", "child")
    OnChild.revert()
    OnBase.revert()


def test_different_attributes_of_one_target_do_not_conflict() -> None:
    Target = target_class()

    class First(Patch[Target]):
        value = 2

    class Second(Patch[Target]):
        def method(self, x):
            return 0

    First.apply()
    Second.apply()
    First.revert()
    Second.revert()


def test_a_patch_that_fails_half_way_leaves_nothing_behind() -> None:
    Target = target_class()
    before = snapshot(Target)

    class Broken:
        def __set_name__(self, owner: type, name: str) -> None:
            if owner is Target:
                raise ValueError("does not like it here")

    class P(Patch[Target]):
        value = 2
        helper = Broken()

    with pytest.raises(ValueError, match="does not like it here"):
        P.apply()
    assert snapshot(Target) == before


def test_a_missing_attribute_names_the_nearest_and_how_to_add_one() -> None:
    Target = target_class()

    class P(Patch[Target]):
        def metod(self, x):
            return 0

    with pytest.raises(PatchError, match=r"did you mean 'method'\?\); correct .* in 'adds'"):
        P.apply()


def test_adding_what_the_target_has_by_now_is_an_error() -> None:
    Target = target_class()

    class P(Patch[Target], adds=("method",)):
        def method(self, x):
            return 0

    with pytest.raises(PatchError, match="which has it already"):
        P.apply()


def test_something_else_that_changed_the_name_since_is_not_clobbered() -> None:
    Target = target_class()

    class P(Patch[Target]):
        value = 2

    P.apply()
    Target.value = 99
    with pytest.raises(PatchError, match=r"Target\.value was changed by something else"):
        P.revert()
    assert Target.value == 99


def test_a_cached_property_learns_its_name() -> None:
    Target = target_class()

    class P(Patch[Target]):
        @functools.cached_property
        def size(self):
            return 5

    P.apply()
    assert Target().size == 5
    P.revert()


def test_the_original_is_there_before_applying_and_named_when_missing() -> None:
    Target = target_class()

    class P(Patch[Target], adds=("extra",)):
        extra = 1
        value = 2

    with pytest.raises(AttributeError, match="had no 'extra' before P"):
        P.original("extra")


# --- modules --------------------------------------------------------------------------------


@pytest.fixture
def mods(importable: Callable[..., None]) -> Callable[[str], ModuleType]:
    importable(
        "mods",
        mod_a="""
            def answer():
                return 1
            def ask():
                return answer()
            LIMIT = 10
            class Thing:
                pass
            """,
        mod_b="""
            from mods.mod_a import answer, Thing as Renamed
            def ask():
                return answer()
            """,
        late="""
            from mods.mod_a import answer
            def ask():
                return answer()
            """,
    )
    return importlib.import_module


def patch_answer(**declared: Any) -> type[Patch]:
    class Answer(Patch, target="mods.mod_a", **declared):
        @staticmethod
        def answer():
            return Answer.original("answer")() + 41

    return Answer


def test_rebinding_the_defining_module_alone_would_miss_who_from_imported_it(mods) -> None:
    """The lesson behind the rebinding: mod_b holds its own reference."""
    mod_a, mod_b = mods("mods.mod_a"), mods("mods.mod_b")
    Answer = patch_answer(rebind=False)
    Answer.apply()
    assert (mod_a.ask(), mod_b.ask()) == (42, 1)
    Answer.revert()


def test_a_replaced_function_is_rebound_wherever_it_was_from_imported(mods) -> None:
    mod_a, mod_b = mods("mods.mod_a"), mods("mods.mod_b")
    Answer = patch_answer()
    report = Answer.apply()
    late = mods("mods.late")
    assert (mod_a.ask(), mod_b.ask(), late.ask()) == (42, 42, 42)
    assert report["Answer"].detail == "mods.mod_a.answer, mods.mod_b.answer"
    Answer.revert()
    assert (mod_a.ask(), mod_b.ask(), late.ask()) == (1, 1, 1)


def test_nothing_is_imported_by_a_patch_of_a_module(mods) -> None:
    Answer = patch_answer()
    report = Answer.apply()
    assert report["Answer"].state == "pending"
    assert "mods" not in sys.modules
    assert mods("mods.mod_b").ask() == 42
    Answer.revert()
    assert mods("mods.mod_b").ask() == 1


def test_a_class_is_rebound_under_its_other_name_too(mods) -> None:
    mod_b = mods("mods.mod_b")

    class Better:
        pass

    class Swap(Patch, target="mods.mod_a"):
        Thing = Better

    original = mod_b.Renamed
    Swap.apply()
    assert mod_b.Renamed is Better
    Swap.revert()
    assert mod_b.Renamed is original


def test_a_number_is_replaced_in_its_module_only(mods) -> None:
    mod_a, mod_b = mods("mods.mod_a"), mods("mods.mod_b")
    mod_b.LIMIT = mod_a.LIMIT

    class Raise(Patch, target="mods.mod_a"):
        LIMIT = 20

    Raise.apply()
    assert (mod_a.LIMIT, mod_b.LIMIT) == (20, 10)
    Raise.revert()
    assert mod_a.LIMIT == 10


@pytest.mark.parametrize("defining_first", [True, False])
def test_patches_of_one_name_through_two_modules_conflict(mods, defining_first: bool) -> None:
    mods("mods.mod_b")

    class InA(Patch, target="mods.mod_a"):
        @staticmethod
        def answer():
            return 2

    class InB(Patch, target="mods.mod_b"):
        @staticmethod
        def answer():
            return 3

    first, second = (InA, InB) if defining_first else (InB, InA)
    first.apply()
    with pytest.raises(PatchConflict):
        second.apply()
    first.revert()
    assert mods("mods.mod_b").ask() == 1


def test_a_conflict_is_found_where_the_name_was_from_imported_after_the_first_patch(mods) -> None:
    mods("mods.mod_a")
    Answer = patch_answer()
    Answer.apply()
    late = mods("mods.late")

    class InLate(Patch, target="mods.late"):
        @staticmethod
        def answer():
            return 3

    with pytest.raises(PatchConflict):
        InLate.apply()
    Answer.revert()
    assert late.ask() == 1


def test_a_class_named_by_a_string_is_patched_when_its_module_is_imported(mods) -> None:
    class Add(Patch, target="mods.mod_a:Thing", adds=("size",)):
        size = 3

    Add.apply()
    assert "mods" not in sys.modules
    assert mods("mods.mod_a").Thing.size == 3
    Add.revert()
    assert not hasattr(mods("mods.mod_a").Thing, "size")


def test_a_patch_of_a_module_can_be_written_like_one_of_a_class(mods) -> None:
    class Swap(Patch["mods.mod_a"]):
        LIMIT = 11

    Swap.apply()
    assert mods("mods.mod_a").LIMIT == 11
    Swap.revert()


def test_a_lazy_member_is_imported_with_its_target(mods, importable: Callable[..., None]) -> None:
    importable("plug", better="class Better: pass")

    class Swap(Patch, target="mods.mod_a"):
        Thing = lazy("plug.better:Better")

    Swap.apply()
    assert "plug" not in sys.modules
    assert mods("mods.mod_a").Thing.__module__ == "plug.better"
    Swap.revert()


def test_a_plugin_keeps_its_own_reference_to_what_it_replaces(mods, importable) -> None:
    importable(
        "plug",
        gate="""
            from drafter_compat.patch import Patch
            from mods.mod_a import answer
            class Gate(Patch, target="mods.mod_a"):
                @staticmethod
                def answer():
                    return 5
            """,
    )
    gate = mods("plug.gate")
    gate.Gate.apply()
    assert gate.answer() == 1
    assert mods("mods.mod_a").ask() == 5
    gate.Gate.revert()


# --- declaring ------------------------------------------------------------------------------


def declare(**declared: Any) -> type[Patch]:
    class P(Patch, **{"target": "mods.mod_a", **declared}):
        answer = 1

    return P


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"target": None}, "has no target"),
        ({"target": "mods.mod-a"}, "a patch's target is a class, a module"),
        ({"target": 3}, "a patch's target is a class, a module"),
        ({"version": ">=1"}, "unknown keyword 'version' (did you mean 'versions'?)"),
        ({"versions": "1.0"}, "'1.0' is no version specifier"),
        ({"when": "later"}, "when is one of registration, import, worker"),
        ({"requires": "other"}, "'requires' is a tuple, not the string 'other'"),
        (
            {"adds": ("anser",)},
            "adds names 'anser', which is no member of it (did you mean 'answer'?)",
        ),
        ({"expects": {"ask": "()"}}, "expects names 'ask', which is no member of it"),
        ({"expects": {"answer": "(self, x"}}, "expects of 'answer' is a signature such as"),
        ({"expects": {"answer": None}}, "expects of 'answer' is a signature such as"),
        ({"pins": (">=0.32",)}, "pins are exact versions such as '0.32.0', not '>=0.32'"),
        ({"on_change": "ignore"}, "on_change is 'refuse' or 'warn'"),
    ],
)
def test_a_wrong_declaration_is_refused_at_once(declared: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchError) as caught:
        declare(**declared)
    assert message in str(caught.value)


def test_an_empty_patch_is_refused() -> None:
    with pytest.raises(PatchError, match="changes nothing"):

        class P(Patch, target="mods"):
            pass


def test_a_member_may_not_have_a_name_that_patches_need() -> None:
    with pytest.raises(PatchError, match="a member cannot be called 'apply'"):

        class P(Patch, target="mods"):
            def apply(self):
                pass


def test_super_without_arguments_is_refused_because_it_would_look_above_the_patch() -> None:
    with pytest.raises(PatchError, match=r"super\(\) in 'method' would look above the patch"):

        class P(Patch, target="mods:Thing"):
            def method(self):
                return super().method()


def test_a_patch_is_neither_instantiated_nor_subclassed() -> None:
    P = declare()
    with pytest.raises(TypeError, match=r"call P\.apply\(\)"):
        P()
    with pytest.raises(PatchError, match="a patch is not subclassed"):

        class Q(P):
            answer = 2


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (Base, f"{__name__}:Base"),
        (inspect, "inspect"),
        ("a.b:C.D", "a.b:C.D"),
    ],
)
def test_a_target_is_named_the_same_way_however_it_is_given(target: object, text: str) -> None:
    assert str(TargetName.of(target)) == text


def test_a_target_that_its_module_does_not_have_is_named(mods) -> None:
    class P(Patch, target="mods.mod_a:Thng"):
        x = 1

    mods("mods.mod_a")
    with pytest.raises(PatchError, match=r"mods\.mod_a has no Thng \(did you mean 'Thing'\?\)"):
        P.apply()


# --- shapes ---------------------------------------------------------------------------------


def expecting(Target: type[Any], shape: str, **declared: Any) -> type[Patch]:
    class P(Patch[Target], expects={"method": shape}, **declared):
        def method(self, x):
            return 0

    return P


@pytest.mark.parametrize("shape", ["(self, x)", "(self, x: int) -> int", "( self,x )"])
def test_the_declared_signature_is_compared_without_annotations(shape: str) -> None:
    P = expecting(target_class(), shape)
    P.apply()
    P.revert()


REGISTRY = object()


def test_a_default_may_be_declared_as_the_source_has_it() -> None:
    class Target:
        def method(self, registry=REGISTRY, limit=2 * 8):
            return registry, limit

    P = expecting(Target, "(self, registry=REGISTRY, limit=2 * 8)")
    P.apply()
    P.revert()
    with pytest.raises(ShapeChanged, match="written against"):
        expecting(Target, "(self, registry=OTHER, limit=2 * 8)").apply()


def test_the_shape_of_a_property_is_that_of_its_getter() -> None:
    class Target:
        @property
        def method(self):
            return 1

    class P(Patch[Target], expects={"method": body_hash(Target.method.fget)}):
        @property
        def method(self):
            return 2

    P.apply()
    assert Target().method == 2
    P.revert()


def test_the_shape_of_a_cached_property_is_that_of_its_function() -> None:
    class Target:
        @functools.cached_property
        def method(self):
            return 1

    with pytest.raises(ShapeChanged, match=r"but the running one is \(self\)"):
        expecting(Target, "(self, x)").apply()
    P = expecting(Target, "(self)")
    P.apply()
    P.revert()


@pytest.mark.parametrize("shape", ["(self, y)", "(self, x, z)", "(self, x=1)", "(self, *, x)"])
def test_a_changed_signature_is_refused_and_says_both(shape: str) -> None:
    Target = target_class()
    with pytest.raises(ShapeChanged, match=r"but the running one is \(self, x\)"):
        expecting(Target, shape).apply()
    assert Target().method(1) == 1


def test_a_changed_signature_can_be_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    P = expecting(target_class(), "(self, y)", on_change="warn")
    P.apply()
    assert "written against (self, y), but the running one is (self, x)" in caplog.text
    P.revert()


def test_a_changed_body_is_refused() -> None:
    Target = target_class()
    P = expecting(Target, body_hash(Target.method))
    P.apply()
    P.revert()
    Other = target_class()
    Other.method = lambda self, x: x
    with pytest.raises((ShapeChanged, PatchError)):
        expecting(Other, body_hash(Target.method)).apply()


def test_a_body_hash_does_not_see_layout_comments_docstrings_or_annotations() -> None:
    def one(a: int, b: int = 2) -> int:
        """Add."""
        total: int = a + b  # the sum
        return total

    plain = one

    def one(a, b=2):
        total = a + b
        return total

    reformatted = one

    def one(a, b=2):
        total = a - b
        return total

    assert body_hash(plain) == body_hash(reformatted)
    assert body_hash(plain) != body_hash(one)


def documented(values, *, scale=1.5, **rest):
    """Every kind of statement that Pythons have parsed differently."""
    match values:
        case [first, *_] if first:
            pass
    with values.a() as a, values.b() as b:
        text = f"{a!r:>{scale}} {'nested'} \\n"
    return [lambda x, /, y=1: (x, y, *values, {**rest}) for _ in values if not -1], b, text


def test_a_body_hash_is_the_same_on_every_python() -> None:
    assert body_hash(documented) == "sha256:ebb90c84cbdfa5c66299dad656ab2ef6"


def test_a_stacked_patch_is_compared_with_the_package_not_with_the_patch_beneath_it() -> None:
    Target = target_class()

    class First(Patch[Target], expects={"method": "(self, x)"}):
        def method(self, *args):
            return First.original("method")(self, *args)

    class Second(Patch[Target], expects={"method": "(self, x)"}, after=("First",)):
        def method(self, *args, **kwargs):
            return Second.original("method")(self, *args, **kwargs)

    First.apply()
    Second.apply()
    assert Target().method(1) == 1
    Second.revert()
    First.revert()
