"""Logs which requests clients abort, for which vLLM has no hook.

vLLM imports this module in every process that it starts, so it imports nothing of vLLM: the target
is a string, and the patch is applied when vLLM imports it.
"""

import logging

from drafter_compat.patch import Patch
from drafter_compat.registry import Registry

VERSIONS = ">=0.24,<0.34"

logger = logging.getLogger("vllm.{{ cookiecutter.package }}")


class AbortLog(
    Patch,
    target="vllm.v1.core.sched.scheduler:Scheduler",
    name="{{ cookiecutter.patch }}",
    why="log which requests clients abort",
    remove_when="vLLM logs aborted requests itself",
    versions=VERSIONS,
    expects={"finish_requests": "(self, request_ids, finished_status)"},
):
    def finish_requests(self, request_ids, finished_status):
        logger.warning("finished from outside, %s: %s", finished_status, request_ids)
        return AbortLog.original("finish_requests")(self, request_ids, finished_status)


registry = Registry("{{ cookiecutter.plugin }}", [AbortLog], versions=VERSIONS, selection=True)


def register() -> None:
    """Entry point of vllm.general_plugins; what it raises stops vLLM's start-up."""
    registry.apply()
