"""Retirement of dataset rows that the policy has mastered, which are not issued again.

ScaleRL's curriculum ("no positive resampling", 2510.13786): a prompt whose rollouts are nearly all
right gives no training signal in later epochs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlsys.errors import require

# Reason of skipped prompts in the ledger.
RETIRED = "retired"


class Curriculum:
    """The retired rows of a dataset.

    Args:
        retire_at: Mean reward of a group at which its row is retired; None for never.
        num_rows: Number of rows in the dataset.
        retired: Rows that a resumed run's checkpoint has as retired.
    """

    def __init__(
        self, retire_at: float | None = None, *, num_rows: int = 0, retired: Iterable[int] = ()
    ) -> None:
        self._retire_at = retire_at
        self._num_rows = num_rows
        self._retired = set(retired)

    @property
    def retired(self) -> list[int]:
        """Retired rows, in ascending order."""
        return sorted(self._retired)

    def scored(self, row: int, rewards: Sequence[float]) -> None:
        """Retire a row if the rewards of its group are high enough; ignore row -1 (no dataset)."""
        if row < 0:
            return
        if self._retire_at is not None and sum(rewards) >= self._retire_at * len(rewards):
            self._retired.add(row)

    def has_retired(self, row: int) -> bool:
        """Return whether a row is retired.

        Raises:
            InvalidValue: All rows are retired.
        """
        if self._retire_at is None:
            return False
        require(
            len(self._retired) < self._num_rows,
            "data.retire_at",
            self._retire_at,
            rule=f"all {self._num_rows} prompts have reached this mean reward, and none is left",
            fix="Give more prompts, fewer num_steps or a higher data.retire_at.",
        )
        return row in self._retired
