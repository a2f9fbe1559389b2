"""What `infer` writes about a plugin. The package and the plugins here are made up."""

from __future__ import annotations

import textwrap

import pytest

from drafter_compat.surface import (
    Anchor,
    Attributes,
    ClassShape,
    Constant,
    EntryPointGroup,
    FromImport,
    FunctionShape,
    ReplacedClass,
    Surface,
    Symbol,
    dump_surface,
    parse_surface,
)
from vllm_drift.infer import infer_surface
from vllm_drift.tree import SourceTree

PACKAGE = {
    "vllm/__init__.py": """
        from typing import TYPE_CHECKING
        LAZY = {"Engine": ".engine:Engine"}
        if TYPE_CHECKING:
            from vllm.engine import Engine
        else:
            def __getattr__(name):
                import importlib
                module, _, attribute = LAZY[name].partition(":")
                return getattr(importlib.import_module(module, __package__), attribute)
        """,
    "vllm/config.py": """
        from dataclasses import dataclass, field
        @dataclass
        class ParallelConfig:
            ranks: int = 1
        @dataclass
        class Config:
            parallel: ParallelConfig = field(default_factory=ParallelConfig)
            extra: "ParallelConfig | None" = None
            name: str = ""
        """,
    "vllm/engine.py": """
        from vllm.config import Config
        from vllm.runner import Runner, make_runner
        STOP = object()
        class Base:
            def close(self): ...
            def describe(self, deep=False): ...
        class Engine(Base):
            limit = 3
            def __init__(self, config: Config):
                self.config = config
                self.runner = Runner(config)
                self.pending = []
            def step(self, tokens, *, wait=True):
                assert isinstance(self.runner, Runner)
                return self.runner.run(tokens)
            @classmethod
            def build(cls, config): ...
            @property
            def busy(self) -> bool: ...
        def start():
            return make_runner(1)
        """,
    "vllm/runner.py": """
        class Runner:
            def __init__(self, config): ...
            def run(self, tokens): ...
            def warm(self): ...
        def make_runner(n, fast=False) -> Runner: ...
        def helper(x): ...
        """,
    "vllm/plugins.py": 'GENERAL = "vllm.general_plugins"\n',
}


def tree(files: dict[str, str], package: str, **extras: str) -> SourceTree:
    return SourceTree.from_files(
        {path: textwrap.dedent(text).encode() for path, text in files.items()},
        label="1.0",
        package=package,
        extras=extras,
    )


RELEASE = tree(PACKAGE, "vllm")


def infer(source: str, *, release: SourceTree | None = RELEASE, **more: str) -> Surface:
    files = {"plug/__init__.py": "", "plug/main.py": source}
    files.update({f"plug/{name}.py": text for name, text in more.items()})
    surface = infer_surface(tree(files, "plug"), release)
    assert parse_surface(dump_surface(surface)) == surface
    return surface


def only(surface: Surface, kind: type[Symbol], name: str) -> Symbol:
    found = [s for s in surface if isinstance(s, kind) and getattr(s, "name", None) == name]
    assert len(found) == 1, [s.id for s in surface]
    return found[0]


def names(surface: Surface) -> set[str]:
    return {s.id for s in surface}


# --- patches -------------------------------------------------------------------------------


def function(surface: Surface, name: str) -> FunctionShape:
    found = only(surface, FunctionShape, name)
    assert isinstance(found, FunctionShape)
    return found


def test_an_assignment_onto_a_class_is_a_patch_with_the_signature_it_puts_there():
    found = function(
        infer("""
        from vllm.engine import Engine
        def step(self, tokens, **kwargs): ...
        Engine.step = step
        """),
        "Engine.step",
    )
    assert found.module == "vllm.engine"
    assert found.replacement == "(self, tokens, **kwargs)"
    assert found.replaced_by == "plug.main:step"
    assert found.why == "patched (plug/main.py:4)"


def test_a_patch_inside_a_function_through_a_local_alias_is_found():
    surface = infer("""
        def install():
            import vllm.engine as engine
            cls = engine.Engine
            original = cls.step
            def step(self, *args, **kwargs):
                return original(self, *args, **kwargs)
            cls.step = step
        """)
    found = function(surface, "Engine.step")
    assert found.replacement == "(self, *args, **kwargs)"
    assert found.calls == ("(*args, **kwargs)",)


