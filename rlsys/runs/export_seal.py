"""Seal of an exported model: proof that a run's hf/ holds the whole model of its last step.

    hf/
        config.json, model.safetensors, ...   the model in the Hugging Face format
        manifest.json                         size and checksum of each of these files
        exported.json                         written last: the step, the run's id, the manifest's
                                              checksum, and its own

Input: the directory, after the export. Output: its step, or a list of what is wrong with it.
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
    """Record that the directory holds the whole model after `step` of the run.

    Raises:
        OSError: The disk refuses. The message has the cause and the fix.
    """
    with writing(directory):
        seal = _seal(step, run_id, write_manifest(directory))
        write_atomically(directory / EXPORTED_FILE, dump_json(seal) + "\n")


def exported_step(directory: Path) -> int | None:
    """Return the step of the exported model, of any run, or None without a finished export."""
    seal = _read_seal(directory)
    return None if seal is None else seal["step"]


def export_faults(directory: Path, *, run_id: str) -> list[str]:
    """Return what is wrong with the exported files of the run `run_id`, by name.

    All files are read, which takes a second per 1 to 2 GB.
    """
    seal = _read_seal(directory)
    if seal is None:
        return [f"{EXPORTED_FILE} is missing or damaged"]
    if seal["run_id"] != run_id:
        return [
            f"{EXPORTED_FILE} has run_id={dump_json(seal['run_id'])}, and this run has "
            f"{dump_json(run_id)}, so it belongs to another run"
        ]
    return faults_of(directory, crc32=seal["manifest"])


def _read_seal(directory: Path) -> dict[str, Any] | None:
    try:
        seal = parse_json(regular_file(directory / EXPORTED_FILE).read_bytes())
        again = _seal(seal["step"], seal["run_id"], seal["manifest"])
        is_valid = type(seal["step"]) is int and seal == again
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seal if is_valid else None


def _seal(step: int, run_id: str, manifest: str) -> dict[str, Any]:
    seal = {"step": step, "run_id": run_id, "manifest": manifest}
    return {**seal, "crc32": zlib.crc32(dump_json(seal).encode())}
