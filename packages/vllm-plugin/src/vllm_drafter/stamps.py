"""One stamp per process: who registered the plugin, in which role, and what was patched.

vLLM loads general plugins from five places, in up to four kinds of processes, and gives no list of
them. A stamp goes to vLLM's log, and to the file that `VLLM_DRAFTER_STAMPS` names, one JSON object
a line. Must not know patches or drafting.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Role", "append_stamp", "current_role", "log_line", "logger"]

# A child of vLLM's logger: it has vLLM's handlers, level and process prefix.
logger = logging.getLogger("vllm.plugins.vllm_drafter")


@dataclass(frozen=True)
class Role:
    """What a process is for vLLM."""

    name: str
    """`front end`, `API server`, `EngineCore`, `worker`, `model inspection` or `unknown`."""
    rank: int | None = None
    """The rank of a worker, or the data-parallel rank of an EngineCore, where one can be told."""

    def __str__(self) -> str:
        return self.name if self.rank is None else f"{self.name} {self.rank}"


# The functions from which vLLM loads general plugins, and the role of a process that gets there.
_CALL_SITES = {
    "vllm.v1.worker.worker_base": "worker",
    "vllm.v1.engine.core": "EngineCore",
    "vllm.model_executor.models.registry": "model inspection",
    "vllm.engine.arg_utils": "front end",
}


def current_role() -> Role:
    """The role of this process: by which part of vLLM is calling, else by the process's name."""
    named = _role_by_process_name(multiprocessing.current_process().name)
    called = _role_by_caller(sys._getframe(1))
    if called is None:
        return named
    if named.name == called.name and named.rank is not None:
        return named
    if called.name == "front end":
        # A process of another name that parses engine arguments is still what its name says.
        return named if named.name != "unknown" else _front_end()
    return called


def _role_by_caller(frame: FrameType | None) -> Role | None:
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name == "__main__" and (spec := frame.f_globals.get("__spec__")) is not None:
            name = spec.name
        role = _CALL_SITES.get(name) if isinstance(name, str) else None
        if role is not None:
            return Role(role, _rank_of(frame.f_locals.get("self")) if role == "worker" else None)
        frame = frame.f_back
    return None


def _rank_of(wrapper: object) -> int | None:
    for attribute in ("global_rank", "rpc_rank"):
        rank = getattr(wrapper, attribute, None)
        if isinstance(rank, int):
            return rank
    return None


def _role_by_process_name(name: str) -> Role:
    """vLLM names its processes: EngineCore, EngineCore_DP1, VllmWorker-0, ApiServer_2."""
    for prefix, role in (
        ("EngineCore", "EngineCore"),
        ("DPEngineCore", "EngineCore"),
        ("VllmWorker", "worker"),
        ("ApiServer", "API server"),
    ):
        if name.startswith(prefix):
            digits = name[len(prefix) :].lstrip("_-DPActor")
            return Role(role, int(digits) if digits.isdigit() else None)
    return Role("unknown")


def _front_end() -> Role:
    """The process that parses engine arguments: a server, or a program that uses `LLM`."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    main = spec.name if spec is not None else Path(sys.argv[0]).name if sys.argv else ""
    serves = main.endswith("api_server") or (
        main in ("vllm", "vllm.entrypoints.cli.main") and "serve" in sys.argv
    )
    return Role("API server" if serves else "front end")


def log_line(message: str, *args: object) -> None:
    """Log one line for the operator, also where vLLM has not set its logging up yet.

    Since 0.32 a program that uses `LLM` loads plugins before vLLM configures logging; the line
    would be lost there. It goes to standard error then, unless vLLM's own settings say less.
    """
    configured = logging.getLogger("vllm").hasHandlers() and logger.isEnabledFor(logging.INFO)
    wanted = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper() in ("INFO", "DEBUG")
    if configured or not wanted or os.environ.get("VLLM_CONFIGURE_LOGGING") == "0":
        logger.info(message, *args)
    else:
        print("INFO", message % args, file=sys.stderr, flush=True)


def append_stamp(path: Path | None, event: str, role: Role, **fields: Any) -> None:
    """Append one stamp to `path`, if any. A file that cannot be written costs a warning."""
    if path is None:
        return
    stamp = {
        "event": event,
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "role": role.name,
        "rank": role.rank,
        **fields,
    }
    line = (json.dumps(stamp) + "\n").encode()
    try:
        # One write to a file opened for appending: lines of several processes do not mix.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError as error:
        logger.warning("vllm-drafter: VLLM_DRAFTER_STAMPS: cannot append to %s: %s", path, error)
