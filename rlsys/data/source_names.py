"""Parser of `data.source`, which names one or several sources.

    a.jsonl                       one file
    train-*.parquet               all files that the pattern matches, in the order of their names
    saved/                        a directory: of `save_to_disk`, of data files, of a hub dataset
    openai/gsm8k                  a dataset of the hub
    a.jsonl,b.csv                 several sources, one after another
    math.jsonl*0.7,code/*0.3      a mixture: the share of all prompts that each source gives

A leading ~ is the home directory. A path that exists as it is written is never read as a pattern, a
list or a weight.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlsys.errors import require

# File name endings, and the type of each. Texts may also end with a compression.
LOADERS = {
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSED = ("json", "csv")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
ENDINGS = f"{', '.join(LOADERS)} (texts also with {', '.join(COMPRESSIONS)})"

WEIGHT = re.compile(r"(.+?)\s*\*\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)")

# A directory of a partitioned table: COLUMN=VALUE.
PARTITION = re.compile(r"[A-Za-z_]\w*=")

# Maximum characters of a path, and of a name in it, on common file systems.
MAX_PATH = 4096
MAX_NAME = 255

Kind = Literal["files", "saved", "directory", "hub"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source: `files` of one type, a directory, or a hub dataset named `text`."""

    text: str
    kind: Kind
    weight: float | None = None
    loader: str | None = None
    files: tuple[str, ...] = field(default=())


def read_sources(text: str, setting: str) -> list[Source]:
    """Return the sources that `text`, the value of `setting`, names.

    Raises:
        InvalidValue: A file does not exist, a pattern matches nothing, the type of a file is
            unknown, or only some sources have a weight.
    """
    require(
        text.strip() != "", setting, text, rule="is empty", fix="Give a hub dataset or local files."
    )
    found = [_read_one(part, setting) for part in _parts(text)]
    weighted = [one for one in found if one.weight is not None]
    require(
        len(weighted) in (0, len(found)),
        setting,
        text,
        rule="some sources have a weight and others have none",
        fix="Give each one a weight, such as a.jsonl*0.7,b.jsonl*0.3, or none.",
    )
    return found


def hub_names(text: str) -> list[str]:
    """Return the sources of `text` that are hub names."""
    parts = [_without_weight(part)[0] for part in _parts(text)]
    return [part for part in parts if _is_hub_name(part)]


def may_have_splits(text: str) -> bool:
    """Return whether `text` names a hub dataset or a directory. Plain files have no splits."""
    paths = [_without_weight(part)[0] for part in _parts(text)]
    return any(_is_hub_name(path) or os.path.isdir(path) for path in paths)


def takes_subset(text: str) -> bool:
    """Return whether data.subset can apply to a source: a hub dataset or a copy of one."""
    paths = [_without_weight(part)[0] for part in _parts(text)]
    return any(
        _is_hub_name(path) or (os.path.isdir(path) and not _is_saved(path)) for path in paths
    )


def _is_saved(path: str) -> bool:
    """Return whether `save_to_disk` wrote this directory."""
    return any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _parts(text: str) -> list[str]:
    """Return the sources of a list, with ~ expanded."""
    for path in (text, os.path.expanduser(text)):
        if path and os.path.exists(path):
            return [path]
    return [os.path.expanduser(part.strip()) for part in text.split(",")] if text else []


def _without_weight(part: str) -> tuple[str, float | None]:
    match = WEIGHT.fullmatch(part)
    if match is None or os.path.exists(part):
        return part, None
    return match[1], float(match[2])


def _is_hub_name(part: str) -> bool:
    is_local = os.path.exists(part) or _is_pattern(part) or loader_of(part) is not None
    return bool(part) and not is_local


def _is_pattern(part: str) -> bool:
    return glob.has_magic(part)


def compression_of(name: str) -> str | None:
    """Return the ending of a compression, such as ".gz", with which a name ends, or None."""
    return next((one for one in COMPRESSIONS if name.lower().endswith(one)), None)


def named(files: Sequence[str]) -> str | list[str]:
    """Return files as the value of an error: one of them as a text."""
    return files[0] if len(files) == 1 else list(files)


def without_compression(name: str) -> str:
    """Return a name without the ending of a compression."""
    return name[: len(name) - len(compression_of(name) or "")]


def loader_of(path: str) -> str | None:
    """Return the type of a file of this name, or None for an unknown one."""
    name = Path(path).name
    loader = LOADERS.get(Path(without_compression(name)).suffix.lower())
    return None if compression_of(name) and loader not in COMPRESSED else loader


