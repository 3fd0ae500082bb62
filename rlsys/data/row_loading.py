"""Dataset rows from local files, directories and the Hugging Face hub.

    data.source ─► sources (source_names.py) ─► files of each split (directory_files.py)
                ─► rows (text_rows.py, table_files.py) ─► parts of splits, joined

Out: rows with column names and length, memory-mapped. The values are those in the files.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsys.config import DataConfig
from rlsys.data.csv_rows import FIX_CSV
from rlsys.data.directory_files import TRAIN, directory_splits
from rlsys.data.joined_rows import JoinedRows
from rlsys.data.json_rows import FIX_JSON
from rlsys.data.source_names import Source, loader_of, named, read_sources, takes_subset
from rlsys.data.table_files import FIX_TABLE, has_times, load_tables
from rlsys.data.text_rows import READERS, joined_parts, load_texts
from rlsys.errors import InvalidValue, require

logger = logging.getLogger(__name__)

# The fix for a source that cannot be loaded, by its kind or the type of its files.
FIXES = {
    "json": FIX_JSON,
    "csv": FIX_CSV,
    "parquet": FIX_TABLE,
    "arrow": "Check the file, or give the directory that save_to_disk wrote.",
    "saved": "Check the split, or save the dataset again with save_to_disk.",
    "directory": "Check the split, data.subset and the files, or give a pattern such as DIR/*.csv.",
    "hub": "Check the name, data.subset, the split and the network, or give a local file.",
}

# A split, or a part of one: "train", "train[:90%]". Several are joined with "+".
SPLIT_NAME = re.compile(r"(?:^|\+)\s*([\w.-]+)")

Load = Callable[[], Any]  # loads the rows of a split


def load_rows(config: DataConfig, setting: str = "data.source", *, file_split: str = TRAIN) -> Any:
    """Load `config.source`, the value of `setting`.

    Plain files have no splits. The split `file_split` means all of a file, and "train[:90%]"
    for a part of it.

    Raises:
        InvalidValue: A file is missing, empty or unreadable, or a hub dataset, subset or split does
            not exist or cannot be reached.
    """
    sources = read_sources(config.source, setting)
    require(
        config.subset is None or takes_subset(config.source),
        "data.subset",
        config.subset,
        rule=f"only hub datasets have subsets, and {setting}={config.source!r} is local data",
        fix="Leave data.subset out.",
    )
    parts = [_load(one, config, setting, file_split) for one in sources]
    if len(parts) == 1:
        return parts[0]
    weights = [one.weight for one in sources if one.weight is not None]
    return JoinedRows(parts, weights or None)


def _load(source: Source, config: DataConfig, setting: str, file_split: str) -> Any:
    import datasets

    if source.kind != "hub":
        datasets.disable_progress_bars()  # local data loads within seconds
    of_kind = {"files": _files, "saved": _saved, "directory": _directory, "hub": _hub}
    with _as_invalid_value(source, setting), _quiet_datasets():
        splits = of_kind[source.kind](source, config, setting, file_split)
        rows = _of_splits(splits, config.split, _split_setting(setting), source.text)
    require(len(rows) > 0, setting, source.text, rule="has no rows", fix="Give data with prompts.")
    return rows


@contextlib.contextmanager
def _as_invalid_value(source: Source, setting: str) -> Iterator[None]:
    """Raise InvalidValue with the source and the fix for an error of the loader."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except InvalidValue:
        raise
    # The JSON loader raises StopIteration for a file without a row. A name that ends with .py
    # raises RuntimeError. An Arrow file without the dataset's description raises KeyError.
    except (
        DatasetsError,
        OSError,
        RuntimeError,
        ValueError,
        StopIteration,
        KeyError,
        IndexError,
        TypeError,
    ) as error:
        reason = " ".join(str(error.__cause__ or error).split()) or "it has no rows"
        raise InvalidValue(
            setting,
            source.text,
            rule=f"cannot be loaded ({reason})",
            fix=FIXES[source.loader or source.kind],
        ) from error


def _files(source: Source, config: DataConfig, setting: str, file_split: str) -> Mapping[str, Load]:
    _check_file_split(source, config.split, _split_setting(setting), file_split)
    load = functools.partial(_load_files, source.files, setting)
    return {TRAIN: load, file_split: load}


def _saved(source: Source, config: DataConfig, setting: str, file_split: str) -> Mapping[str, Load]:
    import datasets

    saved = datasets.load_from_disk(source.text)
    if not isinstance(saved, datasets.DatasetDict):
        _check_file_split(source, config.split, _split_setting(setting), file_split)
        saved = {TRAIN: saved, file_split: saved}
    return {name: functools.partial(saved.get, name) for name in saved}


