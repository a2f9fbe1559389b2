"""One release held against a surface: what is as declared, and what is not, with the witness."""

from __future__ import annotations

import pytest
from drift_small_tree import release, scan, surface_from, verdicts

from vllm_drift.findings import Finding, Severity, Verdict

RUNNER = """
from vllm.proposer import Proposer

class Runner:
    def __init__(self, config):
        self.drafter = Proposer(config)

    def propose(self, tokens):
        assert isinstance(self.drafter, Proposer)
        return self.drafter.propose(self.batch, tokens, slots=slots)

    def load(self):
        if hasattr(self, "drafter"):
            self.drafter.load_model(self.model)
"""
PROPOSER = """
class Proposer:
    def __init__(self, config): pass
    def propose(self, batch, tokens, slots=None): pass
    def load_model(self, *args): pass
"""
GATE = """
from vllm.utils import has_it

class Config:
    method: str | None = None
    size: int = Field(default=3, gt=0)

    def validate(self):
        if not has_it():
            raise ImportError
"""
UTILS = "def has_it(): return False\n"
PLUGINS = """
GROUP = "vllm.general_plugins"
METHODS = Literal["ngram", MoreMethods]
MoreMethods = Literal["suffix"]
def load(): pass
"""
ENGINE = """
class Engine:
    def __init__(self):
        from vllm.plugins import load
        load()
"""
MODULES = {
    "runner": RUNNER,
    "proposer": PROPOSER,
    "gate": GATE,
    "utils": UTILS,
    "plugins": PLUGINS,
    "engine": ENGINE,
}

SYMBOLS = {
    "from-import": """
        [[symbol]]
        id = "s"
        kind = "from-import"
        module = "vllm.gate"
        name = "has_it"
        source = "vllm.utils"
        read_in = ["Config.validate"]
        why = "open it"
        """,
    "replaced-class": """
        [[symbol]]
        id = "s"
        kind = "replaced-class"
        module = "vllm.runner"
        name = "Proposer"
        source = "vllm.proposer"
        isinstance_in = ["Runner.propose"]
        why = "replace it"
        [symbol.provides]
        __init__ = "(self, config)"
        propose = "(self, batch, tokens, slots=None)"
        load_model = "(self, *args)"
        """,
    "constructor-call": """
        [[symbol]]
        id = "s"
        kind = "constructor-call"
        module = "vllm.runner"
        function = "Runner.__init__"
        name = "Proposer"
        args = ["config"]
        why = "be made"
        """,
    "method-call": """
        [[symbol]]
        id = "s"
        kind = "method-call"
        module = "vllm.runner"
        function = "Runner.propose"
        name = "Proposer"
        method = "propose"
        args = ["self.batch", "tokens"]
        keywords = { slots = "slots" }
        why = "be called"
        """,
    "method-call on a value": """
        [[symbol]]
        id = "s"
        kind = "method-call"
        module = "vllm.runner"
        function = "Runner.load"
        value = "self.drafter"
        method = "load_model"
        args = ["self.model"]
        why = "be called"
        """,
    "attributes": """
        [[symbol]]
        id = "s"
        kind = "attributes"
        module = "vllm.runner"
        name = "Runner"
        reads = ["drafter", "load"]
        why = "read them"
        """,
    "function": """
        [[symbol]]
        id = "s"
        kind = "function"
        module = "vllm.proposer"
        name = "Proposer.propose"
        signature = "(self, batch, tokens, slots=None)"
        async = false
        why = "call it"
        """,
    "class": """
        [[symbol]]
        id = "s"
        kind = "class"
        module = "vllm.gate"
        name = "Config"
        bases = []
        methods = ["validate"]
        why = "construct it"
        [symbol.fields]
        method = "None"
        size = "Field(default=3, gt=0)"
        """,
    "constant": """
        [[symbol]]
        id = "s"
        kind = "constant"
        module = "vllm.plugins"
        name = "METHODS"
        contains = ["ngram", "suffix"]
        why = "choose it"
        """,
    "call-sites": """
        [[symbol]]
        id = "s"
        kind = "call-sites"
        callee = "vllm.plugins:load"
        match = "exactly"
        sites = ["vllm.engine:Engine.__init__"]
        why = "be loaded"
        """,
    "anchor": """
        [[symbol]]
        id = "s"
        kind = "anchor"
        module = "vllm.runner"
        function = "Runner.load"
        text = 'hasattr(self, "drafter")'
        why = "edit it"
        """,
    "entry-point-group": """
        [[symbol]]
        id = "s"
        kind = "entry-point-group"
        module = "vllm.plugins"
        name = "GROUP"
        group = "vllm.general_plugins"
        why = "be found"
        """,
}


