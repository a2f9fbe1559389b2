"""Two releases held against each other: the verdict that names the change, with both places."""

from __future__ import annotations

from typing import Any

import pytest
from drift_small_tree import compare, release, surface_from, verdicts
from test_scan import CHANGES, MODULES, SYMBOLS

from vllm_drift.findings import Finding, Severity, Verdict


def compared(kind: str, *, plugin: dict[str, str] | None = None, **changed: str) -> list[Finding]:
    source = release("0.1", package="a_plugin", **plugin) if plugin is not None else None
    return compare(
        surface_from(SYMBOLS[kind]),
        release("1.0", **MODULES),
        release("2.0", **{**MODULES, **changed}),
        plugin=source,
    )


def edited(module: str, old: str, new: str) -> dict[str, Any]:
    assert old in MODULES[module]
    return {module: MODULES[module].replace(old, new)}


@pytest.mark.parametrize("kind", SYMBOLS)
def test_nothing_changed_is_unchanged_with_both_places(kind: str) -> None:
    (finding,) = compared(kind)
    assert (finding.verdict, finding.severity) == (Verdict.UNCHANGED, Severity.INFO)
    assert finding.old is not None
    assert finding.new is not None


REFORMATTED: dict[str, Any] = {
    "runner": """
    # A comment that was not there.
    from vllm.proposer import (
        Proposer,
    )
    import os


    class Runner:
        '''A docstring.'''

        def __init__(
            self,
            config: "Config",  # quoted
        ) -> "None":
            self.drafter: "Proposer" = Proposer(
                config,
            )

        def propose(self, tokens):
            assert isinstance(
                self.drafter,
                Proposer,
            ), "text"
            return (self.drafter.propose(
                self.batch, tokens,
                slots=slots,
            ))

        def load(self):
            if hasattr(self, "drafter"):
                self.drafter.load_model(
                    self.model
                )
    """,
    "proposer": """
    class Proposer(  ):
        def __init__(self, config: 'Config'):
            '''Make one.'''
            pass
        def propose(
            self, batch, tokens,
            slots = None,
        ):
            pass
        def load_model(self, *args): pass
    """,
    "gate": """
    import os
    from vllm.utils import has_it

    class Config:
        method: "Optional[str]" = None
        '''How.'''
        size: int = Field( gt=0, default = 3 )

        def validate(self):
            if (not has_it()):
                raise ImportError
    """,
    "plugins": """
    GROUP = 'vllm.general_plugins'
    MoreMethods = Literal["suffix",]
    METHODS = Literal[MoreMethods, 'ngram']
    def load():
        # nothing
        pass
    """,
}


@pytest.mark.parametrize("kind", SYMBOLS)
def test_another_layout_of_the_same_code_is_no_finding(kind: str) -> None:
    findings = compared(kind, **REFORMATTED)
    assert {f.severity for f in findings} == {Severity.INFO}
    assert set(verdicts(findings)) <= {"unchanged", "compatible"}, [f.message for f in findings]


@pytest.mark.parametrize(("kind", "module", "old", "new", "expected"), CHANGES)
def test_a_change_gets_a_verdict_of_the_same_severity_as_in_a_scan(
    kind: str, module: str, old: str, new: str, expected: str
) -> None:
    findings = compared(kind, **edited(module, old, new))
    worst = max((f.severity for f in findings), key=lambda s: s.rank)
    fine = expected in ("unchanged", "compatible")
    lazily = kind == "from-import" and "        from vllm" in new
    if lazily:
        # The plugin rebinds the module's name: one more import in the function makes that useless.
        assert "ineffective" in verdicts(findings)
        return
    assert (worst is Severity.INFO) == fine, [f.message for f in findings]
    assert all(f.new is not None for f in findings)
    if not fine:
        assert all(f.old is not None for f in findings)


# what a comparison alone can say


def test_a_caller_that_passes_more_is_caller_changed_with_both_lines() -> None:
    (finding,) = compared(
        "method-call", **edited("runner", "self.batch, tokens", "k, self.batch, tokens")
    )
    assert finding.verdict is Verdict.CALLER_CHANGED
    assert str(finding.old) == str(finding.new) == "vllm/runner.py:10"
    assert "(k, self.batch, tokens)" in finding.message


def test_a_renamed_local_that_is_passed_by_position_is_information() -> None:
    (finding,) = compared("method-call", **edited("runner", "tokens", "sampled"))
    assert finding.severity is Severity.INFO


def test_a_function_that_moved_is_found_by_its_name() -> None:
    findings = compared("function", proposer="x = 1\n", elsewhere=MODULES["proposer"])
    assert verdicts(findings) == ["moved"]
    assert findings[0].new is not None
    assert findings[0].new.path == "vllm/elsewhere.py"


