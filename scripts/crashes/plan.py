"""Random faults of each run, decided by a seed before anything starts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

ACTORS = ("rollout", "trainer", "reward", "shard", "keeper")
ALL_KINDS = (*ACTORS, "node", "driver")
STALENESS = (0, 1, 4)
MAX_FAULTS = 3

# A hiccup ends before it may count as a death.
HICCUP_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Fault that hits a process or a node some time after a step."""

    after_step: int
    delay_s: float
    kind: str
    how: str  # kill, stop (for good) or hiccup (a short stop)
    choice: float  # in [0, 1): selects one of several processes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The faults of one run."""

    number: int
    max_staleness: int
    faults: Sequence[Fault]


@dataclass(frozen=True, kw_only=True)
class Kills:
    """Moments at which all processes of a run are killed at once."""

    number: int
    max_staleness: int
    after_steps: Sequence[int]
    delays_s: Sequence[float]


def kills(seed: int, number: int, *, num_steps: int) -> Kills:
    """Return the moments for run `number` of a seed."""
    chance = random.Random(f"{seed}.{number}")
    how_often = chance.randint(1, 2)
    return Kills(
        number=number,
        max_staleness=STALENESS[number % len(STALENESS)],
        after_steps=sorted(chance.sample(range(1, num_steps - 1), how_often)),
        delays_s=[chance.uniform(0.0, 0.5) for _ in range(how_often)],
    )


def plan(seed: int, number: int, *, num_steps: int, kinds: Sequence[str]) -> Plan:
    """Return the faults of run `number` of a seed. Each kind comes first in some run."""
    chance = random.Random(f"{seed}.{number}")
    faults = []
    for fault in range(chance.randint(1, MAX_FAULTS)):
        kind = kinds[number % len(kinds)] if fault == 0 else chance.choice(kinds)
        how = chance.choice(("kill", "kill", "stop", "hiccup"))
        if kind == "driver" and how == "stop":
            how = "kill"  # a stopped driver would never be started again
        faults.append(
            Fault(
                after_step=chance.randint(1, num_steps - 2),
                delay_s=chance.uniform(0.0, 0.5),
                kind=kind,
                how=how,
                choice=chance.random(),
            )
        )
    return Plan(
        number=number,
        max_staleness=STALENESS[number % len(STALENESS)],
        faults=sorted(faults, key=lambda fault: fault.after_step),
    )