def test_the_original_kept_in_a_global_by_another_function_is_followed():
    surface = infer("""
        from collections.abc import Callable
        _original: Callable | None = None
        def step(self, tokens):
            assert _original is not None
            return _original(self, tokens, wait=False)
        def register():
            global _original
            from vllm.engine import Engine
            _original = Engine.step
            Engine.step = step
        """)
    assert function(surface, "Engine.step").calls == ("(tokens, wait=False)",)


def test_setattr_with_a_constant_name_is_a_patch():
    surface = infer(
        """
        from vllm.engine import Engine
        from plug.names import STEP
        setattr(Engine, STEP, lambda self, tokens: None)
        """,
        names='STEP = "step"\n',
    )
    assert function(surface, "Engine.step").replacement == "(self, tokens)"


def test_a_helper_that_patches_what_it_is_given_patches_each_target():
    surface = infer("""
        from vllm.engine import Engine
        from vllm.runner import Runner
        def put(target, name, value):
            setattr(target, name, value)
        def step(self, tokens): ...
        def warm(self): ...
        put(Engine, "step", step)
        put(Runner, "warm", warm)
        """)
    assert function(surface, "Engine.step").replacement == "(self, tokens)"
    assert function(surface, "Runner.warm").replacement == "(self)"
    assert "vllm.engine:Engine.warm" not in names(surface)


def test_a_loop_over_classes_patches_each():
    surface = infer("""
        def install():
            from vllm.engine import Engine
            from vllm.runner import Runner
            for cls in (Engine, Runner):
                wrap(cls)
        def wrap(cls):
            original = cls.__init__
            def init(self, config):
                original(self, config)
            cls.__init__ = init
        """)
    assert function(surface, "Engine.__init__").replacement == "(self, config)"
    assert function(surface, "Runner.__init__").replacement == "(self, config)"


def test_a_patch_class_patches_what_its_body_defines_and_keeps_originals():
    surface = infer(
        """
        from vllm.engine import Engine
        from plug.patching import EnginePatch
        class StepPatch(EnginePatch[Engine]):
            _orig_step = Engine.step
            def step(self, tokens):
                self.added()
                return self._orig_step(tokens, wait=self.busy)
            def added(self): ...
        """,
        patching="class EnginePatch:\n    def __class_getitem__(cls, target): ...\n",
    )
    step = function(surface, "Engine.step")
    assert step.replacement == "(self, tokens)"
    assert step.replaced_by == "plug.main:StepPatch.step"
    assert step.calls == ("(tokens, wait=self.busy)",)
    reads = only(surface, Attributes, "Engine")
    assert isinstance(reads, Attributes)
    assert reads.reads == ("busy",)
    assert not any("added" in s.id or "_orig" in s.id for s in surface)


def test_a_patch_class_may_name_its_target_in_a_string():
    surface = infer("""
        from drafter_compat.patch import Patch
        class StepPatch(Patch["vllm.engine:Engine"]):
            def step(self, tokens): ...
        """)
    assert function(surface, "Engine.step").replacement == "(self, tokens)"


def test_a_subscripted_base_that_is_no_patch_patches_nothing():
    surface = infer("""
        from typing import Generic, TypeVar
        from vllm.engine import Engine
        T = TypeVar("T")
        class Box(Generic[T]): ...
        class EngineBox(Box[Engine]):
            def step(self, tokens): ...
        """)
    assert "vllm.engine:Engine.step" not in names(surface)


def test_a_patch_class_on_a_module_rebinds_its_functions():
    surface = infer("""
        import vllm.runner as runner
        from drafter_compat.patch import Patch
        class Functions(Patch[runner]):
            def make_runner(n, fast=True): ...
        """)
    found = function(surface, "make_runner")
    assert found.rebound
    assert found.replacement == "(n, fast=True)"


def test_rebinding_a_from_imported_function_states_who_reads_it_there():
    surface = infer("""
        import vllm.engine, vllm.runner
        def make_runner(n, fast=True): ...
        vllm.engine.make_runner = make_runner
        vllm.runner.make_runner = make_runner
        """)
    found = only(surface, FromImport, "make_runner")
    assert isinstance(found, FromImport)
    assert (found.module, found.source, found.read_in) == ("vllm.engine", "vllm.runner", ("start",))
    assert function(surface, "make_runner").module == "vllm.runner"


