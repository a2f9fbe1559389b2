"""One kind of change at a time, between two made-up releases, for a plugin that uses the thing.

Each case is what the plugin does, the module `vllm.m` before and after, and the verdicts that are
drift; an empty list where the plugin does not feel the change.
"""

from __future__ import annotations

import textwrap

import pytest
from test_check import check

from vllm_drift.findings import Verdict

CALLS = "from vllm.m import f\ndef g():\n    return f({})\n"
MAKES = "from vllm.m import C\ndef g():\n    return C({})\n"
READS = "from vllm.m import C\ndef g(c: C):\n    return c.{}\n"
IMPORTS = "from vllm.m import X\ndef g():\n    return X()\n"
PATCHES = "import vllm.m\ndef mine(a):\n    return 0\nvllm.m.f = mine\n"
OVERRIDES = "from vllm.m import B\nclass D(B):\n    def step(self, a):\n        return a\n"
PATCHES_METHOD = "from vllm.m import B\ndef mine(self, a):\n    return a\nB.step = mine\n"
DATA = "from dataclasses import InitVar, dataclass, field\n@dataclass\nclass C:\n"
PYDANTIC = "from pydantic import BaseModel, Field\nclass C(BaseModel):\n    a: int\n"
BASE = "import functools\nclass B:\n    def step(self, a, k=None): ...\n"
RUNNER = (
    BASE
    + "class R:\n    def __init__(self):\n        self.b = B()\n    def run(self):\n        {}\n"
)

