"""Dataclasses from JSON files of the planner, with one rule for each kind of field.

    profile.json, plan.json, cpu-*.json ─► restored(StackProfile, ...) ─► StackProfile

The files hold measurements and predictions, so no number in them is negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rlsys.errors import InvalidValue, require

MAX_NUMBER: Final = 10**15  # beyond every size, rate and time of a machine

T = TypeVar("T")

_KINDS: Final[dict[Any, tuple[tuple[type, ...], str]]] = {
    bool: ((bool,), "true or false"),
    str: ((str,), "text"),
    int: ((int,), f"an integer from 0 to {MAX_NUMBER:.0e}"),
    float: ((int, float), f"a number from 0 to {MAX_NUMBER:.0e}"),
}
_FIX: Final = "Write the file again: it was edited or damaged."


def restored(kind: type[T], stored: Any, name: str) -> T:
    """Return the dataclass of a JSON object that was written with `asdict`.

    Args:
        kind: The dataclass. Its fields may be texts, numbers, flags, dataclasses, and tuples and
            mappings of these.
        stored: The JSON value.
        name: Name of the value for messages.

    Raises:
        InvalidValue: A field is unknown, missing or of another type, or a number is negative, not
            finite or too large.
    """
    return cast(T, _value(kind, stored, name))


def _value(kind: Any, stored: Any, name: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return stored
    if origin in (Union, UnionType):
        (inner,) = (one for one in arguments if one is not NoneType)
        return None if stored is None else _value(inner, stored, name)
    if origin is tuple:
        _require(isinstance(stored, list | tuple), name, stored, "a list")
        return tuple(_value(arguments[0], one, f"{name}[{i}]") for i, one in enumerate(stored))
    if origin is Mapping:
        _require(isinstance(stored, dict), name, stored, "an object")
        return {key: _value(arguments[1], one, f"{name}.{key}") for key, one in stored.items()}
    if is_dataclass(kind):
        return _dataclass(kind, stored, name)
    types, described = _KINDS[kind]
    is_valid = type(stored) in types and (kind in (bool, str) or 0 <= stored <= MAX_NUMBER)
    _require(is_valid, name, stored, described)
    return stored


def _dataclass(kind: Any, stored: Any, name: str) -> Any:
    _require(isinstance(stored, dict), name, stored, "an object")
    hints = _hints(kind)
    for key in stored.keys() - hints.keys():
        raise InvalidValue(f"{name}.{key}", rule="is not a known field", fix=_FIX)
    for key in hints.keys() - stored.keys():
        raise InvalidValue(f"{name}.{key}", rule="is missing", fix=_FIX)
    return kind(**{key: _value(hint, stored[key], f"{name}.{key}") for key, hint in hints.items()})


@lru_cache(maxsize=64)
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _require(holds: bool, name: str, stored: Any, described: str) -> None:
    require(holds, name, stored, rule=f"must be {described}", fix=_FIX)