def test_a_replaced_class_says_what_the_replacement_provides():
    surface = infer("""
        import vllm.engine
        class Common:
            def run(self, tokens): ...
        class Mine(Common):
            flag = True
            def __init__(self, config):
                self.config = config
        vllm.engine.Runner = Mine
        """)
    found = only(surface, ReplacedClass, "Runner")
    assert isinstance(found, ReplacedClass)
    assert found.source == "vllm.runner"
    assert found.isinstance_in == ("Engine.step",)
    assert dict(found.provides) == {
        "run": "(self, tokens)",
        "config": "",
        "flag": "",
        "__init__": "(self, config)",
    }


def test_a_method_replaced_on_one_object_is_a_patch_without_receiver():
    surface = infer("""
        from vllm.runner import make_runner
        def attach():
            runner = make_runner(1)
            original = runner.run
            def run(tokens, *rest):
                return original(tokens)
            runner.run = run
        """)
    found = function(surface, "Runner.run")
    assert found.replacement == "(self, tokens, *rest)"
    assert found.calls == ("(tokens)",)


def test_a_new_member_put_on_a_class_is_not_the_packages():
    surface = infer("""
        from vllm.engine import Engine
        def fresh(self): return self.fresh_state
        Engine.fresh = fresh
        Engine.fresh_state = 1
        """)
    assert names(surface) == {"vllm.engine:Engine"}


def test_putting_the_original_back_is_no_patch():
    surface = infer("""
        import vllm.runner
        kept = vllm.runner.helper
        vllm.runner.helper = kept
        """)
    assert [(s.kind, s.id) for s in surface] == [("constant", "vllm.runner:helper")]


def test_the_receiver_of_a_replacement_is_an_object_of_the_patched_class():
    surface = infer("""
        from vllm.engine import Engine
        def step(self, tokens):
            self.runner.warm()
            return self.pending
        Engine.step = step
        """)
    assert function(surface, "Runner.warm").module == "vllm.runner"
    reads = only(surface, Attributes, "Engine")
    assert isinstance(reads, Attributes)
    assert set(reads.reads) == {"runner", "pending"}


# --- subclasses ----------------------------------------------------------------------------


def test_a_subclass_states_overrides_super_calls_and_what_it_provides():
    surface = infer("""
        from vllm.engine import Engine
        class Mine(Engine):
            def step(self, tokens, *, wait=True, extra=None):
                super().step(tokens, wait=wait)
                return self.limit
            def fresh(self): ...
        """)
    step = function(surface, "Engine.step")
    assert step.replacement == "(self, tokens, *, wait=True, extra=None)"
    assert step.calls == ("(tokens, wait=wait)",)
    assert "overridden (plug/main.py:4)" in step.why
    shape = only(surface, ClassShape, "Engine")
    assert isinstance(shape, ClassShape)
    assert set(dict(shape.provides)) == {"step", "fresh"}
    reads = only(surface, Attributes, "Engine")
    assert isinstance(reads, Attributes)
    assert reads.reads == ("limit",)


def test_an_inherited_method_is_named_through_the_class_that_the_plugin_uses():
    surface = infer("""
        from vllm.engine import Engine
        class Mine(Engine):
            def close(self): super().close()
        """)
    assert function(surface, "Engine.close").replacement == "(self)"


def test_a_subclass_of_a_subclass_in_the_plugin_overrides_the_packages_class():
    surface = infer("""
        from vllm.engine import Engine
        class Mine(Engine): ...
        class Ours(Mine):
            def step(self, tokens): ...
        """)
    assert function(surface, "Engine.step").replacement == "(self, tokens)"


def test_overrides_that_differ_in_signature_state_none():
    surface = infer("""
        from vllm.engine import Engine
        class One(Engine):
            def step(self, tokens): ...
        class Two(Engine):
            def step(self, tokens, wait): ...
        """)
    assert function(surface, "Engine.step").replacement is None


# --- calls, construction, reads ------------------------------------------------------------


def test_a_constructed_class_carries_the_shapes_of_its_calls_once_each():
    surface = infer("""
        from vllm.config import Config, ParallelConfig
        a = Config(name="a")
        b = Config(name="b")
        c = Config(ParallelConfig(), name="c")
        """)
    shape = only(surface, ClassShape, "Config")
    assert isinstance(shape, ClassShape)
    assert shape.calls == ("(name='a')", "(ParallelConfig(), name='c')")


