"""Names are followed over imports, aliases, star imports and base classes, as far as source
tells.
"""

from __future__ import annotations

import pytest
from drift_small_tree import release, resolver

from vllm_drift.infer_release import Release
from vllm_drift.resolve import Resolver

DEFINED = "def f(): pass\nclass C:\n    def m(self): pass\n"


@pytest.mark.parametrize(
    "text",
    [
        "from vllm.b import f\n",
        "from vllm.b import g as f\n",
        "from .b import f\n",
        "from vllm.b import *\n",
        "import vllm.b\nf = vllm.b.f\n",
        "import vllm.b as b\nf = b.f\n",
        "from vllm import b\nf = b.f\n",
        "try:\n    from vllm.b import f\nexcept ImportError:\n    f = None\n",
        "f = None\nif x:\n    from vllm.b import f\n",
        "from vllm.c import f\n",
    ],
)
def test_a_name_is_followed_to_its_definition(text: str) -> None:
    names = resolver(a=text, b="def f(): pass\ng = f\n", c="from vllm.b import f\n")
    found = names.resolve("vllm.a", "f")
    assert (found.status, found.target) == ("found", "vllm.b:f")
    assert found.hops


def test_a_package_hands_on_what_its_modules_define() -> None:
    names = resolver(
        config__init="from .cache import *\n", config__cache="__all__ = ['C']\nclass C: pass\n"
    )
    assert names.resolve("vllm.config", "C").target == "vllm.config.cache:C"
    assert names.resolve("vllm", "config.C").target == "vllm.config.cache:C"


def test_a_star_import_brings_only_what_is_exported() -> None:
    names = resolver(
        a="from vllm.b import *\n", b="__all__ = ['f']\ndef f(): pass\ndef g(): pass\n"
    )
    assert names.resolve("vllm.a", "f").found
    assert names.resolve("vllm.a", "g").status == "missing"


def test_a_name_for_type_checkers_only_is_not_there_at_run_time() -> None:
    names = resolver(a="if TYPE_CHECKING:\n    from vllm.b import C\n", b=DEFINED)
    assert names.resolve("vllm.a", "C").status == "missing"
    assert names.resolve("vllm.a", "C", typing=True).target == "vllm.b:C"


def test_a_table_for_a_module_level_getattr_is_followed() -> None:
    text = "NAMES = {'C': '.b:C'}\ndef __getattr__(name):\n    return load(NAMES[name])\n"
    names = resolver(init=text, b=DEFINED)
    assert names.resolve("vllm", "C").target == "vllm.b:C"


def test_a_module_level_getattr_without_a_table_cannot_be_told() -> None:
    names = resolver(a="def __getattr__(name):\n    return compute(name)\n")
    found = names.resolve("vllm.a", "C")
    assert found.status == "unknown"
    assert "__getattr__" in found.reason


def test_a_star_import_from_outside_cannot_be_told() -> None:
    names = resolver(a="from torch import *\n")
    assert names.resolve("vllm.a", "Tensor").status == "unknown"


def test_a_name_from_another_package_is_outside() -> None:
    names = resolver(a="from torch import Tensor\n")
    assert names.resolve("vllm.a", "Tensor").status == "outside"


def test_imports_in_a_circle_end() -> None:
    names = resolver(a="from vllm.b import x\n", b="from vllm.a import x\n")
    assert names.resolve("vllm.a", "x").status == "unknown"


def test_a_module_that_cannot_be_parsed_cannot_be_told() -> None:
    names = resolver(a="x = (\ndef f(: pass\n")
    assert names.resolve("vllm.a", "x").status == "unknown"


def test_a_method_is_found_in_a_base_class_of_another_module() -> None:
    names = resolver(a="from vllm.b import C\nclass D(C): pass\n", b=DEFINED)
    assert names.resolve("vllm.a", "D.m").target == "vllm.b:C.m"


def test_a_base_outside_the_tree_makes_a_missing_method_untellable() -> None:
    names = resolver(a="import torch\nclass D(torch.nn.Module): pass\nclass E(ABC): pass\n")
    assert names.resolve("vllm.a", "D.forward").status == "unknown"
    assert names.resolve("vllm.a", "E.forward").status == "missing"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("method", "method"),
        ("prop", "property"),
        ("field", "field"),
        ("own", "self"),
        ("inherited", "self"),
        ("nothing", None),
    ],
)
def test_attributes_of_a_class_are_found_wherever_they_come_from(
    name: str, kind: str | None
) -> None:
    names = resolver(
        a="""
        from vllm.b import Base
        class C(Base):
            field: int = 0
            @property
            def prop(self): return 1
            def method(self): self.own = 1
        """,
        b="""
        class Base:
            def __init__(this):
                this.inherited: int = 2
        """,
    )
    found = names.member("vllm.a", "C", name)
    assert (found.kind if found else None) == kind


def test_classes_that_inherit_in_a_circle_end() -> None:
    names = resolver(a="class A(B): pass\nclass B(A): pass\n")
    assert list(names.mro("vllm.a", "A")) == [("vllm.a", "A"), ("vllm.a", "B")]


TWO_READERS = {
    "init": """
        import importlib
        from vllm.config import *
        ATTRS = {"LLM": ".entry:LLM"}
        def __getattr__(name):
            if name in ATTRS:
                module, attribute = ATTRS[name].split(":")
                return getattr(importlib.import_module(module, __package__), attribute)
            raise AttributeError(name)
        """,
    "config": "class Config:\n    def check(self): ...\nclass Special(Config): ...\nLIMIT = 3\n",
    "entry": "from .config import Special as LLM\nalias = LLM\n",
    "pkg__init": "from .deep import work\n",
    "pkg__deep": "def work(): ...\n",
}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm", "Config"),
        ("vllm", "LIMIT"),
        ("vllm", "LLM"),
        ("vllm", "pkg.work"),
        ("vllm.entry", "alias"),
        ("vllm.entry", "LLM.check"),
        ("vllm.pkg", "work"),
        ("vllm.pkg", "nothing"),
        ("vllm.config", "Special.check"),
    ],
)
def test_the_resolver_and_what_infer_reads_a_release_with_agree(module: str, name: str) -> None:
    tree = release(**TWO_READERS)
    found, also = Resolver(tree).resolve(module, name), Release(tree).find(module, name)

    kinds = {"assignment": "constant"}
    here = (found.module, found.qualname, kinds.get(found.kind, found.kind))
    there = None if also is None else (also.module, also.name, also.kind)
    assert (here if found.found else None) == there