def scanned(kind: str, **changed: str) -> list[Finding]:
    return scan(surface_from(SYMBOLS[kind]), release(**{**MODULES, **changed}))


@pytest.mark.parametrize("kind", SYMBOLS)
def test_what_is_as_declared_is_unchanged_and_has_a_witness(kind: str) -> None:
    (finding,) = scanned(kind)
    assert (finding.verdict, finding.severity) == (Verdict.UNCHANGED, Severity.INFO)
    assert finding.new is not None


@pytest.mark.parametrize("kind", SYMBOLS)
def test_nothing_of_what_is_declared_is_found_in_an_empty_package(kind: str) -> None:
    findings = scan(surface_from(SYMBOLS[kind]), release(other="x = 1\n"))
    assert findings
    assert {f.verdict for f in findings} <= {Verdict.REMOVED, Verdict.LOST_CALL_SITE}
    assert all(f.new is not None for f in findings)


CHANGES = [
    ("from-import", "gate", "has_it()", "other()", "ineffective"),
    ("from-import", "gate", "from vllm.utils import has_it", "", "removed"),
    ("from-import", "gate", "from vllm.utils", "from vllm.elsewhere", "moved"),
    (
        "from-import",
        "gate",
        "from vllm.utils import has_it",
        "if TYPE_CHECKING:\n    from vllm.utils import has_it",
        "ineffective",
    ),
    (
        "from-import",
        "gate",
        "        if not has_it",
        "        from vllm.utils import has_it\n        if not has_it",
        "unchanged",
    ),
    (
        "from-import",
        "gate",
        "        if not has_it",
        "        from vllm.other import has_it\n        if not has_it",
        "moved",
    ),
    ("from-import", "gate", "def validate", "def check", "moved"),
    ("replaced-class", "runner", "from vllm.proposer import Proposer", "", "removed"),
    (
        "replaced-class",
        "runner",
        "isinstance(self.drafter, Proposer)",
        "self.drafter",
        "caller-changed",
    ),
    ("replaced-class", "runner", "slots=slots", "extra=1", "new-demand"),
    ("replaced-class", "runner", "Proposer(config)", "Proposer(config, 1)", "new-demand"),
    ("replaced-class", "runner", ".propose(self.batch", ".prepare(self.batch", "new-demand"),
    ("constructor-call", "runner", "Proposer(config)", "Proposer(self, config)", "caller-changed"),
    ("constructor-call", "runner", "Proposer(config)", "Proposer(config=config)", "caller-changed"),
    ("constructor-call", "runner", "Proposer(config)", "Proposer(settings)", "unchanged"),
    ("constructor-call", "runner", "Proposer(config)", "make(config)", "lost-call-site"),
    ("method-call", "runner", "self.batch, tokens", "tokens, self.batch", "caller-changed"),
    ("method-call", "runner", "self.batch, tokens", "k, self.batch, tokens", "caller-changed"),
    ("method-call", "runner", "self.batch, tokens", "self.batch, sampled", "unchanged"),
    ("method-call", "runner", "slots=slots", "mappings=slots", "caller-changed"),
    ("method-call", "runner", ", slots=slots", "", "caller-changed"),
    ("method-call", "runner", ", slots=slots", ", slots", "caller-changed"),
    ("method-call", "runner", "def propose(self", "def draft(self", "moved"),
    ("method-call", "runner", "self.drafter.propose", "self.other.propose", "lost-call-site"),
    ("method-call on a value", "runner", "self.model", "self.model, 1", "caller-changed"),
    (
        "method-call on a value",
        "runner",
        "            self.drafter.load_model",
        "            d = self.drafter\n            d.load_model",
        "unchanged",
    ),
    ("attributes", "runner", "self.drafter = ", "self.proposer = ", "removed"),
    ("function", "proposer", "tokens, slots=None", "tokens, slots", "changed-shape"),
    ("function", "proposer", "batch, tokens", "tokens, batch", "changed-shape"),
    ("function", "proposer", "batch, tokens", "k, batch, tokens", "changed-shape"),
    ("function", "proposer", "batch, tokens", "batch, ids", "changed-shape"),
    ("function", "proposer", "slots=None", "slots=0", "changed-shape"),
    ("function", "proposer", "def propose", "async def propose", "changed-shape"),
    ("function", "proposer", "slots=None", "slots=None, more=1", "compatible"),
    ("function", "proposer", "batch, tokens", 'batch: "Batch", tokens: int', "unchanged"),
    ("class", "gate", "class Config:", "class Config(Base):", "changed-shape"),
    ("class", "gate", "def validate", "def check", "removed"),
    ("class", "gate", "default=3", "default=4", "changed-shape"),
    ("class", "gate", "Field(default=3, gt=0)", "3", "compatible"),
    ("class", "gate", "method: str | None = None", "method: str | None", "changed-shape"),
    ("class", "gate", "    method: str | None = None\n", "", "removed"),
    ("constant", "plugins", '"suffix"', '"prefix"', "removed"),
    ("constant", "plugins", "MoreMethods = Literal", "MoreMethods = make", "cannot-tell"),
    ("call-sites", "engine", "        load()", "        pass", "lost-call-site"),
    (
        "call-sites",
        "engine",
        "class Engine:",
        "def f():\n    from vllm.plugins import load\n    load()\nclass Engine:",
        "new-call-site",
    ),
    ("anchor", "runner", 'hasattr(self, "drafter")', "hasattr(self, 'drafter')", "removed"),
    (
        "anchor",
        "runner",
        "            self.drafter.load_model",
        '            hasattr(self, "drafter")\n            self.drafter.load_model',
        "changed-shape",
    ),
    ("entry-point-group", "plugins", "general_plugins", "plugins", "changed-shape"),
]


