"""Only episodes that kill their worker fail, the others are played, and few workers die."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rlsys.environments.workers.fault_isolation import FaultIsolation, Unit


class Played:
    """Play of units by workers that die when they play a culprit."""

    def __init__(
        self, suspects: FaultIsolation, culprits: set[str], *, seed: int, is_seen: bool = False
    ) -> None:
        self.suspects = suspects
        self.culprits = culprits
        self.is_seen = is_seen  # the culprit of each death is known
        self.random = random.Random(seed)
        self.ended: list[str] = []
        self.failed: list[str] = []
        self.num_deaths_together = self.num_deaths_apart = 0

    def run(self, units: Sequence[Unit]) -> None:
        together = list(units)
        while together:
            left, culprit = self._turns(together)
            if not left:
                together = []
            else:
                self.num_deaths_together += 1
                together = self.suspects.died_together(left, culprit)
            while (part := self.suspects.next_part()) is not None:
                self._apart(part)

    def _apart(self, part: Sequence[Unit]) -> None:
        left, culprit = self._turns(part)
        if left:
            self.num_deaths_apart += 1
            if (unit := self.suspects.died_apart(left, culprit)) is not None:
                self.failed += unit
                self.suspects.ended(unit)

    def _turns(self, units: Sequence[Unit]) -> tuple[list[Unit], str]:
        """Return the units left when the worker dies, and the culprit if it is known."""
        left = list(units)
        while left:
            unit = self.random.choice(left)
            if does := [name for name in unit if name in self.culprits]:
                return left, does[0] if self.is_seen else ""
            left.remove(unit)
            self.ended += unit
            self.suspects.ended(unit)
        return [], ""


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Unit], set[str]]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=80))
    units: list[Unit] = []
    for number, size in enumerate(sizes):
        units.append(tuple(f"{number}.{index}" for index in range(size)))
    names = [name for unit in units for name in unit]
    return units, set(draw(st.lists(st.sampled_from(names), max_size=6, unique=True)))


@given(worlds(), st.integers(1, 3), st.integers(2, 5), st.integers(0, 1 << 30), st.booleans())
def test_culprits_alone_fail_and_few_workers_die_for_it(
    world: tuple[list[Unit], set[str]], max_deaths: int, num_parts: int, seed: int, is_seen: bool
) -> None:
    units, culprits = world
    played = Played(
        FaultIsolation(max_deaths=max_deaths, num_parts=num_parts),
        culprits,
        seed=seed,
        is_seen=is_seen,
    )
    played.run(units)
    guilty = [unit for unit in units if culprits & set(unit)]
    assert sorted(played.failed) == sorted(name for unit in guilty for name in unit)
    innocent = [name for unit in units if unit not in guilty for name in unit]
    assert sorted(played.ended) == sorted(innocent)
    num_levels = max(1, math.ceil(math.log(len(units), num_parts) - 1e-9))
    if is_seen:
        assert played.num_deaths_together == played.num_deaths_apart == len(guilty)
    else:
        assert played.num_deaths_together <= len(guilty) * max_deaths
        assert played.num_deaths_apart <= len(guilty) * num_levels


def test_sixteen_suspects_are_played_by_four_and_then_alone() -> None:
    suspects = FaultIsolation(max_deaths=2, num_parts=4)
    units: list[Unit] = [(str(n),) for n in range(16)]
    assert suspects.died_together(units) == units
    late = [*units, ("late",)]
    assert suspects.died_together(late) == [("late",)]
    assert suspects.next_part() == units[:4]
    assert suspects.next_part() == units[4:8]
    assert suspects.died_apart(units[4:8]) is None
    assert [suspects.next_part() for _ in range(4)] == [[unit] for unit in units[4:8]]
    assert suspects.died_apart([("5",)]) == ("5",)
    assert suspects.next_part() == units[8:12]


def test_a_known_culprit_is_played_alone_and_the_others_are_not_suspected() -> None:
    suspects = FaultIsolation(max_deaths=1, num_parts=2)
    assert suspects.died_together([("a",), ("b",), ("c",)], "b") == [("a",), ("c",)]
    assert suspects.next_part() == [("b",)]
    assert suspects.next_part() is None


def test_aborted_episodes_are_removed_from_their_part() -> None:
    suspects = FaultIsolation(max_deaths=1, num_parts=2)
    assert suspects.died_together([("a", "b"), ("c",)]) == []
    assert suspects.withdraw("a")
    assert not suspects.withdraw("a")
    assert suspects.withdraw("c")
    assert suspects.next_part() == [("b",)]
    assert suspects.next_part() is None


def test_a_part_whose_worker_never_began_is_put_back() -> None:
    suspects = FaultIsolation(max_deaths=1, num_parts=2)
    suspects.died_together([("a",), ("b",)])
    part = suspects.next_part()
    assert part == [("a",)]
    suspects.put_back(part)
    assert suspects.next_part() == [("a",)]


def test_an_ended_episode_has_no_deaths() -> None:
    """The same name may come again: a group that is issued once more after it was lost."""
    suspects = FaultIsolation(max_deaths=2, num_parts=2)
    suspects.died_together([("a",)])
    suspects.ended(["a"])
    assert suspects.died_together([("a",)]) == [("a",)]