def _directory(
    source: Source, config: DataConfig, setting: str, file_split: str
) -> Mapping[str, Load]:
    del file_split  # a directory has its own splits
    _instruction(config.split, _split_setting(setting))
    splits = directory_splits(source.text, config.subset, setting)
    return {name: functools.partial(_load_files, files, setting) for name, files in splits.items()}


def _hub(source: Source, config: DataConfig, setting: str, file_split: str) -> Mapping[str, Load]:
    import datasets

    del file_split
    _instruction(config.split, _split_setting(setting))
    names = list(dict.fromkeys(SPLIT_NAME.findall(config.split)))
    found = datasets.load_dataset(path=source.text, name=config.subset, split=names)
    for rows in found:
        _check_no_times(rows, source.text, setting)
    return {
        name: functools.partial(lambda one: one, rows)
        for name, rows in zip(names, found, strict=True)
    }


def _check_no_times(rows: Any, name: str, setting: str) -> None:
    """Raise InvalidValue for a hub dataset of JSON files in which texts became times."""
    if rows.info.builder_name != "json":
        return
    times = [
        column
        for column, kind in zip(rows.column_names, rows.data.schema.types, strict=True)
        if has_times(kind)
    ]
    require(
        not times,
        setting,
        name,
        rule=f"the loader of hub datasets reads texts of the columns {times} as times",
        fix=f"Download it (hf download {name} --repo-type dataset --local-dir DIR), and give DIR.",
    )


def _load_files(files: Sequence[str], setting: str) -> Any:
    """Return the rows of files of one type. Empty files are skipped, with a warning."""
    filled = [file for file in files if Path(file).stat().st_size > 0]
    require(
        len(filled) > 0,
        setting,
        named(files),
        rule="is an empty file",
        fix="Fill it.",
    )
    loader = loader_of(files[0])
    assert loader is not None
    if len(filled) < len(files):
        empty = next(file for file in files if file not in filled)
        logger.warning("%d empty files are skipped (first: %s).", len(files) - len(filled), empty)
    return (load_texts if loader in READERS else load_tables)(filled, loader, setting)


def _of_splits(splits: Mapping[str, Load], text: str, setting: str, path: str) -> Any:
    """Return the rows of a split, of parts of it, or of several.

    Raises:
        InvalidValue: The data does not have the split, or a part has no rows.
    """
    instruction = None if text in splits else _instruction(text, setting)
    names = [text] if instruction is None else list(dict.fromkeys(SPLIT_NAME.findall(text)))
    require(
        all(name in splits for name in names),
        setting,
        text,
        rule=f"is not a split of {path!r}, which has {', '.join(splits)}",
        fix="Use one of them.",
    )
    loaded = {name: splits[name]() for name in names}
    if instruction is None:
        return loaded[text]
    sizes = {name: len(rows) for name, rows in loaded.items()}
    try:
        parts = instruction.to_absolute(sizes)
    except ValueError as error:
        rule = str(error).rstrip(".")
        raise InvalidValue(setting, text, rule=rule, fix="Leave the rounding out.") from error
    for written, part in zip(text.split("+"), parts, strict=True):
        require(
            part.from_ < part.to,
            setting,
            text,
            rule=f"the part {written.strip()!r} has no rows: it begins at row {part.from_} and "
            f"ends before row {part.to} of {sizes[part.splitname]}",
            fix="Use a part with rows, such as train[:90%].",
        )
    return joined_parts([(loaded[one.splitname], range(one.from_, one.to)) for one in parts])


def _instruction(text: str, setting: str) -> Any:
    """Return the parts of a split, or raise InvalidValue for a text that is not one."""
    import datasets

    try:
        return datasets.ReadInstruction.from_spec(text)
    except ValueError as error:
        raise InvalidValue(
            setting,
            text,
            rule="is not a split: NAME or NAME[FROM:TO], where FROM and TO are numbers of rows or "
            "percentages up to 100%, and + joins several",
            fix="Use one such as train or train[:90%].",
        ) from error


def _check_file_split(source: Source, text: str, setting: str, file_split: str) -> None:
    """Raise InvalidValue for a split other than `file_split` and "train": files have no splits."""
    names = SPLIT_NAME.findall(text)
    require(
        bool(names) and all(name in (TRAIN, file_split) for name in names),
        setting,
        text,
        rule=f"{source.text!r} has no splits",
        fix="Remove the option, or write a part of the file, such as train[:90%].",
    )


def _split_setting(setting: str) -> str:
    return setting.removesuffix("source") + "split"


@contextlib.contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Suppress the log lines in which `datasets` announces the error that it raises."""
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
