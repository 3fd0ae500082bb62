"""Rows of a dataset in a resumable order, epoch after epoch.

    index ──► epoch, position ──► row, by the epoch's own shuffle

The n-th row of a run never depends on the ones before it.
"""

from __future__ import annotations

import functools
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlsys.config import DataConfig, require
from rlsys.data.checksum import rows_checksum
from rlsys.data.rows import load_rows
from rlsys.rewards.reward import Reward, check_columns, is_missing, is_of, not_of
from rlsys.types import Int32Array, Prompt


@functools.lru_cache(maxsize=2)  # where one epoch ends, two are in use
def epoch_order(seed: int, epoch: int, num_rows: int) -> Int32Array:
    """The order of one epoch [num_rows]. Each has its own; none needs the ones before it."""
    return np.random.default_rng((seed, epoch)).permutation(num_rows).astype(np.int32)


class RowSource(ABC):
    """Endless rows, in an order that index and seed decide.

    `rows`, a list of dictionaries or a `datasets.Dataset`, stand in place of data.source;
    `held_out`: what `config` says comes from evaluation.source, and errors say so. Whether there
    are enough for a step, `check_size` says.
    """

    _admitted: Int32Array  # the numbers of the rows that are used

    def __init__(
        self,
        config: DataConfig,
        *,
        seed: int,
        rows: Sequence[Mapping[str, Any]] | None = None,
        held_out: bool = False,
    ) -> None:
        self._config = config
        self._seed = seed
        setting = "evaluation.source" if held_out else "data.source"
        self._rows: Any = load_rows(config, setting) if rows is None else rows
        self.where = f"the recipe's {'held-out ' if held_out else ''}data"
        if rows is None:
            self.where = f"{setting}={config.source!r}"
        require(len(self._rows) > 0, f"{self.where} has no rows; give data with prompts.")
        self._columns = list(getattr(self._rows, "column_names", None) or self._rows[0])

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._admitted)

    @property
    def metadata_columns(self) -> tuple[str, ...]:
        """The columns that prompts carry as metadata."""
        return tuple(self._columns)

    @abstractmethod
    def at(self, index: int) -> Prompt:
        """What is asked at this index over the run."""

    def check_size(self, prompts_per_step: int) -> None:
        """Raise ValueError where there are too few for one step."""
        require(
            len(self) >= prompts_per_step,
            f"prompts_per_step={prompts_per_step}, but {self.where} has only {len(self)} prompts "
            f"that can be used; use {f'at most {len(self)} a step, or ' if len(self) else ''}more "
            "data.",
        )

    def check_rewards(self, rewards: Sequence[Reward]) -> None:
        """Raise ValueError for a column that a reward requires and the rows do not have; for a row
        without a value in it; and for a value of a type that the reward cannot use."""
        if rewards:
            check_columns(rewards, self.metadata_columns, self.where)
        for column in dict.fromkeys(name for one in rewards for name in one.required_columns):
            self.check_required([column], "a reward")
        for one in (reward for reward in rewards if reward.column_types):
            for column in one.required_columns:
                for number, value in enumerate(self._values(column)):
                    require(
                        is_of(value, one.column_types),
                        f"reward {one.name!r}, {self._name(number, column)}: "
                        f"{reprlib.repr(value)} {not_of(value, one.column_types)}",
                    )

    def check_required(self, names: Iterable[str], reader: str) -> None:
        """Raise ValueError for a column that `reader` reads and the rows do not have, or a row
        without a value in it."""
        for column in names:
            require(
                column in self.metadata_columns,
                f"{reader} reads column {column!r}, which {self.where} does not have; it has "
                f"{sorted(self.metadata_columns)}. Name the right one.",
            )
            missing = [n for n, value in enumerate(self._values(column)) if is_missing(value)]
            require(
                not missing,
                f"column {column!r}, which {reader} reads, has no value in {len(missing)} of "
                f"{len(self._rows)} rows of {self.where}, first in row {(missing or [0])[0]} "
                "(from 0); fill it, or leave the rows out.",
            )

    def row(self, index: int) -> int:
        """Which row of the data the prompt with this index is."""
        epoch, position = divmod(index, len(self))
        if self._config.shuffle:
            position = int(epoch_order(self._seed, epoch, len(self))[position])
        return int(self._admitted[position])

    @functools.cached_property
    def order(self) -> dict[str, int]:
        """What decides which prompt has which index; a checkpoint keeps it for `check_order`.
        Reads all rows."""
        checksum = rows_checksum(self._rows)
        return {"seed": self._seed, "num_prompts": len(self), "checksum": checksum}

    def check_order(self, order: Mapping[str, int]) -> None:
        """Raise ValueError if the order was another: other data, or another seed. A checkpoint of
        an earlier version has no checksum."""
        for key in ("seed", "num_prompts"):
            require(
                order[key] == self.order[key],
                f"the checkpoint's order of prompts has {key}={order[key]}, but {self.where} has "
                f"{key}={self.order[key]}; resume with the same data and seed.",
            )
        require(
            order.get("checksum", self.order["checksum"]) == self.order["checksum"],
            f"{self.where} has other rows than when the run began, though as many (checksum "
            f"{order.get('checksum')} then, {self.order['checksum']} now). Restore the data, or "
            "start a new run under another --name.",
        )

    def _name(self, number: int, column: str) -> str:
        return f"{column!r} in row {number} (from 0) of {self.where}"

    def _check_column(self, column: str, option: str) -> None:
        """Raise ValueError unless `column`, which `option` names, is one of the rows'."""
        require(
            column in self._columns,
            f"{option}={column!r} is no column of {self.where}, which has {self._columns}; "
            "name one of them.",
        )

    def _values(self, column: str) -> Iterable[Any]:
        if hasattr(self._rows, "column_names"):
            values: Iterable[Any] = self._rows[column]
            return values
        return (row.get(column) for row in self._rows)