def test_a_called_function_carries_the_shapes_of_its_calls():
    found = function(
        infer("""
        from vllm import runner
        runner.make_runner(3, fast=True)
        """),
        "make_runner",
    )
    assert found.calls == ("(3, fast=True)",)
    assert found.why == "called (plug/main.py:3)"


def test_fields_of_configuration_objects_are_followed_by_their_annotations():
    surface = infer("""
        from vllm.config import Config
        def size(config: Config) -> int:
            if config.extra is not None:
                return config.extra.ranks
            return config.parallel.ranks
        """)
    config = only(surface, Attributes, "Config")
    parallel = only(surface, Attributes, "ParallelConfig")
    assert isinstance(config, Attributes)
    assert isinstance(parallel, Attributes)
    assert set(config.reads) == {"extra", "parallel"}
    assert parallel.reads == ("ranks",)


def test_what_a_function_returns_is_followed_by_its_annotation():
    surface = infer("""
        from vllm.runner import make_runner
        make_runner(1).run([])
        """)
    assert function(surface, "Runner.run").calls == ("([])",)


def test_attributes_of_unknown_objects_are_left_out():
    surface = infer("""
        from vllm.engine import start
        def use(thing):
            return thing.whatever, start().whatever
        """)
    assert names(surface) == {"vllm.engine:start"}


def test_imports_for_type_checkers_only_are_left_out():
    surface = infer("""
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from vllm.engine import Engine
            from vllm.nowhere import Missing
        """)
    assert names(surface) == set()


def test_a_guarded_import_is_optional_and_an_unguarded_one_is_not():
    surface = infer("""
        try:
            from vllm.runner import Runner
        except ImportError:
            Runner = None
        from vllm.runner import helper
        """)
    assert {s.id: s.optional for s in surface} == {
        "vllm.runner:Runner": True,
        "vllm.runner:helper": False,
    }


def test_what_the_plugin_copes_without_and_the_release_lacks_is_left_out():
    surface = infer("""
        try:
            from vllm.newer import Thing
        except ImportError:
            Thing = None
        """)
    assert names(surface) == set()


def test_attributes_that_the_plugin_copes_without_are_stated_apart():
    surface = infer("""
        from vllm.config import Config
        def use(config: Config):
            return config.parallel, getattr(config, "extra", None)
        """)
    found = {s.id: (s.reads, s.optional) for s in surface if isinstance(s, Attributes)}
    assert found == {
        "vllm.config:Config attributes": (("parallel",), False),
        "vllm.config:Config optional attributes": (("extra",), True),
    }


def test_a_handler_that_raises_guards_nothing():
    surface = infer("""
        try:
            from vllm.runner import helper
        except ImportError as error:
            raise RuntimeError("too old") from error
        """)
    assert not only(surface, Constant, "helper").optional


def test_a_call_behind_a_question_about_the_release_states_no_shape():
    surface = infer("""
        import inspect
        from vllm.runner import make_runner
        if "fast" in inspect.signature(make_runner).parameters:
            make_runner(1, fast=True)
        else:
            make_runner(1)
        """)
    assert isinstance(only(surface, Constant, "make_runner"), Constant)


def test_a_function_that_is_only_imported_is_relied_on_by_name_and_not_by_shape():
    surface = infer("from vllm.runner import helper\n")
    assert [(s.kind, s.id) for s in surface] == [("constant", "vllm.runner:helper")]


def test_a_decorator_is_called_with_what_it_decorates():
    found = function(
        infer("""
        from vllm.runner import helper
        @helper
        class Thing: ...
        """),
        "helper",
    )
    assert found.calls == ("(Thing)",)


def test_hasattr_and_a_default_make_a_read_optional():
    surface = infer("""
        from vllm.config import Config
        def use(config: Config):
            return hasattr(config, "name") and getattr(config, "extra", None)
        """)
    reads = only(surface, Attributes, "Config")
    assert reads.optional


def test_a_name_that_the_release_lacks_stays_in_the_surface():
    surface = infer("""
        from vllm.runner import gone
        gone(1)
        """)
    assert names(surface) == {"vllm.runner:gone"}


def test_a_lazy_name_of_the_package_is_found():
    surface = infer("""
        from vllm import Engine
        Engine.build(None)
        """)
    assert function(surface, "Engine.build").calls == ("(None)",)


