"""Search for the episode that kills its worker, by replaying smaller and smaller parts.

Only the faulty episode fails; the others that ran with it are played to their end. In: the episodes
of a worker that has died. Out: the episodes to replay in shared workers, those to replay in
separate workers, and those that have failed. No I/O and no clock.

    a worker dies ──► first deaths: replay in shared workers
                  └─► later deaths ──► parts, one worker each ──► all end: no fault found
                                        ▲          └── it dies: smaller parts; a single one fails
                                        └────────────────┘

If n episodes ran and c of them always kill their worker, at most c · max_deaths shared workers die
and c · max(1, ⌈log n / log num_parts⌉) separate ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

# Names of episodes that one worker must play: a single one, or a group with a group reward.
Unit = tuple[str, ...]


class FaultIsolation:
    """Suspected episodes and the parts in which they are replayed.

    Args:
        max_deaths: Number of deaths of shared workers after which an episode is suspected.
        num_parts: Number of parts into which suspected episodes are split.
    """

    def __init__(self, *, max_deaths: int, num_parts: int) -> None:
        self._max_deaths = max_deaths
        self._num_parts = num_parts
        self._deaths: Counter[str] = Counter()  # by episode
        self._parts: list[list[Unit]] = []  # stack of parts to play

    def died_together(self, units: Sequence[Unit], culprit: str = "") -> list[Unit]:
        """Record the death of a shared worker and return the units to replay in shared workers.

        `next_part` returns the others. `culprit` is the episode that is known to have killed the
        worker, if any: then only it is suspected, and the death does not count for the others.
        """
        if culprit:
            found, others = _split_off(units, culprit)
            self._parts.append(found)
            return others
        self._deaths.update(name for unit in units for name in unit)
        suspected = [unit for unit in units if self._is_suspect(unit)]
        self._split(suspected)
        return [unit for unit in units if not self._is_suspect(unit)]

    def died_apart(self, units: Sequence[Unit], culprit: str = "") -> Unit | None:
        """Record the death of the worker of a part.

        Return the failed unit if it was the only one. Otherwise `next_part` returns smaller parts.
        """
        if len(units) == 1:
            return units[0]
        if culprit:
            found, others = _split_off(units, culprit)
            self._parts += [others, found]
        else:
            self._split(units)
        return None

    def next_part(self) -> list[Unit] | None:
        """Return the next part to play in a separate worker; None if there is none."""
        return self._parts.pop() if self._parts else None

    def put_back(self, units: Sequence[Unit]) -> None:
        """Put back a part whose worker died before it began to play."""
        if units:
            self._parts.append(list(units))

    def ended(self, names: Iterable[str]) -> None:
        """Forget the deaths of episodes that were played or have failed."""
        for name in names:
            self._deaths.pop(name, None)

    def withdraw(self, name: str) -> bool:
        """Remove an aborted episode from the waiting parts; return whether it was in one."""
        for index, part in enumerate(self._parts):
            if any(name in unit for unit in part):
                left = [tuple(one for one in unit if one != name) for unit in part]
                self._parts[index] = [unit for unit in left if unit]
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


def _split_off(units: Sequence[Unit], culprit: str) -> tuple[list[Unit], list[Unit]]:
    """Return the unit with this episode, and the others."""
    found = [unit for unit in units if culprit in unit]
    assert len(found) == 1, f"episode {culprit} did not run in this worker"
    return found, [unit for unit in units if culprit not in unit]
