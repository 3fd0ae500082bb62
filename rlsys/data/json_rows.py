"""Rows of JSON files, exactly as they are written.

In: a file with one object per line, with a list of objects, or with objects one after another. Out:
one dictionary per row. No value changes its type: texts that look like numbers or dates stay texts,
integers keep all digits, and nested objects have the keys that the file gives them. Other numbers
are floats of 64 bits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlsys.data.text_files import opened
from rlsys.errors import InvalidValue, require

BLANKS = re.compile(r"\s*")

FIX_JSON = "Check the file: one JSON object per line for .jsonl, a list of them for .json."


class _NoJson(ValueError):
    """A value that Python reads and JSON does not have, or that an object would lose."""


def _no_constant(name: str) -> Any:
    raise _NoJson(f"{name} is not a JSON value")


def _number(text: str) -> float:
    if abs(value := float(text)) == float("inf"):
        raise _NoJson(f"the number {text} is too large for a float")
    if value == 0 and re.match("[-0.]*[1-9]", text):
        raise _NoJson(f"the number {text} is too small for a float")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise _NoJson(f"an object has the key {repeated!r} twice")
    return found


_DECODER = json.JSONDecoder(
    strict=False,
    parse_constant=_no_constant,
    parse_float=_number,
    object_pairs_hook=_object,
)


def json_rows(path: Path, setting: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file.

    Raises:
        InvalidValue: The file is not JSON, or a row is not an object. The value is the file.
    """
    for line, row in _values(path, setting):
        require(
            isinstance(row, dict),
            setting,
            str(path),
            rule=f'a row in line {line} is not a JSON object, such as {{"prompt": "1+1="}}',
            fix=FIX_JSON,
        )
        yield row


def _values(path: Path, setting: str) -> Iterator[tuple[int, Any]]:
    """Yield each row with the number of the line in which the reader found it, from 1."""
    number = 1
    try:
        with opened(path) as file:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not text:
                    continue
                try:
                    row = _DECODER.decode(text)
                except json.JSONDecodeError:  # a row of several lines, or several rows in a line
                    for row in _objects(f"{text}\n{file.read().decode()}".rstrip()):
                        yield from ((number, one) for one in _flat(row))
                    return
                yield from ((number, one) for one in _flat(row))
    except json.JSONDecodeError as error:
        reason = f"{error.msg}, line {number + error.lineno - 1}, column {error.colno}"
        raise _no_json(path, setting, reason) from error
    except (_NoJson, UnicodeError, RecursionError, ValueError) as error:
        reason = f"line {number}: {error or 'nested too deeply'}"
        raise _no_json(path, setting, reason) from error


def _no_json(path: Path, setting: str, reason: str) -> InvalidValue:
    return InvalidValue(setting, str(path), rule=f"is not valid JSON ({reason})", fix=FIX_JSON)


def _flat(row: Any) -> Sequence[Any]:
    return row if isinstance(row, list) else [row]


def _objects(text: str) -> Iterator[Any]:
    """Yield the values of a text that begins with one."""
    position = 0
    while position < len(text):
        value, position = _DECODER.raw_decode(text, position)
        yield value
        blanks = BLANKS.match(text, position)
        position = blanks.end() if blanks else position
