"""What a bump breaks for a plugin: infer and compare in one, on made-up releases and plugins."""

from __future__ import annotations

import textwrap

import pytest

from vllm_drift.check import check_plugin
from vllm_drift.findings import Finding, Report, Severity, Verdict
from vllm_drift.tree import SourceTree


def tree(files: dict[str, str], package: str, label: str) -> SourceTree:
    return SourceTree.from_files(
        {path: textwrap.dedent(text).encode() for path, text in files.items()},
        label=label,
        package=package,
    )


def check(plugin: str, old: dict[str, str], new: dict[str, str]) -> Report:
    """Check `plugin` between two releases; files that `new` does not name are as in `old`."""
    base = {"vllm/__init__.py": ""}
    return check_plugin(
        tree({"plug/__init__.py": plugin}, "plug", "0.1"),
        tree({**base, **old}, "vllm", "1"),
        tree({**base, **old, **new}, "vllm", "2"),
    )


def drift(report: Report) -> list[tuple[str, str]]:
    return [(f.verdict.value, f.symbol) for f in report.drift]


def only(report: Report) -> Finding:
    assert len(report.drift) == 1, drift(report)
    return report.drift[0]


ENGINE = """
    class Engine:
        def __init__(self, config):
            self.config = config
        def step(self, tokens, wait=True):
            return tokens
        def close(self):
            pass
    def run(engine: Engine, tokens):
        return engine.step(tokens)
    """
CALLS_STEP = """
    from vllm.engine import Engine
    def use(engine: Engine):
        engine.step([1], wait=False)
    """
OVERRIDES_STEP = """
    from vllm.engine import Engine
    class Mine(Engine):
        def step(self, tokens, wait=True):
            return super().step(tokens)
    """
PATCHES_STEP = """
    from vllm.engine import Engine
    original = Engine.step
    def step(self, tokens, wait=True):
        return original(self, tokens, wait)
    Engine.step = step
    """


def changed(old: str, new: str) -> tuple[dict[str, str], dict[str, str]]:
    assert old in ENGINE
    return {"vllm/engine.py": ENGINE}, {"vllm/engine.py": ENGINE.replace(old, new)}


def test_nothing_changed_is_no_drift():
    report = check(CALLS_STEP, {"vllm/engine.py": ENGINE}, {})
    assert report.exit_code == 0
    assert {f.verdict for f in report.findings} == {Verdict.UNCHANGED}
    assert all(f.new is not None for f in report.findings)


def test_a_plugin_that_uses_nothing_cannot_be_judged():
    assert check("import os\n", {"vllm/engine.py": ENGINE}, {}).exit_code == 2


def test_the_report_says_that_the_surface_was_inferred_and_from_what():
    report = check(CALLS_STEP, {"vllm/engine.py": ENGINE}, {})
    assert report.notes == ("the surface (2 symbols) was inferred from the source of plug 0.1",)
    assert [r.label for r in report.releases] == ["1", "2"]


# --- calls that the plugin makes -----------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("step(self, tokens, wait=True)", "step(self, tokens, wait=True, fast=False)"),
        ("step(self, tokens, wait=True)", "step(self, tokens, *, wait=True, **more)"),
        ("step(self, tokens, wait=True)", "step(self, batch, wait=True)"),
        ("step(self, tokens, wait=True)", "step(self, tokens: list, wait: bool = True) -> list"),
    ],
)
def test_a_change_that_the_plugins_call_survives_is_no_drift(old: str, new: str):
    assert drift(check(CALLS_STEP, *changed(old, new))) == []


@pytest.mark.parametrize(
    ("new", "says"),
    [
        ("step(self, tokens)", "wait"),
        ("step(self, tokens, blocking=True)", "wait"),
        ("step(self, tokens, flag, wait=True)", "flag"),
        ("step(self, tokens, wait=True, *, flag)", "flag"),
    ],
)
def test_a_change_that_breaks_the_plugins_call_is_a_changed_shape(new: str, says: str):
    finding = only(check(CALLS_STEP, *changed("step(self, tokens, wait=True)", new)))
    assert (finding.verdict, finding.severity) == (Verdict.CHANGED_SHAPE, Severity.ERROR)
    assert finding.symbol == "vllm.engine:Engine.step"
    assert says in finding.message
    assert finding.old is not None
    assert finding.new is not None


