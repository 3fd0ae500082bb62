"""What happens to each run, decided by a seed before anything starts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

ACTORS = ("rollout", "trainer", "reward", "shard", "keeper")
ALL_KINDS = (*ACTORS, "node", "driver")
STALENESS = (0, 1, 4)
MAX_BLOWS = 3

# A hiccup is over before anybody may take it for a death.
HICCUP_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Blow:
    """One process, or all of a node, is hurt when the run has `after_step` steps and some time."""

    after_step: int
    delay_s: float
    kind: str
    how: str  # kill; stop, for good; or hiccup, a stop that ends by itself
    choice: float  # in [0, 1): which of several


@dataclass(frozen=True, kw_only=True)
class Plan:
    number: int
    max_staleness: int
    blows: Sequence[Blow]


@dataclass(frozen=True, kw_only=True)
class Kills:
    """All processes of a run are killed at once, when it has some steps and some time after."""

    number: int
    max_staleness: int
    after_steps: Sequence[int]
    delays_s: Sequence[float]


def kills(seed: int, number: int, *, num_steps: int) -> Kills:
    chance = random.Random(f"{seed}.{number}")
    how_often = chance.randint(1, 2)
    return Kills(
        number=number,
        max_staleness=STALENESS[number % len(STALENESS)],
        after_steps=sorted(chance.sample(range(1, num_steps - 1), how_often)),
        delays_s=[chance.uniform(0.0, 0.5) for _ in range(how_often)],
    )


def plan(seed: int, number: int, *, num_steps: int, kinds: Sequence[str]) -> Plan:
    """Run `number` of a seed. Over several runs every kind has its turn as the first blow."""
    chance = random.Random(f"{seed}.{number}")
    blows = []
    for blow in range(chance.randint(1, MAX_BLOWS)):
        kind = kinds[number % len(kinds)] if blow == 0 else chance.choice(kinds)
        how = chance.choice(("kill", "kill", "stop", "hiccup"))
        if kind == "driver" and how == "stop":
            how = "kill"  # nobody is there who could notice
        blows.append(
            Blow(
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
        blows=sorted(blows, key=lambda blow: blow.after_step),
    )