@pytest.mark.parametrize(("kind", "module", "old", "new", "expected"), CHANGES)
def test_a_release_that_differs_gets_the_verdict_that_names_it(
    kind: str, module: str, old: str, new: str, expected: str
) -> None:
    assert old in MODULES[module]
    findings = scanned(kind, **{module: MODULES[module].replace(old, new)})
    assert verdicts(findings)[0] == expected, [f.message for f in findings]
    assert all(f.new is not None for f in findings)


def test_only_symbols_that_apply_to_the_release_are_judged() -> None:
    surface = surface_from(
        SYMBOLS["function"].replace('id = "s"', 'id = "s"\n        versions = ">=2"')
    )
    assert scan(surface, release("1.0")) == []
    assert len(scan(surface, release("2.0", proposer=PROPOSER))) == 1


def test_what_the_plugin_copes_without_is_information() -> None:
    surface = surface_from(
        SYMBOLS["function"].replace('id = "s"', 'id = "s"\n        optional = true')
    )
    (finding,) = scan(surface, release(proposer="x = 1\n"))
    assert (finding.verdict, finding.severity) == (Verdict.REMOVED, Severity.INFO)


def test_a_function_that_is_handed_on_is_as_declared_unless_it_is_replaced_there() -> None:
    modules = {"a": "from vllm.b import f\n", "b": "def f(): pass\ndef g(): f()\n"}
    text = '[[symbol]]\nid = "s"\nkind = "function"\nmodule = "vllm.a"\nname = "f"\nwhy = "{}"\n{}'
    called = surface_from(text.format("call it", 'calls = ["()"]'))
    patched = surface_from(text.format("replace it", "rebound = true"))
    assert verdicts(scan(called, release(**modules))) == ["unchanged"]
    assert verdicts(scan(patched, release(**modules))) == ["ineffective"]


def test_a_name_that_source_does_not_tell_is_not_called_removed() -> None:
    surface = surface_from(SYMBOLS["function"])
    tree = release(proposer="def __getattr__(name): return load(name)\n")
    (finding,) = scan(surface, tree)
    assert finding.verdict is Verdict.CANNOT_TELL


def test_a_module_that_cannot_be_parsed_cannot_be_told() -> None:
    surface = surface_from(SYMBOLS["from-import"])
    (finding,) = scan(surface, release(gate="def f(:\n    has_it\n", utils=UTILS))
    assert finding.verdict is Verdict.CANNOT_TELL
