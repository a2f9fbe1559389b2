"""What follows from patches: the surface manifest, and whether a release has made one needless."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafter_compat._source import SourceTree
from drafter_compat.check import check_surface
from drafter_compat.export import surface_of
from drafter_compat.needless import why_needless
from drafter_compat.patch import Patch, PatchError
from drafter_compat.registry import Registry
from drafter_compat.surface import (
    Anchor,
    Attributes,
    ClassShape,
    Constant,
    ConstructorCall,
    FromImport,
    FunctionShape,
    MethodCall,
    ReplacedClass,
    Surface,
    dump_surface,
    parse_surface,
)

LIB = {
    "core": """
        LIMIT = 1
        def gate(strict=False):
            return strict
        class Drafter:
            depth = 4
            def __init__(self, config): ...
            @classmethod
            async def propose(cls, batch, *, k=1): ...
        """,
    "runner": """
        from lib.core import Drafter, gate
        class Runner:
            def __init__(self, config):
                self.drafter = Drafter(config, eager=True)
            def step(self, batch):
                if gate():
                    assert isinstance(self.drafter, Drafter)
                    return self.drafter.propose(batch, k=3)
            def late(self):
                from lib.core import gate
                return gate()
        """,
}


@pytest.fixture
def root(write_package: Callable[..., Path]) -> Path:
    return write_package("lib", **LIB)


class Gate(Patch, target="lib.core", name="gate", why="open it", versions=">=1"):
    LIMIT = 2

    @staticmethod
    def gate(strict: bool = True) -> bool:
        return not strict


class Swap(Patch, target="lib.core", name="swap"):
    class Drafter:
        def __init__(self, config): ...

        def propose(self, batch, **kwargs): ...

        kind = "ours"


class Tune(
    Patch,
    target="lib.core:Drafter",
    name="tune",
    adds=("extra",),
    expects={"propose": "(cls, batch, *, k=1)"},
    relies_on=(Anchor(id="a", why="w", module="lib.core", text="LIMIT = 1"),),
):
    depth = 8
    extra = 1

    @classmethod
    async def propose(cls, batch, *, k=2): ...


def surface(root: Path, *patches: type[Patch], **options: Any) -> Surface:
    registry = Registry("my-plugin", patches, package="lib", **options)
    return surface_of(registry, version="1.0", root=root)


def kinds(surface: Surface) -> list[type]:
    return [type(symbol) for symbol in surface]


def test_the_surface_of_patches_holds_where_it_was_exported_and_can_be_written(root: Path) -> None:
    exported = surface(root, Gate, Swap, Tune, versions=">=1,<2")
    assert exported.versions == ">=1,<2"
    assert parse_surface(dump_surface(exported)) == exported
    report = check_surface(exported, version="1.0", root=root)
    assert report.ok, report.explain()


def test_a_replaced_function_brings_its_shape_and_who_from_imports_and_reads_it(root: Path) -> None:
    constant, function, imported = surface(root, Gate).symbols
    assert isinstance(constant, Constant)
    assert isinstance(function, FunctionShape)
    assert (function.signature, function.replacement) == ("(strict=False)", "(strict=True)")
    assert function.replaced_by == f"{__name__}:Gate.gate"
    assert function.rebound
    assert function.versions == ">=1"
    assert isinstance(imported, FromImport)
    assert (imported.module, imported.read_in) == ("lib.runner", ("Runner.step",))


def test_a_replaced_class_brings_how_it_is_constructed_tested_and_called(root: Path) -> None:
    replaced, built, called = surface(root, Swap).symbols
    assert isinstance(replaced, ReplacedClass)
    assert replaced.isinstance_in == ("Runner.step",)
    assert dict(replaced.provides) == {
        "__init__": "(self, config)",
        "propose": "(self, batch, **kwargs)",
        "kind": "",
    }
    assert isinstance(built, ConstructorCall)
    assert (built.function, built.args, built.keywords) == (
        "Runner.__init__",
        ("config",),
        (("eager", "True"),),
    )
    assert isinstance(called, MethodCall)
    assert (called.method, called.args, called.keywords) == ("propose", ("batch",), (("k", "3"),))


def test_members_of_a_class_bring_their_shapes_and_what_the_patch_relies_on_besides(
    root: Path,
) -> None:
    exported = surface(root, Tune)
    assert kinds(exported) == [Attributes, FunctionShape, Anchor]
    method = exported.symbols[1]
    assert isinstance(method, FunctionShape)
    assert (method.name, method.is_async, method.decorators) == (
        "Drafter.propose",
        True,
        ("classmethod",),
    )


def test_what_a_patch_relies_on_is_relied_on_where_the_patch_is_applied(root: Path) -> None:
    own = Anchor(id="own", why="w", module="lib.core", text="LIMIT = 1", versions=">=1.2")
    rest = Anchor(id="rest", why="w", module="lib.core", text="LIMIT = 1")

    class Tuned(Patch, target="lib.core:Drafter", versions=">=1.1", relies_on=(own, rest)):
        depth = 8

    versions = {symbol.id: symbol.versions for symbol in surface(root, Tuned)}
    assert versions == {"Tuned:depth": ">=1.1", "own": ">=1.2", "rest": ">=1.1"}


def test_a_patch_that_only_adds_relies_on_its_class(root: Path) -> None:
    class Only(Patch, target="lib.core:Drafter", adds=("x",)):
        x = 1

    assert kinds(surface(root, Only)) == [ClassShape]


def test_a_worker_patch_relies_on_the_start_of_workers(root: Path) -> None:
    class Late(Patch, target="lib.core", when="worker"):
        LIMIT = 3

    names = [getattr(symbol, "name", "") for symbol in surface(root, Late)]
    assert "WorkerWrapperBase.init_device" in names


def test_without_claimed_versions_the_surface_claims_what_it_was_read_from(root: Path) -> None:
    registry = Registry("my-plugin", [Gate], package="lib")
    assert surface_of(registry, version="1.4+cpu", root=root).versions == "==1.4"


def test_a_changed_caller_is_found_with_the_exported_surface(root: Path) -> None:
    exported = surface(root, Swap)
    runner = root / "runner.py"
    runner.write_text(runner.read_text().replace("propose(batch, k=3)", "propose(3, batch)"))
    wrong = check_surface(exported, version="1.0", root=root).mismatches
    assert [result.found for result in wrong] == ["Drafter.propose(3, batch)"]


def test_the_signature_that_a_patch_expects_is_what_is_checked(root: Path) -> None:
    core = root / "core.py"
    core.write_text(core.read_text().replace("k=1", "k=5"))
    wrong = check_surface(surface(root, Tune), version="1.0", root=root).mismatches
    assert [result.expected for result in wrong] == [
        "@classmethod async lib.core.Drafter.propose(cls, batch, *, k=1)"
    ]


@pytest.mark.parametrize("target", ["lib.gone", "lib.core:Gone"])
def test_a_target_that_is_not_there_is_an_error(root: Path, target: str) -> None:
    class Bad(Patch, target=target):
        x = 1

    with pytest.raises(PatchError, match=r"Gone|gone"):
        surface(root, Bad)


# --- needless -------------------------------------------------------------------------------


def needless(root: Path, version: str = "1.0", **declared: Any) -> str | None:
    class P(Patch, **{"target": "lib.core", **declared}):
        @staticmethod
        def gate(strict=True):
            return not strict

    return why_needless(P, version=version, tree=SourceTree("lib", root))


@pytest.mark.parametrize(
    ("remove_when", "version", "expected"),
    [
        (">=2", "1.9", None),
        (">=2", "2.0+cpu", "2.0+cpu is >=2"),
        ("has lib.core:gate", "1.0", "there is lib.core:gate now"),
        ("has lib.core:Drafter.depth", "1.0", "there is lib.core:Drafter.depth now"),
        ("has lib.core:LIMIT", "1.0", "there is lib.core:LIMIT now"),
        ("has lib.core:GONE", "1.0", None),
        ("has lib.gone:x", "1.0", None),
        ("vLLM does it better", "1.0", None),
        ("", "1.0", None),
    ],
)
def test_remove_when_is_a_version_or_a_name_or_words(
    root: Path, remove_when: str, version: str, expected: str | None
) -> None:
    assert needless(root, version, remove_when=remove_when) == expected


def test_a_patch_that_the_release_has_taken_over_is_needless(root: Path) -> None:
    core = root / "core.py"
    old = "def gate(strict=False):\n    return strict"
    text = core.read_text()
    assert old in text
    core.write_text(
        text.replace(old, "def gate(strict: bool = True):\n    # at last\n    return not strict")
    )
    assert needless(root) == "the release does the same itself"
