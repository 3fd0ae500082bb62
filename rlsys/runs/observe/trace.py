"""Trace events of one process: spans, counters and arrows, and its times of work and of waiting.

    Tracer (one per process) ── drain() ──► TraceBatch ──► TraceFile (one per run) ──► trace.json

Input: calls on hot paths, each of about a microsecond. Output: batches of events, which actors send
along with their results.

Clocks. A tracer's time is Unix time in nanoseconds: the monotonic clock plus the offset to
`time.time_ns` at the creation of the tracer, so that it never steps back. Processes of one node
agree to about a microsecond; processes of two nodes agree as well as NTP synchronizes their clocks,
usually to a millisecond.

Bound. A tracer holds at most `max_pending` events until it is drained. Later ones are counted and
left out. Times of work and of waiting are always complete.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

Clock = Callable[[], int]  # Unix time in nanoseconds
Args = Mapping[str, Any]

# (phase of the trace event format, name, track, start in ns, number, arguments). A plain tuple,
# because it is created on hot paths. The number is a span's duration in ns, a counter's value, or
# the id of an arrow or of an overlapping span.
Event = tuple[str, str, str, int, float, Args | None]

SPAN, COUNTER, INSTANT = "X", "C", "i"
BEGIN, END = "b", "e"  # of a span that overlaps others, matched by name and id over processes
ARROW_OUT, ARROW_IN = "s", "f"

MAX_PENDING = 100_000  # about 25 MB


def unix_clock() -> Clock:
    """Return a monotonic clock of Unix time in nanoseconds."""
    readings = [(time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()) for _ in range(9)]
    # The shortest reading was not interrupted between its two clocks.
    before, unix, after = min(readings, key=lambda reading: reading[2] - reading[0])
    offset = unix - (before + after) // 2
    return lambda: time.perf_counter_ns() + offset


@dataclass(frozen=True)
class TraceBatch:
    """Events that one process recorded since it was last drained.

    `cpu_s` is the CPU time of the process, 0 of a further tracer in the same process.
    """

    process: str
    events: list[Event]
    num_lost: int
    work_s: float = 0.0
    wait_s: float = 0.0
    cpu_s: float = 0.0


class Tracer:
    """Recorder of the events of one process, cheap enough for every call of an actor.

    `process` is the actor's name ("rollout 0"). A track is one of its activities ("generate",
    "weights"). Spans of one track must nest, so each thread needs its own tracks. With
    max_pending=0 nothing is recorded. A pickled tracer arrives empty, with the clock of the
    receiving process.
    """

    def __init__(
        self,
        process: str,
        *,
        clock: Clock | None = None,
        cpu_clock: Callable[[], float] | None = time.process_time,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self.process = process
        self._max_pending = max_pending
        self._events: list[Event] = []
        self._num_lost = 0
        self.now = clock or unix_clock()
        self._count_lock = threading.Lock()
        self._num_jobs = 0
        self._counted_until_ns = self.now()
        self._work_ns = self._wait_ns = 0
        self._cpu_clock = cpu_clock
        self._cpu_s = cpu_clock() if cpu_clock else 0.0  # at the last drain

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.process, self._max_pending)

    def of(self, process: str) -> Tracer:
        """Return a tracer of another name, for tracks that overlap those of this one."""
        return Tracer(process, clock=self.now, cpu_clock=None, max_pending=self._max_pending)

    def span(self, track: str, name: str, **args: Any) -> TraceSpan:
        """Return a context that records a span.

        with tracer.span("train", "micro-batch", tokens=4096): ...
        """
        return TraceSpan(self, track, name, args or None)

    def add_span(
        self, track: str, name: str, start_ns: int, end_ns: int, args: Args | None = None
    ) -> None:
        """Add a span that was timed elsewhere with `now`."""
        self._add((SPAN, name, track, start_ns, end_ns - start_ns, args))

    def instant(self, track: str, name: str, **args: Any) -> None:
        """Add a point in time."""
        self._add((INSTANT, name, track, self.now(), 0, args or None))

    def counter(self, name: str, value: float) -> None:
        """Add a value that holds until the next one, such as the depth of a queue."""
        self._add((COUNTER, name, "", self.now(), value, None))

    def begin(self, name: str, id: int, **args: Any) -> None:
        """Begin a span that may overlap others and end in another process, such as a group's."""
        self._add((BEGIN, name, "", self.now(), id, args or None))

    def end(self, name: str, id: int, **args: Any) -> None:
        """End the span that `begin` began with this name and id."""
        self._add((END, name, "", self.now(), id, args or None))

    def arrow_out(self, track: str, name: str, id: int) -> None:
        """Start an arrow at the track's current span. `arrow_in` with its name and id ends it."""
        self._add((ARROW_OUT, name, track, self.now(), id, None))

    def arrow_in(self, track: str, name: str, id: int) -> None:
        """End the arrow at the track's current span."""
        self._add((ARROW_IN, name, track, self.now(), id, None))

    def job_begins(self) -> None:
        """Count work from now on, until as many jobs have ended as have begun."""
        self._count(+1)

    def job_ends(self) -> None:
        """End one job."""
        self._count(-1)

    @contextlib.contextmanager
    def working(self, track: str, name: str, **args: Any) -> Iterator[None]:
        """Record a span that counts as work."""
        self.job_begins()
        try:
            with self.span(track, name, **args):
                yield
        finally:
            self.job_ends()

    def drain(self) -> TraceBatch:
        """Return what was recorded since the last call."""
        self._count(0)
        cpu_s = self._cpu_clock() if self._cpu_clock else 0.0
        batch = TraceBatch(
            self.process,
            self._events,
            self._num_lost,
            work_s=self._work_ns / 1e9,
            wait_s=self._wait_ns / 1e9,
            cpu_s=cpu_s - self._cpu_s,
        )
        self._events, self._num_lost, self._cpu_s = [], 0, cpu_s
        self._work_ns = self._wait_ns = 0
        return batch

    def _count(self, num_jobs: int) -> None:
        with self._count_lock:  # trainers drain in another thread
            now = self.now()
            if self._num_jobs:
                self._work_ns += now - self._counted_until_ns
            else:
                self._wait_ns += now - self._counted_until_ns
            self._counted_until_ns = now
            self._num_jobs += num_jobs

    def _add(self, event: Event) -> None:
        if len(self._events) < self._max_pending:
            self._events.append(event)
        else:
            self._num_lost += 1


def _restored(process: str, max_pending: int) -> Tracer:
    return Tracer(process, max_pending=max_pending)


class TraceSpan:
    """Context of one `Tracer.span`."""

    __slots__ = ("_args", "_name", "_start_ns", "_tracer", "_track")

    def __init__(self, tracer: Tracer, track: str, name: str, args: Args | None) -> None:
        self._tracer = tracer
        self._track = track
        self._name = name
        self._args = args

    def __enter__(self) -> None:
        self._start_ns = self._tracer.now()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tracer = self._tracer
        tracer.add_span(self._track, self._name, self._start_ns, tracer.now(), self._args)
