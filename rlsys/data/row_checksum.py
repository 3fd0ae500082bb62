"""A checksum of a dataset's rows, equal for equal rows in every process.

rows ─► column by column, values as JSON ─► BLAKE2b ─► a number of 63 bits
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any


def rows_checksum(rows: Sequence[Mapping[str, Any]] | Any) -> int:
    """Return the checksum of all rows, in their order.

    Args:
        rows: Dictionaries, or a `datasets.Dataset`. Its images and sounds do not count, because
            reading them takes long.
    """
    digest = hashlib.blake2b(str(len(rows)).encode(), digest_size=8)
    columns = getattr(rows, "column_names", None)
    if columns is None:
        columns = dict.fromkeys(key for row in rows for key in row)
    features = getattr(rows, "features", None) or {}
    encode = json.JSONEncoder(default=_plain, ensure_ascii=False).encode
    for column in sorted(columns):
        if hasattr(features.get(column), "decode"):
            continue
        digest.update(encode(column).encode(errors="surrogatepass") + b"\0")
        is_table = hasattr(rows, "column_names")
        for value in rows[column] if is_table else (row.get(column) for row in rows):
            digest.update(encode(value).encode(errors="surrogatepass") + b"\0")
    return int.from_bytes(digest.digest(), "big") >> 1


def _plain(value: object) -> object:
    """Return a JSON value for a value that JSON does not have.

    Any other object counts by its type only, because its text may contain its address.
    """
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "tolist"):  # numpy and torch
        return value.tolist()
    if type(value).__module__ in ("datetime", "decimal", "fractions", "uuid"):
        return str(value)
    return type(value).__name__
