"""vLLM's scheduler with a limit of running requests that follows from its preemptions.

    step: a preemption ─► AdmissionWindow ─► max_num_active_reqs ─► requests that may start

Requests beyond the limit wait in vLLM's own queue, by priority and in order of arrival. vLLM
creates the scheduler in its engine core, from the class's dotted name.

Imports vllm: only vLLM's own processes import this module.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from rlsys.dataflow.scheduling.admission_window import AdmissionWindow, StepTimes

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as Base
else:
    Base = object


class _Windowed(Base):
    """The addition to either scheduler of vLLM."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._window = AdmissionWindow()
        self._times = StepTimes()
        self._most_active: int = self.max_num_active_reqs
        self._begun_s: float | None = None  # when the last step began; None if there was nothing
        self._num_prefill = self._num_recomputed = 0  # tokens of the last step
        self._num_ended = 0  # requests, since the last step
        self._is_in_step = False

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step, after the time of the last one is known."""
        self._count_last_step()
        self._is_in_step = True
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self._is_in_step = False
        is_binding = bool(self.waiting) and len(self.running) >= self.max_num_active_reqs
        self._window.ended(self._num_ended, num_running=len(self.running), is_binding=is_binding)
        self._num_ended = 0
        self._apply()
        self._count_tokens(output.num_scheduled_tokens)
        return output

    def _count_last_step(self) -> None:
        """Count the time from one step to the next, which also holds with steps ahead."""
        now_s = time.perf_counter()
        if self._begun_s is not None:
            seconds = now_s - self._begun_s
            wasted_s = self._times.wasted_s(
                seconds, num_prefill=self._num_prefill, num_recomputed=self._num_recomputed
            )
            self._window.worked(seconds, wasted_s=wasted_s)
        self._begun_s = now_s

    def _count_tokens(self, num_scheduled: Mapping[str, int]) -> None:
        at_once = 1 + self.num_spec_tokens  # tokens of a request that decodes
        prefills = {name: num for name, num in num_scheduled.items() if num > at_once}
        self._num_prefill = sum(prefills.values())
        self._num_recomputed = sum(
            num for name, num in prefills.items() if self.requests[name].num_preemptions
        )
        if not num_scheduled:
            self._begun_s = None

    def _preempt_request(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._preempt_request(*args, **kwargs)
        if self._is_in_step:  # for lack of memory, not to clear the cache
            self._window.preempted(len(self.running))
            self._apply()
        return result

    def _free_request(self, *args: Any, **kwargs: Any) -> Any:
        self._num_ended += 1
        return super()._free_request(*args, **kwargs)

    def _apply(self) -> None:
        self.max_num_active_reqs = min(self._most_active, self._window.limit)


class WindowedScheduler(_Windowed, Scheduler):
    """The scheduler of an engine that waits for each step."""


class WindowedAsyncScheduler(_Windowed, AsyncScheduler):
    """The scheduler of an engine that plans a step while another runs."""
