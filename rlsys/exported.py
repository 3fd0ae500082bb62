"""Whether a run's hf/ holds the whole model of its last step.

    hf/
        config.json, model.safetensors, ...   as Hugging Face loads it
        manifest.json                         size and checksum of each of these files
        exported.json                         written last: of which step it is, and its checksum

In: the directory, when the export is done. Out: its step, or what is wrong with it.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from rlsys.disk import write_whole, writing
from rlsys.json_text import parse_json
from rlsys.manifest import faults_of, write_manifest

EXPORTED_FILE = "exported.json"


def seal_export(directory: Path, step: int) -> None:
    """Say that the model after `step` is there, whole. Raises OSError with the cause and the
    fix."""
    with writing(directory):
        write_manifest(directory)
        write_whole(directory / EXPORTED_FILE, json.dumps(_seal(step)) + "\n")


def exported_step(directory: Path) -> int | None:
    """The step whose model is there; None where nothing was ever exported, or not to its end."""
    try:
        seal = parse_json((directory / EXPORTED_FILE).read_bytes())
        return seal["step"] if type(seal["step"]) is int and seal == _seal(seal["step"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def export_faults(directory: Path) -> list[str]:
    """What is wrong with its files, by name. Reads them all: a second per GB or two."""
    if exported_step(directory) is None:
        return [f"{EXPORTED_FILE} is missing or damaged"]
    return faults_of(directory)


def _seal(step: int) -> dict[str, int]:
    return {"step": step, "crc32": zlib.crc32(str(step).encode())}
