"""manifest.json: size and checksum of every other file of a directory that was written once.

Written last. In: a directory. Out: what is wrong with it, by the names of its files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlsys.disk import write_whole
from rlsys.growing_file import Tally, ordinary
from rlsys.json_text import parse_json

MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Of one file. CRC-32 finds every burst of up to 32 damaged bits, at the speed of a disk."""

    bytes: int
    crc32: str


def write_manifest(directory: Path) -> None:
    """Reads all files below."""
    names = [name for name in _files(directory) if name != MANIFEST_FILE]
    entries = {name: asdict(_entry(directory / name)) for name in names}
    write_whole(directory / MANIFEST_FILE, json.dumps(entries, indent=1) + "\n")


def read_manifest(directory: Path) -> dict[str, Entry]:
    """By the files' names. Raises ValueError for one that is missing or damaged."""
    try:
        wanted = parse_json(ordinary(directory / MANIFEST_FILE).read_bytes())
        return {
            str(name): Entry(bytes=int(entry["bytes"]), crc32=str(entry["crc32"]))
            for name, entry in wanted.items()
        }
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST_FILE} is missing") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{MANIFEST_FILE} is damaged ({type(error).__name__}: {error})") from None


def faults_of(directory: Path, *, needed: Sequence[str] = (), checksums: bool = True) -> list[str]:
    """What is wrong with the files of a directory; others beside them (.DS_Store) do no harm. With
    `checksums` all of them are read, else their sizes are compared. `needed`: files, and folders
    with files, that the manifest must list."""
    try:
        files = read_manifest(directory)
    except ValueError as error:
        return [str(error)]
    listed = {part for name in files for part in (name, name.partition("/")[0])}
    faults = [f"{MANIFEST_FILE} does not list {name}" for name in needed if name not in listed]
    for name, entry in sorted(files.items()):
        path = directory / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif (size := path.stat().st_size) != entry.bytes:
            faults.append(f"{name} has {size:,} bytes instead of {entry.bytes:,}")
        elif checksums and _entry(path) != entry:
            faults.append(f"{name} has another checksum than when it was written")
    return faults


def _files(directory: Path) -> list[str]:
    """Every file below, by its path in the directory."""
    return sorted(
        str(Path(root, name).relative_to(directory))
        for root, _, names in os.walk(directory)
        for name in names
    )


def _entry(path: Path) -> Entry:
    tally = Tally.of(path, path.stat().st_size)
    return Entry(bytes=tally.num_bytes, crc32=f"{tally.crc32:08x}")
