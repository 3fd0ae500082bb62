"""The text of `data.source`, read as a list of sources.

    a.jsonl                       one file
    train-*.parquet               all files that the pattern matches, in the order of their names
    saved/                        a directory: of `save_to_disk`, of data files, of a hub dataset
    openai/gsm8k                  a dataset of the hub
    a.jsonl,b.csv                 several sources, one after another
    math.jsonl*0.7,code/*0.3      a mixture: the part of all prompts that each source gives

A path that exists as it is written is never read as a pattern, a list or a weight.
"""

from __future__ import annotations

import glob
import math
import os
import re
import reprlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlsys.config import require

# File name endings, and the loader of `datasets` for each. A ".gz" may follow those of texts.
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
ENDINGS = f"{', '.join(LOADERS)} (texts also with .gz)"

WEIGHT = re.compile(r"(.+)\*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)")

# The most characters of a path, and of a name in it, on common file systems.
MAX_PATH = 4096
MAX_NAME = 255

Kind = Literal["files", "saved", "directory", "hub"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source: `files` of one type, a directory, or a hub dataset named `text`."""

    text: str
    kind: Kind
    weight: float | None = None
    loader: str | None = None
    files: tuple[str, ...] = field(default=())


def read_sources(text: str, setting: str) -> list[Source]:
    """Return the sources that `text`, the value of `setting`, names.

    Raises ValueError for a path without a file, a pattern without a match, a file of unknown type,
    and weights that some sources have and others lack.
    """
    require(text.strip() != "", f"{setting} is empty; give a hub dataset name or a local file.")
    found = [_read_one(part, setting) for part in _parts(text)]
    weighted = [one for one in found if one.weight is not None]
    require(
        len(weighted) in (0, len(found)),
        f"{setting}={text!r}: some sources have a weight and others have none. Give each one a "
        "weight, such as a.jsonl*0.7,b.jsonl*0.3, or none.",
    )
    return found


def hub_names(text: str) -> list[str]:
    """Return the sources of `text` that are looked up on the hub."""
    parts = [_without_weight(part)[0] for part in _parts(text)]
    return [part for part in parts if _is_hub_name(part)]


def may_have_splits(text: str) -> bool:
    """Return whether a source of `text` is of a kind that has splits: a hub dataset or a directory.
    Plain files have none.
    """
    paths = [_without_weight(part)[0] for part in _parts(text)]
    return any(_is_hub_name(path) or os.path.isdir(path) for path in paths)


def takes_subset(text: str) -> bool:
    """Return whether data.subset can apply to a source of `text`: to a hub dataset or a copy of
    one.
    """
    paths = [_without_weight(part)[0] for part in _parts(text)]
    return any(
        _is_hub_name(path) or (os.path.isdir(path) and not _is_saved(path)) for path in paths
    )


def _is_saved(path: str) -> bool:
    """Return whether `save_to_disk` wrote this directory."""
    return any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _parts(text: str) -> list[str]:
    if not text or os.path.exists(text):
        return [text] if text else []
    return [part.strip() for part in text.split(",")]


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


def loader_of(path: str) -> str | None:
    """Return the loader of `datasets` for a file of this name, or None for an unknown type."""
    name = Path(path).name
    is_compressed = name.endswith(".gz")
    loader = LOADERS.get(Path(name.removesuffix(".gz")).suffix)
    return None if is_compressed and loader not in COMPRESSED else loader


def _read_one(part: str, setting: str) -> Source:
    path, weight = _without_weight(part)
    require(path != "", f"{setting}: an item of the list is empty. Remove a comma.")
    require(
        weight is None or (weight > 0 and math.isfinite(weight)),
        f"{setting}={part!r}: the weight is not a positive number. Use one such as *0.3, or leave "
        "the source out.",
    )
    _check_path(path, setting)
    if os.path.isdir(path):
        return _directory(path, weight)
    if not os.path.exists(path) and _is_pattern(path):
        return _pattern(path, weight, setting)
    if loader_of(path) is None:
        require(
            not os.path.isfile(path),
            f"{setting}={path!r} is a file of unknown type; use one of {ENDINGS}.",
        )
        return Source(text=path, kind="hub", weight=weight)
    require(
        os.path.isfile(path),
        f"{setting}={path!r} is no file (looked in {Path.cwd()}); give the path of one.",
    )
    return Source(text=path, kind="files", weight=weight, loader=loader_of(path), files=(path,))


def _check_path(path: str, setting: str) -> None:
    """Raise ValueError for a path that can hold no dataset."""
    is_long = len(path) > MAX_PATH or max(map(len, path.split("/"))) > MAX_NAME
    is_long = is_long or (_is_hub_name(path) and len(path) > MAX_NAME)
    require(
        not is_long or os.path.exists(path) or _is_pattern(path),
        f"{setting}={reprlib.repr(path)} has {len(path)} characters, and there is no such file. "
        f"A path has at most {MAX_PATH}, a name in it and a hub dataset's name at most {MAX_NAME}. "
        "Shorten it.",
    )
    require(
        not os.path.exists(path) or os.path.isfile(path) or os.path.isdir(path),
        f"{setting}={path!r} is a device, a pipe or a socket, which cannot be read twice. Write "
        "the rows into a file.",
    )
    require(
        not os.path.isdir(path) or Path(path).resolve() != Path(path).resolve().parent,
        f"{setting}={path!r} is the root of the file system, which is no dataset. Give a "
        "directory with data files.",
    )


def _check_weight(path: str, setting: str) -> None:
    """Raise ValueError for a pattern without a match that ends with a wrong weight."""
    head, _, tail = path.rpartition("*")
    is_source = os.path.exists(head) or loader_of(head) is not None or bool(glob.glob(head))
    require(
        not head or not tail or not (is_source or _is_float(tail)),
        f"{setting}={path!r}: the weight {tail!r} is no positive finite number, written with "
        f"digits and at most one point. Use one such as {head}*0.3, or leave the weight out.",
    )


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _pattern(path: str, weight: float | None, setting: str) -> Source:
    files = tuple(sorted(one for one in glob.glob(path, recursive=True) if os.path.isfile(one)))
    if not files:
        _check_weight(path, setting)
    require(
        len(files) > 0,
        f"{setting}={path!r} matches no file (looked in {Path.cwd()}); give a pattern that does.",
    )
    loaders = {loader_of(one) for one in files}
    unknown = [one for one in files if loader_of(one) is None]
    require(
        not unknown,
        f"{setting}={path!r} matches {(unknown or [''])[0]!r}, a file of unknown type; use a "
        f"pattern for files of one of {ENDINGS}.",
    )
    require(
        len(loaders) == 1,
        f"{setting}={path!r} matches files of several types ({sorted(map(str, loaders))}); use one "
        "pattern for each type, with a comma between them.",
    )
    return Source(text=path, kind="files", weight=weight, loader=loaders.pop(), files=files)


def _directory(path: str, weight: float | None) -> Source:
    if _is_saved(path):
        return Source(text=path, kind="saved", weight=weight)
    # The hub's cache: datasets--owner--name/snapshots/COMMIT, with the newest commit in refs/main.
    newest = Path(path) / "refs" / "main"
    if newest.is_file() and (Path(path) / "snapshots").is_dir():
        path = str(Path(path) / "snapshots" / newest.read_text().strip())
    return Source(text=path, kind="directory", weight=weight)
