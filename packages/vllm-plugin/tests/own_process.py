"""What tests run in a process of its own: importable there by its name."""

from __future__ import annotations

from batches import COPYABLE, Batch, vllm_config


def answer_once() -> None:
    """Build a proposer, serve one request, and end."""
    from vllm_drafter.proposer import TokensPerStepProposer

    proposer = TokensPerStepProposer(vllm_config())
    batch = Batch()
    batch.add("a", [1, 2, 3])
    proposer.propose(8, batch, batch.sample({"a": COPYABLE}))
