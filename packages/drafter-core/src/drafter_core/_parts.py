"""Compiles functions that Python never calls only as parts of the one that it calls.

Numba makes every compiled function ready to be run by itself: it optimizes it with all that it
calls, and turns it into machine code. Of functions that only kernels call none of that is ever
run, and what is called by many is worked through again for each. Here a `Part` is left as it is
until it has been linked into a `Whole`, and that is optimized once, knowing that nobody else calls
its parts: three quarters of the time to compile or less, and code that is a little faster.

Knows Numba's compiler (`numba.core.codegen`, from 0.61 to 0.69 the same); knows nothing of drafts.
A kernel that is cached does not notice an edit here: empty the cache after one.
"""

# Numba's compiler is untyped.
# mypy: disable-error-code="no-untyped-call,misc"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from llvmlite.binding import Linkage
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder

__all__ = ["Part", "Whole", "load_quickly"]


class _Linked(JITCodeLibrary):
    """Code that is never run where it is, only linked into other code."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """None: there is no machine code."""
        return 0

    @property
    def codegen(self) -> _Linked:
        """Whom Numba asks to set the environment of compiled code."""
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Nowhere to set it, and nothing that would read it: no exceptions, no Python objects."""


class Part(CompilerBase):
    """`pipeline_class` of `numba.njit` for functions that Python never calls."""

    def define_pipelines(self) -> list[Any]:
        """Numba's own passes, on a library that stays as it is."""
        state = self.state
        state.library = _Linked(state.targetctx.codegen(), state.func_id.func_qualname)
        return [DefaultPassBuilder.define_nopython_pipeline(state)]


class _Linking(JITCodeLibrary):
    """Code with its parts, which nothing else calls."""

    def _optimize_final_module(self) -> None:
        for function in self._final_module.functions:
            if function.linkage == Linkage.linkonce_odr and not function.is_declaration:
                function.linkage = Linkage.internal
        super()._optimize_final_module()


class Whole(CompilerBase):
    """`pipeline_class` of `numba.njit` for the functions that Python calls."""

    def define_pipelines(self) -> list[Any]:
        """Numba's own passes."""
        state = self.state
        state.library = _Linking(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return [DefaultPassBuilder.define_nopython_pipeline(state)]


@contextmanager
def load_quickly(kernel: Any) -> Iterator[None]:
    """Let the function that Python calls be loaded from Numba's cache without Numba's compiler.

    Numba makes all that it knows of types and operations ready before it looks into its cache: 0.35
    seconds, of which code that is compiled needs nothing. Where the cache has no such code, the
    compiler makes itself ready. A cache that is damaged, by a full disk or a crash, is emptied and
    made again.
    """
    load = kernel._cache.load_overload

    def load_overload(signature: Any, target_context: Any) -> Any:
        target_context.refresh = lambda: None
        try:
            return load(signature, target_context)
        except Exception:  # noqa: BLE001  a damaged file raises whatever it likes
            with suppress(OSError):
                kernel._cache.flush()
            return None
        finally:
            del target_context.refresh

    kernel._cache.load_overload = load_overload
    try:
        yield
    finally:
        del kernel._cache.load_overload
