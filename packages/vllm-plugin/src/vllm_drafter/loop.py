"""What happens at each decode step: the runner's rows go into the drafter, drafts come out, and
nothing is raised.

The rows themselves say what each request has got so far, so the drafter follows them whatever
happened in between: accepted drafts, preemption, a resumed request, a request id that is used
again. A fault costs the request its drafts, never the engine its step. Must not know vLLM, or how
drafts are found.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vllm_drafter.activity import Activity, Sizes
from vllm_drafter.settings import ELSEWHERE, ON_CPU, SettingError
from vllm_drafter.snapshots import SnapshotKeeper, load_snapshot
from vllm_drafter.stamps import logger

if TYPE_CHECKING:
    from drafter_core import SuffixDrafter

__all__ = ["DraftLoop", "DraftSettings"]

MAX_REBUILDS = 3
"""How often a broken drafter is replaced before drafting is given up in this process."""


@dataclass(frozen=True)
class DraftSettings:
    """What the engine asks of the drafter, in the words of its `suffix_decoding_*` settings."""

    num_speculative_tokens: int
    max_model_len: int
    max_tree_depth: int = 24
    max_cached_requests: int = 10_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1
    verify_tokens: int | None = None

    @classmethod
    def from_vllm(
        cls, vllm_config: Any, sharing: str = "global", verify_tokens: int | None = None
    ) -> DraftSettings:
        """Read them from a `VllmConfig`; with sharing `none`, no response is kept for others.

        verify_tokens: as `Settings` has it.

        Raises:
            SettingError: one of vLLM's settings that the drafter cannot do. vLLM checks none of
                them for a custom class, and for `method="suffix"` not how deep is too deep.
        """
        from drafter_core.drafter import MAX_DEPTH

        speculative = vllm_config.speculative_config
        if verify_tokens is None:
            on_cpu = vllm_config.device_config.device_type == "cpu"
            verify_tokens = ON_CPU if on_cpu else ELSEWHERE
        cached = int(_within(speculative, "max_cached_requests", 0))
        return cls(
            num_speculative_tokens=int(speculative.num_speculative_tokens),
            max_model_len=int(vllm_config.model_config.max_model_len),
            max_tree_depth=int(_within(speculative, "max_tree_depth", 1, MAX_DEPTH)),
            max_cached_requests=0 if sharing == "none" else cached,
            max_spec_factor=float(_within(speculative, "max_spec_factor", 0)),
            min_token_prob=float(_within(speculative, "min_token_prob", 0, 1)),
            verify_tokens=verify_tokens or None,
        )


def _within(speculative: Any, name: str, low: int, high: int | None = None) -> float:
    """One of vLLM's `suffix_decoding_*` settings, if it is from `low` to `high`."""
    name = f"suffix_decoding_{name}"
    value: float = getattr(speculative, name)
    if value >= low and (high is None or value <= high):
        return value
    expected = f"a number from {low} to {high}" if high is not None else f"{low} or more"
    raise SettingError(
        f"{name}={value!r}: expected {expected}. Correct it in --speculative-config, or leave it "
        "out for vLLM's default."
    )


@dataclass(frozen=True)
class _Request:
    handle: int
    prompt_length: int


@dataclass(frozen=True)
class _Batch:
    """Requests that step together, and mostly go on to: known again without a look at each."""

    keys: Sequence[Hashable]
    prompt_lengths: Sequence[int]
    handles: npt.NDArray[np.int64]

    def is_of(self, step: _Step) -> bool:
        return self.keys == step.keys and self.prompt_lengths == step.prompt_lengths


@dataclass(frozen=True)
class _Step:
    """The arguments of `DraftLoop.step`, with the most tokens that each draft may have."""

    keys: Sequence[Hashable]
    rows: npt.NDArray[np.int64]
    prompt_lengths: Sequence[int]
    token_ids: npt.NDArray[np.int32]
    num_tokens: npt.NDArray[np.int32]
    max_tokens: npt.NDArray[np.int32]

    def prompt(self, place: int) -> npt.NDArray[np.int32]:
        return self.token_ids[self.rows[place], : self.prompt_lengths[place]]

    def some(self, places: Sequence[int]) -> _Step:
        """The same step for some of the requests."""
        chosen = np.array(places, dtype=np.int64)
        return _Step(
            [self.keys[place] for place in places],
            self.rows[chosen],
            [self.prompt_lengths[place] for place in places],
            self.token_ids,
            self.num_tokens,
            self.max_tokens[chosen],
        )

    def only(self, place: int) -> _Step:
        """The same step for one of the requests."""
        return self.some([place])