def test_a_plugin_with_a_call_for_each_release_is_not_broken_by_the_other_one():
    plugin = """
        from vllm.engine import Engine
        def use_1(engine: Engine): engine.step([1], wait=False)
        def use_2(engine: Engine): engine.step([1], blocking=False)
        """
    report = check(plugin, *changed("tokens, wait=True):", "tokens, blocking=True):"))
    assert drift(report) == []


def test_a_decorator_that_loses_a_parameter_which_the_plugin_does_not_pass_is_no_drift():
    plugin = "from vllm.wrap import wrap\n@wrap\nclass Mine: ...\n"
    old = {"vllm/wrap.py": "def wrap(cls=None, *, eager=False, more=None): ...\n"}
    new = {"vllm/wrap.py": "def wrap(cls=None, *, eager=False): ...\n"}
    assert drift(check(plugin, old, new)) == []


def test_a_module_of_the_plugin_that_cannot_be_parsed_is_named():
    report = check("from vllm.engine import run\nrun(None, []\n", {"vllm/engine.py": ENGINE}, {})
    assert report.exit_code == 2
    assert any("plug/__init__.py" in note for note in report.notes)


def test_arguments_by_position_that_swap_places_are_a_changed_shape():
    plugin = CALLS_STEP.replace("[1], wait=False", "[1], False")
    finding = only(check(plugin, *changed("tokens, wait=True):", "wait, tokens=()):")))
    assert finding.verdict is Verdict.CHANGED_SHAPE
    assert "argument 1 was tokens and is wait now" in finding.message


def test_a_removed_method_is_drift_and_a_moved_one_says_where():
    removed = check(CALLS_STEP, *changed("def step(", "def advance_now("))
    assert only(removed).verdict in (Verdict.REMOVED, Verdict.MOVED)
    new = {
        "vllm/engine.py": "from vllm.core import Engine\n",
        "vllm/core.py": ENGINE,
    }
    assert drift(check(CALLS_STEP, {"vllm/engine.py": ENGINE}, new)) == []


def test_a_method_with_a_trivial_body_is_not_found_in_another_of_that_body():
    old, new = changed("def close(self):\n            pass", "def fresh(self):\n            pass")
    plugin = CALLS_STEP.replace("step([1], wait=False)", "close()")
    assert only(check(plugin, old, new)).verdict is Verdict.REMOVED


def test_a_base_of_another_name_is_no_drift_while_the_members_are_there():
    base = "class Base:\n    def close(self): ...\n"
    plugin = "from vllm.engine import Engine\nclass Mine(Engine):\n    def close(self): ...\n"
    old = {"vllm/engine.py": base + "class Engine(Base): ...\n"}
    new = {"vllm/engine.py": old["vllm/engine.py"].replace("Base", "Root")}
    assert drift(check(plugin, old, new)) == []


def test_a_method_that_moves_to_a_base_is_no_drift():
    new = ENGINE.replace("class Engine:", "class Base:").replace(
        "    def close(self):\n", "class Engine(Base):\n        def close(self):\n"
    )
    report = check(CALLS_STEP, {"vllm/engine.py": ENGINE}, {"vllm/engine.py": new})
    assert drift(report) == []


# --- what vLLM asks of the plugin's code ---------------------------------------------------


def test_a_new_argument_that_a_caller_passes_is_a_new_demand_on_an_override():
    old, new = changed("step(self, tokens, wait=True)", "step(self, tokens, wait=True, fast=False)")
    new["vllm/engine.py"] = new["vllm/engine.py"].replace(
        "engine.step(tokens)", "engine.step(tokens, fast=True)"
    )
    finding = only(check(OVERRIDES_STEP, old, new))
    assert finding.verdict is Verdict.NEW_DEMAND
    assert "fast" in finding.message
    assert finding.new is not None
    assert new["vllm/engine.py"].splitlines()[finding.new.line - 1].strip() == (
        "return engine.step(tokens, fast=True)"
    )