def test_a_class_named_by_its_path_in_a_string_is_relied_on():
    surface = infer("""
        def backend():
            return "vllm.engine.Engine"
        """)
    assert names(surface) == {"vllm.engine:Engine"}


def test_constants_and_class_attributes_are_told_apart():
    surface = infer("""
        from vllm.engine import STOP, Engine
        limit = Engine.limit
        """)
    assert isinstance(only(surface, Constant, "STOP"), Constant)
    reads = only(surface, Attributes, "Engine")
    assert isinstance(reads, Attributes)
    assert reads.reads == ("limit",)


# --- text replacement ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        'src = src.replace("tokens)", "tokens, 1)")',
        'assert src.count("tokens)") == 1',
        'assert "tokens)" in src',
        'at = src.index("tokens)")',
    ],
)
def test_text_that_is_looked_for_in_a_functions_source_is_an_anchor(code: str):
    surface = infer(f"""
        import inspect, textwrap
        from vllm.engine import Engine
        src = textwrap.dedent(inspect.getsource(Engine.step))
        {code}
        """)
    anchors = [s for s in surface if isinstance(s, Anchor)]
    assert [(a.module, a.function, a.text) for a in anchors] == [
        ("vllm.engine", "Engine.step", "tokens)")
    ]


def test_anchors_that_a_helper_takes_are_found_with_their_source():
    surface = infer("""
        import inspect
        from vllm.engine import Engine
        ANCHOR = "assert isinstance"
        def swap(source, old, new):
            if source.count(old) != 1:
                raise RuntimeError(old)
            return source.replace(old, new)
        swap(inspect.getsource(Engine.step), ANCHOR, "assert callable")
        """)
    anchors = [s for s in surface if isinstance(s, Anchor)]
    assert [a.text for a in anchors] == ["assert isinstance"]


def test_replacing_text_of_anything_else_is_no_anchor():
    surface = infer("""
        from vllm.engine import Engine
        def tidy(text): return text.replace("a", "b")
        """)
    assert not [s for s in surface if isinstance(s, Anchor)]


# --- the distribution ----------------------------------------------------------------------


def test_distribution_versions_and_entry_points_come_from_the_metadata():
    surface = infer_surface(
        tree(
            {"plug/__init__.py": ""},
            "plug",
            METADATA="Name: my-plugin\nRequires-Dist: torch\nRequires-Dist: vllm<2,>=1.0\n",
            **{"entry_points.txt": "[vllm.general_plugins]\nmine = plug:register\n"},
        ),
        RELEASE,
    )
    assert (surface.plugin, surface.versions) == ("my-plugin", "<2,>=1.0")
    group = next(iter(surface))
    assert isinstance(group, EntryPointGroup)
    assert (group.module, group.name, group.group) == (
        "vllm.plugins",
        "GENERAL",
        "vllm.general_plugins",
    )


def test_distribution_versions_and_entry_points_come_from_pyproject():
    pyproject = """
        [project]
        name = "my-plugin"
        dependencies = ["vllm==1.0"]
        [project.entry-points."vllm.general_plugins"]
        mine = "plug:register"
        """
    surface = infer_surface(
        tree({"plug.py": ""}, "plug", **{"pyproject.toml": textwrap.dedent(pyproject)}), None
    )
    assert (surface.plugin, surface.versions, len(surface)) == ("my-plugin", "==1.0", 1)


def test_the_plugins_own_tests_are_not_read():
    files = {"plug/__init__.py": "", "plug/tests/test_x.py": "from vllm.engine import Engine\n"}
    assert len(infer_surface(tree(files, "plug"), RELEASE)) == 0


# --- without a release ---------------------------------------------------------------------


def test_without_a_release_only_what_the_plugin_proves_is_written():
    surface = infer(
        """
        from vllm.engine import STOP, Engine
        from vllm.runner import helper
        original = Engine.step
        def step(self, tokens): return original(self, tokens)
        Engine.step = step
        Engine.fresh = lambda self: None
        helper(1)
        """,
        release=None,
    )
    assert {(s.kind, s.id) for s in surface} == {
        ("constant", "vllm.engine:STOP"),
        ("class", "vllm.engine:Engine"),
        ("function", "vllm.runner:helper"),
        ("function", "vllm.engine:Engine.step"),
    }
