"""The check of a surface against source and memory, kind by kind, on a package made up for it."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drafter_compat.check import Report, Result, SurfaceMismatch, check_live, check_surface
from drafter_compat.patch import Patch
from drafter_compat.surface import Surface, Symbol, parse_surface

GATE = """
    def has_extra() -> bool:
        return False

    class Helper:
        pass
    """

RUNNER = '''
    from typing import TYPE_CHECKING, Literal

    from lib.gate import (
        Helper,
        has_extra,  # (a comment with brackets)
    )
    from lib.drafter import Drafter

    if TYPE_CHECKING:
        from lib.drafter import OnlyForTypes

    GROUP = "lib.plugins"
    INNER = Literal["b", "c"]
    METHODS = Literal["a", INNER]

    class Base:
        inherited: int = 0

        def close(self): ...

    class Runner(Base):
        """
        class Runner:
            def decoy(self): ...
        """

        eager: bool = False
        depth: int

        def __init__(self, config, *, device="cpu"):
            self.config = config
            self.steps: int = 0
            self.left, self.right = 1, 2
            if has_extra():
                self.drafter = Drafter(self.config, device=device)

        @property
        def size(self):
            return 1

        @staticmethod
        def plain(a, b=(1, 2)): ...

        async def later(self): ...

        def step(self, batch):
            def step(inner): ...

            other = self.other.propose(1)
            if batch:
                assert isinstance(self.drafter, Drafter)
                drafts = self.drafter.propose(batch, mapping=batch.map)
            elif other:
                assert isinstance(self.drafter, Helper)
                drafts = self.drafter.propose(1, 2, 3)
            return self.drafter.finish(drafts)

        def lazy(self):
            from lib.gate import has_extra

            return has_extra()
    '''

DRAFTER = """
    class Drafter:
        def propose(self, batch, mapping=None): ...
    """

LOADER = """
    def load(): ...

    def start():
        load()

    class App:
        def run(self):
            from lib.loader import load
            load()
    """


@pytest.fixture
def root(importable: Callable[..., None], tmp_path: Path) -> Path:
    importable("lib", gate=GATE, runner=RUNNER, drafter=DRAFTER, loader=LOADER)
    return tmp_path / "lib"


def surface_of(*symbols: str, versions: str = ">=1,<3") -> Surface:
    """A surface of symbols written as the lines of their tables, 'id' and 'why' added."""
    head = f'schema = 1\nplugin = "my-plugin"\npackage = "lib"\nversions = "{versions}"\n'
    tables = "".join(
        f'[[symbol]]\nid = "s{place}"\nwhy = "do its work"\n{symbol}\n'
        for place, symbol in enumerate(symbols)
    )
    return parse_surface(head + tables)


def check(symbol: str, root: Path) -> Result:
    report = check_surface(surface_of(symbol), version="2.0", root=root)
    claim, result = report
    assert claim.kind == "version"
    return result


FROM_IMPORT = (
    'kind = "from-import"\nmodule = "lib.runner"\nname = "has_extra"\nsource = "lib.gate"\n'
)
REPLACED = (
    'kind = "replaced-class"\nmodule = "lib.runner"\nname = "Drafter"\nsource = "lib.drafter"\n'
)
CONSTRUCTED = 'kind = "constructor-call"\nmodule = "lib.runner"\nname = "Drafter"\n'
CALLED = 'kind = "method-call"\nmodule = "lib.runner"\nfunction = "Runner.step"\n'
ATTRIBUTES = 'kind = "attributes"\nmodule = "lib.runner"\nname = "Runner"\n'
FUNCTION = 'kind = "function"\nmodule = "lib.runner"\n'
CLASS = 'kind = "class"\nmodule = "lib.runner"\nname = "Runner"\n'
CONSTANT = 'kind = "constant"\nmodule = "lib.runner"\n'
SITES = 'kind = "call-sites"\ncallee = "lib.loader:load"\n'
ANCHOR = 'kind = "anchor"\nmodule = "lib.runner"\n'
GROUP = 'kind = "entry-point-group"\nmodule = "lib.runner"\nname = "GROUP"\n'


@pytest.mark.parametrize(
    "symbol",
    [
        FROM_IMPORT,
        FROM_IMPORT + 'read_in = ["Runner.__init__"]',
        FROM_IMPORT + 'read_in = ["Runner.lazy"]',
        REPLACED,
        REPLACED + 'isinstance_in = ["Runner.step"]',
        CONSTRUCTED
        + 'function = "Runner.__init__"\nargs = ["self.config"]\nkeywords = {device = "device"}',
        CALLED
        + 'name = "Drafter"\nmethod = "propose"\nargs = ["batch"]\n'
        + 'keywords = {mapping = "batch.map"}',
        CALLED + 'name = "Helper"\nmethod = "propose"\nargs = ["1", "2", "3"]',
        CALLED + 'value = "self.other"\nmethod = "propose"\nargs = ["1"]',
        CALLED + 'value = "self . drafter"\nmethod = "finish"\nargs = ["drafts"]',
        ATTRIBUTES + 'reads = ["config", "steps", "left", "right", "size", "eager", "depth"]',
        ATTRIBUTES + 'reads = ["inherited", "close"]',
        FUNCTION
        + 'name = "Runner.__init__"\nsignature = "(self, config: dict, *, device=\'cpu\') -> None"',
        FUNCTION
        + 'name = "Runner.plain"\nsignature = "(a, b=(1,2))"\ndecorators = ["staticmethod"]',
        FUNCTION + 'name = "Runner.later"\nasync = true',
        FUNCTION + 'name = "Runner.step"\nasync = false\nsignature = "(self, batch)"',
        CLASS
        + 'bases = ["Base"]\nmethods = ["step", "close"]\nfields = {eager = "False", depth = ""}',
        CONSTANT + 'name = "GROUP"\nvalue = "lib.plugins"',
        CONSTANT + 'name = "METHODS"\ncontains = ["a", "c"]',
        CONSTANT + 'name = "Helper"',
        SITES + 'sites = ["lib.loader:start"]',
        SITES + 'match = "exactly"\nsites = ["lib.loader:start", "lib.loader:App.run"]',
        SITES + 'match = "all"\nsites = ["lib.loader:start", "lib.loader:App.run", "lib.gone:f"]',
        ANCHOR + 'text = "self.drafter.finish(drafts)"',
        ANCHOR + 'text = "return 1"\nfunction = "Runner.size"',
        GROUP + 'group = "lib.plugins"',
    ],
)
def test_a_symbol_that_is_as_expected_is_ok(symbol: str, root: Path) -> None:
    result = check(symbol, root)
    assert result.ok, result
    assert result.way_out == ""


@pytest.mark.parametrize(
    ("symbol", "found"),
    [
        (FROM_IMPORT.replace("lib.runner", "lib.gone"), "there is no module lib.gone"),
        (FROM_IMPORT.replace("has_extra", "has_other"), "lib.gate defines no has_other"),
        (FROM_IMPORT.replace('"lib.gate"', '"lib.drafter"'), "lib.drafter defines no has_extra"),
        (
            FROM_IMPORT.replace('"lib.runner"', '"lib.loader"'),
            "lib.loader does not from-import has_extra",
        ),
        (FROM_IMPORT + 'read_in = ["Runner.step"]', "step does not read has_extra"),
        (FROM_IMPORT + 'read_in = ["Runner.gone"]', "lib.runner defines no Runner.gone"),
        (REPLACED.replace('"Drafter"', '"Gone"'), "lib.drafter defines no Gone"),
        (REPLACED + 'isinstance_in = ["Runner.lazy"]', "does not test isinstance(..., Drafter)"),
        (CONSTRUCTED + 'function = "Runner.step"', "Runner.step does not call Drafter"),
        (
            CONSTRUCTED + 'function = "Runner.__init__"\nargs = ["self.config"]',
            "Drafter(self.config, device=device)",
        ),
        (
            CALLED + 'name = "Drafter"\nmethod = "propose"\nargs = ["batch"]',
            "Drafter.propose(batch, mapping=batch.map)",
        ),
        (
            CALLED + 'name = "Drafter"\nmethod = "finish"\nargs = ["drafts"]',
            "does not call Drafter.finish",
        ),
        (ATTRIBUTES + 'reads = ["config", "decoy", "gone"]', "Runner has no decoy, gone"),
        (ATTRIBUTES.replace("Runner", "Gone") + 'reads = ["x"]', "lib.runner defines no Gone"),
        (
            FUNCTION + 'name = "Runner.step"\nsignature = "(self, other)"',
            "Runner.step(self, batch)",
        ),
        (
            FUNCTION + 'name = "Runner.__init__"\nsignature = "(self, config, *, device=\'cuda\')"',
            "device='cpu'",
        ),
        (FUNCTION + 'name = "Runner.later"\nasync = false', "Runner.later is async"),
        (FUNCTION + 'name = "Runner.step"\nasync = true', "Runner.step is not async"),
        (FUNCTION + 'name = "Runner.size"\ndecorators = []', "its decorators are property"),
        (FUNCTION + 'name = "Runner.decoy"', "lib.runner defines no Runner.decoy"),
        (FUNCTION + 'name = "step"', "lib.runner defines no step"),
        (FUNCTION + 'name = "Runner"', "Runner is a class"),
        (CLASS + "bases = []", "its bases are Base"),
        (CLASS + 'methods = ["gone"]', "Runner has no method gone"),
        (CLASS + 'fields = {eager = "True"}', "the default of eager is False"),
        (CLASS + 'fields = {depth = "1"}', "the default of depth is no default"),
        (CLASS + 'fields = {gone = ""}', "Runner has no field gone"),
        (CONSTANT + 'name = "GROUP"\nvalue = "other"', "'lib.plugins'"),
        (CONSTANT + 'name = "METHODS"\ncontains = ["a", "z"]', "METHODS lacks 'z'"),
        (CONSTANT + 'name = "GONE"', "GONE is not assigned in lib.runner"),
        (
            SITES + 'sites = ["lib.loader:start", "lib.gate:has_extra"]',
            "no longer called by lib.gate:has_extra",
        ),
        (
            SITES + 'match = "exactly"\nsites = ["lib.loader:start"]',
            "also called by lib.loader:App.run",
        ),
        (
            SITES + 'match = "all"\nsites = ["lib.loader:start"]',
            "also called by lib.loader:App.run",
        ),
        (ANCHOR + 'text = "self.drafter.propose("', "it occurs 2 times"),
        (ANCHOR + 'text = "nowhere"', "it occurs 0 times"),
        (GROUP + 'group = "other"', "'lib.plugins'"),
        (
            FROM_IMPORT.replace("has_extra", "OnlyForTypes").replace("lib.gate", "lib.drafter"),
            "defines no OnlyForTypes",
        ),
    ],
)
def test_a_symbol_that_is_not_as_expected_says_what_was_found(
    symbol: str, found: str, root: Path
) -> None:
    result = check(symbol, root)
    assert not result.ok
    assert found in result.found
    assert "pip install" in result.way_out


def test_a_result_says_where(root: Path) -> None:
    expected = (root / "runner.py").read_text().splitlines().index('GROUP = "lib.plugins"') + 1
    assert check(GROUP + 'group = "other"', root).location == f"lib/runner.py:{expected}"


def test_an_import_for_type_checkers_only_binds_nothing(
    importable: Callable[..., None], tmp_path: Path
) -> None:
    importable(
        "lib",
        gate="def has_extra(): ...",
        runner="""
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                from lib.gate import has_extra
            """,
    )
    result = check(FROM_IMPORT, tmp_path / "lib")
    assert result.found == "lib.runner does not from-import has_extra"


@pytest.mark.parametrize(
    "runner",
    [
        "from .gate import has_extra",
        "from lib.gate import *",
        "try:\n    from lib.gate import has_extra\nexcept ImportError:\n    has_extra = None\n",
        "from lib.gate import \\\n    has_extra\n",
    ],
)
def test_imports_are_found_in_every_spelling(
    runner: str, importable: Callable[..., None], tmp_path: Path
) -> None:
    importable("lib", gate="def has_extra(): ...", runner=runner)
    assert check(FROM_IMPORT, tmp_path / "lib").ok


def test_an_import_under_another_name_is_a_mismatch(
    importable: Callable[..., None], tmp_path: Path
) -> None:
    importable("lib", gate="def has_extra(): ...", runner="from lib.gate import has_extra as extra")
    assert not check(FROM_IMPORT, tmp_path / "lib").ok


def test_the_name_of_another_module_is_a_mismatch_that_names_it(
    importable: Callable[..., None], tmp_path: Path
) -> None:
    importable("lib", gate="def has_extra(): ...", runner="from lib.moved import has_extra")
    assert check(FROM_IMPORT, tmp_path / "lib").found == "has_extra is has_extra of lib.moved"


def test_of_two_definitions_the_last_counts(
    importable: Callable[..., None], tmp_path: Path
) -> None:
    importable("lib", runner="def f(a): ...\nif True:\n    def f(b): ...\n")
    assert check(FUNCTION + 'name = "f"\nsignature = "(b)"', tmp_path / "lib").ok


def test_source_that_is_not_python_is_a_mismatch_and_no_crash(
    importable: Callable[..., None], tmp_path: Path
) -> None:
    importable("lib", runner="def f(:\n")
    assert not check(FUNCTION + 'name = "f"', tmp_path / "lib").ok


def test_what_a_plugin_copes_without_may_be_absent_but_not_different(root: Path) -> None:
    absent = check(FUNCTION + 'name = "gone"\noptional = true', root)
    assert absent.ok
    assert "my-plugin copes without it" in absent.found
    assert not check(FUNCTION + 'name = "Runner.step"\noptional = true\nsignature = "()"', root).ok


def test_an_optional_text_may_be_gone_but_not_be_there_twice(root: Path) -> None:
    gone = check(ANCHOR + 'text = "nowhere"\noptional = true', root)
    assert gone.ok
    assert "it occurs 0 times; my-plugin copes without it" in gone.found
    assert not check(ANCHOR + 'text = "def "\noptional = true', root).ok


def test_the_check_imports_nothing(root: Path) -> None:
    (root / "runner.py").write_text("raise SystemExit('was imported')\n")
    check(FROM_IMPORT, root)
    assert not [name for name in sys.modules if name.partition(".")[0] == "lib"]


def test_a_version_outside_of_the_claim_is_a_mismatch_of_its_own(root: Path) -> None:
    surface = surface_of(FROM_IMPORT)
    report = check_surface(surface, version="3.0", root=root)
    assert [(result.id, result.ok) for result in report] == [("version", False), ("s0", True)]
    assert check_surface(surface, version="3.0", root=root, accept_unclaimed=True).ok


def test_the_way_out_notices_that_two_versions_are_mixed(root: Path) -> None:
    surface = surface_of(
        CALLED + 'name = "Drafter"\nmethod = "propose"\nargs = ["batch"]\nversions = ">=2"',
        versions=">=1",
    )
    old = surface_of(
        CALLED
        + 'name = "Drafter"\nmethod = "propose"\nargs = ["batch"]\n'
        + 'keywords = {mapping = "batch.map"}\n'
        + 'versions = "<2"'
    )
    both = Surface("my-plugin", "lib", ">=1", (*old.symbols, *surface.symbols))
    wrong = check_surface(both, version="2.1", root=root).mismatches
    assert len(wrong) == 1
    assert (
        "has the shape of lib <2, its metadata says 2.1: two versions are mixed" in wrong[0].way_out
    )


def mismatch(root: Path) -> SurfaceMismatch:
    report = check_surface(
        surface_of(GROUP + 'group = "other"', FROM_IMPORT, ANCHOR + 'text = "nowhere"'),
        version="2.0",
        root=root,
    )
    with pytest.raises(SurfaceMismatch) as caught:
        report.raise_for_mismatch(turn_off="MY_PLUGIN=0")
    return caught.value


def test_the_error_explains_every_wrong_symbol_and_only_those(root: Path) -> None:
    text = str(mismatch(root))
    assert "my-plugin does not fit this lib 2.0: 2 of 4 symbols" in text
    assert "s0 (entry-point-group)" in text
    assert "expected   lib.runner.GROUP = 'other'" in text
    assert "found      'lib.plugins'" in text
    assert "s2 (anchor)" in text
    assert "s1" not in text
    assert "To start lib without my-plugin: MY_PLUGIN=0" in text


def test_the_error_survives_the_way_to_the_parent_process(root: Path) -> None:
    error = mismatch(root)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.report == error.report


def test_a_report_that_is_ok_raises_nothing_and_says_so(root: Path) -> None:
    report = check_surface(surface_of(FROM_IMPORT), version="2.0", root=root)
    report.raise_for_mismatch()
    assert report.explain() == "my-plugin: all 2 symbols of lib 2.0 are as expected"


# --- in memory ------------------------------------------------------------------------------


def live(*symbols: str) -> Report:
    return check_live(surface_of(*symbols), version="2.0")


def test_modules_that_are_not_imported_give_no_result(root: Path) -> None:
    assert live(FROM_IMPORT, REPLACED).results == ()


def test_imported_modules_that_are_as_expected_are_ok(root: Path) -> None:
    importlib.import_module("lib.runner")
    importlib.import_module("lib.loader")
    report = live(
        FROM_IMPORT + 'read_in = ["Runner.__init__"]',
        REPLACED,
        CONSTRUCTED + 'function = "Runner.__init__"',
        CALLED + 'name = "Drafter"\nmethod = "propose"',
        ATTRIBUTES + 'reads = ["config"]',
        FUNCTION + 'name = "Runner.step"',
        CLASS + 'methods = ["close"]',
        CONSTANT + 'name = "GROUP"\nvalue = "lib.plugins"',
        SITES + 'sites = ["lib.loader:start"]',
        GROUP + 'group = "lib.plugins"',
    )
    assert [(result.id, result.found) for result in report.mismatches] == []
    assert len(report.results) == 10


def test_a_class_deleted_in_memory_is_found(root: Path) -> None:
    drafter = importlib.import_module("lib.drafter")
    del drafter.Drafter
    assert "lib.drafter has no Drafter" in live(REPLACED).results[0].found


def test_a_class_renamed_in_memory_is_found(root: Path) -> None:
    runner = importlib.import_module("lib.runner")
    runner.OldRunner = runner.Runner
    del runner.Runner
    assert "lib.runner has no Runner" in live(ATTRIBUTES + 'reads = ["x"]').results[0].found


def test_a_class_that_another_plugin_has_replaced_is_found(root: Path) -> None:
    runner = importlib.import_module("lib.runner")

    class Foreign:
        pass

    runner.Drafter = Foreign
    result = live(REPLACED).results[0]
    assert not result.ok
    assert "is not lib.drafter.Drafter" in result.found
    assert "another plugin" in result.way_out


def test_a_class_replaced_where_it_is_defined_is_found(root: Path) -> None:
    drafter = importlib.import_module("lib.drafter")
    drafter.Drafter = type("Drafter", (), {"__module__": "foreign"})
    assert "is a class of foreign" in live(REPLACED).results[0].found


def test_a_from_imported_name_deleted_in_memory_is_found(root: Path) -> None:
    runner = importlib.import_module("lib.runner")
    del runner.has_extra
    report = live(FROM_IMPORT + 'read_in = ["Runner.__init__"]')
    assert "lib.runner has no has_extra" in report.results[0].found


def test_a_name_that_a_function_imports_for_itself_need_not_be_in_the_module(root: Path) -> None:
    runner = importlib.import_module("lib.runner")
    del runner.has_extra
    assert live(FROM_IMPORT + 'read_in = ["Runner.lazy"]').ok


def test_what_our_own_patches_changed_is_judged_by_what_was_there_before(root: Path) -> None:
    importlib.import_module("lib.runner")

    class Ours:
        pass

    class Swap(Patch, target="lib.drafter"):
        Drafter = Ours

    Swap.apply()
    assert live(REPLACED).ok
    Swap.revert()


def test_a_module_imported_after_our_patch_is_judged_so_too(root: Path) -> None:
    importlib.import_module("lib.drafter")

    class Ours:
        pass

    class Swap(Patch, target="lib.drafter"):
        Drafter = Ours

    Swap.apply()
    assert importlib.import_module("lib.runner").Drafter is Ours
    assert live(REPLACED).ok
    Swap.revert()


def test_reports_can_be_added(root: Path) -> None:
    importlib.import_module("lib.runner")
    surface = surface_of(FROM_IMPORT)
    both = check_surface(surface, version="2.0", root=root) + check_live(surface, version="2.0")
    assert [result.id for result in both] == ["version", "s0", "s0"]
    assert isinstance(next(iter(surface)), Symbol)
