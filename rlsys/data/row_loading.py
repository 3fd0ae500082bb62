"""Dataset rows from local files, directories and the Hugging Face hub.

In: the text of `data.source` (source_names.py). Out: a memory-mapped `datasets.Dataset`, or several
of them joined, with column names and length.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlsys.config import DataConfig
from rlsys.data.joined_rows import JoinedRows
from rlsys.data.json_types import check_json_types, opened
from rlsys.data.source_names import COMPRESSED, Source, loader_of, read_sources, takes_subset
from rlsys.errors import InvalidValue, require

# The fix for a source that cannot be loaded, by its kind or the loader of its files.
FIXES = {
    "json": "Check the file: one JSON object per line for .jsonl, a list of them for .json.",
    "csv": "Check the file: a first line with the names of the columns, then a line for each row.",
    "parquet": "Check the file, or write it anew, such as with pandas.DataFrame.to_parquet.",
    "arrow": "Check the file, or give the directory that save_to_disk wrote.",
    "saved": "Check the split, or save the dataset again with save_to_disk.",
    "directory": "Check the split, data.subset and the files, or give a pattern such as DIR/*.csv.",
    "hub": "Check the name, data.subset, the split and the network, or give a local file.",
}

# The beginning of a JSON file that can be read: an object, or a list of objects (or of none).
OBJECTS = re.compile(rb"(\xef\xbb\xbf)?\s*(\[\s*\]|(\[\s*)?\{|$)")

UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

# A split, or a part of one: "train", "train[:90%]". Several are joined with "+".
SPLIT_NAME = re.compile(r"(?:^|\+)\s*([\w.-]+)")

TRAIN = "train"  # the name that `datasets` gives the only split of files


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
    loaders = {"files": _load_files, "saved": _load_saved}
    load = loaders.get(source.kind, _load_named)
    for file in source.files:
        _check_file(Path(file), source.loader, setting)
    if source.kind == "directory":
        _check_one_type(source.text, setting)
    with _as_invalid_value(source, setting), _quiet_datasets():
        rows = load(source, config, _split_setting(setting), file_split)
        files = _json_files(source, config)
    check_json_types(files, rows.features, setting)
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
        if source.loader == "json":
            check_json_types(source.files, None, setting)
        reason = " ".join(str(error.__cause__ or error).split()) or "it has no rows"
        raise InvalidValue(
            setting,
            source.text,
            rule=f"cannot be loaded ({reason})",
            fix=FIXES[source.loader or source.kind],
        ) from error


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
    """Load a hub dataset, or a directory with data files.

    The README.md of a hub dataset may describe its data files.
    """
    import datasets

    _instruction(config.split, setting)
    names = list(dict.fromkeys(SPLIT_NAME.findall(config.split)))
    rows = datasets.load_dataset(path=source.text, name=config.subset, split=names)
    return _of_splits(dict(zip(names, rows, strict=True)), config.split, setting, source.text)


def _check_one_type(directory: str, setting: str) -> None:
    """Raise InvalidValue for a directory with data files of several types.

    The loader takes the most frequent type and silently ignores the other files. Directories whose
    README.md lists their data files are not checked.
    """
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

    card = Path(directory, "README.md")
    if card.is_file() and "data_files" in card.read_text(errors="replace"):
        return
    base = str(Path(directory).resolve())
    try:
        found = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base)
    except (EmptyDatasetError, FileNotFoundError):
        return  # the loader reports it
    names = [str(file).removesuffix(".gz") for files in found.values() for file in files]
    counts = Counter(Path(name).suffix for name in names if loader_of(name))
    types = {"tsv" if ending == ".tsv" else loader_of(f"a{ending}") for ending in counts}
    shown = ", ".join(f"{number} {ending}" for ending, number in counts.most_common())
    patterns = ",".join(f"{directory.rstrip('/')}/*{ending}" for ending in counts)
    require(
        len(types) < 2,
        setting,
        directory,
        rule=f"the directory has files of several types ({shown}), and only one can be loaded",
        fix=f"Name the files of each type, such as {patterns}, or move the others away.",
    )


def _json_files(source: Source, config: DataConfig) -> Sequence[str]:
    """Return the local JSON files from which the rows of a source come."""
    import datasets

    if source.kind == "directory":
        builder = datasets.load_dataset_builder(source.text, config.subset)
        found = builder.config.data_files or {}
        names = dict.fromkeys(SPLIT_NAME.findall(config.split))
        files = [file for name in names for file in found.get(name, ())]
        return [file for file in files if loader_of(file) == "json" and Path(file).is_file()]
    return source.files if source.loader == "json" else ()


def _of_splits(splits: Any, text: str, setting: str, path: str) -> Any:
    """Return the rows of a split, of parts of it, or of several.

    Raises:
        InvalidValue: The data does not have the split, or a part has no rows.
    """
    import datasets

    if text in splits:
        return splits[text]
    instruction = _instruction(text, setting)
    require(
        all(name in splits for name in SPLIT_NAME.findall(text)),
        setting,
        text,
        rule=f"is not a split of {path!r}, which has {', '.join(splits)}",
        fix="Use one of them.",
    )
    sizes = {name: len(splits[name]) for name in splits}
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
    return datasets.concatenate_datasets(
        [splits[one.splitname].select(range(one.from_, one.to)) for one in parts]
    )


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


def _check_file(path: Path, loader: str | None, setting: str) -> None:
    """Raise InvalidValue for an empty file, for a text that is not UTF-8, and for broken gzip."""
    require(path.stat().st_size > 0, setting, str(path), rule="is an empty file", fix="Fill it.")
    if loader not in COMPRESSED:
        return
    try:
        _check_utf8(path, setting)
        if loader == "json":
            _check_objects(path, setting)
    except (EOFError, OSError) as error:
        raise InvalidValue(
            setting, str(path), rule=f"cannot be read ({error})", fix="Write it anew."
        ) from error


def _check_utf8(path: Path, setting: str) -> None:
    """Raise InvalidValue with the line that is not UTF-8. The loader reports it late or never."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    number, line = 0, b""
    with opened(path) as file:
        beginning = file.readline()
        is_utf16 = beginning[:2] in UTF16_MARKS or b"\0" in beginning
        file.seek(0)
        try:
            for number, line in enumerate(file, start=1):  # noqa: B007, used below
                decoder.decode(line)
            decoder.decode(b"", final=True)
            if not is_utf16:
                return
            number, reason = 1, "it contains zero bytes"
        except UnicodeDecodeError as error:
            reason = error.reason
    encoding = "UTF-16" if is_utf16 else "LATIN1"
    raise InvalidValue(
        setting,
        str(path),
        rule=f"is not UTF-8 text (line {number}: {reason})",
        fix=f"Convert it, such as from {encoding} with: iconv -f {encoding} -t UTF-8 {path.name}",
    )


def _check_objects(path: Path, setting: str) -> None:
    """Raise InvalidValue for a file whose first row is not a JSON object.

    The loader makes a column called "text" of some of them, and crashes on others.
    """
    with opened(path) as file:
        require(
            any(line.strip(b"\xef\xbb\xbf \t\r\n") for line in file),
            setting,
            str(path),
            rule="has only blank lines",
            fix=f"Write rows into it. {FIXES['json']}",
        )
        file.seek(0)
        beginning = file.read(4096)
    require(
        OBJECTS.match(beginning) is not None,
        setting,
        str(path),
        rule='its first row is not a JSON object, such as {"prompt": "1+1="}',
        fix=FIXES["json"],
    )


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
