"""Rows of a dataset in a resumable order, epoch after epoch.

    index ──► epoch, position ──► row, by the epoch's own shuffle

The n-th row of a run never depends on the ones before it.
"""

from __future__ import annotations

import functools
import reprlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlsys.common.option_names import option
from rlsys.config import DataConfig, require
from rlsys.data.joined_rows import JoinedRows
from rlsys.data.mixture import mixed
from rlsys.data.row_checksum import rows_checksum
from rlsys.data.row_loading import load_rows
from rlsys.rewards.column_paths import nearest_paths, split_path, value_at, value_below
from rlsys.rewards.reward import Reward, is_missing, is_of, not_of
from rlsys.types import Int32Array, Prompt


@functools.lru_cache(maxsize=2)  # where one epoch ends, two are in use
def epoch_order(seed: int, epoch: int, num_rows: int) -> Int32Array:
    """Return the order of one epoch [num_rows]. It depends on no other epoch."""
    return np.random.default_rng((seed, epoch)).permutation(num_rows).astype(np.int32)


class RowSource(ABC):
    """Endless rows, in an order that index and seed decide.

    `rows`, a list of dictionaries or a `datasets.Dataset`, replace data.source. With `held_out`,
    errors name evaluation.source. Rows that are `evaluated` are no mixture: each counts once.
    `check_size` checks whether there are enough rows for a step.
    """

    _admitted: Int32Array  # the numbers of the rows of one epoch; a mixture repeats some

    def __init__(
        self,
        config: DataConfig,
        *,
        seed: int,
        rows: Sequence[Mapping[str, Any]] | None = None,
        held_out: bool = False,
        evaluated: bool = False,
    ) -> None:
        self._config = config
        self._seed = seed
        setting = "evaluation.source" if held_out else "data.source"
        self._evaluated = evaluated
        file_split = "test" if evaluated else "train"
        self._rows: Any = (
            load_rows(config, setting, file_split=file_split) if rows is None else rows
        )
        self.where = f"the recipe's {'held-out ' if held_out else ''}data"
        if rows is None:
            self.where = f"{setting}={config.source!r}"
        require(len(self._rows) > 0, f"{self.where} has no rows; give data with prompts.")
        self._joined = self._rows if isinstance(self._rows, JoinedRows) else None
        self._columns = list(getattr(self._rows, "column_names", None) or self._rows[0])

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._admitted)

    @property
    def num_rows(self) -> int:
        """The number of different rows in one epoch."""
        return len(np.unique(self._admitted))

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
        without a value in it; and for a value of a type that the reward cannot use.
        """
        for one in rewards:
            for column in one.required_columns:
                self._check_known(column, f"reward {one.name!r}")
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
        without a value in it.
        """
        for column in names:
            self._check_known(column, reader)
            missing = [n for n, value in enumerate(self._values(column)) if is_missing(value)]
            require(
                not missing,
                f"column {column!r}, which {reader} reads, has no value in {len(missing)} of "
                f"{len(self._rows)} rows of {self.where}, first in row {(missing or [0])[0]} "
                f"(from 0); {self._filling(column, len(missing))}",
            )

    def _check_known(self, column: str, reader: str) -> None:
        require(
            split_path(column, self.metadata_columns) is not None,
            f"{reader} reads column {column!r}, which {self.where} does not have beside its "
            f"prompt; it has {sorted(self.metadata_columns)}. {self._nearest(column)}",
        )

    def row(self, index: int) -> int:
        """Return the number of the row that the prompt with this index is made of."""
        epoch, position = divmod(index, len(self))
        if self._config.shuffle:
            position = int(epoch_order(self._seed, epoch, len(self))[position])
        return int(self._admitted[position])

    @functools.cached_property
    def order(self) -> dict[str, int]:
        """What decides which prompt has which index; a checkpoint keeps it for `check_order`.
        Reads all rows.
        """
        # The rows of an epoch count too: in a mixture they follow from the weights.
        checksum = rows_checksum(self._rows) ^ zlib.crc32(self._admitted.tobytes())
        return {"seed": self._seed, "num_prompts": len(self), "checksum": checksum}

    def check_order(self, order: Mapping[str, int]) -> None:
        """Raise ValueError if the order was another: other data, or another seed. A checkpoint of
        an earlier version has no checksum.
        """
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
            f"start a new run under another {option('name')}.",
        )

    def _epoch(self, admitted: Int32Array) -> Int32Array:
        """Return the rows of one epoch, made of those that may be used."""
        joined = self._joined
        if joined is None or joined.weights is None or self._evaluated:
            return admitted
        sources = np.split(admitted, np.searchsorted(admitted, joined.ends[:-1]))
        return mixed(sources, joined.weights, self.where)

    def _name(self, number: int, column: str) -> str:
        return f"{column!r} in {self._row_name(number)}"

    def _row_name(self, number: int) -> str:
        return f"row {number} (from 0) of {self.where}"

    def _check_column(self, column: str, option: str) -> None:
        """Raise ValueError unless `column`, which `option` names, is one of the rows'."""
        require(
            split_path(column, self._columns) is not None,
            f"{option}={column!r} is no column of {self.where}, which has {self._columns}; "
            f"name one of them. {self._nearest(column)}".removesuffix(" Name the right one."),
        )

    def _nearest(self, column: str) -> str:
        """Return the fix for a column that the rows lack: similar paths of the first row."""
        found = nearest_paths(column, self._rows[0])
        return f"Did you mean {' or '.join(found)}?" if found else "Name the right one."

    def _filling(self, column: str, num_missing: int) -> str:
        """Return the fix for a column that has no value in some rows."""
        if num_missing < len(self._rows) or "." not in column:
            return "fill it, or leave the rows out."
        return self._nearest(column)

    def _values(self, path: str) -> Iterable[Any]:
        """Return the values of a column, or of a dotted path below one, in the rows' order."""
        if not hasattr(self._rows, "column_names"):
            return (value_at(row, path) for row in self._rows)
        column, keys = split_path(path, self._columns) or (path, ())
        values: Iterable[Any] = self._rows[column]
        return (value_below(value, keys) for value in values) if keys else values
