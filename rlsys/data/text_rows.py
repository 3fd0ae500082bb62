"""Rows of JSON and CSV files in a memory-mapped table of texts.

    files ─► rows (json_rows.py, csv_rows.py) ─► CACHE/rlsys/FINGERPRINT.arrow ─► rows on access

The values of JSON files are stored as JSON texts and decoded on access, so that each one keeps its
type. FINGERPRINT.sum has the checksum of the table, so that a damaged one is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from rlsys.data.csv_rows import csv_rows
from rlsys.data.json_rows import json_rows
from rlsys.data.source_names import named
from rlsys.data.text_files import check_text_file
from rlsys.errors import InvalidValue, require

READERS: dict[str, Callable[[Path, str], Iterator[dict[str, Any]]]] = {
    "json": json_rows,
    "csv": csv_rows,
}

FORMAT = 1  # of the cached tables
BATCH_ROWS = 1000
CHECKSUM_BYTES = 2**22

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
_encode_ascii = json.JSONEncoder(allow_nan=False).encode  # also surrogates without a partner
_decode = json.JSONDecoder().decode


def cache_directory() -> Path:
    """Return the directory for tables made of local files, in the cache of `datasets`."""
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE, "rlsys")


def fingerprint(files: Sequence[str], kind: str) -> str:
    """Return a text that differs after any change of a file, even of one that keeps its time.

    `cp -p`, `rsync -t` and `tar` restore the modification time, but not the time of the last
    change of the inode.
    """
    digest = hashlib.blake2b(f"{FORMAT} {kind}".encode(), digest_size=16)
    for file in files:
        path = os.path.realpath(file)
        found = os.stat(path)
        times = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        digest.update(f"{path}\0{file}\0{times}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


@contextlib.contextmanager
def writing_cache() -> Iterator[None]:
    """Raise InvalidValue about the cache for an OSError."""
    try:
        yield
    except OSError as error:
        raise InvalidValue(
            "HF_DATASETS_CACHE",
            str(cache_directory().parent),
            rule=f"tables of the data cannot be written there ({' '.join(str(error).split())})",
            fix="Free space, or set the variable to a directory that can be written.",
        ) from error


def _checksum_file(path: Path) -> Path:
    return path.with_suffix(".sum")


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(CHECKSUM_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _is_whole(path: Path) -> bool:
    """Return whether a table exists and has the bytes that were written."""
    try:
        return _checksum_file(path).read_text() == _checksum(path)
    except (FileNotFoundError, NotADirectoryError):
        return False


def load_texts(files: Sequence[str], loader: str, setting: str) -> Any:
    """Return the rows of files: JsonRows, or a `datasets.Dataset` of texts for CSV.

    Args:
        files: The files. Some may be without rows.
        loader: "json" or "csv".
        setting: The field of an InvalidValue.

    Raises:
        InvalidValue: A file cannot be read, or all are without rows.
    """
    import datasets

    before = fingerprint(files, loader)
    path = cache_directory() / f"{before}.arrow"
    if not _is_whole(path):
        with writing_cache():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = tempfile.TemporaryDirectory(dir=path.parent)
        with temporary as directory:
            made = Path(directory, path.name)
            _write_table(files, loader, setting, made)
            require(
                fingerprint(files, loader) == before,
                setting,
                named(files),
                rule="has changed while it was read",
                fix="Start again when it is complete.",
            )
            with writing_cache():
                _checksum_file(made).write_text(_checksum(made))
                made.replace(path)
                _checksum_file(made).replace(_checksum_file(path))
    table = datasets.Dataset.from_file(str(path))
    return JsonRows(table) if loader == "json" else table


def _write_table(files: Sequence[str], loader: str, setting: str, path: Path) -> None:
    import pyarrow

    columns: dict[str, None] = {}
    for file in files:
        check_text_file(Path(file), setting)
        found = dict.fromkeys(itertools.chain.from_iterable(READERS[loader](Path(file), setting)))
        if loader == "csv" and columns and found:
            _check_columns(list(columns), list(found), file, setting)
        columns.update(found)
    require(
        bool(columns),
        setting,
        named(files),
        rule="has no rows with a column",
        fix="Write rows with a prompt into it.",
    )
    schema = pyarrow.schema([(name, pyarrow.large_string()) for name in columns])
    rows = itertools.chain.from_iterable(READERS[loader](Path(file), setting) for file in files)
    with contextlib.ExitStack() as table:
        with writing_cache():
            sink = table.enter_context(pyarrow.OSFile(str(path), "wb"))
            writer = table.enter_context(pyarrow.ipc.new_stream(sink, schema))
        while batch := list(itertools.islice(rows, BATCH_ROWS)):
            cells = [[row.get(name) for row in batch] for name in columns]
            if loader == "json":
                cells = [_json_texts(one) for one in cells]
            arrays = [pyarrow.array(one, pyarrow.large_string()) for one in cells]
            with writing_cache():
                writer.write_batch(pyarrow.record_batch(arrays, schema))
        with writing_cache():
            table.close()


def _check_columns(columns: list[str], found: list[str], file: str, setting: str) -> None:
    if {*columns} != {*found}:
        raise InvalidValue(
            setting,
            file,
            rule=f"has the columns {found}, and the files before it have {columns}",
            fix="Write the same columns, or name the files in a list, such as a.csv,b.csv, whose "
            "rows have the columns of all.",
        )


def _json_texts(values: Iterable[Any]) -> list[str | None]:
    values = list(values)
    texts = [None if value is None else _encode(value) for value in values]
    try:
        "".join(text for text in texts if text).encode()
    except UnicodeEncodeError:
        return [None if value is None else _encode_ascii(value) for value in values]
    return texts


class JsonRows(Sequence[dict[str, Any]]):
    """The rows of a table of JSON texts, decoded on access."""

    def __init__(self, table: Any) -> None:
        self.table = table
        self.column_names: list[str] = table.column_names

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, key: Any) -> Any:
        """Return the row with a number, the rows of a slice, or the values of a column."""
        if isinstance(key, str):
            return JsonValues(self.table[key])
        if isinstance(key, slice):
            return [self[number] for number in range(*key.indices(len(self)))]
        return _decoded(self.table[key])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(_decoded, self.table)


def joined_parts(parts: Sequence[tuple[Any, range]]) -> Any:
    """Return ranges of rows, one after another, of `JsonRows` or of `datasets.Dataset`s."""
    import datasets

    is_json = isinstance(parts[0][0], JsonRows)
    tables = [(rows.table if is_json else rows).select(numbers) for rows, numbers in parts]
    joined = datasets.concatenate_datasets(tables)
    return JsonRows(joined) if is_json else joined


class JsonValues(Sequence[Any]):
    """The values of one column, decoded on access."""

    def __init__(self, texts: Any) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, number: Any) -> Any:
        """Return the value of the row with a number, or those of a slice."""
        if isinstance(number, slice):
            return [_value(text) for text in self._texts[number]]
        return _value(self._texts[number])

    def __iter__(self) -> Iterator[Any]:
        return map(_value, self._texts)


def _decoded(row: Mapping[str, str | None]) -> dict[str, Any]:
    return {name: _value(text) for name, text in row.items()}


def _value(text: str | None) -> Any:
    return None if text is None else _decode(text)
