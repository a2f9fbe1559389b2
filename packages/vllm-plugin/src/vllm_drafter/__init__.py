"""The vLLM plugin that swaps vLLM's suffix drafter for drafter-core.

vLLM imports this package in every process that it starts, so it stays light: everything else is
imported by the function that needs it. vLLM swallows an error raised while an entry point is
imported; an error raised by the entry point itself stops the process, which is what a gate that
finds something wrong wants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_drafter.custom_class import CustomClassProposer

__all__ = ["CustomClassProposer", "register"]

__version__ = "0.1.0"


def register() -> None:
    """Entry point `suffix_drafter` of `vllm.general_plugins`: swap the drafter in this process.

    Safe to call more than once. Raises SettingError for a wrong `VLLM_DRAFTER_*` variable and
    `drafter_compat.check.SurfaceMismatch` if this vLLM is not the one the plugin was made for; vLLM
    is then untouched.
    """
    from vllm_drafter.startup import start

    start()


def __getattr__(name: str) -> Any:
    if name == "CustomClassProposer":
        from vllm_drafter.custom_class import CustomClassProposer

        return CustomClassProposer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
