"""Values of columns by dotted paths, such as "reward_model.ground_truth".

In: a row and a path. Out: the value. A column whose own name is the path comes first. Otherwise the
beginning of the path names a column, and the rest names keys of the mappings inside. A text that
contains a JSON object counts as that object.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rlsys.common.safe_json import parse_json

# Levels of nested keys that `nested_paths` lists.
MAX_LEVELS = 3

_SHORT = reprlib.Repr()
_SHORT.maxlist = 12


def split_path(path: str, columns: Collection[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return the column that `path` begins with and the keys below it, or None if there is none.

    The longest column name wins.
    """
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        column = ".".join(parts[:length])
        if column in columns:
            return column, tuple(parts[length:])
    return None


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """Return the value of a column or of a dotted path, or None if the row has no such value."""
    found = split_path(path, row)
    return None if found is None else value_below(row[found[0]], found[1])


def value_below(value: Any, keys: tuple[str, ...]) -> Any:
    """Follow `keys` through nested mappings. Return None if one of them is missing."""
    for place, key in enumerate(keys):
        value = _as_mapping(value)
        if value is None:
            return None
        rest = ".".join(keys[place:])
        if rest in value:  # a key that contains dots itself
            return value[rest]
        value = value.get(key)
    return value


def dead_end(row: Mapping[str, Any], path: str) -> str:
    """Return where a path leads to nothing in a row, or "" if it leads to a value or to null."""
    found = split_path(path, row)
    if found is None:
        return f"the columns are {_SHORT.repr(list(row))}"
    column, keys = found
    reached, value = column, row[column]
    for place, key in enumerate(keys):
        inside = _as_mapping(value)
        if value is None or (inside and ".".join(keys[place:]) in inside):
            return ""
        if inside is None:
            return f"{reached!r} is of type {type(value).__name__} and has no keys"
        if key not in inside:
            return f"{reached!r} has the keys {_SHORT.repr(list(inside))}"
        reached, value = f"{reached}.{key}", inside[key]
    return ""


def nested_paths(row: Mapping[str, Any]) -> list[str]:
    """Return the columns of a row and the dotted paths of the mappings inside."""
    return list(_paths(row, "", MAX_LEVELS))


def nearest_paths(path: str, row: Mapping[str, Any]) -> list[str]:
    """Return the paths of `row` that a wrong `path` may have meant.

    These are the paths with the same last part, or else the most similar one.
    """
    paths = nested_paths(row)
    last = path.rpartition(".")[2]
    same = [one for one in paths if one.rpartition(".")[2] == last and one != path]
    return same or difflib.get_close_matches(path, paths, n=1, cutoff=0.7)


def _paths(row: Mapping[str, Any], prefix: str, levels: int) -> Iterator[str]:
    for key, value in row.items():
        yield prefix + key
        inner = _as_mapping(value) if levels > 1 else None
        if inner:
            yield from _paths(inner, f"{prefix}{key}.", levels - 1)


def _as_mapping(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = parse_json(value)
        except ValueError:
            return None
    return value if isinstance(value, Mapping) else None