def _read_one(part: str, setting: str) -> Source:
    path, weight = _without_weight(part)
    require(path != "", setting, rule="an item of the list is empty", fix="Remove a comma.")
    require(
        weight is None or (weight > 0 and math.isfinite(weight)),
        setting,
        part,
        rule="the weight is not a positive number",
        fix="Use one such as *0.3, or leave the source out.",
    )
    _check_path(path, setting)
    if os.path.isdir(path):
        return _directory(path, weight)
    if not os.path.exists(path) and _is_pattern(path):
        return _pattern(path, weight, setting)
    if loader_of(path) is None:
        require(
            not os.path.isfile(path),
            setting,
            path,
            rule="is a file of unknown type",
            fix=f"Use one of {ENDINGS}.",
        )
        return Source(text=path, kind="hub", weight=weight)
    require(
        os.path.isfile(path),
        setting,
        path,
        rule=f"does not exist (looked in {Path.cwd()})",
        fix="Give the path of a file.",
    )
    return Source(text=path, kind="files", weight=weight, loader=loader_of(path), files=(path,))


def _check_path(path: str, setting: str) -> None:
    """Raise InvalidValue for a path that cannot be a dataset."""
    is_long = len(path) > MAX_PATH or max(map(len, path.split("/"))) > MAX_NAME
    is_long = is_long or (_is_hub_name(path) and len(path) > MAX_NAME)
    require(
        not is_long or os.path.exists(path) or _is_pattern(path),
        setting,
        path,
        rule=f"has {len(path)} characters and does not exist; a path has at most {MAX_PATH}, and a "
        f"name in it or of a hub dataset at most {MAX_NAME}",
        fix="Shorten it.",
    )
    require(
        not os.path.exists(path) or os.path.isfile(path) or os.path.isdir(path),
        setting,
        path,
        rule="is a device, a pipe or a socket, which cannot be read twice",
        fix="Write the rows into a file.",
    )
    require(
        not os.path.isdir(path) or Path(path).resolve() != Path(path).resolve().parent,
        setting,
        path,
        rule="is the root of the file system",
        fix="Give a directory with data files.",
    )


def _check_weight(path: str, setting: str) -> None:
    """Raise InvalidValue for a pattern without a match that ends with a wrong weight."""
    head, _, tail = (part.strip() for part in path.rpartition("*"))
    is_source = os.path.exists(head) or loader_of(head) is not None or bool(glob.glob(head))
    require(
        not head or not tail or not (is_source or _is_float(tail)),
        setting,
        path,
        rule=f"the weight {tail!r} is not a positive finite number, written with digits and at "
        "most one point",
        fix=f"Use one such as {head}*0.3, or leave the weight out.",
    )


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _pattern(path: str, weight: float | None, setting: str) -> Source:
    found = sorted(glob.glob(path, recursive=True))
    for one in found:
        check_link(one, setting)
    files = tuple(one for one in found if os.path.isfile(one))
    if not files:
        _check_weight(path, setting)
    require(
        len(files) > 0,
        setting,
        path,
        rule=f"matches no file (looked in {Path.cwd()})",
        fix="Give a pattern that does.",
    )
    loaders = {loader_of(one) for one in files}
    unknown = [one for one in files if loader_of(one) is None]
    require(
        not unknown,
        setting,
        path,
        rule=f"matches {(unknown or [''])[0]!r}, a file of unknown type",
        fix=f"Use a pattern for files of one of {ENDINGS}.",
    )
    require(
        len(loaders) == 1,
        setting,
        path,
        rule=f"matches files of several types ({sorted(map(str, loaders))})",
        fix="Use one pattern for each type, with a comma between them.",
    )
    check_partitions(files, path, setting)
    return Source(text=path, kind="files", weight=weight, loader=loaders.pop(), files=files)


def check_link(path: str, setting: str) -> None:
    """Raise InvalidValue for a symbolic link to a file that does not exist."""
    require(
        os.path.exists(path) or not os.path.islink(path),
        setting,
        path,
        rule="is a symbolic link to a file that does not exist, so its rows would be missing",
        fix="Restore the file, such as by another download, or remove the link.",
    )


def check_partitions(files: Sequence[str], root: str, setting: str) -> None:
    """Raise InvalidValue for files in directories such as "answer=4" below `root`.

    They hold the values of a column that the files lack.
    """
    known = Path(root).parts
    for file in files:
        folders = [one for one in Path(file).parent.parts if one not in known]
        partition = next((one for one in folders if PARTITION.match(one)), None)
        require(
            partition is None,
            setting,
            file,
            rule=f"is in the directory {partition!r} of a partitioned table, whose column would be "
            "lost",
            fix="Write the table as plain files, or name the files by a pattern without this "
            "column, such as with the directory's whole name.",
        )


def _directory(path: str, weight: float | None) -> Source:
    if _is_saved(path):
        return Source(text=path, kind="saved", weight=weight)
    # The hub's cache: datasets--owner--name/snapshots/COMMIT, with the newest commit in refs/main.
    newest = Path(path) / "refs" / "main"
    if newest.is_file() and (Path(path) / "snapshots").is_dir():
        path = str(Path(path) / "snapshots" / newest.read_text().strip())
    return Source(text=path, kind="directory", weight=weight)
