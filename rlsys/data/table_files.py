"""Rows of Parquet and Arrow files.

The loader converts the columns of later files to the types of the first one. This changes values
silently, such as the text "007" to the number 7, so files with different types are refused.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from typing import Any

from rlsys.data.source_names import named
from rlsys.data.text_rows import cache_directory, fingerprint, writing_cache
from rlsys.errors import InvalidValue, require

FIX_TABLE = "Check the file, or write it anew, such as with pandas.DataFrame.to_parquet."


def load_tables(files: Sequence[str], loader: str, setting: str) -> Any:
    """Return a `datasets.Dataset` of Parquet or Arrow files.

    Raises:
        InvalidValue: A file cannot be read, the files have different columns or types, or none has
            a row.
    """
    import datasets

    read = {"parquet": _read_parquet, "arrow": _read_arrow}[loader]
    found = [(file, *_opened(read, file, setting)) for file in files]
    filled = [(file, schema) for file, schema, num_rows in found if num_rows > 0]
    require(
        len(filled) > 0,
        setting,
        named(files),
        rule="has no rows",
        fix="Write rows with a prompt into it.",
    )
    first, schema = filled[0]
    for file, other in filled[1:]:
        _check_schema(schema, other, first, file, setting)
    if all(schema.equals(other) for _, other in filled):
        return _load([file for file, _ in filled], loader)
    # Joined tables have the type of the first one that is not a column of nulls.
    return datasets.concatenate_datasets([_load([file], loader) for file, _ in filled])


def _load(files: Sequence[str], loader: str) -> Any:
    import datasets

    with writing_cache():  # the files have been opened by now
        return datasets.load_dataset(
            loader,
            data_files=[glob.escape(file) for file in files],
            split="train",
            cache_dir=str(cache_directory() / fingerprint(files, loader)),
        )


def _opened(read: Callable[[str], tuple[Any, int]], file: str, setting: str) -> tuple[Any, int]:
    import pyarrow

    try:
        return read(file)
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise InvalidValue(
            setting, file, rule=f"cannot be read ({reason})", fix=FIX_TABLE
        ) from error


def _read_parquet(file: str) -> tuple[Any, int]:
    """Return the schema and the number of rows."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        return table.schema_arrow, table.metadata.num_rows


def _read_arrow(file: str) -> tuple[Any, int]:
    """Return the schema and the number of rows of a stream or a file with an index."""
    import pyarrow

    with pyarrow.memory_map(file) as source:
        try:
            reader: Any = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            source.seek(0)
            reader = pyarrow.ipc.open_file(source)
        return reader.schema, reader.read_all().num_rows


def _check_schema(schema: Any, other: Any, first: str, file: str, setting: str) -> None:
    names = schema.names
    require(
        sorted(names) == sorted(other.names),
        setting,
        file,
        rule=f"has the columns {other.names}, and {first!r} has {names}",
        fix="Write the same columns, or name the files in a list, such as a.parquet,b.parquet, "
        "whose rows have the columns of all.",
    )
    for name in names:
        require(
            _is_same(schema.field(name).type, other.field(name).type),
            setting,
            file,
            rule=f"the column {name!r} has the type {other.field(name).type}, and that of "
            f"{first!r} has {schema.field(name).type}",
            fix="Write one type, or name the files in a list, such as a.parquet,b.parquet.",
        )


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two Arrow types hold the same values. A column of nulls suits any type."""
    import pyarrow

    types = pyarrow.types
    if one.equals(other) or types.is_null(one) or types.is_null(other):
        return True
    for is_kind in (_is_text, _is_bytes):
        if is_kind(one) and is_kind(other):
            return True
    if _is_list(one) and _is_list(other):
        return _is_same(one.value_type, other.value_type)
    if types.is_struct(one) and types.is_struct(other):
        names = sorted(field.name for field in one)
        return names == sorted(field.name for field in other) and all(
            _is_same(one.field(name).type, other.field(name).type) for name in names
        )
    return False


def has_times(kind: Any) -> bool:
    """Return whether an Arrow type is, or contains, a date or a time."""
    import pyarrow

    parts = (kind.field(number).type for number in range(kind.num_fields))
    return bool(pyarrow.types.is_temporal(kind)) or any(map(has_times, parts))


def _is_text(kind: Any) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))


def _is_bytes(kind: Any) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))


def _is_list(kind: Any) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind))