def test_a_new_argument_that_nobody_passes_is_no_demand():
    old, new = changed("step(self, tokens, wait=True)", "step(self, tokens, wait=True, fast=False)")
    assert drift(check(OVERRIDES_STEP, old, new)) == []


def test_an_override_that_takes_anything_meets_every_demand():
    plugin = OVERRIDES_STEP.replace("tokens, wait=True", "tokens, **more")
    old, new = changed("step(self, tokens, wait=True)", "step(self, tokens, wait=True, fast=False)")
    new["vllm/engine.py"] = new["vllm/engine.py"].replace(
        "engine.step(tokens)", "engine.step(tokens, fast=True)"
    )
    assert drift(check(plugin, old, new)) == []


def test_a_caller_of_a_method_of_that_name_on_another_class_is_no_demand():
    other = """
        class Other:
            def step(self, tokens, fast): ...
        def elsewhere(other: Other, thing):
            other.step([], fast=True)
            thing.step([], fast=True)
        """
    old, new = changed("step(self, tokens, wait=True)", "step(self, tokens, wait=True, fast=False)")
    report = check(OVERRIDES_STEP, {**old, "vllm/other.py": other}, new)
    assert drift(report) == []


def test_a_sibling_class_that_calls_its_own_method_asks_nothing_of_the_override():
    other = """
        from vllm.engine import Engine
        class Sibling(Engine):
            def go(self): self.step([], fast=True)
            def step(self, tokens, fast): ...
        """
    old, new = changed("step(self, tokens, wait=True)", "step(self, tokens, wait=True, fast=False)")
    report = check(OVERRIDES_STEP, old, {**new, "vllm/other.py": other})
    assert drift(report) == []


def test_calls_that_ask_the_same_are_one_finding_with_every_place_in_the_detail():
    old, new = changed("step(self, tokens, wait=True)", "step(self, tokens, wait=True, fast=False)")
    new["vllm/engine.py"] = new["vllm/engine.py"].replace(
        "engine.step(tokens)", "engine.step(tokens, fast=True) or engine.step([], fast=True)"
    )
    finding = only(check(PATCHES_STEP, old, new))
    assert finding.verdict is Verdict.NEW_DEMAND
    assert finding.detail.count("vllm/engine.py:") == 2


def test_a_caller_that_no_longer_passes_what_the_patch_needs_is_a_changed_caller():
    old, new = changed("step(self, tokens, wait=True)", "step(self, wait=True)")
    new["vllm/engine.py"] = new["vllm/engine.py"].replace("engine.step(tokens)", "engine.step()")
    verdicts = {v for v, _ in drift(check(PATCHES_STEP, old, new))}
    assert Verdict.CALLER_CHANGED.value in verdicts


def test_a_new_required_parameter_that_an_override_lacks_is_a_changed_shape():
    old, new = changed("step(self, tokens, wait=True)", "step(self, tokens, budget, wait=True)")
    new["vllm/engine.py"] = new["vllm/engine.py"].replace("engine.step(tokens)", "None")
    plugin = OVERRIDES_STEP.replace("return super().step(tokens)", "return tokens")
    finding = only(check(plugin, old, new))
    assert finding.verdict is Verdict.CHANGED_SHAPE
    assert "budget is required now" in finding.message


def test_a_new_abstract_method_that_the_subclass_lacks_is_a_new_demand():
    old, new = changed(
        "def close(self):",
        "@abstractmethod\n        def drain(self): ...\n        def close(self):",
    )
    finding = only(check(OVERRIDES_STEP, old, new))
    assert finding.verdict is Verdict.NEW_DEMAND
    assert "drain" in finding.message
    body = "return super().step(tokens)"
    plugin = OVERRIDES_STEP.replace(body, f"{body}\n        def drain(self): ...")
    assert drift(check(plugin, old, new)) == []


# --- construction --------------------------------------------------------------------------

