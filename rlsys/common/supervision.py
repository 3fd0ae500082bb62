"""Decisions about workers that die: restart or give up; retry, isolate or drop their work.

    died, start_failed, progressed ──► Supervisor ──► Decision ──► a shell carries it out

A *place* is the slot of a worker, which gets a successor when its worker dies. An *item* is work
that runs in a worker: a batch, a call, a model, a group or an episode. Deaths are counted in two
ways. Deaths in a row without progress count for the place, which is given up in the end. Deaths
with an item count for the item, which is dropped in the end.

All limits of the system are in the table of policies below. There is no I/O, and the clock is
injected. The shells are actors/cluster/supervised_pool.py for Ray actors and
rlsys/common/local_process.py for local processes. The loops of the controller use a Supervisor
directly.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

# Limit that is never reached.
UNLIMITED = sys.maxsize

# The place of a supervisor with one worker.
ONLY = 0


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """When the worker of a place is not restarted any more.

    Attributes:
        max_restarts: Restarts in a row after deaths without progress.
        first_pause_s: Pause before the first such restart. Each further one is twice as long.
        longest_pause_s: Upper limit of the pause.
    """

    max_restarts: int
    first_pause_s: float = 0.0
    longest_pause_s: float = math.inf

    def times(self, num_workers: int) -> RestartPolicy:
        """Return the policy of one place that counts the deaths of several workers."""
        return RestartPolicy(
            max_restarts=self.max_restarts * num_workers,
            first_pause_s=self.first_pause_s,
            longest_pause_s=self.longest_pause_s,
        )


@dataclass(frozen=True, kw_only=True)
class PoisonPolicy:
    """When an item counts as the cause of its workers' deaths.

    Attributes:
        max_deaths: Deaths with the item at which it is dropped.
        isolates: Whether it is instead run apart from others then, and dropped if its worker dies
            there too. Items alone are blamed for a death then, because isolation finds the guilty
            one. Otherwise the place is blamed as well.
    """

    max_deaths: int
    isolates: bool = False


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Limits of one kind of worker, and the reason for them."""

    restart: RestartPolicy
    poison: PoisonPolicy
    reason: str


ALWAYS = RestartPolicy(max_restarts=UNLIMITED)
NEVER_DROPPED = PoisonPolicy(max_deaths=UNLIMITED)

REWARD_WORKERS = Policy(
    restart=RestartPolicy(max_restarts=1),
    poison=PoisonPolicy(max_deaths=2),
    reason="They run no user code, so a second death with a rollout is no coincidence.",
)
FROZEN_MODELS = Policy(
    restart=RestartPolicy(max_restarts=2),
    poison=PoisonPolicy(max_deaths=3),
    reason="A loss of the rows ends the run, and a successor may meet a node that is being lost.",
)
EVALUATION = Policy(
    restart=ALWAYS,
    poison=PoisonPolicy(max_deaths=2),
    reason="A failed evaluation never ends a run. Each attempt costs minutes.",
)
REPLICAS = Policy(
    restart=RestartPolicy(max_restarts=4, first_pause_s=1.0),
    poison=PoisonPolicy(max_deaths=3),
    reason="Lost nodes take seconds to be noticed. A group that kills replicas must not kill all.",
)
TRAINER = Policy(
    restart=RestartPolicy(max_restarts=5),
    poison=NEVER_DROPPED,
    reason="A restart is cheap from memory. Deaths without a step between them do not end.",
)
TRAINER_OPERATIONS = Policy(
    restart=RestartPolicy(max_restarts=2),
    poison=NEVER_DROPPED,
    reason="Ray notices a lost node late, so the first restart may be placed on one.",
)
ENVIRONMENT_WORKERS = Policy(
    restart=RestartPolicy(max_restarts=3),
    poison=PoisonPolicy(max_deaths=2, isolates=True),
    reason="One death may be a coincidence. The search for a guilty episode costs workers.",
)
STANDBY_WORKERS = Policy(
    restart=RestartPolicy(max_restarts=3),
    poison=NEVER_DROPPED,
    reason="An unused worker that keeps dying is started only when it is needed.",
)
LOCAL_RAY = Policy(
    restart=RestartPolicy(max_restarts=1),
    poison=NEVER_DROPPED,
    reason="Ray's start fails now and then on a busy machine, hardly ever twice.",
)
REWARD_PROCESSES = Policy(
    restart=RestartPolicy(max_restarts=2, first_pause_s=1.0, longest_pause_s=10.0),
    poison=PoisonPolicy(max_deaths=1, isolates=True),
    reason="Memory may be short for seconds. To repeat a call alone costs one process start.",
)
SYNC_FUNCTIONS = Policy(
    restart=ALWAYS,
    poison=PoisonPolicy(max_deaths=2, isolates=True),
    reason="An episode is long, so it is repeated among others once before it is isolated.",
)