LONG = """
def {name}(batch):
    result = []
    for request in batch.requests_in_order:
        if request.has_unfinished_tokens:
            result.append(request.unfinished_tokens)
    return result
"""


def test_a_function_that_was_renamed_is_found_by_its_body() -> None:
    text = PATCHED.replace("C.work", "gather").replace("patched", "call it")
    findings = compare(
        surface_from(text),
        release("1.0", a=LONG.format(name="gather")),
        release("2.0", a="x = 1\n", b=LONG.format(name="collect_all")),
    )
    assert verdicts(findings) == ["moved"]
    assert "vllm.b:collect_all" in findings[0].message
    assert "100% alike" in findings[0].message


def test_another_function_of_that_name_is_not_where_it_went() -> None:
    text = PATCHED.replace("C.work", "gather").replace("patched", "call it")
    other = "def gather(x):\n    print(x)\n    exit(1)\n    return None\n"
    findings = compare(
        surface_from(text),
        release("1.0", a=LONG.format(name="gather"), b=other),
        release("2.0", a="x = 1\n", b=other),
    )
    assert verdicts(findings) == ["removed"]


def test_a_module_that_became_a_shim_makes_a_rebinding_ineffective() -> None:
    findings = compared(
        "replaced-class",
        runner="from vllm.worker import *\nfrom vllm.worker import Proposer\n",
        worker=MODULES["runner"],
    )
    assert verdicts(findings) == ["ineffective"]
    assert "vllm.worker" in findings[0].message


def test_a_from_import_that_became_an_attribute_read_makes_a_rebinding_ineffective() -> None:
    gate = MODULES["gate"].replace("from vllm.utils import has_it", "from vllm import utils")
    findings = compared("from-import", gate=gate.replace("has_it()", "utils.has_it()"))
    assert verdicts(findings) == ["ineffective"]


def test_a_method_that_vllm_now_calls_on_the_replaced_class_is_a_new_demand() -> None:
    proposer = MODULES["proposer"] + "    def warm_up(self): pass\n"
    runner = MODULES["runner"].replace(
        "self.drafter = Proposer(config)",
        "self.drafter = Proposer(config)\n        self.drafter.warm_up()",
    )
    findings = compared("replaced-class", proposer=proposer, runner=runner)
    assert [f.target for f in findings if f.verdict is Verdict.NEW_DEMAND] == [
        "vllm.runner:Proposer.warm_up"
    ]


def test_what_is_asked_of_other_classes_is_no_demand() -> None:
    runner = MODULES["runner"].replace(
        "    def load(self):",
        "    def other(self):\n        assert isinstance(self.drafter, Other)\n        "
        "self.drafter.warm_up()\n"
        "        if hasattr(self.drafter, 'cool'):\n            self.drafter.cool()\n    def "
        "load(self):",
    )
    assert verdicts(compared("replaced-class", runner=runner)) == ["unchanged"]


OVERRIDDEN = """
[[symbol]]
id = "s"
kind = "class"
module = "vllm.base"
name = "Base"
methods = ["run"]
why = "subclass it"
"""


def test_an_argument_that_vllm_now_passes_to_an_overridden_method_is_a_new_demand() -> None:
    old = release(
        "1.0", base="class Base:\n    def run(self, a): pass\n", user="def f(b):\n    b.run(1)\n"
    )
    new = release(
        "2.0",
        base="class Base:\n    def run(self, a, extra=None): pass\n",
        user="def f(b):\n    b.run(1, extra=2)\n",
    )
    findings = compare(surface_from(OVERRIDDEN), old, new)
    demand = [f for f in findings if f.verdict is Verdict.NEW_DEMAND]
    assert [str(f.new) for f in demand] == ["vllm/user.py:2"]
    takes = release(
        "0.1", package="a_plugin", sub="class Sub(Base):\n    def run(self, a, **kw): pass\n"
    )
    assert not [
        f
        for f in compare(surface_from(OVERRIDDEN), old, new, plugin=takes)
        if f.verdict is Verdict.NEW_DEMAND
    ]


def test_a_new_abstract_method_is_a_new_demand() -> None:
    old = release("1.0", base="class Base:\n    def run(self): pass\n")
    new = release(
        "2.0",
        base="class Base:\n    def run(self): pass\n    @abstractmethod\n    def stop(self): ...\n",
    )
    findings = compare(surface_from(OVERRIDDEN), old, new)
    assert verdicts(findings) == ["new-demand"]


def test_a_new_required_field_of_a_constructed_class_is_a_changed_shape() -> None:
    dataclass = "@dataclass\n" + MODULES["gate"].strip().partition("\n\n")[2]
    old = release("1.0", gate=dataclass)
    new = release("2.0", gate=dataclass.replace("    size:", "    depth: int\n    size:"))
    findings = compare(surface_from(SYMBOLS["class"]), old, new)
    assert verdicts(findings) == ["changed-shape"]
    assert "required field depth" in findings[0].message


