"""Rows of CSV and TSV files. Each field is the text that is in the file.

    prompt,answer          {"prompt": "1+1=", "answer": "002"}
    1+1=,002         ──►   {"prompt": "a, b", "answer": None}
    "a, b",

CSV has no types, so `002` stays a text. An empty field is None. Blank lines are ignored.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from rlsys.data.source_names import without_compression
from rlsys.data.text_files import opened
from rlsys.errors import InvalidValue, require

FIX_CSV = "Check the file: a first line with the names of the columns, then a line for each row."

# Maximum characters of a field: that of Python's csv module is 128 Ki.
MAX_FIELD = 2**31 - 1


def csv_rows(path: Path, setting: str) -> Iterator[dict[str, str | None]]:
    """Yield the rows of a file.

    Raises:
        InvalidValue: A row has more or fewer fields than the first line, a column occurs twice, or
            a quote does not end. The value is the file.
    """
    csv.field_size_limit(MAX_FIELD)
    is_tabbed = without_compression(path.name).lower().endswith(".tsv")
    with opened(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        reader = csv.reader(text, delimiter="\t" if is_tabbed else ",", strict=True)
        columns: list[str] | None = None
        line = 1
        try:
            for fields in reader:
                if fields and columns is None:
                    columns = _columns(fields, path, setting)
                elif fields:
                    _check_size(fields, columns or [], path, line, setting)
                    yield dict(zip(columns or [], (one or None for one in fields), strict=True))
                line = reader.line_num + 1
        except csv.Error as error:
            raise InvalidValue(
                setting,
                str(path),
                rule=f"is not valid CSV (the row that begins in line {line}: {error})",
                fix='Write a quote within a quoted field twice, such as "5"" wide".',
            ) from error


def _columns(fields: list[str], path: Path, setting: str) -> list[str]:
    """Return the names of the columns. One without a name gets that of pandas, "Unnamed: 0"."""
    names = [name or f"Unnamed: {number}" for number, name in enumerate(fields)]
    repeated = sorted({name for name in names if names.count(name) > 1})
    require(
        not repeated,
        setting,
        str(path),
        rule=f"the first line has these columns several times: {repeated}",
        fix="Give each column its own name.",
    )
    return names


def _check_size(fields: list[str], columns: list[str], path: Path, line: int, setting: str) -> None:
    require(
        len(fields) == len(columns),
        setting,
        str(path),
        rule=f"the row in line {line} has {len(fields)} fields, and the first line has "
        f"{len(columns)} columns",
        fix='Put fields with commas or line breaks in quotes ("a, b"), and add missing commas.',
    )
