"""Time model of a generation engine with continuous batching and a limit of cached tokens.

    add ──► waiting ──admitted: prefill──► running ──one token per decode step──► finished
                ▲                             │
                └── preempted, newest first ──┘  when the cache is full

All running sequences get one token per decode step, so nothing changes between two events. The
model jumps from event to event: its cost depends on the number of sequences, not on their tokens.
It is a pure state machine. The caller gives the time of each call in seconds.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from rlsys.dataflow.scheduling.admission_window import AdmissionWindow


class DecodeCosts(Protocol):
    """Seconds that an engine takes."""

    def decode_step_s(self, num_sequences: int, context_tokens: float) -> float:
        """Return the time of one decode step over sequences with that many tokens in all."""

    def prefill_s(self, num_tokens: int) -> float:
        """Return the time to compute the keys and values of new tokens."""


@dataclass(kw_only=True, eq=False)
class SampledSequence:
    """A completion that the engine samples.

    Attributes:
        prompt: Key of the prompt. Sequences with the same key share the prompt's cached tokens.
        num_prompt_tokens: Tokens of the prompt.
        num_tokens: Tokens that the completion will have in the end.
        num_done: Tokens that are sampled.
        num_uncached: Tokens whose keys and values its start computes. None: all of its tokens.
    """

    name: str
    prompt: int
    num_prompt_tokens: int
    num_tokens: int
    num_done: int = 0
    num_uncached: int | None = None
    _ends_at: int = field(default=0, init=False)  # decode step after which it is complete


class BatchingEngine:
    """Engine that holds `cache_tokens` tokens and runs at most `max_running` sequences.

    With a `window` the limit of running sequences also follows from the preemptions.

    The methods that change the engine take the present time and first advance the engine to it.
    A decode step that has begun is completed before new sequences start.

    Raises:
        ValueError: A sequence needs more tokens than the cache holds.
    """

    def __init__(
        self,
        costs: DecodeCosts,
        *,
        cache_tokens: int,
        max_running: int = 1 << 30,
        window: AdmissionWindow | None = None,
    ) -> None:
        self._costs = costs
        self._cache_tokens = cache_tokens
        self._max_running = max_running
        self._window = window
        self._now_s = 0.0  # all work before this time is done; beyond the present during a prefill
        self._num_steps = 0  # decode steps so far
        self._waiting: deque[SampledSequence] = deque()
        self._running: dict[str, SampledSequence] = {}  # in order of admission
        self._ends: list[tuple[int, int, SampledSequence]] = []  # heap by last decode step
        self._num_admitted = 0
        self._cached = 0  # distinct tokens of running sequences
        self._context = 0  # tokens that attention reads in a step
        self._num_by_prompt: dict[int, int] = {}
        self._finished: list[SampledSequence] = []
        self._is_paused = False
        self.is_admitting = True
        self.busy_s = 0.0
        self.num_sampled = 0
        self.num_preempted = 0

    @property
    def num_running(self) -> int:
        """Number of running sequences."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for room in the cache."""
        return len(self._waiting)

    def sequences(self) -> Iterator[SampledSequence]:
        """Yield all sequences that are not finished."""
        yield from self._running.values()
        yield from self._waiting

    def add(self, sequence: SampledSequence, now_s: float) -> None:
        """Queue a sequence."""
        needed = sequence.num_prompt_tokens + sequence.num_tokens
        if needed > self._cache_tokens:
            raise ValueError(
                f"{sequence.name} needs {needed} tokens, and the engine's cache holds "
                f"{self._cache_tokens}. Give the replica more memory, or limit the lengths."
            )
        self.advance(now_s)
        self._waiting.append(sequence)
        if self._now_s >= now_s:  # between two decode steps; else the next one ends first
            self._admit()

    def abort(self, name: str, now_s: float) -> SampledSequence | None:
        """Remove a sequence and return it; None if it has finished."""
        self.advance(now_s)
        if (running := self._running.get(name)) is not None:
            self._remove(running)
            self._ends = [entry for entry in self._ends if entry[2] is not running]
            heapq.heapify(self._ends)
            self._admit()
            return running
        for waiting in self._waiting:
            if waiting.name == name:
                self._waiting.remove(waiting)
                return waiting
        return None

    def pause(self, now_s: float) -> None:
        """Stop sampling until `resume`. Sequences keep their tokens."""
        self.advance(now_s)
        self._is_paused = True

    def forget(self) -> None:
        """Drop the cached tokens during a pause. Running sequences compute theirs again."""
        assert self._is_paused
        for sequence in reversed(list(self._running.values())):
            self._remove(sequence)
            sequence.num_uncached = None
            self._waiting.appendleft(sequence)
        self._ends.clear()

    def resume(self, now_s: float) -> None:
        """Continue after `pause`."""
        self._now_s = max(self._now_s, now_s)
        self._is_paused = False
        self._admit()

    def admit_again(self, now_s: float) -> None:
        """Admit waiting sequences after `is_admitting` was set again."""
        self.advance(now_s)
        self.is_admitting = True
        self._admit()

    def take_finished(self) -> list[SampledSequence]:
        """Return the sequences that have finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def next_event_s(self) -> float | None:
        """Return the time of the next finished or preempted sequence; None if there is none."""
        if self._is_paused or not self._running:
            return None
        return self._now_s + self._steps_s(self._steps_to_event())

    def advance(self, now_s: float) -> None:
        """Sample until a time. Tokens of a decode step that ends later are not sampled yet."""
        while not self._is_paused and self._running and self._now_s < now_s:
            steps = self._steps_to_event()
            seconds = self._steps_s(steps)
            # The tolerance lets a caller that sleeps until the next event see it.
            if self._now_s + seconds > now_s * (1 + 1e-12) + 1e-9:
                self._step(self._steps_within(now_s - self._now_s, steps))
                return
            self._step(steps)
            self._end_sequences()
            self._admit()
        if not self._running:
            self._now_s = max(self._now_s, now_s)

    def _steps_to_event(self) -> int:
        """Return the number of decode steps until a sequence ends or starts or finds no room."""
        if self._waiting and self._may_admit(self._waiting[0]):
            return 1
        to_end = self._ends[0][0] - self._num_steps
        room = (self._cache_tokens - self._cached) // len(self._running)
        return max(1, min(to_end, room))

    def _steps_s(self, steps: int) -> float:
        """Return the seconds of decode steps, with the mean context of these steps."""
        batch = len(self._running)
        context = self._context + batch * (steps - 1) / 2
        return steps * self._costs.decode_step_s(batch, context)

    def _steps_within(self, seconds: float, at_most: int) -> int:
        """Return the number of whole decode steps that fit into a time."""
        low, high = 0, at_most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._steps_s(middle) <= seconds else (low, middle)
        return low

    def _step(self, steps: int) -> None:
        if steps == 0:
            return
        seconds, batch = self._steps_s(steps), len(self._running)
        self._work(seconds)
        self._num_steps += steps
        self._cached += steps * batch
        self._context += steps * batch
        self.num_sampled += steps * batch

    def _end_sequences(self) -> None:
        is_binding = bool(self._waiting) and len(self._running) >= self._limit
        num_before = len(self._finished)
        while self._ends and self._ends[0][0] <= self._num_steps:
            sequence = heapq.heappop(self._ends)[2]
            self._remove(sequence)
            self._finished.append(sequence)
        while self._running and self._cached + len(self._running) > self._cache_tokens:
            newest = self._running[next(reversed(self._running))]
            self._remove(newest)
            self._ends = [entry for entry in self._ends if entry[2] is not newest]
            heapq.heapify(self._ends)
            self._waiting.appendleft(newest)
            self.num_preempted += 1
            if self._window is not None:
                self._window.preempted(len(self._running))
        if self._window is not None:
            self._window.ended(
                len(self._finished) - num_before,
                num_running=len(self._running),
                is_binding=is_binding,
            )

    @property
    def _limit(self) -> int:
        return min(self._max_running, self._window.limit if self._window else self._max_running)

    def _remove(self, sequence: SampledSequence) -> None:
        """Take a sequence out of the batch; its number of sampled tokens is then up to date."""
        del self._running[sequence.name]
        sequence.num_done = self._done(sequence)
        self._context -= sequence.num_prompt_tokens + sequence.num_done
        self._cached -= sequence.num_done
        left = self._num_by_prompt[sequence.prompt] - 1
        if left:
            self._num_by_prompt[sequence.prompt] = left
        else:
            del self._num_by_prompt[sequence.prompt]
            self._cached -= sequence.num_prompt_tokens

    def num_done(self, sequence: SampledSequence) -> int:
        """Return the number of sampled tokens of a sequence."""
        return self._done(sequence) if sequence.name in self._running else sequence.num_done

    def _done(self, sequence: SampledSequence) -> int:
        return sequence.num_tokens - (sequence._ends_at - self._num_steps)

    def _admit(self) -> None:
        """Start waiting sequences that have room; their prefill delays all others."""
        new_tokens = num_recomputed = 0
        while self._waiting and self._may_admit(self._waiting[0]):
            sequence = self._waiting.popleft()
            is_shared = sequence.prompt in self._num_by_prompt
            own = sequence.num_done + (0 if is_shared else sequence.num_prompt_tokens)
            computed = own if sequence.num_uncached is None else min(own, sequence.num_uncached)
            new_tokens += computed
            # A sequence that comes with tokens of another replica counts too.
            num_recomputed += computed if sequence.num_done else 0
            self._cached += own
            self._context += sequence.num_prompt_tokens + sequence.num_done
            self._num_by_prompt[sequence.prompt] = self._num_by_prompt.get(sequence.prompt, 0) + 1
            sequence._ends_at = self._num_steps + sequence.num_tokens - sequence.num_done
            self._num_admitted += 1
            self._running[sequence.name] = sequence
            heapq.heappush(self._ends, (sequence._ends_at, self._num_admitted, sequence))
        if new_tokens:
            seconds = self._costs.prefill_s(new_tokens)
            self._work(seconds, wasted_s=seconds * num_recomputed / new_tokens)

    def _work(self, seconds: float, *, wasted_s: float = 0.0) -> None:
        self._now_s += seconds
        self.busy_s += seconds
        if self._window is not None:
            self._window.worked(seconds, wasted_s=wasted_s)

    def _may_admit(self, sequence: SampledSequence) -> bool:
        if self._is_paused or not self.is_admitting or len(self._running) >= self._limit:
            return False
        own = sequence.num_done
        if sequence.prompt not in self._num_by_prompt:
            own += sequence.num_prompt_tokens
        # One token more for each sequence, so that the next step has room.
        return self._cached + own + len(self._running) + 1 <= self._cache_tokens
