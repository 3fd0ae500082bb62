"""Whether a run's hf/ holds the whole model of its last step.

    hf/
        config.json, model.safetensors, ...   as Hugging Face loads it
        manifest.json                         size and checksum of each of these files
        exported.json                         written last: of which step of which run it is (its
                                              run_id), the manifest's checksum, and its own

In: the directory, when the export is done. Out: its step, or what is wrong with it.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from rlsys.common.append_only_file import regular_file
from rlsys.common.atomic_files import write_atomically, writing
from rlsys.common.manifest import faults_of, write_manifest
from rlsys.common.safe_json import dump_json, parse_json

EXPORTED_FILE = "exported.json"


def seal_export(directory: Path, step: int, *, run_id: str) -> None:
    """Say that the model after `step` of the run is there, whole. Raises OSError with the cause and
    the fix.
    """
    with writing(directory):
        seal = _seal(step, run_id, write_manifest(directory))
        write_atomically(directory / EXPORTED_FILE, dump_json(seal) + "\n")


def exported_step(directory: Path) -> int | None:
    """The step whose model is there, of whichever run; None where nothing was ever exported, or not
    to its end.
    """
    seal = _read_seal(directory)
    return None if seal is None else seal["step"]


def export_faults(directory: Path, *, run_id: str) -> list[str]:
    """What is wrong with its files, by name, as those of the run `run_id`. Reads them all: a second
    per GB or two.
    """
    seal = _read_seal(directory)
    if seal is None:
        return [f"{EXPORTED_FILE} is missing or damaged"]
    if seal["run_id"] != run_id:
        return [
            f"{EXPORTED_FILE} has run_id={dump_json(seal['run_id'])} where this run's is "
            f"{dump_json(run_id)}: it is another run's"
        ]
    return faults_of(directory, crc32=seal["manifest"])


def _read_seal(directory: Path) -> dict[str, Any] | None:
    try:
        seal = parse_json(regular_file(directory / EXPORTED_FILE).read_bytes())
        again = _seal(seal["step"], seal["run_id"], seal["manifest"])
        is_one = type(seal["step"]) is int and seal == again
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seal if is_one else None


def _seal(step: int, run_id: str, manifest: str) -> dict[str, Any]:
    told = {"step": step, "run_id": run_id, "manifest": manifest}
    return {**told, "crc32": zlib.crc32(dump_json(told).encode())}
