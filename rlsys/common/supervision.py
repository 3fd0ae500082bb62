"""Decisions about workers that die: restart or give up; retry, isolate or drop their work.

    died, progressed, ended ──► Supervisor ──► Decision ──► a shell carries it out

A *place* is the slot of a worker, which gets a successor when its worker dies. An *item* is work
that runs in a worker: a batch, a call, a model, a group or an episode. Deaths are counted in two
ways. Deaths in a row without progress count for the place, which is given up in the end. Deaths
with an item count for the item, which is dropped in the end.

All limits of the system are in the table below. There is no I/O, and the clock is injected. The
shells are actors/cluster/supervised_pool.py for Ray actors and rlsys/common/local_process.py for
local processes. The loops of the controller use a Supervisor directly.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
T = TypeVar("T")

# Beyond any pause in practice, so that 2 ** deaths does not overflow.
MAX_DOUBLINGS = 60

# The place of a supervisor with one worker.
ONLY = 0


@dataclass(frozen=True)
class RestartPolicy:
    """Limit of the restarts at a place.

    Attributes:
        max_restarts: Restarts in a row after deaths without progress, failed starts included.
        first_pause_s: Pause before the first such restart. Each further one is twice as long.
        longest_pause_s: Upper limit of the pause.
    """

    max_restarts: int = sys.maxsize
    first_pause_s: float = 0.0
    longest_pause_s: float = math.inf


@dataclass(frozen=True)
class PoisonPolicy:
    """Limit of the deaths with an item, which counts as their cause then.

    Attributes:
        max_deaths: Deaths with the item at which it is dropped.
        isolates: Whether it is instead run apart from others then, and dropped if its worker dies
            there too. Since isolation finds the guilty item, the place is not blamed for a death
            with items.
    """

    max_deaths: int = sys.maxsize
    isolates: bool = False


@dataclass(frozen=True)
class Policy:
    """Limits of one kind of worker."""

    restart: RestartPolicy = field(default_factory=RestartPolicy)
    poison: PoisonPolicy = field(default_factory=PoisonPolicy)


# Successors may be placed on a lost node too. Reward workers run no user code, so a third death
# with a rollout is no coincidence.
REWARD_WORKERS = Policy(RestartPolicy(2), PoisonPolicy(3))
# The loss of rows ends the run. Successors as above.
FROZEN_MODELS = Policy(RestartPolicy(2), PoisonPolicy(3))
# An evaluation takes minutes, and a failed one does not end the run. Successors as above.
EVALUATION = Policy(RestartPolicy(2), PoisonPolicy(2))
# Lost nodes take seconds to be noticed. A group that kills its replica must not kill all of them.
REPLICAS = Policy(RestartPolicy(4, first_pause_s=1.0), PoisonPolicy(3))
# Deaths in a row that drop groups, by replica. Progress is a complete group: replicas that finish
# single rollouts between their deaths would be restarted for ever.
DROPPED_GROUPS = Policy(RestartPolicy(4))
# Of a server, which goes on without: the next request starts another one then.
SAMPLERS = Policy(RestartPolicy(4, first_pause_s=1.0))
# Between two steps. A restart from memory takes seconds.
TRAINER = Policy(RestartPolicy(5))
# One start, export or publication. Ray may place the first restart on a lost node.
TRAINER_OPERATIONS = Policy(RestartPolicy(2))
# Restarts by worker. One death may be a coincidence, and isolation takes workers.
ENVIRONMENT_WORKERS = Policy(RestartPolicy(3), PoisonPolicy(2, isolates=True))
# A standby worker that keeps dying unused is started only when it is needed.
STANDBY_WORKERS = Policy(RestartPolicy(3))
# A node on which a shard dies twice during its start is lost or out of memory.
STORE_SHARDS = Policy(RestartPolicy(1))
# A start of Ray fails now and then on a busy machine, hardly ever twice.
LOCAL_RAY = Policy(RestartPolicy(1))
# Memory may be short for some seconds. To run a call alone takes one start of a process.
REWARD_PROCESSES = Policy(
    RestartPolicy(2, first_pause_s=1.0, longest_pause_s=10.0), PoisonPolicy(1, isolates=True)
)
# An episode is long, so it is repeated among others once before it gets a process of its own.
SYNC_FUNCTIONS = Policy(poison=PoisonPolicy(2, isolates=True))


async def retried(
    work: Callable[[], Awaitable[T]],
    policy: Policy,
    deadly: type[Exception],
    on_retry: Callable[[Exception], Awaitable[None]] | None = None,
) -> T:
    """Return the result of `work`, which is called again after each deadly error.

    Raises the last error when the policy gives up. `on_retry` gets each other one before.
    """
    supervisor = Supervisor[str](policy)
    while True:
        try:
            return await work()
        except deadly as death:
            if supervisor.died(str(death)).gives_up:
                raise
            if on_retry is not None:
                await on_retry(death)


@dataclass(frozen=True, kw_only=True)
class Decision(Generic[Item]):
    """Consequences of a death.

    Attributes:
        retry: Items to run again as before.
        isolate: Items to run again, apart from others.
        drop: Items that are not run again, with the reason of the last death.
        gives_up: Reason of the last death if the place has died too often in a row, else "".
    """

    retry: Sequence[Item]
    isolate: Sequence[Item]
    drop: Mapping[Item, str]
    gives_up: str


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

    def died(
        self,
        reason: str,
        running: Iterable[Item] = (),
        *,
        place: Hashable = ONLY,
        is_alone: bool = False,
    ) -> Decision[Item]:
        """Record the death of a worker, or its failed start, with the items that it had.

        With `is_alone`, it was the worker of isolated items.
        """
        items = list(dict.fromkeys(running))
        self._num_deaths.update(items)
        limit = 0 if is_alone else self._poison.max_deaths
        poison = {item: reason for item in items if self._num_deaths[item] >= limit}
        isolates = self._poison.isolates and not is_alone
        drop = {} if isolates else poison
        self.ended(drop)
        is_given_up = not is_alone and self._count(place, is_blamed=not (items and isolates))
        return Decision(
            retry=[item for item in items if item not in poison],
            isolate=list(poison) if isolates else [],
            drop=drop,
            gives_up=reason if is_given_up else "",
        )

    def pause_s(self, *, place: Hashable = ONLY) -> float:
        """Return the time until the worker of a place may be restarted."""
        return max(0.0, self._restart_s[place] - self._clock())

    def _count(self, place: Hashable, *, is_blamed: bool) -> bool:
        """Count a death for its place, if that is blamed; return whether the place is given up."""
        if place in self._fruitful or not is_blamed:
            self._fruitful.discard(place)
            return False
        self._num_fruitless[place] += 1
        num_fruitless, policy = self._num_fruitless[place], self._restart
        factor = 2.0 ** min(num_fruitless - 1, MAX_DOUBLINGS)
        pause_s = min(policy.longest_pause_s, policy.first_pause_s * factor)
        self._restart_s[place] = self._clock() + pause_s
        return num_fruitless > policy.max_restarts