PATCHED = """
[[symbol]]
id = "s"
kind = "function"
module = "vllm.a"
name = "C.work"
why = "patched"
"""
BEFORE = "class C:\n    def work(self, x):\n        y = x\n        return y\n"
AFTER = "class C:\n    def work(self, x):\n        y = x + 1\n        log(y)\n        return y\n"


def test_another_body_of_a_patched_function_is_information_with_a_short_diff() -> None:
    (finding,) = compare(surface_from(PATCHED), release("1.0", a=BEFORE), release("2.0", a=AFTER))
    assert (finding.verdict, finding.severity) == (Verdict.BODY_CHANGED, Severity.INFO)
    assert "+log(y)" in finding.detail
    assert "-y = x" in finding.detail


def test_a_patch_that_upstream_made_itself_is_upstreamed() -> None:
    patch = AFTER.replace("y = x + 1", "y = (x + 1)  # better").replace("class C", "class Patched")
    plugin = release("0.1", package="a_plugin", patches=patch)
    (finding,) = compare(
        surface_from(PATCHED), release("1.0", a=BEFORE), release("2.0", a=AFTER), plugin=plugin
    )
    assert (finding.verdict, finding.severity) == (Verdict.UPSTREAMED, Severity.INFO)


def test_a_patch_that_upstream_does_not_have_is_not_upstreamed() -> None:
    plugin = release("0.1", package="a_plugin", patches=BEFORE.replace("x\n", "x * 2\n"))
    findings = compare(
        surface_from(PATCHED), release("1.0", a=BEFORE), release("2.0", a=AFTER), plugin=plugin
    )
    assert verdicts(findings) == ["body-changed"]


def test_a_new_caller_is_named_and_a_lost_one_too() -> None:
    symbol = SYMBOLS["call-sites"].replace("exactly", "at-least")
    old = release("1.0", **MODULES)
    more = MODULES["engine"] + "def worker():\n    from vllm.plugins import load\n    load()\n"
    fresh = compare(surface_from(symbol), old, release("2.0", **{**MODULES, "engine": more}))
    assert [(f.verdict, f.severity) for f in fresh] == [(Verdict.NEW_CALL_SITE, Severity.INFO)]
    less = MODULES["engine"].replace("        load()", "        pass")
    gone = compare(surface_from(symbol), old, release("2.0", **{**MODULES, "engine": less}))
    assert verdicts(gone) == ["lost-call-site"]


def test_what_appears_is_compatible() -> None:
    for kind, text in SYMBOLS.items():
        findings = compare(
            surface_from(text), release("1.0", x="y = 1\n"), release("2.0", **MODULES)
        )
        assert verdicts(findings) == ["compatible"], kind
        assert findings[0].severity is Severity.INFO


def test_what_was_wrong_already_is_preexisting() -> None:
    wrong = edited("method-call" and "runner", "self.batch, tokens", "self.batch")
    tree = {**MODULES, **wrong}
    findings = compare(
        surface_from(SYMBOLS["method-call"]), release("1.0", **tree), release("2.0", **tree)
    )
    assert [f.verdict for f in findings if f.preexisting] == [Verdict.CALLER_CHANGED]
    assert not [f for f in findings if not f.preexisting and f.severity is not Severity.INFO]


def test_what_is_in_neither_release_is_preexisting() -> None:
    findings = compare(
        surface_from(SYMBOLS["function"]), release("1.0", x="y = 1\n"), release("2.0", x="y = 1\n")
    )
    assert [(f.verdict, f.preexisting) for f in findings] == [(Verdict.REMOVED, True)]


def test_a_change_that_the_surface_declares_is_information() -> None:
    shapes = SYMBOLS["method-call"].replace('id = "s"', 'id = "s"\n        versions = "<2"')
    newer = (
        SYMBOLS["method-call"]
        .replace('id = "s"', 'id = "s"\n        versions = ">=2"')
        .replace('args = ["self.batch", "tokens"]', 'args = ["k", "self.batch", "tokens"]')
    )
    (finding,) = compare(
        surface_from(shapes + newer),
        release("1.0", **MODULES),
        release(
            "2.0", **{**MODULES, **edited("runner", "self.batch, tokens", "k, self.batch, tokens")}
        ),
    )
    assert (finding.verdict, finding.severity) == (Verdict.CALLER_CHANGED, Severity.INFO)
    assert "declares" in finding.message


def test_a_return_annotation_that_changed_is_a_changed_shape() -> None:
    text = PATCHED.replace("C.work", "f").replace("patched", "call it")
    old, new = (release(v, a=f"def f() -> {r}: ...\n") for v, r in (("1.0", "int"), ("2.0", "str")))
    findings = compare(surface_from(text), old, new)
    assert verdicts(findings) == ["changed-shape"]
    assert "return annotation" in findings[0].message


