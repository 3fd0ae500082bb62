"""Rows of a dataset in a resumable order, epoch after epoch.

    index ──► epoch, position ──► row, by the epoch's own shuffle

The n-th row of a run never depends on the ones before it.
"""

from __future__ import annotations

import functools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlsys.common.option_names import option
from rlsys.config import DataConfig
from rlsys.data.joined_rows import JoinedRows
from rlsys.data.mixture import mixed
from rlsys.data.row_checksum import rows_checksum
from rlsys.data.row_loading import load_rows
from rlsys.errors import InvalidValue, require
from rlsys.rewards.column_paths import dead_end, nearest_paths, split_path, value_at, value_below
from rlsys.rewards.reward import Reward, check_type, is_missing
from rlsys.types import Int32Array, Prompt


@functools.lru_cache(maxsize=2)  # two epochs are in use where one of them ends
def epoch_order(seed: int, epoch: int, num_rows: int) -> Int32Array:
    """Return the order of one epoch [num_rows]. It depends on no other epoch."""
    return np.random.default_rng((seed, epoch)).permutation(num_rows).astype(np.int32)


class RowSource(ABC):
    """Endless rows of a dataset, in an order that index and seed decide.

    Args:
        config: Names the dataset and its columns.
        seed: Decides the order.
        rows: A list of dictionaries or a `datasets.Dataset`, which replaces data.source.
        held_out: Errors name evaluation.source.
        evaluated: The rows are not a mixture: each counts once.
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
        self._fix_of_held_out = ""
        if held_out:
            self._fix_of_held_out = "Use one name for it in the training data and in " + (
                f"{setting}."
                if rows is None
                else "HeldOut.rows, or leave HeldOut.rows out and use evaluation.source or "
                "evaluation.split."
            )
        file_split = "test" if evaluated else "train"
        self._rows: Any = (
            load_rows(config, setting, file_split=file_split) if rows is None else rows
        )
        self.where = f"the recipe's {'held-out ' if held_out else ''}data"
        if rows is None:
            self.where = f"{setting}={config.source!r}"
        require(
            len(self._rows) > 0, self.where, rule="has no rows", fix="Give a dataset with prompts."
        )
        self._joined = self._rows if isinstance(self._rows, JoinedRows) else None
        self._columns = list(getattr(self._rows, "column_names", None) or self._rows[0])

    def __len__(self) -> int:
        """Return the number of prompts in one epoch."""
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
        """Return the prompt or task with this index over the run."""

    def check_size(self, prompts_per_step: int) -> None:
        """Raise InvalidValue if an epoch has fewer prompts than one step."""
        require(
            len(self) >= prompts_per_step,
            "prompts_per_step",
            prompts_per_step,
            rule=f"{self.where} has only {len(self)} prompts that can be used",
            fix=f"Use {f'at most {len(self)}, or ' if len(self) else ''}more data.",
        )

    def check_rewards(self, rewards: Sequence[Reward]) -> None:
        """Check that all rows have the columns that `rewards` require.

        Raises:
            InvalidValue: A column or a value is missing, or a value has a type that the reward
                cannot use.
        """
        for one in rewards:
            for column in one.required_columns:
                self._check_known(column, f"reward {one.name!r}")
        readers: dict[str, str] = {}
        for one in rewards:
            for column in one.required_columns:
                readers.setdefault(column, one.name)
        for column, reader in readers.items():
            self.check_required([column], f"reward {reader!r}")
        for one in (reward for reward in rewards if reward.column_types):
            for column in one.required_columns:
                for number, value in enumerate(self._values(column)):
                    check_type(value, one.column_types, self._name(number, column))

    def check_required(self, names: Iterable[str], reader: str) -> None:
        """Raise InvalidValue for a column in `names` that is missing or empty in some rows.

        `reader` names what reads the columns, such as "reward 'exact_match'".
        """
        for column in names:
            self._check_known(column, reader)
            missing = [n for n, value in enumerate(self._values(column)) if is_missing(value)]
            if len(missing) == len(self._rows):
                self._check_path(column, f"{reader}: column")
            require(
                not missing,
                f"{reader}: column",
                column,
                rule=f"has no value in {len(missing)} of {len(self._rows)} rows of {self.where} "
                f"(first: row {(missing or [0])[0]}, from 0)",
                fix="Fill it, or leave these rows out.",
            )

    def _check_known(self, column: str, reader: str) -> None:
        require(
            split_path(column, self.metadata_columns) is not None,
            f"{reader}: column",
            column,
            rule=f"{self.where} has no such column besides its prompt; it has "
            f"{sorted(self.metadata_columns)}",
            fix=self._nearest(column),
        )

    def row(self, index: int) -> int:
        """Return the number of the row from which the prompt with this index is made."""
        epoch, position = divmod(index, len(self))
        if self._config.shuffle:
            position = int(epoch_order(self._seed, epoch, len(self))[position])
        return int(self._admitted[position])

    @functools.cached_property
    def order(self) -> dict[str, int]:
        """Seed, number of prompts and checksum of all rows, which decide the order of prompts.

        A checkpoint keeps it for `check_order`. Reads all rows.
        """
        # The rows of an epoch count too: in a mixture they follow from the weights.
        checksum = rows_checksum(self._rows) ^ zlib.crc32(self._admitted.tobytes())
        return {"seed": self._seed, "num_prompts": len(self), "checksum": checksum}

    def check_order(self, order: Mapping[str, int]) -> None:
        """Raise InvalidValue if a checkpoint's order differs: other data, or another seed.

        A checkpoint of an earlier version has no checksum.
        """
        for key in ("seed", "num_prompts"):
            require(
                order[key] == self.order[key],
                f"checkpoint: {key}",
                order[key],
                rule=f"{self.where} has {key}={self.order[key]}",
                fix="Resume with the same data and seed.",
            )
        require(
            order.get("checksum", self.order["checksum"]) == self.order["checksum"],
            "checkpoint: checksum",
            order.get("checksum"),
            rule=f"the rows of {self.where} have changed since the run began (checksum "
            f"{self.order['checksum']} now)",
            fix=f"Restore the data, or start a new run under another {option('name')}.",
        )

    def _epoch(self, admitted: Int32Array) -> Int32Array:
        """Return the rows of one epoch, made from the rows that can be used."""
        joined = self._joined
        if joined is None or joined.weights is None or self._evaluated:
            return admitted
        sources = np.split(admitted, np.searchsorted(admitted, joined.ends[:-1]))
        return mixed(sources, joined.weights, self.where)

    def _name(self, number: int, column: str) -> str:
        """Return the field of an InvalidValue about a value."""
        return f"{self._row_name(number)}: {column}"

    def _row_name(self, number: int) -> str:
        """Return the field of an InvalidValue about a row."""
        return f"{self.where}, row {number} (from 0)"

    def _check_column(self, column: str, field: str) -> None:
        """Raise InvalidValue about `field` unless the rows have this column or dotted path."""
        found = split_path(column, self._columns)
        require(
            found is not None,
            field,
            column,
            rule=f"{self.where} has no such column; it has {self._columns}",
            fix=self._nearest(column),
        )
        if found and found[1] and all(value is None for value in self._values(column)):
            self._check_path(column, field)

    def _check_path(self, column: str, field: str) -> None:
        """Raise InvalidValue about `field` if a dotted path leads to nothing in some row."""
        reason = next((reason for row in self._rows if (reason := dead_end(row, column))), "")
        if reason:
            raise InvalidValue(
                field,
                column,
                rule=f"leads to no value in {self.where}: {reason}",
                fix=self._nearest(column, otherwise="Give a path that leads to a value."),
            )

    def _nearest(self, column: str, otherwise: str = "Name one of these.") -> str:
        """Return the fix for a column that the rows lack: similar paths of the first row.

        Held-out rows are read after the training rows, with the same options and rewards.
        """
        if self._fix_of_held_out:
            return self._fix_of_held_out
        found = nearest_paths(column, self._rows[0])
        return f"Did you mean {' or '.join(found)}?" if found else otherwise

    def _values(self, path: str) -> Iterable[Any]:
        """Return the values of a column, or of a dotted path below one, in the rows' order."""
        if not hasattr(self._rows, "column_names"):
            return (value_at(row, path) for row in self._rows)
        column, keys = split_path(path, self._columns) or (path, ())
        values: Iterable[Any] = self._rows[column]
        return (value_below(value, keys) for value in values) if keys else values
