"""A configuration class as data: its leaf fields, and instances to and from dictionaries.

In: a frozen dataclass whose fields are plain values or further dataclasses (sections).
Out: leaves with name, type and default; instances built from overrides; TOML.

A leaf is addressed by its dotted name, such as "trainer.learning_rate". Leaf types: bool, int,
float, str, Literal, bool | Literal, int | str, tuple[X, ...], and X | None of those; and
dict[str, Any], a table of options that another library defines.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import os
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

import numpy as np

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.config.foreign_option_names import counterpart
from rlsys.config.foreign_option_names import hint as foreign_hint
from rlsys.errors import ErrorCollector, InvalidValue, InvalidValues

C = TypeVar("C")

MAX_INT = 2**63 - 1  # largest number of a 64-bit tensor, seed or file position
MAX_GIB = 2**30  # the kernel takes memory limits up to 2**63 bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """A field with a plain value."""

    name: str  # dotted
    type: Any
    default: Any  # MISSING if the field has none
    owner: type[Any]  # the section's class, or the base class of it, that defines the field


class Section:
    """Base class of configuration sections.

    An unknown keyword argument raises a TypeError that suggests the right name.
    """

    def __new__(cls, *args: Any, **arguments: Any) -> Self:
        """Create the instance after checking the names of its arguments."""
        names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in arguments:
            if name not in names:
                raise TypeError(_unknown_argument(name, cls))
        return super().__new__(cls)


def _unknown_argument(name: str, cls: type[Any]) -> str:
    kind = f"field of {cls.__name__}"
    names = [leaf.name for leaf in leaves(cls)]
    replacement = None if name in map(_last_part, names) else foreign_hint(name)
    if replacement:
        return f"{name}: not a {kind}. {replacement}"
    return str(unknown_name(name, names, kind=kind))


def split_optional(annotation: Any) -> tuple[Any, bool]:
    """Return (X, True) for `X | None`, and (X, False) for any other X."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation, False
    others = tuple(arg for arg in get_args(annotation) if arg is not types.NoneType)
    if len(others) == len(get_args(annotation)):
        return annotation, False
    return Union[others], True  # noqa: UP007, the number of members varies


def choices(annotation: Any) -> dict[str, Any] | None:
    """Return {word: value} for a bool, a Literal or a union of them, and None for other types."""
    if annotation is bool:
        return {"true": True, "false": False}
    if get_origin(annotation) is Literal:
        return {str(choice): choice for choice in get_args(annotation)}
    if get_origin(annotation) in (Union, types.UnionType):
        members = [choices(member) for member in get_args(annotation)]
        if None not in members:
            return {word: value for member in members if member for word, value in member.items()}
    return None


def is_table(annotation: Any) -> bool:
    """Return whether a leaf of this type is a table of options that are not fields."""
    return get_origin(annotation) is dict


def expected(annotation: Any) -> str:
    """Return a description of the values of a type.

    Raises:
        TypeError: A leaf cannot have this type.
    """
    inner, optional = split_optional(annotation)
    if is_table(inner):
        return "a table of names and values"
    if get_origin(inner) is Literal:
        text = "one of " + ", ".join(choices(inner) or ())
    elif words := choices(inner):
        text = " or ".join([", ".join([*words][:-1]), [*words][-1]])
    elif get_origin(inner) is tuple:
        text = f"a list, each item {expected(get_args(inner)[0])}"
    else:
        names = {
            int: "a whole number",
            float: "a number",
            str: "text",
            int | str: "a whole number, or text",
        }
        if inner not in names:
            raise TypeError(f"A field cannot have the type {annotation}. See rlsys.config.fields.")
        text = names[inner]
    return f"{text}, or none" if optional else text


