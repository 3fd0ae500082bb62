"""A configuration class as data: its leaf fields, and instances to and from dictionaries.

In: a frozen dataclass whose fields are plain values or further dataclasses (sections).
Out: leaves with name, type and default; instances built from overrides; TOML.

A leaf is addressed by its dotted name, such as "trainer.learning_rate". Leaf types: bool, int,
float, str, Literal, bool | Literal, int | str, tuple[X, ...], and X | None of those.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.config.foreign_option_names import counterpart
from rlsys.config.foreign_option_names import hint as foreign_hint

C = TypeVar("C")

MAX_INT = 2**63 - 1  # what tensors, seeds and files count with


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    name: str  # dotted
    type: Any
    default: Any  # MISSING where there is none
    owner: type[Any]  # the class, of the section's bases, whose body defines it


class Section:
    """Base of the configuration's classes: a keyword argument that is no field raises TypeError
    with the right name.
    """

    def __new__(cls, *args: Any, **given: Any) -> Self:
        names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in given:
            if name not in names:
                raise TypeError(_no_argument(name, cls))
        return super().__new__(cls)


def _no_argument(name: str, cls: type[Any]) -> str:
    kind = f"field of {cls.__name__}"
    names = [leaf.name for leaf in leaves(cls)]
    named = None if name in map(_last_part, names) else foreign_hint(name)
    return f"{name} is no {kind}; {named}" if named else str(unknown_name(name, names, kind=kind))


def split_optional(annotation: Any) -> tuple[Any, bool]:
    """(X, True) of `X | None`, (X, False) of any other X."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation, False
    others = tuple(arg for arg in get_args(annotation) if arg is not types.NoneType)
    if len(others) == len(get_args(annotation)):
        return annotation, False
    return Union[others], True  # noqa: UP007, of as many as there are


def choices(annotation: Any) -> dict[str, Any] | None:
    """{word: value} of a type with few values: bool, Literal, or both; None of any other type."""
    if annotation is bool:
        return {"true": True, "false": False}
    if get_origin(annotation) is Literal:
        return {str(choice): choice for choice in get_args(annotation)}
    if get_origin(annotation) in (Union, types.UnionType):
        members = [choices(member) for member in get_args(annotation)]
        if None not in members:
            return {word: value for member in members if member for word, value in member.items()}
    return None


def expected(annotation: Any) -> str:
    """The values of a type in words. Raises TypeError for what is no leaf type."""
    inner, optional = split_optional(annotation)
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
            raise TypeError(f"{annotation} is no type for a field; see rlsys.config.fields.")
        text = names[inner]
    return f"{text}, or none" if optional else text


def checked(value: Any, annotation: Any, name: str) -> Any:
    """`value` as the field's type: a list becomes a tuple, an int a float, a number of numpy's one
    of Python's. Nothing else changes.

    Raises ValueError that names the field, the value and what was expected.
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
    elif inner is int and type(value) is int:
        return _checked_int(value, name)
    elif inner is float and type(value) in (int, float):
        return _checked_float(value, name)
    elif inner == int | str and (type(value) is int or str(value).isdecimal()):
        return _checked_int(int(value), name)
    elif inner in (str, int | str) and isinstance(value, str):
        return _checked_text(value, name)
    raise ValueError(f"{name}={value!r} does not fit; give {expected(annotation)}.")


def _checked_int(value: int, name: str) -> int:
    if not -MAX_INT - 1 <= value <= MAX_INT:
        raise ValueError(f"{name}={value} does not fit into 64 bits; use at most {MAX_INT}.")
    return value


def _checked_float(value: float, name: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}={number} is no finite number; give one, such as 0.5.")
    return number + 0.0  # -0.0 becomes 0.0


def _checked_text(value: str, name: str) -> str:
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(
            f"{name}={value!r} holds a NUL character or bytes that are no UTF-8, which no file or "
            "message can carry; leave them out."
        )
    return str(value)


def conform(config: Any, section: str = "") -> None:
    """Check every field of a frozen dataclass that is being constructed, its sections by their
    class, and put each value in as its field's type (see `checked`); called by __post_init__.

    `section` is the name by which messages call the class. Raises ValueError.
    """
    prefix = f"{section}." if section else ""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint, name = getattr(config, field.name), hints[field.name], prefix + field.name
        if not dataclasses.is_dataclass(hint):
            object.__setattr__(config, field.name, checked(value, hint, name))
        elif not isinstance(value, hint):  # type: ignore[arg-type]
            raise ValueError(
                f"{name}={value!r} is no {hint.__name__}; give "  # type: ignore[union-attr]
                f"{name}={hint.__name__}(...)."  # type: ignore[union-attr]
            )


def _members(cls: type[Any], default: Any, prefix: str) -> Iterator[tuple[str, Any, Any, Any]]:
    """(key, dotted name, type, default) of each field; an instance `default` has the last word."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        value = field.default
        if default is not MISSING:
            value = getattr(default, field.name)
        elif callable(field.default_factory):
            value = field.default_factory()
        yield field.name, prefix + field.name, hints[field.name], value


