"""The route `shim`: a package `arctic_inference` with a module `suffix_decoding`, ours.

Whatever imports that name, vLLM's own suffix proposer or that of a fork, gets drafter-core behind
the interface that it was written against, and nothing of the engine is changed. The finder comes
last: it never hides a package, and it is refused where there is one to hide. Must not import vLLM
or numba; what is behind the name is imported by whoever imports the name.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from vllm_drafter.settings import ROUTE, SHARING, SettingError, Settings

__all__ = ["MODULE", "PACKAGE", "ShimFinder", "check", "install"]

PACKAGE = "arctic_inference"
MODULE = f"{PACKAGE}.suffix_decoding"
_BEHIND = "vllm_drafter.shim_cache"


class ShimFinder:
    """Finds the package and its one module, and fills the module when it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for the two names, for nothing else."""
        if name not in (PACKAGE, MODULE):
            return None
        # importlib asks nothing of a loader but these two methods.
        loader: importlib.abc.Loader = self  # type: ignore[assignment]
        return ModuleSpec(name, loader, origin="vllm-drafter", is_package=name == PACKAGE)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """None: an ordinary module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put our names into the module; the package itself is empty."""
        if module.__name__ == MODULE:
            behind = importlib.import_module(_BEHIND)
            module.__doc__ = behind.__doc__
            for name in behind.__all__:
                setattr(module, name, getattr(behind, name))


def _hidden_package() -> str | None:
    """Where an `arctic_inference` of someone else's is, or None."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or isinstance(spec.loader, ShimFinder):
        return None
    return spec.origin or ", ".join(spec.submodule_search_locations or ())


def check(settings: Settings) -> None:
    """Whether the package can be provided here.

    Raises:
        SettingError: there is a package of that name, or a sharing that the interface cannot do.
    """
    if settings.sharing == "lora":
        raise SettingError(
            f"{SHARING}=lora: expected global or none with {ROUTE}=shim, because the interface of "
            f"{PACKAGE} is told of no LoRA adapter. Choose one of them, or {ROUTE}=patch."
        )
    found = _hidden_package()
    if found is not None:
        raise SettingError(
            f"{ROUTE}=shim: expected no package {PACKAGE}, found {found}; the shim does not stand "
            f"in for a package that is there. pip uninstall arctic-inference, or unset {ROUTE}: "
            "the route patch drafts with ours beside it."
        )


def install(settings: Settings) -> None:
    """Provide the package in this process, once. SettingError as from `check`."""
    check(settings)
    if not any(isinstance(finder, ShimFinder) for finder in sys.meta_path):
        sys.meta_path.append(ShimFinder())
