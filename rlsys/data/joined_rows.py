"""Rows of several sources as one sequence, one source after another."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class JoinedRows(Sequence[dict[str, Any]]):
    """The rows of `parts`, in the order of the parts.

    A row has the columns of all parts, with None for a column that its own part lacks. `weights`
    has one number per part, or is None if the parts are not a mixture.
    """

    def __init__(self, parts: Sequence[Any], weights: Sequence[float] | None = None) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(len(part) for part in parts))
        self.weights = weights
        self.column_names = list(
            dict.fromkeys(name for part in parts for name in part.column_names)
        )

    @property
    def ends(self) -> Sequence[int]:
        """Number of rows up to the end of each part."""
        return self._ends

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, key: Any) -> Any:
        """Return the row with a number, the rows of a slice, or the values of a column."""
        if isinstance(key, str):
            return list(self._column(key))
        if isinstance(key, slice):
            return [self[number] for number in range(*key.indices(len(self)))]
        number = range(len(self))[key]
        part = bisect.bisect_right(self._ends, number)
        return self._filled(self._parts[part][number - self._ends[part]])  # counted from its end

    def _column(self, name: str) -> Iterator[Any]:
        for part in self._parts:
            yield from (
                part[name] if name in part.column_names else itertools.repeat(None, len(part))
            )

    def _filled(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: row.get(name) for name in self.column_names}
