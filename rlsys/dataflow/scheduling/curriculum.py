"""Which rows of the data are not issued again: those that the policy has learnt.

ScaleRL's curriculum ("no positive resampling", 2510.13786): a prompt whose rollouts were nearly all
right would come again, epoch after epoch, and teach nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlsys.config import require

# Why the ledger says that a prompt was left out.
RETIRED = "retired"


class Curriculum:
    """`retire_at` is the mean reward of a group from which on its row is retired, None for never;
    the data has `num_rows`; `retired` are those of a resumed run's checkpoint.
    """

    def __init__(
        self, retire_at: float | None = None, *, num_rows: int = 0, retired: Iterable[int] = ()
    ) -> None:
        self._retire_at = retire_at
        self._num_rows = num_rows
        self._retired = set(retired)

    @property
    def retired(self) -> list[int]:
        """Rows, in their order."""
        return sorted(self._retired)

    def scored(self, row: int, rewards: Sequence[float]) -> None:
        """All rollouts of a group of this row have their rewards; -1: it is of none of the data."""
        if row < 0:
            return
        if self._retire_at is not None and sum(rewards) >= self._retire_at * len(rewards):
            self._retired.add(row)

    def has_retired(self, row: int) -> bool:
        """Raises ValueError where no row is left."""
        if self._retire_at is None:
            return False
        require(
            len(self._retired) < self._num_rows,
            f"all {self._num_rows} prompts were answered with a mean reward of at least "
            f"data.retire_at={self._retire_at}, so that nothing is left to train on; give more "
            "prompts, or fewer num_steps, or a higher data.retire_at.",
        )
        return row in self._retired
