"""Dataset rows from the Hugging Face hub or from a local file.

In: where they come from. Out: a `datasets.Dataset`, memory-mapped, with column names and length.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlsys.config import DataConfig, require

# File name endings, and the loader of `datasets` for each.
LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}

# What each asks for.
HINTS = {
    "json": "check the file: one JSON object per line for .jsonl, a list of them for .json",
    "parquet": "check the file, or write it anew, such as with pandas.DataFrame.to_parquet",
    None: "check the name, data.subset, the split and the network, or give a local file",
}

# What a file of JSON may begin with: an object, or a list of objects (or of none).
OBJECTS = re.compile(rb"(\xef\xbb\xbf)?\s*(\[\s*\]|(\[\s*)?\{|$)")


def load_rows(config: DataConfig, setting: str = "data.source") -> Any:
    """Load `config.source`, which `setting` gives.

    Raises ValueError for a file that is missing, empty or unreadable, and for a hub dataset, subset
    or split that is not there or cannot be reached.
    """
    if config.source and Path(config.source).is_dir():
        raise ValueError(
            f"{setting}={config.source!r} is a directory; give one of its files (.jsonl, .json "
            "or .parquet), or a hub name."
        )
    import datasets
    from datasets.exceptions import DatasetsError

    source = config.source
    require(source != "", f"{setting} is empty; give a hub dataset name or a local file.")
    path = Path(source)
    loader = LOADERS.get(path.suffix)
    if loader is None:
        require(
            not path.is_file(),
            f"{setting}={source!r} is a file of unknown type; use one of {', '.join(LOADERS)}.",
        )
        arguments: dict[str, Any] = {"path": source, "name": config.subset, "split": config.split}
    else:
        require(
            path.is_file(),
            f"{setting}={source!r} is no file (looked in {Path.cwd()}); give the path of one.",
        )
        require(path.stat().st_size > 0, f"{setting}={source!r} is an empty file; fill it.")
        require(
            config.subset is None,
            f"data.subset={config.subset!r} is of a hub dataset, and {setting}={source!r} is a "
            "local file, which has none; leave data.subset out.",
        )
        if loader == "json":
            _check_utf8(path, setting)
            _check_objects(path, setting)
        datasets.disable_progress_bars()  # a local file loads in no time
        arguments = {"path": loader, "data_files": source, "split": "train"}
    try:
        with _only_errors_that_are_raised():
            return datasets.load_dataset(**arguments)
    # StopIteration: what the JSON loader raises for a file without a row. RuntimeError: what a name
    # that ends with .py gives, of a file that is not there.
    except (DatasetsError, OSError, RuntimeError, ValueError, StopIteration) as error:
        reason = " ".join(str(error.__cause__ or error).split()) or "it has no rows"
        raise ValueError(
            f"{setting}={source!r} cannot be loaded ({reason}); {HINTS[loader]}."
        ) from error


def _check_utf8(path: Path, setting: str) -> None:
    """Raise ValueError with the line that is no UTF-8: the loader would find it when it is read."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    number = 0
    with path.open("rb") as file:
        try:
            for number, line in enumerate(file, start=1):  # noqa: B007, it is told below
                decoder.decode(line)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{setting}={str(path)!r} is no UTF-8 text (line {number}: {error.reason}); "
                f"convert it, for one from Latin-1 with: iconv -f LATIN1 -t UTF-8 {path.name}"
            ) from error


def _check_objects(path: Path, setting: str) -> None:
    """Raise ValueError for a file whose first row is no object: the loader would make a column
    called "text" of some, and crash over others."""
    with path.open("rb") as file:
        beginning = file.read(4096)
    require(
        OBJECTS.match(beginning) is not None,
        f"{setting}={str(path)!r}: its first row is no JSON object, such as "
        f'{{"prompt": "1+1="}}; {HINTS["json"]}.',
    )


@contextlib.contextmanager
def _only_errors_that_are_raised() -> Iterator[None]:
    """Without the log lines in which `datasets` announces what it is about to raise."""
    logger = logging.getLogger("datasets")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