def test_an_attribute_that_became_a_method_is_a_changed_shape() -> None:
    runner = MODULES["runner"].replace("self.drafter = Proposer(config)", "Proposer(config)") + (
        "    def drafter(self): return None\n"
    )
    findings = compared("attributes", runner=runner)
    assert verdicts(findings) == ["changed-shape"]


def test_a_method_that_moved_to_a_base_class_is_found_there() -> None:
    text = PATCHED.replace("patched", "call it")
    old = release("1.0", a="class C:\n    def work(self): pass\n")
    new = release(
        "2.0",
        a="from vllm.b import B\nclass C(B): pass\n",
        b="class B:\n    def work(self): pass\n",
    )
    (finding,) = compare(surface_from(text), old, new)
    assert (finding.verdict, finding.severity) == (Verdict.COMPATIBLE, Severity.INFO)


def test_what_is_defined_only_under_a_condition_now_is_a_changed_shape() -> None:
    text = PATCHED.replace("C.work", "f").replace("patched", "call it")
    old = release("1.0", a="def f(): pass\n")
    new = release("2.0", a="if flag:\n    def f(): pass\n")
    both = release("2.0", a="if flag:\n    def f(): pass\nelse:\n    def f(): pass\n")
    assert verdicts(compare(surface_from(text), old, new)) == ["changed-shape"]
    assert verdicts(compare(surface_from(text), old, both)) == ["unchanged"]


def test_an_import_that_may_fail_now_is_a_changed_shape_unless_something_stands_in() -> None:
    gate = MODULES["gate"]
    line = "from vllm.utils import has_it\n"
    alone = gate.replace(line, f"if flag:\n    {line}")
    stands_in = gate.replace(line, f"try:\n    {line}except ImportError:\n    has_it = None\n")
    assert verdicts(compared("from-import", gate=alone)) == ["changed-shape"]
    assert verdicts(compared("from-import", gate=stands_in)) == ["unchanged"]


def test_an_override_that_was_dropped_is_removed_unless_the_inherited_one_does_the_same() -> None:
    base = "class B:\n    def work(self):\n        raise NotImplementedError\n"
    same = "class B:\n    def work(self):\n        return 1\n"
    own = "from vllm.b import B\nclass C(B):\n    def work(self):\n        return 1\n"
    left = "from vllm.b import B\nclass C(B):\n    pass\n"
    text = surface_from(PATCHED.replace("patched", "call it"))
    findings = compare(text, release("1.0", a=own, b=base), release("2.0", a=left, b=base))
    assert [(f.verdict, f.severity) for f in findings] == [(Verdict.REMOVED, Severity.WARNING)]
    findings = compare(text, release("1.0", a=own, b=same), release("2.0", a=left, b=same))
    assert verdicts(findings) == ["compatible"]


def test_a_method_that_a_class_dropped_is_removed_though_an_outside_base_may_have_it() -> None:
    own = "import torch\nclass C(torch.nn.Module):\n    def work(self):\n        return 1\n"
    left = "import torch\nclass C(torch.nn.Module):\n    pass\n"
    text = surface_from(PATCHED.replace("patched", "call it"))
    findings = compare(text, release("1.0", a=own), release("2.0", a=left))
    assert [(f.verdict, f.severity) for f in findings] == [(Verdict.REMOVED, Severity.WARNING)]


def test_a_caller_that_was_renamed_is_not_confused_with_the_one_it_inherits() -> None:
    base = "class Base:\n    def propose(self, tokens):\n        self.drafter.propose(1)\n"
    runner = "from vllm.base import Base\n" + MODULES["runner"].replace(
        "class Runner:", "class Runner(Base):"
    )
    renamed = runner.replace("def propose(self", "def draft(self")
    symbol = surface_from(SYMBOLS["method-call"])
    findings = compare(
        symbol, release("1.0", base=base, runner=runner), release("2.0", base=base, runner=renamed)
    )
    assert verdicts(findings) == ["moved"]


def test_a_call_site_that_was_renamed_is_not_confused_with_the_one_it_inherits() -> None:
    base = (
        "class Base:\n    def start(self):\n        from vllm.plugins import load\n        load()\n"
    )
    engine = "from vllm.base import Base\n" + MODULES["engine"].replace(
        "class Engine:", "class Engine(Base):"
    ).replace("__init__", "start")
    symbol = SYMBOLS["call-sites"].replace("exactly", "at-least").replace("__init__", "start")
    common = {"base": base, "plugins": MODULES["plugins"]}
    findings = compare(
        surface_from(symbol),
        release("1.0", engine=engine, **common),
        release("2.0", engine=engine.replace("def start", "def begin"), **common),
    )
    assert "lost-call-site" in verdicts(findings)
