"""The vLLM plugin that swaps the suffix drafter."""


def register() -> None:
    """Entry point `suffix_drafter` of `vllm.general_plugins`."""