def leaves(cls: type[Any], *, default: Any = MISSING, prefix: str = "") -> list[Leaf]:
    """Every leaf, in the order of definition. Raises TypeError for a type that is none."""
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
    """Of leaves that have one, by dotted name, as JSON gives them back."""
    found = {leaf.name: leaf.default for leaf in leaves(cls) if leaf.default is not MISSING}
    plain: dict[str, Any] = parse_json(dump_json(found))
    return plain


def num_leaf_fields(cls: type[Any]) -> int:
    return len(leaves(cls))


def unknown_name(name: str, names: Iterable[str], *, kind: str) -> ValueError:
    """Return the error for a name that is none of `names`, with the right one: the same name in
    another section; else the counterpart of another library's name; else the most similar name of
    its own section, or of any.
    """
    known = list(names)
    section, _, word = name.rpartition(".")
    neighbours = [other for other in known if section and other.startswith(f"{section}.")]
    nearest = [other for other in known if _last_part(other) == _last_part(word)]
    if not nearest and (replacement := foreign_hint(name, known)):
        return ValueError(f"{name} is no {kind}; {replacement}")
    nearest = nearest or _similar(word, neighbours) or _similar(word, known)
    fix = f"did you mean {' or '.join(nearest)}?" if nearest else "--help lists all."
    return ValueError(f"{name} is no {kind}; {fix}")


def _similar(word: str, names: Sequence[str]) -> list[str]:
    """Those whose last part has `word` as its words' initials; else those where it is nearest."""
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
    """Nested mappings as {dotted name: value}.

    Raises ValueError for names that the class does not have, and for a section given as a value.
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
                raise ValueError(f"{name}={value!r} is a section; set its fields: {members[0]}.")
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
    """An instance with the defaults of `cls` but for `overrides`, {dotted name: value}.

    Raises ValueError for a value of the wrong type, for a missing field that has no default, and
    for whatever the class itself refuses, with the names that the fields have here.
    """
    values: dict[str, Any] = {}
    for key, name, hint, value in _members(cls, default, prefix):
        if dataclasses.is_dataclass(hint):
            value = build(hint, overrides, default=value, prefix=f"{name}.")  # type: ignore[arg-type]
        elif name in overrides:
            value = checked(overrides[name], hint, name)
        elif value is MISSING:
            raise ValueError(f"{name} is missing and has no default; give {expected(hint)}.")
        values[key] = value
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(_with_names(str(error), cls, prefix)) from error


def _with_names(message: str, cls: type[Any], prefix: str) -> str:
    """As a class calls its fields and sections as if it stood alone; they stand below `prefix`."""
    if not prefix:
        return message
    parent, _, section = prefix[:-1].rpartition(".")
    hints = get_type_hints(cls)
    for key, hint in hints.items():
        if dataclasses.is_dataclass(hint):
            message = re.sub(rf"(?<![\w.]){key}\.(?=[a-z])", f"{prefix}{key}.", message)
    if parent:
        message = re.sub(rf"(?<![\w.]){section}\.(?=[a-z])", prefix, message)
    begins = re.match(r"(\w+)=", message)
    return prefix + message if begins is not None and begins[1] in hints else message


def to_dict(config: Any) -> dict[str, Any]:
    """Nested dictionaries of plain values, as JSON gives them back: tuples are lists."""
    plain: dict[str, Any] = parse_json(dump_json(dataclasses.asdict(config)))
    return plain


def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
    """Inverse of `to_dict`. Keys that are left out take their defaults; unknown ones are errors."""
    return build(cls, flatten(cls, values))


def to_toml(config: Any) -> str:
    """The configuration as a TOML file that `--config` reads back; None is written as "none"."""
    flat = flatten(type(config), to_dict(config))
    lines: list[str] = []
    section = ""
    for name in sorted(flat, key=lambda name: "." in name):  # stable: TOML wants tables last
        table, _, key = name.rpartition(".")
        if table != section:
            lines += ["", f"[{table}]"]
            section = table
        lines.append(f"{key} = {_toml_value(flat[name])}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    match value:
        case None:
            return '"none"'
        case bool():
            return str(value).lower()
        case str():
            # JSON's escapes are TOML's too, but for DEL, which only TOML wants escaped.
            return dump_json(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list():
            return f"[{', '.join(_toml_value(item) for item in value)}]"
        case _:
            return repr(value)