KINDS: dict[str, tuple[str, str, str, list[str]]] = {
    # parameters, and a call of the plugin
    "keyword-only became positional": (
        CALLS.format("a=1"),
        "def f(*, a): ...",
        "def f(a): ...",
        [],
    ),
    "positional became keyword-only": (
        CALLS.format("1"),
        "def f(a): ...",
        "def f(*, a): ...",
        ["changed-shape"],
    ),
    "positional-only, passed by keyword": (
        CALLS.format("a=1"),
        "def f(a): ...",
        "def f(a, /): ...",
        ["changed-shape"],
    ),
    "positional-only, passed by position": (
        CALLS.format("1"),
        "def f(a): ...",
        "def f(a, /): ...",
        [],
    ),
    "*args takes what was for another": (
        CALLS.format("1, 2"),
        "def f(a, b): ...",
        "def f(*a, b): ...",
        ["changed-shape"],
    ),
    "a parameter in between": (
        CALLS.format("1, 2"),
        "def f(a, b=1): ...",
        "def f(a, x=0, b=1): ...",
        ["changed-shape"],
    ),
    "partial with a keyword that is gone": (
        "import functools\nfrom vllm.m import f\ng = functools.partial(f, b=1)\n",
        "def f(a, b=0): ...",
        "def f(a): ...",
        ["changed-shape"],
    ),
    "partial without what comes later": (
        "import functools\nfrom vllm.m import f\ng = functools.partial(f, b=1)\n",
        "def f(a, b=0): ...",
        "def f(a, b): ...",
        [],
    ),
    "called under another name": (
        "from vllm.m import f\nh = f\ndef g():\n    return h(1, b=2)\n",
        "def f(a, b=0): ...",
        "def f(a): ...",
        ["changed-shape"],
    ),
    "called through an attribute of self": (
        "from vllm.m import C\nclass P:\n    def __init__(self):\n        self.c = C()\n"
        "    def h(self):\n        return self.c.go(1)\n",
        "class C:\n    def go(self, a): ...",
        "class C:\n    def go(self): ...",
        ["changed-shape"],
    ),
    # what a call gives
    "function became a context manager": (
        CALLS.format("1"),
        "def f(a): ...",
        "import contextlib\n@contextlib.contextmanager\ndef f(a): yield a",
        ["changed-shape"],
    ),
    "function became a generator": (
        CALLS.format("1"),
        "def f(a): return [a]",
        "def f(a): yield a",
        ["changed-shape"],
    ),
    "coroutine became an async generator": (
        "from vllm.m import f\nasync def g():\n    return await f(1)\n",
        "async def f(a): return a",
        "async def f(a): yield a",
        ["changed-shape"],
    ),
    "a generator inside is none itself": (
        CALLS.format("1"),
        "def f(a): return [a]",
        "def f(a):\n    def inner(): yield a\n    return list(inner())",
        [],
    ),
    "a cache around it": (
        CALLS.format("1"),
        "def f(a): ...",
        "import functools\n@functools.lru_cache\ndef f(a): ...",
        [],
    ),
    "another overload": (
        CALLS.format("1"),
        "from typing import overload\n@overload\ndef f(a: int) -> int: ...\n"
        "@overload\ndef f(a: str) -> str: ...\ndef f(a): return a",
        "from typing import overload\n@overload\ndef f(a: int) -> int: ...\n"
        "@overload\ndef f(a: bytes) -> str: ...\ndef f(a): return a",
        [],
    ),
    "wrapped and assigned, the same signature": (
        CALLS.format("1"),
        "def f(a): return a",
        "def _f(a): return a\nf = _f\n",
        [],
    ),
    "wrapped and assigned, another signature": (
        CALLS.format("1"),
        "def f(a): return a",
        "def _f(a, b): return a\nf = _f\n",
        ["changed-shape"],
    ),
    "function became a constant": (
        CALLS.format("1"),
        "def f(a): return a",
        "f = 3\n",
        ["changed-shape"],
    ),
    # constructed classes
    "dataclass fields reordered, by position": (
        MAKES.format("1, 2"),
        DATA + "    a: int\n    b: int\n",
        DATA + "    b: int\n    a: int\n",
        ["changed-shape"],
    ),
    "dataclass fields reordered, by keyword": (
        MAKES.format("a=1, b=2"),
        DATA + "    a: int\n    b: int\n",
        DATA + "    b: int\n    a: int\n",
        [],
    ),
    "dataclass became kw_only": (
        MAKES.format("1, 2"),
        DATA + "    a: int\n    b: int\n",
        DATA.replace("@dataclass", "@dataclass(kw_only=True)") + "    a: int\n    b: int\n",
        ["changed-shape"],
    ),
    "InitVar without a default": (
        MAKES.format("a=1"),
        DATA + "    a: int\n",
        DATA + "    a: int\n    b: InitVar[int]\n",
        ["changed-shape"],
    ),
    "field left out of the constructor": (
        MAKES.format("a=1"),
        DATA + "    a: int\n",
        DATA + "    a: int = field(init=False)\n",
        ["changed-shape"],
    ),
    "pydantic Field lost its default": (
        MAKES.format("a=1"),
        PYDANTIC + "    b: int = Field(default=1)\n",
        PYDANTIC + "    b: int = Field(...)\n",
        ["changed-shape"],
    ),
    "pydantic Field has another default": (
        MAKES.format("a=1"),
        PYDANTIC + "    b: int = Field(default=1)\n",
        PYDANTIC + "    b: int = Field(default=2)\n",
        [],
    ),
    "class became a function that takes the call": (
        MAKES.format("a=1"),
        DATA + "    a: int\n",
        "def C(a): return a\n",
        [],
    ),
    "class became a function with other parameters": (
        MAKES.format("a=1"),
        DATA + "    a: int\n",
        "def C(b): return b\n",
        ["changed-shape"],
    ),
    "class became a function, and is asked for by isinstance": (
        MAKES.format("a=1") + "def h(x):\n    return isinstance(x, C)\n",
        DATA + "    a: int\n",
        "def C(a): return a\n",
        ["changed-shape"],
    ),
    # members
    "property became a method": (
        READS.format("p"),
        "class C:\n    @property\n    def p(self): return 1\n",
        "class C:\n    def p(self): return 1\n",
        ["changed-shape"],
    ),
    "method became a property": (
        READS.format("p()"),
        "class C:\n    def p(self): return 1\n",
        "class C:\n    @property\n    def p(self): return 1\n",
        ["changed-shape"],
    ),
    "attribute became a property": (
        READS.format("p"),
        "class C:\n    def __init__(self): self.p = 1\n",
        "class C:\n    @property\n    def p(self): return 1\n",
        [],
    ),
    "method went to a base": (
        READS.format("p()"),
        "class C:\n    def p(self): return 1\n",
        "class B:\n    def p(self): return 1\nclass C(B): ...\n",
        [],
    ),
    "enum member removed": (
        "from vllm.m import E\ndef g():\n    return E.A\n",
        "import enum\nclass E(enum.Enum):\n    A = 1\n    B = 2\n",
        "import enum\nclass E(enum.Enum):\n    B = 2\n",
        ["removed"],
    ),
    "another enum member removed": (
        "from vllm.m import E\ndef g():\n    return E.A\n",
        "import enum\nclass E(enum.Enum):\n    A = 1\n    B = 2\n",
        "import enum\nclass E(enum.Enum):\n    A = 1\n",
        [],
    ),
    # imports
    "imported in both branches": (
        IMPORTS,
        "from vllm.n import X\n",
        "import os\nif os.name:\n    from vllm.n import X\nelse:\n    X = None\n",
        [],
    ),
    "imported in one branch only": (
        IMPORTS,
        "from vllm.n import X\n",
        "import os\nif os.name:\n    from vllm.n import X\n",
        ["changed-shape"],
    ),
    "imported for type checkers only": (
        IMPORTS,
        "from vllm.n import X\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm.n import X\n",
        ["removed"],
    ),
    "gone from the table that __getattr__ answers": (
        "from vllm import m\ndef g():\n    return m.KNOB\n",
        "T = {'KNOB': lambda: 1}\ndef __getattr__(name):\n    if name in T:\n"
        "        return T[name]()\n    raise AttributeError(name)\n",
        "T = {'Y': lambda: 1}\ndef __getattr__(name):\n    if name in T:\n"
        "        return T[name]()\n    raise AttributeError(name)\n",
        ["removed"],
    ),
    "gone from a table that others add to": (
        "from vllm import m\ndef g():\n    return m.KNOB\n",
        "T = {'KNOB': lambda: 1}\ndef __getattr__(name):\n    if name in T:\n"
        "        return T[name]()\n    raise AttributeError(name)\n",
        "T = {'Y': lambda: 1}\nT.update(more())\ndef __getattr__(name):\n    if name in T:\n"
        "        return T[name]()\n    raise AttributeError(name)\n",
        [],
    ),
    "handed on by a star import": (IMPORTS, "class X: ...", "from vllm.n import *\n", []),
    "Literal behind another name": (
        "from vllm.m import T\nprint(T)\n",
        "from typing import Literal\nT = Literal['a', 'b']\n",
        "from typing import Literal\nA = Literal['a', 'b']\nT = A\n",
        [],
    ),
    # patches and overrides, and who calls them
    "patched where only a shim is left": (
        PATCHES,
        "def f(a): return 1\ndef user(): return f(1)\n",
        "from vllm.n import f\n",
        ["ineffective"],
    ),
    "patched where a shim is still read": (
        PATCHES,
        "def f(a): return 1\ndef user(): return f(1)\n",
        "from vllm.n import f\ndef user(): return f(1)\n",
        [],
    ),
    "an argument that the signature had all along": (
        OVERRIDES,
        RUNNER.format("self.b.step(1)"),
        RUNNER.format("self.b.step(1, k=2)"),
        ["new-demand"],
    ),
    "an argument passed through a local name": (
        OVERRIDES,
        RUNNER.format("go = self.b.step\n        go(1)"),
        RUNNER.format("go = self.b.step\n        go(1, k=2)"),
        ["new-demand"],
    ),
    "an argument passed through partial": (
        OVERRIDES,
        RUNNER.format("return functools.partial(self.b.step, 1)"),
        RUNNER.format("return functools.partial(self.b.step, 1, k=2)"),
        ["new-demand"],
    ),
    "an argument passed by a function inside": (
        OVERRIDES,
        RUNNER.format("return lambda: self.b.step(1)"),
        RUNNER.format("return lambda: self.b.step(1, k=2)"),
        ["new-demand"],
    ),
    "an argument that vLLM passed before, too": (
        OVERRIDES,
        RUNNER.format("self.b.step(1, k=2)"),
        RUNNER.format("self.b.step(1, k=3)"),
        [],
    ),
    "a hook that nobody calls any more": (
        OVERRIDES,
        RUNNER.format("self.b.step(1)"),
        RUNNER.format("pass"),
        ["ineffective"],
    ),
    "a patched method that nobody calls any more": (
        PATCHES_METHOD,
        RUNNER.format("self.b.step(1)"),
        RUNNER.format("pass"),
        ["ineffective"],
    ),
    "a hook that is called by its name in a string": (
        OVERRIDES,
        RUNNER.format("self.b.step(1)"),
        RUNNER.format("self.rpc('step', 1)"),
        [],
    ),
    "a hook that nobody called before either": (
        OVERRIDES,
        RUNNER.format("pass"),
        RUNNER.format("return 1"),
        [],
    ),
}
MORE = {"vllm/n.py": "class X: ...\ndef f(a): return 1\ndef user(): return f(1)\n"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_change_has_its_verdict(kind: str) -> None:
    plugin, before, after, verdicts = KINDS[kind]
    report = check(plugin, {"vllm/m.py": before, **MORE}, {"vllm/m.py": after})

    assert sorted({f.verdict.value for f in report.drift}) == verdicts
    assert all(f.old or f.new for f in report.drift), "a finding has a witness"


def test_a_patch_is_ineffective_where_its_reader_imports_the_name_early_now() -> None:
    late = "from vllm import m\ndef user():\n    return m.f(1)\n"
    early = "from vllm.m import f\ndef user():\n    return f(1)\n"
    report = check(PATCHES, {"vllm/m.py": "def f(a): ...", "vllm/u.py": late}, {"vllm/u.py": early})

    (finding,) = report.drift
    assert finding.verdict is Verdict.INEFFECTIVE
    assert finding.new is not None
    assert str(finding.new) == "vllm/u.py:1"


def test_a_removed_hook_says_that_the_override_is_never_called() -> None:
    before = "class B:\n    def step(self, a): ...\n    def go(self): self.step(1)\n"
    report = check(OVERRIDES, {"vllm/m.py": before}, {"vllm/m.py": "class B: ...\n"})

    (finding,) = report.drift
    assert finding.verdict is Verdict.REMOVED
    assert "override of it is never called" in finding.message


def test_a_keyword_that_a_double_star_takes_now_cannot_be_told() -> None:
    report = check(
        CALLS.format("1, b=2"),
        {"vllm/m.py": "def f(a, b=1): ..."},
        {"vllm/m.py": "def f(a, **k): ..."},
    )

    assert [f.verdict for f in report.findings] == [Verdict.CANNOT_TELL]
    assert report.drift == ()


def test_a_function_that_became_a_value_made_at_run_time_cannot_be_told() -> None:
    report = check(
        CALLS.format("1"),
        {"vllm/m.py": "def f(a): ..."},
        {"vllm/m.py": "f = lambda a: a"},
    )

    assert [f.verdict for f in report.findings] == [Verdict.CANNOT_TELL]


def test_a_call_that_fitted_neither_release_is_preexisting() -> None:
    report = check(
        CALLS.format("1, 2"), {"vllm/m.py": "def f(a): ..."}, {"vllm/m.py": "def f(a): return a"}
    )

    assert report.drift == ()
    (finding,) = (f for f in report.findings if f.preexisting)
    assert finding.verdict is Verdict.CHANGED_SHAPE
    assert "fits neither release" in finding.message


def test_a_plugin_with_a_call_for_each_release_has_nothing_preexisting() -> None:
    plugin = CALLS.format("1") + "def h():\n    return f(1, 2, 3)\n"
    report = check(plugin, {"vllm/m.py": "def f(a): ..."}, {"vllm/m.py": "def f(a): return a"})

    assert [f for f in report.findings if f.preexisting] == []


def test_what_vllm_passed_before_and_a_patch_cannot_take_is_preexisting() -> None:
    report = check(
        OVERRIDES,
        {"vllm/m.py": RUNNER.format("self.b.step(1, k=2)")},
        {"vllm/m.py": RUNNER.format("self.b.step(1, k=3)")},
    )

    (finding,) = (f for f in report.findings if f.preexisting)
    assert finding.verdict is Verdict.NEW_DEMAND
    assert "k" in finding.message


def test_an_anchor_whose_replacement_upstream_has_itself_is_upstreamed_and_gone() -> None:
    plugin = textwrap.dedent("""
        import inspect
        from vllm.m import f
        source = inspect.getsource(f)
        source = source.replace("return a + 1", "return a + 2")
        """)
    report = check(
        plugin,
        {"vllm/m.py": "def f(a):\n    return a + 1\n"},
        {"vllm/m.py": "def f(a):\n    return a + 2\n"},
    )

    anchors = [f for f in report.findings if f.kind == "anchor"]
    assert sorted(f.verdict.value for f in anchors) == ["removed", "upstreamed"]
    assert report.exit_code == 1
