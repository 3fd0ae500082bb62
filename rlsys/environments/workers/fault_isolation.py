"""Which of the episodes that ran in a worker has ended it: found by playing fewer and fewer of them
together, so that it fails alone and its neighbours are played to their end.

In: what ran in a worker that has died. Out: what is to be played again beside others, what in
workers of its own, and what has failed. No I/O and no clock.

    a worker dies ──► its first deaths: again, beside others
                  └─► after these ──► parts, a worker each ──► they end: innocent
                                        ▲          └── it dies: smaller parts; one alone has failed
                                        └────────────────┘

Where n episodes ran, c of which end their worker whenever they are played, at most
c · max_deaths workers die that play for all, and c · max(1, ⌈log n / log num_parts⌉) that play a
part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

# Names of episodes that are played by the same worker: one, or a group that is judged as a whole.
Unit = tuple[str, ...]


class FaultIsolation:
    """`max_deaths`: of workers that play for all, after which who ran in each of them is suspected.
    `num_parts`: into so many are suspects split.
    """

    def __init__(self, *, max_deaths: int, num_parts: int) -> None:
        self._max_deaths = max_deaths
        self._num_parts = num_parts
        self._deaths: Counter[str] = Counter()  # by episode
        self._parts: list[list[Unit]] = []  # that nobody plays yet; the next one is the last

    def died_together(self, units: Sequence[Unit], culprit: str = "") -> list[Unit]:
        """A worker that plays for all has died with these; returns those to be played again beside
        others, which `next_part` does not return. `culprit`: the episode that was seen to do it, in
        one of the units, where one was: it alone is suspected, and this is no death of others.
        """
        if culprit:
            seen, others = _parted(units, culprit)
            self._parts.append(seen)
            return others
        self._deaths.update(name for unit in units for name in unit)
        suspected = [unit for unit in units if self._is_suspect(unit)]
        self._split(suspected)
        return [unit for unit in units if not self._is_suspect(unit)]

    def died_apart(self, units: Sequence[Unit], culprit: str = "") -> Unit | None:
        """The worker of a part has died with these of it; returns the one that has failed, if it
        was alone. Else `next_part` returns them in smaller parts.
        """
        if len(units) == 1:
            return units[0]
        if culprit:
            seen, others = _parted(units, culprit)
            self._parts += [others, seen]
        else:
            self._split(units)
        return None

    def next_part(self) -> list[Unit] | None:
        """What a worker of its own is to play."""
        return self._parts.pop() if self._parts else None

    def put_back(self, units: Sequence[Unit]) -> None:
        """A part whose worker has died before it had begun with it."""
        if units:
            self._parts.append(list(units))

    def ended(self, names: Iterable[str]) -> None:
        """They have been played, or have failed."""
        for name in names:
            self._deaths.pop(name, None)

    def withdraw(self, name: str) -> bool:
        """It is not wanted any more. Whether it waited in a part, which it is taken out of."""
        for place, part in enumerate(self._parts):
            if any(name in unit for unit in part):
                left = [tuple(one for one in unit if one != name) for unit in part]
                self._parts[place] = [unit for unit in left if unit]
                self._parts = [one for one in self._parts if one]
                self.ended([name])
                return True
        return False

    def _is_suspect(self, unit: Unit) -> bool:
        return max(self._deaths[name] for name in unit) >= self._max_deaths

    def _split(self, units: Sequence[Unit]) -> None:
        if units:
            size = -(-len(units) // self._num_parts)
            parts = [list(units[i : i + size]) for i in range(0, len(units), size)]
            self._parts += reversed(parts)


def _parted(units: Sequence[Unit], culprit: str) -> tuple[list[Unit], list[Unit]]:
    """The unit with this episode, and the others."""
    seen = [unit for unit in units if culprit in unit]
    assert len(seen) == 1, f"{culprit} did not run there"
    return seen, [unit for unit in units if culprit not in unit]