def checked(value: Any, annotation: Any, name: str) -> Any:
    """Return `value` in the field's type.

    A list becomes a tuple, an int becomes a float, and a numpy scalar becomes a Python number. No
    other conversion takes place.

    Raises:
        InvalidValue: The value does not have the type.
    """
    inner, optional = split_optional(annotation)
    if value is None and optional:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if (words := choices(inner)) is not None:
        if any(type(value) is type(choice) and value == choice for choice in words.values()):
            return value
    elif get_origin(inner) is tuple:
        if isinstance(value, list | tuple):
            return tuple(checked(item, get_args(inner)[0], name) for item in value)
    elif is_table(inner):
        if isinstance(value, Mapping):
            return {str(key): _checked_item(item, f"{name}.{key}") for key, item in value.items()}
    elif inner is int and type(value) is int:
        return _checked_int(value, name)
    elif inner is float and type(value) in (int, float):
        return _checked_float(value, name)
    elif inner == int | str and (type(value) is int or re.fullmatch("[0-9]+", str(value))):
        return _checked_int(int(value), name)
    elif inner in (str, int | str) and isinstance(value, str):
        return _checked_text(value, name)
    raise wrong_type(name, value, annotation)


def wrong_type(name: str, value: Any, annotation: Any) -> InvalidValue:
    """Return the error for a value that does not have the field's type."""
    return InvalidValue(name, value, rule="not a valid value", fix=f"Give {expected(annotation)}.")


def _checked_item(value: Any, name: str) -> Any:
    """Return a copy of a value of a table, in the types that TOML and JSON have.

    Raises:
        InvalidValue: The value has another type.
    """
    if isinstance(value, np.generic):
        value = value.item()
    match value:
        case bool():
            return value
        case int():
            return _checked_int(value, name)
        case float():
            return _checked_float(value, name)
        case str():
            return _checked_text(value, name)
        case list() | tuple():
            return [_checked_item(item, name) for item in value]
        case Mapping():
            return {str(key): _checked_item(item, f"{name}.{key}") for key, item in value.items()}
    raise InvalidValue(
        name,
        value,
        rule="a table holds numbers, text, true, false, lists and tables",
        fix="Use one of these, or leave the name out.",
    )


def _checked_int(value: int, name: str) -> int:
    if not -MAX_INT - 1 <= value <= MAX_INT:
        raise InvalidValue(
            name, value, rule="does not fit into 64 bits", fix=f"Use at most {MAX_INT}."
        )
    return value


