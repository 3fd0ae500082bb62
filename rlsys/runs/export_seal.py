"""Seal of an exported model: proof that a run's hf/ holds the whole model of its last step.

    hf/
        config.json, model.safetensors, ...   the model in the Hugging Face format
        manifest.json                         size and checksum of each of these files
        exported.json                         written last: the step, the run's id, the manifest's
                                              checksum, why the run stopped early, if it did,
                                              and its own checksum

Input: the directory, after the export. Output: its step, or a list of what is wrong with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlsys.common.append_only_file import regular_file
from rlsys.common.atomic_files import write_atomically, writing
from rlsys.common.manifest import OnBytes, faults_of, ignore_bytes, write_manifest
from rlsys.common.safe_json import dump_json, parse_json

EXPORTED_FILE = "exported.json"


@dataclass(frozen=True, kw_only=True)
class EarlyEnd:
    """End of a run before its configured number of steps.

    Attributes:
        reason: Why it stopped.
        num_steps: The configured number of steps.
        stop_when: The configured conditions.
    """

    reason: str
    num_steps: int
    stop_when: tuple[str, ...] = ()


def seal_export(
    directory: Path, step: int, *, run_id: str, early_end: EarlyEnd | None = None
) -> None:
    """Record that the directory holds the whole model after `step`, the last one of the run.

    Raises:
        OSError: The disk refuses. The message has the cause and the fix.
    """
    with writing(directory):
        seal = _seal(step, run_id, write_manifest(directory), early_end)
        write_atomically(directory / EXPORTED_FILE, dump_json(seal) + "\n")


def exported_step(directory: Path) -> int | None:
    """Return the step of the exported model, of any run, or None without a finished export."""
    seal = _read_seal(directory)
    return None if seal is None else seal["step"]


def early_end(directory: Path) -> EarlyEnd | None:
    """Return why the run of the exported model stopped early, or None if it did not."""
    seal = _read_seal(directory)
    return None if seal is None else _early_end(seal)


def is_exported(directory: Path, num_steps: int, stop_when: Sequence[str] = ()) -> bool:
    """Return whether the exported model is the last one of a run with this configuration.

    A run that stopped early is complete as long as neither its number of steps nor its conditions
    change. The files of the model are not read.
    """
    end = early_end(directory)
    if end is not None:
        return (end.num_steps, end.stop_when) == (num_steps, tuple(stop_when))
    return exported_step(directory) == num_steps


def export_faults(directory: Path, *, run_id: str, on_bytes: OnBytes = ignore_bytes) -> list[str]:
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
    return faults_of(directory, crc32=seal["manifest"], on_bytes=on_bytes)


def _read_seal(directory: Path) -> dict[str, Any] | None:
    try:
        seal = parse_json(regular_file(directory / EXPORTED_FILE).read_bytes())
        again = _seal(seal["step"], seal["run_id"], seal["manifest"], _early_end(seal))
        is_valid = type(seal["step"]) is int and seal == again
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seal if is_valid else None


def _early_end(seal: dict[str, Any]) -> EarlyEnd | None:
    end = seal.get("early_end")
    return end and EarlyEnd(**{**end, "stop_when": tuple(end["stop_when"])})


def _seal(step: int, run_id: str, manifest: str, end: EarlyEnd | None) -> dict[str, Any]:
    seal: dict[str, Any] = {"step": step, "run_id": run_id, "manifest": manifest}
    if end is not None:
        seal["early_end"] = {**asdict(end), "stop_when": list(end.stop_when)}
    return {**seal, "crc32": zlib.crc32(dump_json(seal).encode())}
