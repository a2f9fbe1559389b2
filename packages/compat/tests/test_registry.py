"""Ordered sets of patches: when they apply, what is skipped and why, what a failure leaves."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from drafter_compat import registry as registry_module
from drafter_compat.patch import Patch, PatchConflict, PatchError
from drafter_compat.registry import Registry
from drafter_compat.surface import FunctionShape


@pytest.fixture(autouse=True)
def lib(importable: Callable[..., None]) -> None:
    importable(
        "lib",
        a="def f():\n    return 'f'\ndef g():\n    return 'g'\n",
        b="from lib.a import f\ndef use():\n    return f()\n",
        c="def h():\n    return 'h'\n",
    )


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PATCHES", raising=False)


@pytest.fixture
def make() -> Iterator[Callable[..., Registry]]:
    """make(patch, ...) -> a registry, reverted when the test ends."""
    made: list[Registry] = []

    def build(*patches: type[Patch], **options: Any) -> Registry:
        registry = Registry("my-plugin", patches, package="lib", **options)
        made.append(registry)
        return registry

    yield build
    for registry in reversed(made):
        registry.revert()


def patch_of(place: str, *, name: str = "", value: object = None, **declared: Any) -> type[Patch]:
    """A patch called `name` that makes `module.function` return `name`, or puts `value` there."""
    module, _, attribute = place.rpartition(".")
    name = name or attribute
    body = {attribute: staticmethod(lambda: name) if value is None else value}
    return type(
        "P", (Patch,), {"__module__": __name__, **body}, target=module, name=name, **declared
    )


def states(registry: Registry) -> dict[str, str]:
    return {item.name: item.state for item in registry.report()}


def f_and_h() -> tuple[str, str]:
    return importlib.import_module("lib.a").f(), importlib.import_module("lib.c").h()


def test_patches_wait_for_their_module_and_are_applied_before_anybody_can_use_it(make) -> None:
    registry = make(patch_of("lib.a.f", name="new f"), patch_of("lib.c.h", name="new h"))
    registry.apply(version="1.0")
    assert states(registry) == {"new f": "pending", "new h": "pending"}
    assert registry.report()["new f"].detail == "until lib.a is imported"
    assert "lib" not in sys.modules
    assert importlib.import_module("lib.b").use() == "new f"
    assert states(registry) == {"new f": "applied", "new h": "pending"}


def test_patches_of_imported_modules_are_applied_at_once(make) -> None:
    importlib.import_module("lib.b")
    report = make(patch_of("lib.a.f")).apply(version="1.0")
    assert report["f"].state == "applied"
    assert report["f"].detail == "lib.a.f, lib.b.f"


def test_a_second_apply_changes_nothing(make) -> None:
    registry = make(patch_of("lib.a.f", name="new"))
    importlib.import_module("lib.a")
    first = registry.apply(version="1.0")
    assert registry.apply(version="1.0") == first
    registry.revert()
    assert f_and_h()[0] == "f"


def test_revert_before_the_import_leaves_the_import_alone(make) -> None:
    registry = make(patch_of("lib.a.f", name="new"))
    registry.apply(version="1.0")
    registry.revert()
    assert f_and_h()[0] == "f"
    assert states(registry) == {"new": "idle"}


def test_reverting_and_applying_again_works_with_imports_in_between(make) -> None:
    registry = make(patch_of("lib.a.f", name="new"))
    registry.apply(version="1.0")
    registry.revert()
    registry.apply(version="1.0")
    assert f_and_h()[0] == "new"
    registry.revert()
    assert f_and_h()[0] == "f"


# --- failure --------------------------------------------------------------------------------


def test_a_failure_at_once_takes_off_what_was_applied_and_raises(make) -> None:
    importlib.import_module("lib.a")
    importlib.import_module("lib.c")
    registry = make(patch_of("lib.a.f", name="new"), patch_of("lib.c.gone", name="bad"))
    with pytest.raises(PatchError, match=r"'gone' of lib\.c, which has no such attribute"):
        registry.apply(version="1.0")
    assert f_and_h() == ("f", "h")
    assert states(registry) == {"new": "skipped", "bad": "failed"}


def test_a_failure_at_an_import_takes_off_everything_and_stops_that_import(make) -> None:
    registry = make(patch_of("lib.a.f", name="new"), patch_of("lib.c.gone", name="bad"))
    registry.apply(version="1.0")
    assert importlib.import_module("lib.a").f() == "new"
    with pytest.raises(PatchError):
        importlib.import_module("lib.c")
    assert importlib.import_module("lib.a").f() == "f"
    assert "lib.c" not in sys.modules


def test_after_a_failure_the_module_does_not_come_in_unpatched_at_a_second_try(make) -> None:
    registry = make(patch_of("lib.c.gone", name="bad"))
    registry.apply(version="1.0")
    for _ in range(2):
        with pytest.raises(PatchError, match="no such attribute"):
            importlib.import_module("lib.c")
    registry.revert()
    assert importlib.import_module("lib.c").h() == "h"


@pytest.mark.parametrize("failing_first", [True, False])
def test_patches_of_other_registries_wait_again_where_one_makes_an_import_fail(
    make, failing_first
) -> None:
    bad = make(patch_of("lib.c.gone", name="bad"))
    good = make(patch_of("lib.c.h", name="new h"))
    for registry in (bad, good) if failing_first else (good, bad):
        registry.apply(version="1.0")
    with pytest.raises(PatchError, match="no such attribute"):
        importlib.import_module("lib.c")
    assert good.report()["new h"].state == "pending"
    bad.revert()
    assert importlib.import_module("lib.c").h() == "new h"
    assert good.report()["new h"].state == "applied"
    good.revert()
    assert importlib.import_module("lib.c").h() == "h"


def test_a_failure_cancels_what_was_still_pending(make) -> None:
    importlib.import_module("lib.c")
    registry = make(patch_of("lib.a.f", name="new"), patch_of("lib.c.gone", name="bad"))
    with pytest.raises(PatchError):
        registry.apply(version="1.0")
    assert f_and_h()[0] == "f"


def test_an_optional_patch_that_fails_is_reported_and_leaves_the_others(make, caplog) -> None:
    importlib.import_module("lib.c")
    registry = make(
        patch_of("lib.c.gone", name="bad", optional=True), patch_of("lib.c.h", name="new")
    )
    registry.apply(version="1.0")
    assert states(registry) == {"bad": "failed", "new": "applied"}
    assert "no such attribute" in registry.report()["bad"].detail
    assert "optional patch bad is left out" in caplog.text


def test_a_patch_whose_requirement_failed_fails_too(make) -> None:
    importlib.import_module("lib.c")
    registry = make(
        patch_of("lib.c.gone", name="bad", optional=True),
        patch_of("lib.c.h", name="needs", requires=("bad",), optional=True),
    )
    registry.apply(version="1.0")
    assert states(registry) == {"bad": "failed", "needs": "failed"}


def test_an_error_in_a_lazy_member_is_not_swallowed(make) -> None:
    from drafter_compat.patch import lazy

    registry = make(patch_of("lib.a.f", name="new", value=lazy("lib.nowhere:f")))
    registry.apply(version="1.0")
    with pytest.raises(ModuleNotFoundError, match=r"lib\.nowhere"):
        importlib.import_module("lib.a")


def test_two_registries_that_change_one_name_conflict_and_the_second_changes_nothing(make) -> None:
    importlib.import_module("lib.a")
    importlib.import_module("lib.c")
    make(patch_of("lib.a.f", name="first")).apply(version="1.0")
    second = make(patch_of("lib.c.h", name="other"), patch_of("lib.a.f", name="second"))
    with pytest.raises(PatchConflict, match=r"first of .* and second of"):
        second.apply(version="1.0")
    assert f_and_h() == ("first", "h")


def test_an_explicit_order_stacks_patches_of_two_registries(make) -> None:
    importlib.import_module("lib.a")

    class Over(Patch, target="lib.a", name="over", after=("under",)):
        @staticmethod
        def f():
            return Over.original("f")() + " and over"

    make(Over).apply(version="1.0")
    make(patch_of("lib.a.f", name="under")).apply(version="1.0")
    assert f_and_h()[0] == "under and over"


# --- order ----------------------------------------------------------------------------------


def test_requirements_and_after_come_first(make) -> None:
    registry = make(
        patch_of("lib.a.f", name="third", after=("second",)),
        patch_of("lib.a.g", name="second", requires=("first",)),
        patch_of("lib.c.h", name="first"),
    )
    assert [patch.spec.name for patch in registry.patches] == ["first", "second", "third"]


def test_a_circle_is_named(make) -> None:
    registry = make(
        patch_of("lib.a.f", name="x", after=("y",)), patch_of("lib.a.g", name="y", after=("x",))
    )
    with pytest.raises(PatchError, match="in a circle: x -> y -> x"):
        registry.apply(version="1.0")


def test_an_unknown_requirement_names_the_nearest(make) -> None:
    registry = make(
        patch_of("lib.a.f", name="gate"), patch_of("lib.a.g", name="other", requires=("gaet",))
    )
    with pytest.raises(PatchError, match=r"requires 'gaet', which is no patch .* 'gate'"):
        registry.apply(version="1.0")


def test_a_patch_that_comes_too_late_is_refused(make) -> None:
    registry = make(patch_of("lib.a.f", name="new"))
    registry.apply(version="1.0")
    late = patch_of("lib.c.h", name="late")
    with pytest.raises(PatchError, match="my-plugin is applied already, and would never apply"):
        registry.add(late)
    registry.revert()
    registry.add(late)
    registry.apply(version="1.0")
    assert f_and_h() == ("new", "late")


def test_one_name_is_given_once(make) -> None:
    registry = make(patch_of("lib.a.f", name="same"))
    with pytest.raises(PatchError, match="two patches called 'same'"):
        registry.add(patch_of("lib.a.g", name="same"))


# --- versions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("0.21.0", "skipped"),
        ("0.22.0rc1", "pending"),
        ("0.33.0+cpu", "pending"),
        ("0.34.0", "skipped"),
    ],
)
def test_outside_of_its_versions_a_patch_is_skipped_and_says_why(make, version, state) -> None:
    registry = make(patch_of("lib.a.f", name="new", versions=">=0.22,<0.34"))
    report = registry.apply(version=version)
    assert report["new"].state == state
    if state == "skipped":
        assert report["new"].detail == f"lib {version} is outside >=0.22,<0.34"


@pytest.mark.parametrize(
    ("version", "pins", "fits"),
    [
        ("0.32.0", ("0.32.0",), True),
        ("0.32.0+cpu", ("0.32.0",), True),
        ("0.32.0+cpu", ("0.32.0+cpu",), True),
        ("0.32.0+cu129", ("0.32.0+cpu",), False),
        ("0.32.0rc1", ("0.32.0",), False),
        ("0.32.1", ("0.31.0", "0.32.0"), False),
    ],
)
def test_an_exactly_pinned_patch_is_refused_everywhere_else(make, version, pins, fits) -> None:
    registry = make(patch_of("lib.a.f", name="new", pins=pins))
    if fits:
        assert registry.apply(version=version)["new"].state == "pending"
        return
    with pytest.raises(PatchError, match=r"verified on lib .* only, not on"):
        registry.apply(version=version)
    assert f_and_h()[0] == "f"


def test_an_optional_pinned_patch_is_skipped_elsewhere(make) -> None:
    registry = make(patch_of("lib.a.f", name="new", pins=("1.0",), optional=True))
    assert registry.apply(version="2.0")["new"].state == "skipped"


def test_what_requires_a_skipped_patch_is_skipped(make) -> None:
    registry = make(
        patch_of("lib.a.f", name="old", versions="<1"),
        patch_of("lib.a.g", name="needs", requires=("old",)),
    )
    report = registry.apply(version="2.0")
    assert report["needs"].detail == "requires old, which is skipped: lib 2.0 is outside <1"


def relying(name: str, attribute: str, **declared: Any) -> type[Patch]:
    symbol = FunctionShape(id=name, why="call it", module="lib.c", name=attribute, signature="()")
    return patch_of("lib.a.f", name=name, relies_on=(symbol,), **declared)


@pytest.fixture
def installed_lib(tmp_path) -> None:
    (tmp_path / "lib-1.0.dist-info").mkdir()
    (tmp_path / "lib-1.0.dist-info" / "METADATA").write_text("Name: lib\nVersion: 1.0\n")


def test_what_a_patch_relies_on_besides_its_target_is_looked_at_first(make, installed_lib) -> None:
    registry = make(relying("good", "h"))
    assert registry.apply()["good"].state == "pending"
    assert "lib.c" not in sys.modules


def test_a_patch_whose_reliance_is_gone_is_refused_and_nothing_is_applied(
    make, installed_lib
) -> None:
    importlib.import_module("lib.a")
    registry = make(patch_of("lib.a.g", name="new g"), relying("bad", "gone"))
    with pytest.raises(PatchError, match=r"patch bad does not fit this lib 1\.0: 1 of 1 symbols"):
        registry.apply()
    assert importlib.import_module("lib.a").g() == "g"
    assert states(registry) == {"new g": "idle", "bad": "idle"}


def test_an_optional_patch_whose_reliance_is_gone_is_left_out_with_what_requires_it(
    make, installed_lib
) -> None:
    registry = make(
        relying("bad", "gone", optional=True),
        patch_of("lib.c.h", name="more", requires=("bad",), optional=True),
        patch_of("lib.a.g", name="new g"),
    )
    report = registry.apply()
    assert states(registry) == {"bad": "failed", "more": "failed", "new g": "pending"}
    assert "patch bad does not fit this lib 1.0" in report["bad"].detail
    assert report["more"].detail == "requires bad, which failed"


def test_a_patch_that_is_not_optional_is_not_left_out_with_an_optional_one(
    make, installed_lib
) -> None:
    registry = make(
        relying("bad", "gone", optional=True),
        patch_of("lib.c.h", name="more", requires=("bad",)),
    )
    with pytest.raises(PatchError, match="patch more requires bad, which failed"):
        registry.apply()


def test_the_version_is_that_of_the_installed_package(make, tmp_path) -> None:
    info = tmp_path / "lib-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lib\nVersion: 1.5\n")
    registry = make(patch_of("lib.a.f", name="new", versions="<1.5"))
    assert registry.apply()["new"].detail == "lib 1.5 is outside <1.5"


# --- selection ------------------------------------------------------------------------------


@pytest.fixture
def choosable(make) -> Registry:
    return make(
        patch_of("lib.a.f", name="fast-f"),
        patch_of("lib.a.g", name="fast-g", default=False),
        patch_of("lib.c.h", name="fast-h", default=False, requires=("fast-g",)),
        selection=True,
    )


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        (None, {"fast-f"}),
        ("fast-g", {"fast-g"}),
        (" fast-f , fast-g,", {"fast-f", "fast-g"}),
        ("fast-h", {"fast-g", "fast-h"}),
        ("all", {"fast-f", "fast-g", "fast-h"}),
        ("none", set()),
        ("", set()),
    ],
)
def test_one_environment_variable_chooses(choosable, monkeypatch, value, chosen) -> None:
    if value is not None:
        monkeypatch.setenv("VLLM_PATCHES", value)
    report = choosable.apply(version="1.0")
    assert set(report.names("pending")) == chosen


def test_a_wrong_name_is_an_error_that_lists_the_right_ones(choosable, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_PATCHES", "fast-f,fats-g")
    with pytest.raises(PatchError) as caught:
        choosable.apply(version="1.0")
    assert "VLLM_PATCHES names 'fats-g' (did you mean 'fast-g'?)" in str(caught.value)
    assert "the patches are fast-f, fast-g, fast-h" in str(caught.value)


def test_a_patch_of_another_plugin_is_no_wrong_name(choosable, make, monkeypatch) -> None:
    other = make(patch_of("lib.c.h", name="elsewhere"), selection=True)
    monkeypatch.setattr(registry_module, "installed_registries", lambda: {"other": other})
    monkeypatch.setenv("VLLM_PATCHES", "elsewhere,fast-g")
    assert choosable.apply(version="1.0").names("pending") == ("fast-g",)


def test_other_plugins_are_not_even_looked_at_where_the_names_are_our_own(
    choosable, monkeypatch
) -> None:
    def fail() -> dict[str, Registry]:
        raise AssertionError("the declarations of other plugins were imported")

    monkeypatch.setattr(registry_module, "installed_registries", fail)
    monkeypatch.setenv("VLLM_PATCHES", "fast-f,fast-g")
    assert choosable.apply(version="1.0").names("pending") == ("fast-f", "fast-g")


def test_a_registry_that_is_not_choosable_ignores_the_variable(make, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_PATCHES", "none")
    assert make(patch_of("lib.a.f")).apply(version="1.0").names("pending") == ("f",)


def test_a_skipped_patch_says_how_to_choose_it(choosable) -> None:
    detail = choosable.apply(version="1.0")["fast-g"].detail
    assert detail == "off by default; choose it with VLLM_PATCHES=fast-g"


def test_the_choice_can_be_given_in_code(choosable) -> None:
    assert choosable.apply(version="1.0", select=["fast-g"]).names("pending") == ("fast-g",)


# --- when -----------------------------------------------------------------------------------


def test_at_registration_the_target_is_imported_at_once(make) -> None:
    registry = make(patch_of("lib.c.h", name="new", when="registration"))
    assert registry.apply(version="1.0")["new"].state == "applied"
    assert "lib.c" in sys.modules


WORKER = """
    import lib.c
    seen = []
    class WorkerWrapperBase:
        def init_worker(self, register):
            register()
        def init_device(self):
            seen.append(lib.c.h())
            return "started"
    """


@pytest.fixture
def worker_base(importable, monkeypatch) -> Iterator[None]:
    importable("fakevllm", worker=WORKER)
    target = registry_module._WorkerStart.spec.target
    monkeypatch.setattr(registry_module, "WORKER_MODULE", "fakevllm.worker")
    moved = type(target)("fakevllm.worker", target.qualname)
    object.__setattr__(registry_module._WorkerStart.spec, "target", moved)
    yield
    registry_module._WorkerStart.revert()
    object.__setattr__(registry_module._WorkerStart.spec, "target", target)


def test_in_a_worker_a_patch_is_applied_when_the_worker_starts(make, worker_base) -> None:
    registry = make(patch_of("lib.c.h", name="new h", when="worker"))
    report = registry.apply(version="1.0")
    assert report["new h"].detail == "until vLLM has started a worker in this process"
    worker = importlib.import_module("fakevllm.worker")
    assert importlib.import_module("lib.c").h() == "h"
    assert worker.WorkerWrapperBase().init_device() == "started"
    assert worker.seen == ["new h"]
    assert registry.report()["new h"].state == "applied"


def test_a_spawned_worker_loads_its_plugins_after_it_has_begun_to_start(make, worker_base) -> None:
    registry = make(patch_of("lib.c.h", name="new h", when="worker"))
    worker = importlib.import_module("fakevllm.worker")
    wrapper = worker.WorkerWrapperBase()
    wrapper.init_worker(lambda: registry.apply(version="1.0"))
    assert importlib.import_module("lib.c").h() == "h"
    wrapper.init_device()
    assert worker.seen == ["new h"]


def test_a_failure_in_a_worker_stops_the_worker(make, worker_base) -> None:
    make(patch_of("lib.c.gone", name="bad", when="worker")).apply(version="1.0")
    worker = importlib.import_module("fakevllm.worker")
    with pytest.raises(PatchError, match="no such attribute"):
        worker.WorkerWrapperBase().init_device()


def test_what_watches_for_workers_goes_with_the_last_patch_that_needs_it(make, worker_base) -> None:
    worker = importlib.import_module("fakevllm.worker")
    untouched = vars(worker.WorkerWrapperBase)["init_device"]
    first = make(patch_of("lib.c.h", name="new h", when="worker"))
    second = make(patch_of("lib.a.f", name="new f", when="worker"))
    first.apply(version="1.0")
    second.apply(version="1.0")
    first.revert()
    worker.WorkerWrapperBase().init_device()
    assert f_and_h() == ("new f", "h")
    second.revert()
    assert vars(worker.WorkerWrapperBase)["init_device"] is untouched


def test_a_module_that_is_half_imported_is_refused(make, importable) -> None:
    importable("half", m="import trigger_here\ndef f(): ...\n")
    registry = make(patch_of("half.m.f", name="new"))
    module = type(sys)("trigger_here")
    sys.modules["trigger_here"] = module
    del sys.modules["trigger_here"]

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "trigger_here":
                registry.apply(version="1.0")

    sys.meta_path.insert(0, Finder)
    try:
        with pytest.raises(PatchError, match=r"half\.m is being imported right now"):
            importlib.import_module("half.m")
    finally:
        sys.meta_path.remove(Finder)


def test_a_child_process_gets_the_same_choice(tmp_path, monkeypatch) -> None:
    """What the front end was told in the environment, the processes that it starts are told too."""
    monkeypatch.setenv("VLLM_PATCHES", "fast-g")
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import multiprocessing, sys
            sys.path.insert(0, {str(tmp_path)!r})
            from drafter_compat.patch import Patch
            from drafter_compat.registry import Registry

            class F(Patch, target="lib.a", name="fast-f"):
                f = staticmethod(lambda: "patched")
            class G(Patch, target="lib.a", name="fast-g"):
                g = staticmethod(lambda: "patched")

            def child():
                registry = Registry("my-plugin", [F, G], package="lib", selection=True)
                registry.apply(version="1.0")
                import lib.a
                print(lib.a.f(), lib.a.g(), flush=True)

            if __name__ == "__main__":
                for method in ("spawn", "fork"):
                    process = multiprocessing.get_context(method).Process(target=child)
                    process.start()
                    process.join()
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["f patched", "f patched"]