def _checked_float(value: float, name: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    is_size = name.endswith("_gib")
    if not math.isfinite(number):
        fix = f"Use a number{' of GiB' if is_size else ''} such as 0.5."
        raise InvalidValue(name, number, rule="must be finite", fix=fix)
    if is_size and number > MAX_GIB:
        fix = "Use at most the memory of the machine."
        raise InvalidValue(name, number, rule=f"must be at most {MAX_GIB} GiB", fix=fix)
    return number + 0.0  # -0.0 becomes 0.0


def _checked_text(value: str, name: str) -> str:
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidValue(
            name,
            value,
            rule="contains a NUL character or bytes that are not UTF-8, which cannot be stored",
            fix="Remove them.",
        )
    return str(value)


_HINTS: WeakKeyDictionary[type[Any], dict[str, Any]] = WeakKeyDictionary()


def _hints(cls: type[Any]) -> dict[str, Any]:
    """Return the types of a class's fields, evaluated once: that takes most of a check's time."""
    if cls not in _HINTS:
        _HINTS[cls] = get_type_hints(cls)
    return _HINTS[cls]


def conform(config: Any, section: str = "") -> None:
    """Check each field of a frozen dataclass and convert it to the field's type (see `checked`).

    A section must be an instance of its class. `__post_init__` calls this function first.
    `section` is the name of the class in errors.

    Raises:
        InvalidValue: A field does not have its type.
    """
    prefix = f"{section}." if section else ""
    hints = _hints(type(config))
    for field in dataclasses.fields(config):
        value, hint, name = getattr(config, field.name), hints[field.name], prefix + field.name
        if not dataclasses.is_dataclass(hint):
            object.__setattr__(config, field.name, checked(value, hint, name))
        elif not isinstance(value, hint):  # type: ignore[arg-type]
            kind = hint.__name__  # type: ignore[union-attr]
            raise InvalidValue(name, value, rule=f"must be a {kind}", fix=f"Give {kind}(...).")


def expand_home(config: Any, name: str) -> None:
    """Replace a leading ~ of a path in a frozen dataclass. `__post_init__` calls this function."""
    object.__setattr__(config, name, os.path.expanduser(getattr(config, name)))


def _members(cls: type[Any], default: Any, prefix: str) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield (key, dotted name, type, default) of each field.

    The attributes of the instance `default` replace the defaults of the class.
    """
    hints = _hints(cls)
    for field in dataclasses.fields(cls):
        value = field.default
        if default is not MISSING:
            value = getattr(default, field.name)
        elif callable(field.default_factory):
            value = field.default_factory()
        yield field.name, prefix + field.name, hints[field.name], value


def leaves(cls: type[Any], *, default: Any = MISSING, prefix: str = "") -> list[Leaf]:
    """Return all leaves in the order of definition.

    Raises:
        TypeError: A field has a type that leaves cannot have.
    """
    found: list[Leaf] = []
    for key, name, hint, value in _members(cls, default, prefix):
        if dataclasses.is_dataclass(hint):
            found += leaves(hint, default=value, prefix=f"{name}.")  # type: ignore[arg-type]
        else:
            expected(hint)
            owner = next(base for base in cls.__mro__ if key in inspect.get_annotations(base))
            found.append(Leaf(name=name, type=hint, default=value, owner=owner))
    return found


def leaf_defaults(cls: type[Any]) -> dict[str, Any]:
    """Return the defaults of the leaves that have one, by dotted name, as plain JSON values."""
    found = {leaf.name: leaf.default for leaf in leaves(cls) if leaf.default is not MISSING}
    plain: dict[str, Any] = parse_json(dump_json(found))
    return plain


def num_leaf_fields(cls: type[Any]) -> int:
    """Return the number of leaves."""
    return len(leaves(cls))


def unknown_name(name: str, names: Iterable[str], *, kind: str) -> InvalidValue:
    """Return the error for a name that is not one of `names`, with a suggestion.

    The suggestion is, in this order: the counterpart of another library's name with its section,
    the same name in another section, the counterpart of another library's name, the most similar
    name of the same section, the most similar name of all.
    """
    known = list(names)
    section, _, word = name.rpartition(".")
    neighbours = [other for other in known if section and other.startswith(f"{section}.")]
    nearest = [other for other in known if _last_part(other) == _last_part(word)]
    fix = foreign_hint(name, known, with_section=bool(nearest))
    if fix is None:
        nearest = nearest or _similar(word, neighbours) or _similar(word, known)
        fix = f"Did you mean {' or '.join(nearest)}?" if nearest else "--help lists all."
    return InvalidValue(name, rule=f"not {'an' if kind[0] in 'aeiou' else 'a'} {kind}", fix=fix)


def _similar(word: str, names: Sequence[str]) -> list[str]:
    """Return the names whose last part has the initials `word`, or else is spelled most alike."""
    word = _last_part(word)
    parts = {name: _last_part(name) for name in names}
    short = [name for name, part in parts.items() if _initials(part) == word]
    nearest = difflib.get_close_matches(word, set(parts.values()), n=1, cutoff=0.7)
    return short or [name for name, part in parts.items() if part in nearest]


def _initials(part: str) -> str:
    return "".join(word[:1] for word in re.split("[-_]", part))


def _last_part(name: str) -> str:
    return name.lstrip("-").rpartition(".")[2]


def flatten(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings as {dotted name: value}.

    Raises:
        InvalidValue: The class does not have a field of this name, or a section has a plain value.
    """
    names = [leaf.name for leaf in leaves(cls)]
    sections = {name.rpartition(".")[0] for name in names if "." in name}
    flat: dict[str, Any] = {}

    def add(mapping: Mapping[str, Any], prefix: str) -> None:
        for key, value in mapping.items():
            name = prefix + key
            members = [other for other in names if other.startswith(f"{name}.")]
            if members and isinstance(value, Mapping):
                add(value, f"{name}.")
            elif members:
                raise InvalidValue(
                    name,
                    value,
                    rule="is a section and cannot have a value",
                    fix=f"Set its fields, such as {members[0]}.",
                )
            elif name in names:
                flat[name] = value
            else:
                known = [*sorted(sections), *names]
                inner = [one for one in _leaf_names(name, value) if counterpart(one)]
                raise unknown_name(inner[0] if inner else name, known, kind="field")

    add(values, "")
    return flat


def _leaf_names(name: str, value: Any) -> Iterator[str]:
    """Return the dotted names of the values below `name`."""
    if not isinstance(value, Mapping):
        yield name
        return
    for key, inner in value.items():
        yield from _leaf_names(f"{name}.{key}", inner)


def build(
    cls: type[C], overrides: Mapping[str, Any], *, default: Any = MISSING, prefix: str = ""
) -> C:
    """Return an instance with the defaults of `cls`, except for `overrides`, {dotted name: value}.

    Raises:
        InvalidValue: A value has the wrong type, a field without a default is missing, or the class
            rejects its values. Mistakes of several fields and sections are raised together. The
            names in errors start with `prefix`.
    """
    values: dict[str, Any] = {}
    mistakes = ErrorCollector()
    for key, name, hint, value in _members(cls, default, prefix):
        with mistakes.collect():
            if dataclasses.is_dataclass(hint):
                value = build(hint, overrides, default=value, prefix=f"{name}.")  # type: ignore[arg-type]
            elif name in overrides:
                value = checked(overrides[name], hint, name)
            elif value is MISSING:
                raise InvalidValue(
                    name, rule="is required and has no default", fix=f"Give {expected(hint)}."
                )
            values[key] = value
    mistakes.raise_found()
    try:
        return cls(**values)
    except InvalidValues as several:
        raise InvalidValues(
            tuple(
                _with_full_names(error, cls, prefix) if isinstance(error, InvalidValue) else error
                for error in several.errors
            )
        ) from several
    except InvalidValue as error:
        raise _with_full_names(error, cls, prefix) from error
    except ValueError as error:
        raise ValueError(_with_full_option_names(str(error), cls, prefix)) from error


def _with_full_names(error: InvalidValue, cls: type[Any], prefix: str) -> InvalidValue:
    """Return an error of `cls` with the names that fields have below `prefix`.

    A class calls its own fields `field` or `section.field`.
    """
    if not prefix:
        return error
    hints = _hints(cls)
    first, _, rest = error.field.partition(".")
    if first in hints:
        field = f"{prefix}{error.field}"
    elif rest.partition(".")[0] in hints:
        field = f"{prefix}{rest}"
    else:
        field = error.field
    rule, fix = (_with_full_option_names(text, cls, prefix) for text in (error.rule, error.fix))
    return InvalidValue(field, error.value, rule=rule, fix=fix)


def _with_full_option_names(text: str, cls: type[Any], prefix: str) -> str:
    """Return `text` with the dotted names of options of `cls` below `prefix`."""
    if not prefix:
        return text
    parent, _, section = prefix[:-1].rpartition(".")
    hints = _hints(cls)
    for key, hint in hints.items():
        if dataclasses.is_dataclass(hint):
            text = re.sub(rf"(?<![\w.]){key}\.(?=[a-z])", f"{prefix}{key}.", text)
    if parent:
        text = re.sub(rf"(?<![\w.]){section}\.(?=[a-z])", prefix, text)
    begins = re.match(r"(\w+)=", text)
    return prefix + text if begins is not None and begins[1] in hints else text


def to_dict(config: Any) -> dict[str, Any]:
    """Return nested dictionaries of plain JSON values; tuples become lists."""
    plain: dict[str, Any] = parse_json(dump_json(dataclasses.asdict(config)))
    return plain


def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
    """Return the inverse of `to_dict`.

    Missing keys take their defaults.

    Raises:
        InvalidValue: A key is unknown or a value is invalid.
    """
    return build(cls, flatten(cls, values))


def to_toml(config: Any) -> str:
    """Return the configuration as a TOML file for `--config`; None is written as "none"."""
    flat = flatten(type(config), to_dict(config))
    lines: list[str] = []
    section = ""
    for name in sorted(flat, key=lambda name: "." in name):  # stable; TOML needs tables last
        table, _, key = name.rpartition(".")
        if table != section:
            lines += ["", f"[{table}]"]
            section = table
        lines.append(f"{key} = {toml_value(flat[name])}")
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """Return a value of a configuration as TOML; None is written as "none"."""
    match value:
        case None:
            return '"none"'
        case bool():
            return str(value).lower()
        case str():
            # JSON and TOML have the same escapes, except that TOML also escapes DEL.
            return dump_json(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(toml_value(item) for item in value)}]"
        case dict():
            items = (f"{_toml_key(key)} = {toml_value(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        case _:
            return repr(value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else str(toml_value(key))
