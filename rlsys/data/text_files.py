"""Opening of text files, compressed or not, and checks of their bytes."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

from rlsys.data.source_names import compression_of
from rlsys.errors import InvalidValue, require

UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

# The first bytes of compressed data, and the ending that names it.
MAGIC = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}

# Errors of decompression.
BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError)


def _open_zstandard(path: Path) -> IO[bytes]:
    import pyarrow

    stream: Any = pyarrow.input_stream(str(path), compression="zstd")
    return io.BufferedReader(stream)


OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
}


def opened(path: Path) -> IO[bytes]:
    """Open a file, decompressed if its name has the ending of a compression."""
    compression = compression_of(path.name)
    return cast("IO[bytes]", OPENERS[compression](path) if compression else path.open("rb"))


def check_text_file(path: Path, setting: str) -> None:
    """Raise InvalidValue for a text that is not UTF-8, and for damaged or unnamed compression."""
    with path.open("rb") as file:
        beginning = file.read(6)
    ending = next((one for magic, one in MAGIC.items() if beginning.startswith(magic)), None)
    require(
        ending is None or compression_of(path.name) is not None,
        setting,
        str(path),
        rule=f"contains compressed data, and its name does not end with {ending}",
        fix=f"Rename it to {path.name}{ending}.",
    )
    try:
        _check_utf8(path, setting)
    except BROKEN as error:
        raise InvalidValue(
            setting, str(path), rule=f"cannot be read ({error})", fix="Write it anew."
        ) from error


def _check_utf8(path: Path, setting: str) -> None:
    """Raise InvalidValue with the line that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    number, line, is_utf16 = 0, b"", False
    with opened(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    is_utf16 = line[:2] in UTF16_MARKS or b"\0" in line
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
