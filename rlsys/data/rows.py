"""Dataset rows from the Hugging Face hub or from a local file.

In: where they come from. Out: a `datasets.Dataset`, memory-mapped, with column names and length.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlsys.config import DataConfig, require

# File name endings, and the loader of `datasets` for each.
LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def load_rows(config: DataConfig) -> Any:
    """Load `data.source`.

    Raises ValueError for a file that is missing, empty or unreadable, and for a hub dataset, subset
    or split that is not there or cannot be reached.
    """
    if config.source and Path(config.source).is_dir():
        raise ValueError(
            f"data.source={config.source!r} is a directory; give one of its files (.jsonl, .json "
            "or .parquet), or a hub name."
        )
    import datasets
    from datasets.exceptions import DatasetsError

    source = config.source
    require(source != "", "data.source is empty; give a hub dataset name or a local file.")
    path = Path(source)
    loader = LOADERS.get(path.suffix)
    if loader is None:
        require(
            not path.is_file(),
            f"data.source={source!r} is a file of unknown type; use one of {', '.join(LOADERS)}.",
        )
        arguments: dict[str, Any] = {"path": source, "name": config.subset, "split": config.split}
    else:
        require(
            path.is_file(),
            f"data.source={source!r} is no file (looked in {Path.cwd()}); give the path of one.",
        )
        require(path.stat().st_size > 0, f"data.source={source!r} is an empty file; fill it.")
        if loader == "json":
            _check_utf8(path, source)
        datasets.disable_progress_bars()  # a local file loads in no time
        arguments = {"path": loader, "data_files": source, "split": "train"}
    try:
        with _only_errors_that_are_raised():
            return datasets.load_dataset(**arguments)
    # StopIteration: what the JSON loader raises for a file without a row.
    except (DatasetsError, OSError, ValueError, StopIteration) as error:
        reason = " ".join(str(error.__cause__ or error).split()) or "it has no rows"
        hint = (
            "check the file: one JSON object per line for .jsonl, a list of them for .json"
            if loader
            else "check data.source, data.subset, data.split and the network, or give a local file"
        )
        raise ValueError(f"data.source={source!r} cannot be loaded ({reason}); {hint}.") from error


def _check_utf8(path: Path, source: str) -> None:
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
                f"data.source={source!r} is no UTF-8 text (line {number}: {error.reason}); convert "
                f"it, for one from Latin-1 with: iconv -f LATIN1 -t UTF-8 {path.name}"
            ) from error


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