@dataclass(frozen=True, kw_only=True)
class Decision(Generic[Item]):
    """What follows a death.

    Attributes:
        retry: Items to run again as before.
        isolate: Items to run again, apart from others.
        drop: Items that are not run again, with the reason of the last death.
        gives_up: Reason of the last death if the place has died too often in a row, else "".
    """

    retry: Sequence[Item] = ()
    isolate: Sequence[Item] = ()
    drop: Mapping[Item, str]
    gives_up: str = ""


class Supervisor(Generic[Item]):
    """Counts of deaths by place and by item, and the decisions that follow from a policy."""

    def __init__(self, policy: Policy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._restart = policy.restart
        self._poison = policy.poison
        self._clock = clock
        self._num_fruitless: Counter[Hashable] = Counter()  # deaths in a row, by place
        self._fruitful: set[Hashable] = set()  # places whose worker has made progress
        self._restart_s: defaultdict[Hashable, float] = defaultdict(lambda: -math.inf)
        self._num_deaths: Counter[Item] = Counter()  # by item

    def progressed(self, *, place: Hashable = ONLY) -> None:
        """Record that the worker of a place has done some of its work."""
        self._num_fruitless[place] = 0
        self._fruitful.add(place)

    def ended(self, items: Iterable[Item]) -> None:
        """Forget the deaths of items that have ended."""
        for item in items:
            self._num_deaths.pop(item, None)

    def start_failed(self, reason: str, *, place: Hashable = ONLY) -> Decision[Item]:
        """Record that a worker has died before it had any work."""
        return Decision(drop={}, gives_up=self._blame(place, reason))

    def died(
        self,
        reason: str,
        running: Iterable[Item] = (),
        *,
        place: Hashable = ONLY,
        is_alone: bool = False,
    ) -> Decision[Item]:
        """Record the death of a worker with the items that were running in it.

        With `is_alone`, it was the worker of isolated items.
        """
        items = list(dict.fromkeys(running))
        is_blamed = not (self._poison.isolates and items) and not is_alone
        gives_up = self._blame(place, reason) if is_blamed else ""
        if not is_blamed:
            self._fruitful.discard(place)
        retry: list[Item] = []
        poison: list[Item] = []
        for item in items:
            self._num_deaths[item] += 1
            is_poison = is_alone or self._num_deaths[item] >= self._poison.max_deaths
            (poison if is_poison else retry).append(item)
        if self._poison.isolates and not is_alone:
            return Decision(retry=retry, isolate=poison, drop={}, gives_up=gives_up)
        self.ended(poison)
        return Decision(retry=retry, drop=dict.fromkeys(poison, reason), gives_up=gives_up)

    def pause_s(self, *, place: Hashable = ONLY) -> float:
        """Return the time until the worker of a place may be restarted."""
        return max(0.0, self._restart_s[place] - self._clock())

    def _blame(self, place: Hashable, reason: str) -> str:
        """Count a death for a place; return the reason if the place is given up."""
        if place in self._fruitful:
            self._fruitful.discard(place)
            return ""
        self._num_fruitless[place] += 1
        num_fruitless, policy = self._num_fruitless[place], self._restart
        pause_s = min(policy.longest_pause_s, policy.first_pause_s * 2.0 ** (num_fruitless - 1))
        self._restart_s[place] = self._clock() + pause_s
        return reason if num_fruitless > policy.max_restarts else ""
