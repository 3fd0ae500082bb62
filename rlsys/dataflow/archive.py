"""What a checkpoint keeps of rollouts whose groups have not ended, as one file.

    write_rollouts(path, finished, running) ──► rollouts.npz ──► read_rollouts(path)

Rollouts that had ended are kept whole, those that were running with the tokens that they had. The
arrays of all rollouts lie one after another, with their lengths beside them; so do columns that
only some runs have (experts, branches, rewards of turns). P prompt tokens, T completion tokens of
one rollout.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlsys.dataflow.blocks import Array
from rlsys.types import Float32Array, Int32Array

COLUMNS = {
    "prompt_token_ids": np.int32,
    "token_ids": np.int32,
    "sampler_logprobs": np.float32,
    "policy_versions": np.int32,
}
LENGTHS = "_lengths"


@dataclass(frozen=True, kw_only=True)
class SavedRollout:
    request_id: str
    finish_reason: str  # "": it was running
    prompt_token_ids: Int32Array  # [P]; empty for one that was running
    token_ids: Int32Array  # [T]
    sampler_logprobs: Float32Array  # [T]
    policy_versions: Int32Array  # [T]
    beside: Mapping[str, Array] = field(default_factory=dict)  # flat, by column

    @classmethod
    def of(cls, request_id: str, finish_reason: str, columns: Mapping[str, Array]) -> SavedRollout:
        return cls(
            request_id=request_id,
            finish_reason=finish_reason,
            **{name: columns[name] for name in COLUMNS},
            beside={name: array for name, array in columns.items() if name not in COLUMNS},
        )

    @property
    def columns(self) -> dict[str, Array]:
        return {name: getattr(self, name) for name in COLUMNS} | dict(self.beside)


def write_rollouts(path: Path, rollouts: Sequence[SavedRollout]) -> None:
    """Raises OSError where the file cannot be written."""
    arrays: dict[str, np.ndarray] = {
        "request_ids": np.array([r.request_id for r in rollouts], np.str_),
        "finish_reasons": np.array([r.finish_reason for r in rollouts], np.str_),
    }
    for name, dtype in COLUMNS.items():
        each = [getattr(rollout, name) for rollout in rollouts]
        arrays[name] = np.concatenate([np.zeros(0, dtype), *each])
        arrays[f"{name}{LENGTHS}"] = np.array([len(values) for values in each], np.int64)
    names = {name for rollout in rollouts for name in rollout.beside}
    assert all(names == set(rollout.beside) for rollout in rollouts), (
        "a run has the same columns of all rollouts"
    )
    for name in sorted(names):
        beside = [rollout.beside[name] for rollout in rollouts]
        arrays[name] = np.concatenate(beside)
        arrays[f"{name}{LENGTHS}"] = np.array([len(values) for values in beside], np.int64)
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_rollouts(path: Path) -> list[SavedRollout]:
    """Raises ValueError for a file that is damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            found = (name.removesuffix(LENGTHS) for name in file if name.endswith(LENGTHS))
            names = (*COLUMNS, *(name for name in found if name not in COLUMNS))
            columns = {
                name: np.split(file[name], np.cumsum(file[f"{name}{LENGTHS}"])[:-1])
                for name in names
            }
            return [
                SavedRollout.of(
                    str(request_id), str(reason), {name: columns[name][i] for name in names}
                )
                for i, (request_id, reason) in enumerate(
                    zip(file["request_ids"], file["finish_reasons"], strict=True)
                )
            ]
    except (KeyError, IndexError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} is damaged ({error}); delete its checkpoint to go on from an older one."
        ) from error
