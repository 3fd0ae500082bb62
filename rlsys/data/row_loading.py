"""Dataset rows from local files, directories and the Hugging Face hub.

In: the text of `data.source` (source_names.py). Out: a `datasets.Dataset`, memory-mapped, or
several joined, with column names and length.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlsys.config import DataConfig, require
from rlsys.data.joined_rows import JoinedRows
from rlsys.data.json_types import check_json_types, opened
from rlsys.data.source_names import Source, loader_of, read_sources, takes_subset

# The fix for a source that cannot be loaded, by its kind or its files' loader.
HINTS = {
    "json": "check the file: one JSON object per line for .jsonl, a list of them for .json",
    "csv": "check the file: a first line with the names of the columns, then a line for each row",
    "parquet": "check the file, or write it anew, such as with pandas.DataFrame.to_parquet",
    "arrow": "check the file, or give the directory that save_to_disk wrote",
    "saved": "check the split, or save the dataset again with save_to_disk",
    "directory": "check the split, data.subset and the files, or give a pattern, such as DIR/*.csv",
    "hub": "check the name, data.subset, the split and the network, or give a local file",
}

# The beginning of a JSON file that can be read: an object, or a list of objects (or of none).
OBJECTS = re.compile(rb"(\xef\xbb\xbf)?\s*(\[\s*\]|(\[\s*)?\{|$)")

# A split, or a part of one: "train", "train[:90%]". Several are joined with "+".
SPLIT_NAME = re.compile(r"(?:^|\+)\s*([\w.-]+)")

TRAIN = "train"  # the name that `datasets` gives the only split of files


def load_rows(config: DataConfig, setting: str = "data.source", *, file_split: str = TRAIN) -> Any:
    """Load `config.source`, the value of `setting`.

    A plain file has no splits: `file_split` is the value of the split's setting that takes all of
    it, and a part of it is written as "train[:90%]".

    Raises ValueError for a file that is missing, empty or unreadable, and for a hub dataset, subset
    or split that does not exist or cannot be reached.
    """
    sources = read_sources(config.source, setting)
    require(
        config.subset is None or takes_subset(config.source),
        f"data.subset={config.subset!r} is of a hub dataset, and {setting}={config.source!r} is "
        "local data, which has none; leave data.subset out.",
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
    loaders = {"files": _load_files, "saved": _load_saved}
    load = loaders.get(source.kind, _load_named)
    for file in source.files:
        require(Path(file).stat().st_size > 0, f"{setting}={file!r} is an empty file; fill it.")
        if source.loader == "json":
            _check_json(Path(file), setting)
    with _as_refusal(source, setting), _quiet_datasets():
        rows = load(source, config, _split_setting(setting), file_split)
        files = _json_files(source, config)
    check_json_types(files, rows.features, setting)
    return rows


@contextlib.contextmanager
def _as_refusal(source: Source, setting: str) -> Iterator[None]:
    """Raise ValueError with the source and the fix for an error of the loader."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except RefusalError:
        raise
    # StopIteration: raised by the JSON loader for a file without a row. RuntimeError: raised for a
    # name that ends with .py. KeyError: an Arrow file without the dataset's description.
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
        if source.loader == "json":
            check_json_types(source.files, None, setting)
        reason = " ".join(str(error.__cause__ or error).split()) or "it has no rows"
        raise ValueError(
            f"{setting}={source.text!r} cannot be loaded ({reason}); "
            f"{HINTS[source.loader or source.kind]}."
        ) from error


class RefusalError(ValueError):
    """An error that names the setting and the fix."""


def _load_files(source: Source, config: DataConfig, setting: str, file_split: str) -> Any:
    import datasets

    _check_file_split(source, config.split, setting, file_split)
    tabs = source.files[0].removesuffix(".gz").endswith(".tsv")
    rows = datasets.load_dataset(
        source.loader,
        data_files=[glob.escape(file) for file in source.files],
        split=TRAIN,
        **({"sep": "\t"} if tabs else {}),
    )
    return _of_splits({TRAIN: rows, file_split: rows}, config.split, setting, source.text)


def _load_saved(source: Source, config: DataConfig, setting: str, file_split: str) -> Any:
    import datasets

    saved = datasets.load_from_disk(source.text)
    if not isinstance(saved, datasets.DatasetDict):
        _check_file_split(source, config.split, setting, file_split)
        saved = {TRAIN: saved, file_split: saved}
    return _of_splits(saved, config.split, setting, source.text)


def _load_named(source: Source, config: DataConfig, setting: str, file_split: str) -> Any:
    """Load a hub dataset, or a directory with data files or with a hub dataset's own description
    of them (README.md).
    """
    import datasets

    _instruction(config.split, setting)
    names = list(dict.fromkeys(SPLIT_NAME.findall(config.split)))
    rows = datasets.load_dataset(path=source.text, name=config.subset, split=names)
    return _of_splits(dict(zip(names, rows, strict=True)), config.split, setting, source.text)


