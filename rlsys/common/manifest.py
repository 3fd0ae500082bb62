"""manifest.json: sizes and checksums of the other files of a directory.

    {"files": {"model.safetensors": {"bytes": 7, "crc32": "…"}, …}, "crc32": "…"}

The manifest is written last. The outer checksum covers `files`, so that an incomplete list is
detected, and directories with the same checksum have the same content. In: a directory. Out: faults
of its files.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rlsys.common.append_only_file import regular_file
from rlsys.common.atomic_files import write_atomically
from rlsys.common.safe_json import dump_json, parse_json

MANIFEST_FILE = "manifest.json"
READ_BYTES = 1 << 18  # stays in the processor's cache

# Called with the number of bytes that are read or copied, and with that of all files.
OnBytes = Callable[[int, int], None]


def ignore_bytes(done: int, total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True, kw_only=True)
class ManifestEntry:
    """Size and checksum of a file. CRC-32 detects each burst of up to 32 damaged bits."""

    bytes: int
    crc32: str

    def __post_init__(self) -> None:
        for name, kind in (("bytes", int), ("crc32", str)):
            if type(value := getattr(self, name)) is not kind:
                raise TypeError(f"{name}={value!r} is not of type {kind.__name__}")


def write_manifest(directory: Path, *, sync: bool = True) -> str:
    """Write the manifest of a directory and return the checksum of all its files.

    Without `sync`, the manifest may be lost when the machine loses power.
    """
    names = [name for name in _files(directory) if name != MANIFEST_FILE]
    files = {name: _entry(directory / name) for name in names}
    entries = {name: asdict(entry) for name, entry in files.items()}
    manifest = {"files": entries, "crc32": _checksum(files)}
    text = dump_json(manifest, indent=1) + "\n"
    write_atomically(directory / MANIFEST_FILE, text, sync=sync)
    return _checksum(files)


def read_manifest(directory: Path) -> dict[str, ManifestEntry]:
    """Return the entries of a manifest by file name.

    Raises:
        ValueError: The manifest is missing or damaged.
    """
    try:
        manifest = parse_json(regular_file(directory / MANIFEST_FILE).read_bytes())
        files = {
            name: ManifestEntry(bytes=entry["bytes"], crc32=entry["crc32"])
            for name, entry in manifest["files"].items()
        }
        is_intact = manifest["crc32"] == _checksum(files)
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST_FILE} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{MANIFEST_FILE} is damaged, or of another version of rlsys "
            f"({type(error).__name__}: {error})"
        ) from None
    if not is_intact:
        raise ValueError(f"{MANIFEST_FILE} was edited: it has another checksum than it says")
    return files


def manifest_checksum(directory: Path) -> str:
    """Return the checksum that `write_manifest` returned.

    Raises:
        ValueError: The manifest is missing or damaged.
    """
    return _checksum(read_manifest(directory))


def faults_of(
    directory: Path, *, crc32: str | None = None, on_bytes: OnBytes = ignore_bytes
) -> list[str]:
    """Return what is wrong with the files of a directory, after reading all of them.

    Files that are not in the manifest, such as .DS_Store, are ignored. `crc32` is the checksum that
    `write_manifest` returned, if known. `on_bytes` is called after each file.
    """
    try:
        files = read_manifest(directory)
    except ValueError as error:
        return [str(error)]
    if crc32 not in (None, _checksum(files)):
        return [f"{MANIFEST_FILE} belongs to other files than were written here"]
    faults = []
    done, total = 0, sum(entry.bytes for entry in files.values())
    for name, entry in sorted(files.items()):
        path = directory / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif (size := path.stat().st_size) != entry.bytes:
            faults.append(f"{name} has {size:,} bytes instead of {entry.bytes:,}")
        elif _entry(path) != entry:
            faults.append(f"{name} has another checksum than when it was written")
        done += entry.bytes
        on_bytes(done, total)
    return faults


def check_entry(directory: Path, name: str) -> None:
    """Check one file of a directory.

    Raises:
        ValueError: The manifest does not describe the file as it is, or is damaged.
    """
    files = read_manifest(directory)
    if name not in files or files[name] != _entry(directory / name):
        raise ValueError(f"{name} has another checksum than when it was written")


def _checksum(files: Mapping[str, ManifestEntry]) -> str:
    lines = [f"{name} {entry.bytes} {entry.crc32}\n" for name, entry in sorted(files.items())]
    return f"{zlib.crc32(''.join(lines).encode(errors='surrogateescape')):08x}"


def _files(directory: Path) -> list[str]:
    """Return the paths of all files below, relative to the directory."""
    return sorted(
        str(Path(root, name).relative_to(directory))
        for root, _, names in os.walk(directory)
        for name in names
    )


def _entry(path: Path) -> ManifestEntry:
    num_bytes, crc32 = 0, 0
    part = memoryview(bytearray(READ_BYTES))
    with regular_file(path).open("rb", buffering=0) as file:
        while num_read := file.readinto(part):
            crc32 = zlib.crc32(part[:num_read], crc32)
            num_bytes += num_read
    return ManifestEntry(bytes=num_bytes, crc32=f"{crc32:08x}")
