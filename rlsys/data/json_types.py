"""A check that JSON files were loaded as they are written.

The loader stores the values of a column with several types as JSON texts, and converts later rows
to the type of the first ones. Both change values silently: the text "010" becomes the number 10.
"""

from __future__ import annotations

import gzip
import json
import re
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from rlsys.errors import InvalidValue

KINDS: dict[type, str] = {
    str: "text",
    bool: "boolean",
    int: "number",
    float: "number",
    dict: "object",
    list: "list",
}

BLANKS = re.compile(r"\s*")


@dataclass(frozen=True)
class JsonPlace:
    """A value in a file, with the number of its row from 0."""

    file: str
    row: int
    value: object

    def __str__(self) -> str:
        return f"{reprlib.repr(self.value)} in row {self.row} (from 0) of {self.file!r}"


@dataclass
class JsonColumn:
    """The first value of each kind in a column, or in a path below one."""

    first: dict[str, JsonPlace] = field(default_factory=dict)
    changed: JsonPlace | None = None


def check_json_types(files: Sequence[str], features: Any, setting: str) -> None:
    """Raise InvalidValue for a value that the loaded `features` represent as another type.

    Without features, raise it for a value of another type than the first one of its column.
    """
    columns: dict[str, JsonColumn] = {}
    for file in files:
        try:
            for number, row in enumerate(_rows(Path(file))):
                if isinstance(row, dict):
                    _compare_keys(row, features, "", JsonPlace(file, number, row), columns)
        except json.JSONDecodeError as error:
            if features is None:
                return  # the error of the loader names the line
            raise InvalidValue(
                setting, file, rule=f"is not valid JSON ({error})", fix="Write one object per line."
            ) from error
    for path, column in columns.items():
        changed = column.changed
        if changed is None:
            continue
        others = [one for kind, one in column.first.items() if kind != _kind(changed.value)]
        reason = f", because {others[0]} has another type" if others else ""
        raise InvalidValue(
            setting,
            changed.file,
            rule=f"the loader would change column {path!r}: it does not keep {changed}{reason}",
            fix="Write one JSON object per line, and all values of the column with one type, such "
            "as all as texts.",
        )


def _kind(value: object) -> str:
    return KINDS[type(value)]


def _compare_keys(
    value: dict[str, Any],
    features: Any,
    above: str,
    place: JsonPlace,
    columns: dict[str, JsonColumn],
) -> None:
    for key, item in value.items():
        if item is not None and (features is None or key in features):
            _compare(item, features and features[key], f"{above}{key}", place, columns)


def _compare(
    value: Any, feature: Any, path: str, place: JsonPlace, columns: dict[str, JsonColumn]
) -> None:
    column = columns.get(path)
    if column is None:
        column = columns[path] = JsonColumn()
    kind = _kind(value)
    if kind not in column.first:
        column.first[kind] = JsonPlace(place.file, place.row, value)
    is_kept = kind in list(column.first)[:1] if feature is None else _keeps(feature, value, kind)
    if column.changed is None and not is_kept:
        column.changed = JsonPlace(place.file, place.row, value)
    if kind == "object" and isinstance(feature, dict | None):
        _compare_keys(value, feature, f"{path}.", place, columns)
    elif kind == "list":
        items = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        for item in value if items is not None or feature is None else ():
            if item is not None:
                _compare(item, items, path + "[]", place, columns)


def _keeps(feature: Any, value: Any, kind: str) -> bool:
    """Return whether a column of this feature holds the value as it is written."""
    import datasets

    if isinstance(feature, datasets.Value):
        match feature.dtype:
            case "string" | "large_string":
                return kind == "text"
            case "bool":
                return kind == "boolean"
            case dtype if dtype.startswith(("int", "uint", "float", "double")):
                return kind == "number"
        return True  # such as a time, read from a text
    if isinstance(feature, datasets.features.Json):
        return kind != "text" or _is_kept_text(feature, value)
    return kind == ("object" if isinstance(feature, dict) else "list")


def _is_kept_text(feature: Any, text: str) -> bool:
    """Return whether a text in a column of JSON values is read as itself."""
    return bool(feature.decode_example(feature.encode_example(text)) == text)


def opened(path: Path) -> IO[bytes]:
    """Open a file, compressed by gzip or not."""
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path))
    return path.open("rb")


def _rows(path: Path) -> Iterator[Any]:
    """Yield the rows of a file with a list of objects, or with objects one after another."""
    decoder = json.JSONDecoder(strict=False)
    with opened(path) as file:
        for line in file:
            text = line.decode("utf-8-sig").strip()
            if not text:
                continue
            try:
                row = decoder.decode(text)
            except json.JSONDecodeError:  # a row of several lines, or several rows in a line
                yield from _objects(text + "\n" + file.read().decode(), decoder)
                return
            yield from row if isinstance(row, list) else [row]


def _objects(text: str, decoder: json.JSONDecoder) -> Iterator[Any]:
    """Yield the rows of a text that begins with a row."""
    position = 0
    while position < len(text):
        row, position = decoder.raw_decode(text, position)
        yield from row if isinstance(row, list) else [row]
        blanks = BLANKS.match(text, position)
        position = blanks.end() if blanks else position