def _json_files(source: Source, config: DataConfig) -> Sequence[str]:
    """Return the local JSON files that the rows of a source come from."""
    import datasets

    if source.kind == "directory":
        builder = datasets.load_dataset_builder(source.text, config.subset)
        found = builder.config.data_files or {}
        names = dict.fromkeys(SPLIT_NAME.findall(config.split))
        files = [file for name in names for file in found.get(name, ())]
        return [file for file in files if loader_of(file) == "json" and Path(file).is_file()]
    return source.files if source.loader == "json" else ()


def _of_splits(splits: Any, text: str, setting: str, path: str) -> Any:
    """Return the rows of a split, of parts of it, or of several. Raises RefusalError for a split
    that the data does not have, and for a part without a row.
    """
    import datasets

    if text in splits:
        return splits[text]
    instruction = _instruction(text, setting)
    if any(name not in splits for name in SPLIT_NAME.findall(text)):
        raise RefusalError(
            f"{setting}={text!r} is no split of {path!r}, which has {', '.join(splits)}; use one "
            "of them."
        )
    sizes = {name: len(splits[name]) for name in splits}
    try:
        parts = instruction.to_absolute(sizes)
    except ValueError as error:
        raise RefusalError(f"{setting}={text!r}: {error} Leave the rounding out.") from error
    for written, part in zip(text.split("+"), parts, strict=True):
        if part.from_ >= part.to:
            raise RefusalError(
                f"{setting}={text!r}: the part {written.strip()!r} has no rows: it begins at row "
                f"{part.from_} and ends before row {part.to} of {sizes[part.splitname]}. Use a "
                "part with rows, such as train[:90%]."
            )
    return datasets.concatenate_datasets(
        [splits[one.splitname].select(range(one.from_, one.to)) for one in parts]
    )


def _instruction(text: str, setting: str) -> Any:
    """Return the parts of a split. Raises RefusalError for a text that is written wrongly."""
    import datasets

    try:
        return datasets.ReadInstruction.from_spec(text)
    except ValueError as error:
        raise RefusalError(
            f"{setting}={text!r} is no split. A split is NAME or NAME[FROM:TO], where FROM and TO "
            "are numbers of rows or percentages up to 100%, and + joins several. Use one such as "
            "train or train[:90%]."
        ) from error


def _check_file_split(source: Source, text: str, setting: str, file_split: str) -> None:
    """Raise RefusalError for another name than `file_split` and "train" of files, which have no
    splits.
    """
    names = SPLIT_NAME.findall(text)
    if not names or any(name not in (TRAIN, file_split) for name in names):
        raise RefusalError(
            f"{setting}={text!r}: {source.text!r} has no splits. Remove the option, or write a "
            "part of the file, such as train[:90%]."
        )


def _split_setting(setting: str) -> str:
    return setting.removesuffix("source") + "split"


def _check_json(path: Path, setting: str) -> None:
    """Raise ValueError for a text that is no UTF-8, and for a file that is no gzip."""
    try:
        _check_objects(path, setting)
        _check_utf8(path, setting)
    except (EOFError, OSError) as error:
        raise ValueError(
            f"{setting}={str(path)!r} cannot be read ({error}); write it anew."
        ) from error


def _check_utf8(path: Path, setting: str) -> None:
    """Raise ValueError with the line that is no UTF-8. The loader finds it late or not at all."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    number = 0
    with opened(path) as file:
        try:
            for number, line in enumerate(file, start=1):  # noqa: B007, used below
                decoder.decode(line)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{setting}={str(path)!r} is no UTF-8 text (line {number}: {error.reason}); "
                f"convert it, for one from Latin-1 with: iconv -f LATIN1 -t UTF-8 {path.name}"
            ) from error


def _check_objects(path: Path, setting: str) -> None:
    """Raise ValueError for a file whose first row is no object. The loader makes a column called
    "text" of some of them, and crashes over others.
    """
    with opened(path) as file:
        require(
            any(line.strip(b"\xef\xbb\xbf \t\r\n") for line in file),
            f"{setting}={str(path)!r} has only blank lines. Write rows into it: {HINTS['json']}.",
        )
        file.seek(0)
        beginning = file.read(4096)
    require(
        OBJECTS.match(beginning) is not None,
        f"{setting}={str(path)!r}: its first row is no JSON object, such as "
        f'{{"prompt": "1+1="}}; {HINTS["json"]}.',
    )


@contextlib.contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Suppress the log lines in which `datasets` announces what it is about to raise."""
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
