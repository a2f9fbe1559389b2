"""Every patch says what it is, and none is applied that nobody chose."""

from __future__ import annotations

import subprocess
import sys

import pytest

from drafter_compat.patch import PatchError
from vllm_patches import registry

CHOSEN = {
    "priority-scheduler": {"priority-argument", "priority-scheduler"},
    "priority-argument": {"priority-argument"},
    "fp32-lm-head": {"fp32-lm-head"},
    "rollout-replay": {"output-lengths", "rollout-replay"},
    "hybrid-drafting": {"hybrid-drafting-guard", "hybrid-drafting"},
}


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PATCHES", raising=False)


def pending() -> set[str]:
    return set(registry.plan(version="0.32.0").names("pending"))


def test_nothing_is_applied_where_nobody_chose() -> None:
    assert pending() == set()


@pytest.mark.parametrize("name", CHOSEN)
def test_a_patch_is_chosen_with_what_it_requires(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PATCHES", name)
    assert pending() == CHOSEN[name]


def test_a_wrong_name_lists_the_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PATCHES", "priority-schedular")
    with pytest.raises(PatchError, match=r"did you mean 'priority-scheduler'\?"):
        pending()


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0"])
def test_no_patch_is_applied_to_a_release_that_nobody_looked_at(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PATCHES", "all")
    assert set(registry.plan(version=version).names("skipped")) == {
        patch.spec.name for patch in registry.patches
    }


@pytest.mark.parametrize("patch", registry.patches, ids=lambda patch: patch.spec.name)
def test_a_patch_says_why_it_is_there_when_it_goes_and_what_it_relies_on(patch) -> None:
    spec = patch.spec
    assert spec.why
    assert spec.remove_when
    assert spec.versions
    assert spec.expects or spec.relies_on
    assert not spec.default


def test_declaring_them_imports_neither_vllm_nor_torch_nor_the_drafter() -> None:
    code = (
        "import sys, vllm_patches; "
        "print([m for m in ('vllm', 'torch', 'numba', 'vllm_drafter') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
