"""`priority-scheduler`: urgent requests first, said in the request's extra arguments.

    SamplingParams(extra_args={"priority": 10})        # through a server: "vllm_xargs"

A higher number is more urgent; without the argument a request has priority 0. vLLM's own
`--scheduling-policy priority` orders the waiting requests only; a running request keeps its seat
(`max_num_seqs`) until it is done. This patch also takes the seat of the least urgent running
request for a waiting one that is strictly more urgent. Whoever loses its seat goes on later, from
the prefix cache where that still holds it, and answers the same.
"""

from __future__ import annotations

import time
from typing import Any

from drafter_compat.patch import Patch
from drafter_compat.surface import Attributes, FunctionShape

__all__ = ["PriorityArgument", "PriorityScheduler", "make_room", "read_priority"]

ARGUMENT = "priority"
VERSIONS = ">=0.31,<0.34"

PROCESS_INPUTS = (
    "(self, request_id, prompt, params, supported_tasks, arrival_time=None, lora_request=None, "
    "tokenization_kwargs=None, trace_headers=None, priority=0, data_parallel_rank=None, "
    "resumable=False, session_id=None, kv_hints=None)"
)
"""The signature of `InputProcessor.process_inputs`, which both front-end patches wrap."""


def read_priority(extra_args: Any) -> int | None:
    """The priority in a request's extra arguments, or None. ValueError if it is no integer."""
    value = (extra_args or {}).get(ARGUMENT)
    # JSON knows one kind of number, and some clients write 5.0.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(
            f"the extra argument {ARGUMENT!r} is an integer, higher for more urgent, not {value!r}"
        )
    return value


class PriorityArgument(
    Patch,
    target="vllm.v1.engine.input_processor:InputProcessor",
    name="priority-argument",
    why="read a request's priority from its extra arguments, higher for more urgent",
    remove_when="clients can send vLLM's own `priority` field, lower for more urgent",
    versions=VERSIONS,
    expects={"process_inputs": PROCESS_INPUTS},
    default=False,
    relies_on=(
        Attributes(
            id="priority-argument:request",
            why="set the priority of a request",
            module="vllm.v1.engine",
            name="EngineCoreRequest",
            reads=("priority", "sampling_params"),
        ),
    ),
):
    """In the front end, where a wrong argument is the answer to the client who sent it."""

    def process_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, and the extra argument decides the priority."""
        request = PriorityArgument.original("process_inputs")(self, *args, **kwargs)
        if request.sampling_params is not None:
            priority = read_priority(request.sampling_params.extra_args)
            if priority is not None:
                # vLLM: lower first.
                request.priority = -priority
        return request


class PriorityScheduler(
    Patch,
    target="vllm.v1.core.sched.scheduler:Scheduler",
    name="priority-scheduler",
    why="urgent requests first, also where every seat (max_num_seqs) is taken",
    upstream="https://github.com/vllm-project/vllm/issues/40004",
    remove_when="vLLM's priority policy preempts at max_num_seqs",
    versions=VERSIONS,
    expects={
        "__init__": "(self, vllm_config, kv_cache_config, structured_output_manager, block_size, "
        "hash_block_size=None, mm_registry=MULTIMODAL_REGISTRY, include_finished_set=False, "
        "log_stats=False)",
        "schedule": "(self, throttle_prefills=False)",
    },
    requires=("priority-argument",),
    default=False,
    relies_on=(
        FunctionShape(
            id="priority-scheduler:preempt",
            why="give a request's seat to another",
            module="vllm.v1.core.sched.scheduler",
            name="Scheduler._preempt_request",
            signature="(self, request, timestamp, drop_stale_output=False)",
            calls=("(request, now, drop_stale_output=True)",),
        ),
        Attributes(
            id="priority-scheduler:state",
            why="see who runs, who waits, and how many seats there are",
            module="vllm.v1.core.sched.scheduler",
            name="Scheduler",
            reads=(
                "running",
                "waiting",
                "deferred_waiting",
                "max_num_active_reqs",
                "prev_step_scheduled_req_ids",
                "connector",
            ),
        ),
    ),
):
    """In the engine core: vLLM's own priority policy, and seats for those who are more urgent."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """As vLLM's, with the policy set."""
        vllm_config.scheduler_config.policy = "priority"
        PriorityScheduler.original("__init__")(self, vllm_config, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, after room has been made."""
        make_room(self, time.monotonic())
        return PriorityScheduler.original("schedule")(self, *args, **kwargs)


def make_room(scheduler: Any, now: float) -> list[str]:
    """Take the seats of the least urgent for waiting requests that are strictly more urgent.

    Returns the ids of those that lost theirs. Nobody does as long as a seat is free for each, nor
    with a KV connector, whose transfers a lost seat would cut.
    """
    running = scheduler.running
    waiting = scheduler.waiting
    if scheduler.connector is not None or not running or not waiting:
        return []
    free = scheduler.max_num_active_reqs - len(running)
    lost = []
    # Iterates from the most urgent on. Who is deferred waits for something else than a seat.
    for urgent in list(waiting):
        if urgent in scheduler.deferred_waiting:
            continue
        if free > 0:
            free -= 1
            continue
        victim = max(running, key=_least_urgent, default=None)
        if victim is None or victim.priority <= urgent.priority:
            break
        running.remove(victim)
        # As vLLM does outside `schedule` when it resets the prefix cache with requests running.
        scheduler._preempt_request(victim, now, drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(victim.request_id)
        lost.append(victim.request_id)
    return lost


def _least_urgent(request: Any) -> tuple[int, float]:
    return request.priority, request.arrival_time