class DraftLoop:
    """Keeps one drafter in step with the rows of a running batch."""

    def __init__(self, settings: DraftSettings, *, prepared: bool = False) -> None:
        """Build the drafter and compile its kernels, so that no request waits for the compiler.

        prepared: the kernels are there, because a loop of this process has drafted with them.
        """
        from drafter_core import CapacityExhausted, CorruptState

        self._fatal = (CapacityExhausted, CorruptState)
        self.settings = settings
        self.faults = 0
        """Faults so far: each cost one request its drafts, or all requests those of one step."""
        self.activity = Activity()
        """What its steps did, for whoever publishes it."""
        self.siblings: tuple[DraftLoop, ...] = ()
        """Loops of requests that share nothing with this one's; they count as part of it."""
        self._counts_into: DraftLoop | None = None
        self._keeper: SnapshotKeeper | None = None
        self._in_use = threading.Lock()
        """Held while the drafter works, because a snapshot is copied in a thread of its own."""
        self._rebuilds = 0
        self._requests: dict[Hashable, _Request] = {}
        self._batch: _Batch | None = None
        """The last step's, as long as its requests are the ones that run."""
        self._muted: set[Hashable] = set()
        self._drafter: SuffixDrafter | None = None
        started = time.perf_counter()
        if prepared:
            self._drafter = self._new_drafter()
        else:
            self._prepare()
        self.warm_up_seconds = time.perf_counter() - started

    def _prepare(self) -> None:
        """Build the drafter when its kernels may still have to be compiled."""
        logger.info(
            "vllm-drafter: preparing the drafter's kernels; the first start on a machine "
            "compiles them, which can take a minute"
        )
        try:
            self._try_out()
            self._drafter = self._new_drafter()
        except Exception as error:
            raise RuntimeError(
                "vllm-drafter: the drafter's kernels cannot be compiled or loaded here "
                f"({type(error).__name__}: {error}). If they were compiled by another numba, "
                "remove them, or set NUMBA_CACHE_DIR to an empty directory; "
                "`vllm-drafter doctor` says where they are kept."
            ) from error

    # --- one step -----------------------------------------------------------

    def step(
        self,
        keys: Sequence[Hashable],
        rows: npt.NDArray[np.int64],
        prompt_lengths: Sequence[int],
        token_ids: npt.NDArray[np.int32],
        num_tokens: npt.NDArray[np.int32],
        num_speculative_tokens: int,
    ) -> list[list[int]]:
        """One draft (maybe empty) for each of n requests; never raises.

        Args:
            keys: n request ids.
            rows: int64 [n], the row of each.
            prompt_lengths: for each of n, how much of its row is prompt; the rest is its response.
            token_ids: int32 [max_num_reqs, max_model_len].
            num_tokens: int32 [max_num_reqs], how much of each row is filled.
            num_speculative_tokens: most tokens in a draft; it also stays within `max_model_len`.
        """
        try:
            room = self.settings.max_model_len - 1 - num_tokens[rows]
            max_tokens = np.maximum(np.minimum(room, num_speculative_tokens), 0).astype(np.int32)
            step = _Step(keys, rows, prompt_lengths, token_ids, num_tokens, max_tokens)
        except Exception as fault:  # noqa: BLE001 - whatever it is, the engine goes on
            self.note_fault(fault)
            return [[] for _ in keys]
        with self._in_use:
            if self._keeper is not None:
                self._keeper.steps += 1
            try:
                return self._step(step)
            except Exception as fault:  # noqa: BLE001 - as above
                self.note_fault(fault)
                if not self._survives(fault):
                    return [[] for _ in keys]
            return [self._step_alone(step.only(place)) for place in range(len(keys))]

    def retire(self, keys: Iterable[Hashable]) -> None:
        """End requests; what they generated stays as a source of drafts. Never raises."""
        with self._in_use:
            for key in keys:
                self._batch = None
                self._muted.discard(key)
                if self._requests.pop(key, None) is not None and self._drafter is not None:
                    try:
                        self._drafter.stop_request(key)
                    except Exception as fault:  # noqa: BLE001 - as in step
                        self.note_fault(fault)
                        self._survives(fault)

    def not_running(self, running: Set[Any]) -> set[Hashable]:
        """The requests that the loop follows and that are not among those running."""
        followed = self._requests.keys() | self._muted if self._muted else self._requests.keys()
        return followed - running

    def new_sibling(self) -> DraftLoop:
        """A loop of the same settings for requests that must share nothing with this one's."""
        loop = DraftLoop(self.settings, prepared=True)
        loop.activity = self.activity
        loop._counts_into = self
        self.siblings = (*self.siblings, loop)
        return loop

    def drop_sibling(self, loop: DraftLoop) -> None:
        """Forget a sibling, and all that it knows."""
        self.siblings = tuple(other for other in self.siblings if other is not loop)

    def keep(self, path: Path, seconds: float, *, write: bool) -> None:
        """Load the cache from a snapshot and, with `write`, save it there from time to time.

        Raises:
            SettingError: the file cannot be used.
        """
        assert self._drafter is not None
        load_snapshot(path, self._drafter)
        if write:
            self._keeper = SnapshotKeeper(path, seconds, lambda: self._drafter, self._in_use)

    def sizes(self) -> Sizes:
        """Return how much the drafter holds, and those of its siblings."""
        held = [
            loop._drafter.stats() for loop in (self, *self.siblings) if loop._drafter is not None
        ]
        return Sizes(
            active_requests=sum(stats.active_requests for stats in held),
            cached_requests=sum(stats.cached_requests for stats in held),
            cached_tokens=sum(stats.cached_tokens for stats in held),
            memory_bytes=sum(stats.bytes_in_use for stats in held),
            evicted_responses=sum(stats.evicted_responses for stats in held),
        )

    def note_fault(self, fault: BaseException) -> None:
        """Count a fault; the first is logged with its traceback."""
        self.faults += 1
        if self._counts_into is not None:
            self._counts_into.note_fault(fault)
        elif self.faults == 1:
            logger.error(
                "vllm-drafter: a fault while drafting; generation goes on, and the requests "
                "concerned get no more drafts. Further faults are counted, not logged. Please "
                "report this traceback.",
                exc_info=fault,
            )

    # --- inside -------------------------------------------------------------

    def _step(self, step: _Step) -> list[list[int]]:
        if self._batch is not None and self._batch.is_of(step):
            return self._draft(self._batch.handles, step)
        places = []
        handles = []
        for place, key in enumerate(step.keys):
            request = self._requests.get(key)
            if request is None or request.prompt_length != step.prompt_lengths[place]:
                request = self._start(key, step.prompt(place))
            if request is not None:
                places.append(place)
                handles.append(request.handle)
        known = np.array(handles, dtype=np.int64)
        if len(places) == len(step.keys):
            self._batch = _Batch(step.keys, step.prompt_lengths, known)
            return self._draft(known, step)
        drafts: list[list[int]] = [[] for _ in step.keys]
        if places:
            for place, draft in zip(places, self._draft(known, step.some(places)), strict=True):
                drafts[place] = draft
        return drafts

    def _draft(self, handles: npt.NDArray[np.int64], step: _Step) -> list[list[int]]:
        """The drafts of requests that the drafter knows."""
        batch = self._call(handles, step)
        drafts: list[list[int]] = batch.tolist()
        self.activity.note_drafts(batch.lengths, batch.match_lengths)
        if batch.status.any():
            # Another call would overwrite the statuses.
            for place, status in enumerate(batch.status.tolist()):
                if status:
                    drafts[place] = self._again(step.only(place), status)
        return drafts

    def _call(self, handles: npt.NDArray[np.int64], step: _Step) -> Any:
        assert self._drafter is not None
        return self._drafter.step(
            handles,
            step.rows,
            step.token_ids,
            step.num_tokens,
            step.max_tokens,
            max_spec_factor=self.settings.max_spec_factor,
            min_token_prob=self.settings.min_token_prob,
        )

    def _start(self, key: Hashable, prompt: npt.NDArray[np.int32]) -> _Request | None:
        """Start a request, or start it over; None if it gets no drafts."""
        if self._drafter is None or key in self._muted:
            return None
        try:
            if key not in self._requests:
                self.activity.requests += 1
            self._forget(key)
            request = _Request(self._drafter.start_request(key, prompt), len(prompt))
        except self._fatal:
            raise
        except Exception as fault:  # noqa: BLE001 - as in step
            self.note_fault(fault)
            self._mute(key)
            return None
        self._requests[key] = request
        return request

    def _again(self, step: _Step, status: int) -> list[int]:
        """Start a request over if its row does not continue what the drafter has (status 1)."""
        [key] = step.keys
        if status == 1:
            request = self._start(key, step.prompt(0))
            if request is None:
                return []
            batch = self._call(np.array([request.handle], dtype=np.int64), step)
            status = int(batch.status[0])
            if status == 0:
                draft: list[int] = batch.tolist()[0]
                return draft
        self.note_fault(
            ValueError(f"request {key!r}: the drafter refused its row with status {status}")
        )
        self._mute(key)
        return []

    def _step_alone(self, step: _Step) -> list[int]:
        """One request's step, after that of the batch failed: whichever is at fault is muted."""
        try:
            return self._step(step)[0]
        except Exception as fault:  # noqa: BLE001 - as in step
            self.note_fault(fault)
            if self._survives(fault):
                self._mute(step.keys[0])
            return []

    def _mute(self, key: Hashable) -> None:
        """No drafts for this request until it is gone."""
        self._muted.add(key)
        with contextlib.suppress(Exception):
            self._forget(key)

    def _forget(self, key: Hashable) -> None:
        """Take a request, and the response cached under its id, out of the drafter."""
        assert self._drafter is not None
        self._batch = None
        self._requests.pop(key, None)
        if key in self._drafter.active_requests:
            self._drafter.stop_request(key)
        if key in self._drafter.cached_requests:
            # A resumed request gives its whole response again: kept, it would count twice.
            self._drafter.evict_cached_response(key)

    def _survives(self, fault: BaseException) -> bool:
        """Whether the drafter can be used after `fault`; if not, it is replaced or given up."""
        if self._drafter is not None and not isinstance(fault, self._fatal):
            return True
        self._batch = None
        self._requests.clear()
        self._drafter = None
        if self._rebuilds < MAX_REBUILDS:
            self._rebuilds += 1
            with contextlib.suppress(Exception):
                self._drafter = self._new_drafter()
        if self._drafter is None:
            logger.error(
                "vllm-drafter: the drafter cannot be used any more; generation goes on without "
                "drafts"
            )
        return False

    def _new_drafter(self) -> SuffixDrafter:
        from drafter_core import SuffixDrafter

        return SuffixDrafter(
            max_depth=self.settings.max_tree_depth,
            max_cached_requests=self.settings.max_cached_requests,
            verify_tokens=self.settings.verify_tokens,
        )

    def _try_out(self) -> None:
        """Compile, or load, what steps call, and take some on a request of no meaning."""
        token_ids = np.tile(np.arange(8, dtype=np.int32), (1, 8))
        num_tokens = np.full(1, 32, dtype=np.int32)
        row = np.zeros(1, dtype=np.int64)
        max_tokens = np.full(1, 4, dtype=np.int32)
        self._drafter = self._new_drafter()
        # The second prompt is shorter: the request is started over.
        for prompt_length in (16, 12):
            for length in (24, 32):
                num_tokens[0] = length
                self._step(
                    _Step(["try-out"], row, [prompt_length], token_ids, num_tokens, max_tokens)
                )
        self._forget("try-out")
        self.activity = Activity()
        if self.faults:
            raise RuntimeError("the drafter refused a request that it must take")