CONFIG = """
    from dataclasses import dataclass, field
    @dataclass
    class Config:
        name: str
        ranks: int = 1
        tags: list = field(default_factory=list)
        cached: int = field(init=False, default=0)
    """
CONSTRUCTS = """
    from vllm.config import Config
    config = Config("a", tags=[])
    """


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ranks: int = 1", "ranks: int = 1\n        depth: int = 0"),
        ("tags: list = field(default_factory=list)", "tags: list | None = None"),
        ("ranks: int = 1", "ranks: int = 2"),
        ("cached: int = field(init=False, default=0)", ""),
    ],
)
def test_a_changed_field_that_the_plugin_does_not_feel_is_no_drift(old: str, new: str):
    report = check(
        CONSTRUCTS, {"vllm/config.py": CONFIG}, {"vllm/config.py": CONFIG.replace(old, new)}
    )
    assert drift(report) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("name: str", "name: str\n        size: int", "size"),
        ("tags: list = field(default_factory=list)", "", "tags"),
        ("tags: list = field(", "labels: list = field(", "tags"),
        ("@dataclass", "@dataclass(kw_only=True)", "positional"),
    ],
)
def test_a_changed_field_that_breaks_a_construction_is_a_changed_shape(
    old: str, new: str, says: str
):
    report = check(
        CONSTRUCTS, {"vllm/config.py": CONFIG}, {"vllm/config.py": CONFIG.replace(old, new)}
    )
    finding = only(report)
    assert (finding.verdict, finding.symbol) == (Verdict.CHANGED_SHAPE, "vllm.config:Config")
    assert says in finding.message


def test_a_field_that_an_inherited_class_adds_is_part_of_the_constructor():
    base = "from dataclasses import dataclass\n@dataclass\nclass Base:\n    size: int = 0\n"
    config = "from dataclasses import dataclass\nfrom vllm.base import Base\n@dataclass\n"
    config += "class Config(Base):\n    name: str = ''\n"
    plugin = "from vllm.config import Config\nConfig(size=1, name='a')\n"
    old = {"vllm/base.py": base, "vllm/config.py": config}
    new = {"vllm/base.py": base.replace("size", "width")}
    assert "size" in only(check(plugin, old, new)).message


# --- attributes, names, guards -------------------------------------------------------------


def test_a_field_that_goes_away_is_drift_for_a_plugin_that_reads_it():
    plugin = "from vllm.config import Config\ndef use(config: Config): return config.ranks\n"
    report = check(
        plugin,
        {"vllm/config.py": CONFIG},
        {"vllm/config.py": CONFIG.replace("ranks", "world_size")},
    )
    assert {v for v, _ in drift(report)} <= {"removed", "moved", "changed-shape", "mismatch"}
    assert drift(report)


def test_what_the_plugin_copes_without_is_no_drift():
    plugin = """
        try:
            from vllm.engine import run
        except ImportError:
            run = None
        """
    old, new = changed("def run(", "def run_all(")
    assert drift(check(plugin, old, new)) == []


def test_what_was_wrong_before_is_told_apart():
    plugin = "from vllm.engine import gone\ngone()\n"
    report = check(plugin, {"vllm/engine.py": ENGINE}, {})
    assert [f.symbol for f in report.preexisting] == ["vllm.engine:gone"]
    assert report.drift == ()


def test_a_constant_computed_at_run_time_is_judged_by_its_existence():
    plugin = "from vllm.log import logger\n"
    old = {"vllm/log.py": "import logging\nlogger = logging.getLogger('vllm')\n"}
    assert check(plugin, old, {}).exit_code == 0
    gone = check(plugin, old, {"vllm/log.py": "import logging\n"})
    assert [v for v, _ in drift(gone)] == ["removed"]


def test_a_class_found_by_its_path_is_still_read_where_the_plugin_rebinds_it():
    plugin = """
        import vllm.engine
        class Mine(vllm.engine.Engine): ...
        vllm.engine.Engine = Mine
        """
    old = {"vllm/engine.py": ENGINE, "vllm/registry.py": 'ENGINE = "vllm.engine.Engine"\n'}
    assert drift(check(plugin, old, {})) == []
