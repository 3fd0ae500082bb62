"""The file of a checkpoint with the rollouts of unfinished groups.

    write_rollouts(path, rollouts) ──► rollouts.npz ──► read_rollouts(path)

Finished rollouts are kept completely, running ones with their tokens so far. The arrays of all
rollouts are concatenated, and their lengths are stored too. P prompt tokens, T completion tokens of
one rollout.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlsys.dataflow.graph.stages import (
    BRANCHES_COLUMN,
    EXPERTS_COLUMN,
    SEATS_COLUMN,
    TURN_REWARDS_COLUMN,
    TURNS_COLUMN,
)
from rlsys.errors import InvalidValue
from rlsys.types import Float32Array, Int32Array

COLUMNS = {
    "prompt_token_ids": np.int32,
    "token_ids": np.int32,
    "sampler_logprobs": np.float32,
    "policy_versions": np.int32,
}

# Other columns, flat. Either all rows of a run have one or none.
EXTRA_COLUMNS = (EXPERTS_COLUMN, TURN_REWARDS_COLUMN, TURNS_COLUMN, SEATS_COLUMN, BRANCHES_COLUMN)


@dataclass(frozen=True, kw_only=True)
class SavedRollout:
    """A rollout in a checkpoint."""

    request_id: str
    finish_reason: str  # "" if it was running
    prompt_token_ids: Int32Array  # [P]; empty if it was running
    token_ids: Int32Array  # [T]
    sampler_logprobs: Float32Array  # [T]
    policy_versions: Int32Array  # [T]
    extra: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)  # by names of EXTRA_COLUMNS
    result: str = ""  # the encoded reward of an episode; "" for none


def write_rollouts(path: Path, rollouts: Sequence[SavedRollout]) -> None:
    """Write rollouts to a file. Raises OSError if that fails."""
    arrays: dict[str, np.ndarray] = {
        "request_ids": np.array([r.request_id for r in rollouts], np.str_),
        "finish_reasons": np.array([r.finish_reason for r in rollouts], np.str_),
        "told": np.array([r.result for r in rollouts], np.str_),
    }
    for name, dtype in COLUMNS.items():
        each = [getattr(rollout, name) for rollout in rollouts]
        arrays[name] = np.concatenate([np.zeros(0, dtype), *each])
        arrays[f"{name}_lengths"] = np.array([len(values) for values in each], np.int64)
    for name in EXTRA_COLUMNS:
        has = [r for r in rollouts if name in r.extra]
        if not has:
            continue
        # Running rollouts do not have all columns.
        values = [r.extra.get(name, has[0].extra[name][:0]) for r in rollouts]
        arrays[name] = np.concatenate(values)
        arrays[f"{name}_lengths"] = np.array([len(one) for one in values])
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_rollouts(path: Path) -> list[SavedRollout]:
    """Return the rollouts of a file.

    Raises:
        InvalidValue: The file is damaged.
    """
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            extra = [name for name in EXTRA_COLUMNS if name in file]
            columns = {
                name: np.split(file[name], np.cumsum(file[f"{name}_lengths"])[:-1])
                for name in (*COLUMNS, *extra)
            }
            results = file["told"] if "told" in file else [""] * len(file["request_ids"])
            return [
                SavedRollout(
                    request_id=str(request_id),
                    finish_reason=str(reason),
                    **{name: columns[name][i] for name in COLUMNS},
                    extra={name: columns[name][i] for name in extra},
                    result=str(results[i]),
                )
                for i, (request_id, reason) in enumerate(
                    zip(file["request_ids"], file["finish_reasons"], strict=True)
                )
            ]
    except (KeyError, IndexError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidValue(
            str(path),
            rule=f"the file is damaged ({error})",
            fix="Delete its checkpoint to continue from an older one.",
        ) from error
