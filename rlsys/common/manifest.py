"""manifest.json: size and checksum of every other file of a directory that was written once.

    {"files": {"model.safetensors": {"bytes": 7, "crc32": "…"}, …}, "crc32": "…"}

Written last. The last checksum is of `files`: a list that lacks a file is no manifest, and two
directories with the same one hold the same. In: a directory. Out: what is wrong with it, by the
names of its files.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rlsys.common.append_only_file import Tally, ordinary
from rlsys.common.atomic_files import write_whole
from rlsys.common.safe_json import dump_json, parse_json

MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class ManifestEntry:
    """Of one file. CRC-32 finds every burst of up to 32 damaged bits, at the speed of a disk."""

    bytes: int
    crc32: str

    def __post_init__(self) -> None:
        for name, kind in (("bytes", int), ("crc32", str)):
            if type(value := getattr(self, name)) is not kind:
                raise TypeError(f"{name}={value!r} is not of type {kind.__name__}")


def write_manifest(directory: Path) -> str:
    """Reads all files below. Returns the checksum of them all."""
    names = [name for name in _files(directory) if name != MANIFEST_FILE]
    files = {name: _entry(directory / name) for name in names}
    entries = {name: asdict(entry) for name, entry in files.items()}
    manifest = {"files": entries, "crc32": _checksum(files)}
    write_whole(directory / MANIFEST_FILE, dump_json(manifest, indent=1) + "\n")
    return _checksum(files)


def read_manifest(directory: Path) -> dict[str, ManifestEntry]:
    """By the files' names. Raises ValueError for one that is missing or damaged."""
    try:
        manifest = parse_json(ordinary(directory / MANIFEST_FILE).read_bytes())
        files = {
            name: ManifestEntry(bytes=entry["bytes"], crc32=entry["crc32"])
            for name, entry in manifest["files"].items()
        }
        is_as_told = manifest["crc32"] == _checksum(files)
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST_FILE} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{MANIFEST_FILE} is damaged, or of another version of rlsys "
            f"({type(error).__name__}: {error})"
        ) from None
    if not is_as_told:
        raise ValueError(f"{MANIFEST_FILE} was edited: it has another checksum than it says")
    return files


def manifest_checksum(directory: Path) -> str:
    """What `write_manifest` returned. Raises ValueError for one that is missing or damaged."""
    return _checksum(read_manifest(directory))


def faults_of(directory: Path, *, crc32: str | None = None) -> list[str]:
    """What is wrong with the files of a directory, all of which are read; others beside them
    (.DS_Store) do no harm. `crc32`: what `write_manifest` returned, where that is known.
    """
    try:
        files = read_manifest(directory)
    except ValueError as error:
        return [str(error)]
    if crc32 not in (None, _checksum(files)):
        return [f"{MANIFEST_FILE} is of other files than were written there"]
    faults = []
    for name, entry in sorted(files.items()):
        path = directory / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif (size := path.stat().st_size) != entry.bytes:
            faults.append(f"{name} has {size:,} bytes instead of {entry.bytes:,}")
        elif _entry(path) != entry:
            faults.append(f"{name} has another checksum than when it was written")
    return faults


def _checksum(files: Mapping[str, ManifestEntry]) -> str:
    lines = [f"{name} {entry.bytes} {entry.crc32}\n" for name, entry in sorted(files.items())]
    return f"{zlib.crc32(''.join(lines).encode(errors='surrogateescape')):08x}"


def _files(directory: Path) -> list[str]:
    """Every file below, by its path in the directory."""
    return sorted(
        str(Path(root, name).relative_to(directory))
        for root, _, names in os.walk(directory)
        for name in names
    )


def _entry(path: Path) -> ManifestEntry:
    tally = Tally.of(path, path.stat().st_size)
    return ManifestEntry(bytes=tally.num_bytes, crc32=f"{tally.crc32:08x}")
