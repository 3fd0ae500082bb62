"""Data files of a directory, by split.

In: a directory, such as a copy of a hub dataset. Out: the files of each split. The header of its
README.md lists them, or else their names do:

    train-00000-of-00002.parquet, test/part-1.jsonl    ──►    train, test
    a.jsonl, b.jsonl                                   ──►    train

Only files with a known ending are data. Hidden files, and those whose name begins with "__", are
not. A file is never left out because of its split.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsys.data.source_names import check_link, check_partitions, loader_of, without_compression
from rlsys.errors import InvalidValue, require

logger = logging.getLogger(__name__)

TRAIN = "train"  # the split of files whose names have none

Splits = dict[str, tuple[str, ...]]

SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
WORD = re.compile(r"[^-._ 0-9]+")

# The hub's names of converted data, with any split: data/exam-00000-of-00001.parquet
SHARD = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*")

# Files that describe a dataset.
DESCRIPTIONS = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
ABOUT = re.compile(r"(readme|license|licence|notice|citation)\b.*", re.IGNORECASE)

HEADER = re.compile(r"\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)

# Keys of a README.md's configuration that change how files are read.
READING = ("sep", "delimiter", "names", "column_names", "header", "skiprows", "quotechar", "field")


def directory_splits(directory: str, subset: str | None, setting: str) -> Splits:
    """Return the data files of each split. All have the same type.

    Raises:
        InvalidValue: There are no data files, they have several types, some names have a split and
            others none, a link leads to no file, or the subset does not exist.
    """
    configs = _configs(directory, setting)
    config = _chosen(configs, directory, subset)
    base = str(Path(directory, str(config.get("data_dir") or "")))
    files = config.get("data_files")
    splits = _by_name(base, setting) if files is None else _listed(base, files, setting)
    found = [file for some in splits.values() for file in some]
    require(
        len(found) > 0,
        setting,
        directory,
        rule="the directory has no data files",
        fix="Give a directory with files such as .jsonl or .parquet.",
    )
    check_partitions(found, directory, setting)
    _check_one_type(found, directory, setting)
    return splits


def _configs(directory: str, setting: str) -> list[Mapping[str, Any]]:
    """Return the configurations in the header of README.md, each with its name."""
    import yaml

    card = Path(directory, "README.md")
    check_link(str(card), setting)
    header = HEADER.match(card.read_text(errors="replace")) if card.is_file() else None
    try:
        parsed = yaml.safe_load(header[1]) if header else None
    except yaml.YAMLError as error:
        raise InvalidValue(
            setting,
            str(card),
            rule=f"the header is not valid YAML ({' '.join(str(error).split())})",
            fix="Correct it, or remove README.md.",
        ) from error
    configs = parsed.get("configs") if isinstance(parsed, Mapping) else None
    require(
        configs is None
        or (isinstance(configs, list) and all(isinstance(one, Mapping) for one in configs)),
        setting,
        str(card),
        rule="`configs` in the header is not a list of configurations",
        fix="Correct it, or remove README.md.",
    )
    return [{"config_name": "default", **one} for one in configs or ()]


def _chosen(
    configs: Sequence[Mapping[str, Any]], directory: str, subset: str | None
) -> Mapping[str, Any]:
    names = [str(one["config_name"]) for one in configs] or ["default"]
    default = [str(one["config_name"]) for one in configs if one.get("default")]
    name = subset or (default or (names if len(names) == 1 else ["default"]))[0]
    require(
        name in names,
        "data.subset",
        subset,
        rule=f"is not a subset of {directory!r}, which has {', '.join(names)}",
        fix="Use one of them.",
    )
    chosen = configs[names.index(name)] if configs else {}
    options = [key for key in READING if key in chosen]
    require(
        not options,
        "data.subset",
        subset,
        rule=f"README.md of {directory!r} sets {options} for its files, which is not supported",
        fix="Convert the files to .jsonl, and give these.",
    )
    return chosen


def _listed(base: str, files: Any, setting: str) -> Splits:
    """Return the files of the patterns in README.md, each one once per split."""
    entries: list[tuple[Any, Any]] = [*files.items()] if isinstance(files, Mapping) else []
    listed: list[Any] = files if isinstance(files, list) else [files]
    for one in listed if not entries else ():
        is_entry = isinstance(one, Mapping)
        entries.append((one.get("split", TRAIN), one.get("path", ())) if is_entry else (TRAIN, one))
    found: dict[str, dict[str, None]] = {}
    for split, patterns in entries:
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            matches = _matches(base, str(pattern), setting)
            found.setdefault(str(split), {}).update(dict.fromkeys(matches))
    return {split: tuple(some) for split, some in found.items()}


def _matches(base: str, pattern: str, setting: str) -> list[str]:
    found = sorted(glob.glob(pattern, root_dir=base, recursive=True))
    paths = [os.path.join(base, one) for one in found]
    for path in paths:
        check_link(path, setting)
    files = [path for path in paths if os.path.isfile(path)]
    data = [path for path in files if loader_of(path) and _is_data(os.path.basename(path))]
    _warn_ignored(base, [path for path in files if path not in data])
    require(
        len(data) > 0,
        setting,
        os.path.join(base, pattern),
        rule="no data file matches this pattern of README.md",
        fix="Add the files, or correct README.md.",
    )
    return data


def _by_name(base: str, setting: str) -> Splits:
    """Return all data files below a directory by the split in their names."""
    names = _walked(base, setting)
    data = [name for name in names if loader_of(name)]
    _warn_ignored(base, [name for name in names if not loader_of(name)])
    splits: dict[str | None, list[str]] = {}
    for name in data:
        split = _split_of(name, os.path.join(base, name), setting)
        splits.setdefault(split, []).append(name)
    if None in splits and len(splits) > 1:
        split, named = next((one, some[0]) for one, some in splits.items() if one is not None)
        unnamed = splits[None][0]
        ending = Path(unnamed).suffix
        raise InvalidValue(
            setting,
            base,
            rule=f"the name of {named!r} has the split {split!r}, and the name of {unnamed!r} has "
            "none",
            fix=f"Give a pattern for the files, such as {base.rstrip('/')}/*{ending}, or a list of "
            "files with commas.",
        )
    return {
        split or TRAIN: tuple(os.path.join(base, name) for name in some)
        for split, some in splits.items()
    }


def _split_of(name: str, path: str, setting: str) -> str | None:
    """Return the split in the name of a file below a directory, or None."""
    if shard := SHARD.fullmatch(name):
        return shard[1]
    folder, _, last = name.rpartition("/")
    splits = _splits_in(folder) | _splits_in(without_compression(last))
    require(
        len(splits) < 2,
        setting,
        path,
        rule=f"the name has several splits: {', '.join(sorted(splits))}",
        fix="Rename the file, or give a pattern for the files of one split.",
    )
    return next(iter(splits), None)


def _splits_in(name: str) -> set[str]:
    words = (word.lower() for part in name.split("/") for word in WORD.findall(part))
    return {SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS}


def _is_data(name: str) -> bool:
    return not name.startswith((".", "__")) and name not in DESCRIPTIONS


def _walked(base: str, setting: str) -> list[str]:
    """Return the names of all files below a directory, sorted. Links are followed."""

    def fail(error: OSError) -> None:
        raise error

    found = []
    for folder, folders, names in os.walk(base, followlinks=True, onerror=fail):
        above = os.path.realpath(folder) + "/"
        folders[:] = [
            one
            for one in folders
            if _is_data(one) and not above.startswith(os.path.realpath(f"{folder}/{one}") + "/")
        ]
        for name in filter(_is_data, names):
            check_link(os.path.join(folder, name), setting)
            found.append(os.path.relpath(os.path.join(folder, name), base))
    return sorted(found)


def _warn_ignored(base: str, names: Iterable[str]) -> None:
    ignored = [name for name in names if not ABOUT.fullmatch(os.path.basename(name))]
    if ignored:
        logger.warning(
            "%s: ignored %d files of unknown type: %s",
            *(base, len(ignored), ", ".join(ignored[:5]) + (", ..." if ignored[5:] else "")),
        )


def _check_one_type(files: Sequence[str], directory: str, setting: str) -> None:
    counts = Counter(Path(without_compression(file)).suffix for file in files)
    shown = ", ".join(f"{number} {ending}" for ending, number in counts.most_common())
    patterns = ",".join(f"{directory.rstrip('/')}/*{ending}" for ending in counts)
    require(
        len({loader_of(file) for file in files}) < 2,
        setting,
        directory,
        rule=f"the directory has files of several types ({shown}), and only one can be loaded",
        fix=f"Name the files of each type, such as {patterns}, or move the others away.",
    )
