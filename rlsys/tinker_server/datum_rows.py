"""From the data of a request to rows that the training engine takes.

A datum's tensors stand at its input tokens: position i reads token i and is asked for target i.
Where the targets are the input moved on by one, which is the rule, the row is an ordinary one of
the engine: its prompt is the first token, its completion are the targets. Where they are others, or
several at a position, they travel as tokens whose log-probabilities are asked for beside.

Shape legend: N input tokens, K targets of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlsys.tinker_server.api_errors import ApiError
from rlsys.tinker_server.api_losses import Kind
from rlsys.tinker_server.protobuf_messages import Array, WireDatum
from rlsys.types import Float32Array, TrainRow

# Names of columns: which datum of the request a token belongs to, and targets that are asked for.
DATUM, TARGETS = "datum", "targets"


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    vocab_size: int
    max_context: int  # tokens of a row


@dataclass(frozen=True, kw_only=True)
class DataRows:
    """Rows of one request, in the order of its data. `num_targets`: K of those that are asked for
    beside; 0 where the rows' own tokens are the targets. `shapes`: of each datum's targets.
    """

    rows: Sequence[TrainRow]
    num_targets: int
    shapes: Sequence[tuple[int, ...]]


def rows_of(data: Sequence[WireDatum], name: str, kind: Kind, limits: ModelLimits) -> DataRows:
    """Raises Refused, with the number of the datum, for what does not fit the loss or the model."""
    if not data:
        raise ApiError("forward_backward got no data; send at least one datum.")
    targets = [_targets(number, one, limits) for number, one in enumerate(data)]
    aligned = all(
        target.ndim == 1 and np.array_equal(target[:-1], one.token_ids[1:])
        for target, one in zip(targets, data, strict=True)
    )
    num_targets = 0
    if not aligned:
        num_targets = max(1 if target.ndim == 1 else target.shape[1] for target in targets)
    groups: dict[bytes, int] = {}
    rows = []
    for number, (one, target) in enumerate(zip(data, targets, strict=True)):
        if target.ndim == 2 and name != "cross_entropy":
            raise ApiError(
                f"target_tokens of datum {number} has shape {target.shape}; {name} takes one "
                "target at a position, of shape (N,)."
            )
        columns = _columns(number, one, target, kind)
        head = one.token_ids[: _num_untrained(columns, len(one.token_ids))].tobytes()
        rows.append(
            _row(number, one, target, columns, num_targets, groups.setdefault(head, len(groups)))
        )
    return DataRows(rows=rows, num_targets=num_targets, shapes=[one.shape for one in targets])


def _targets(number: int, datum: WireDatum, limits: ModelLimits) -> npt.NDArray[np.int64]:
    """[N] or [N, K]."""
    size = len(datum.token_ids)
    if not size:
        raise ApiError(f"datum {number} has no input token; send at least one.")
    if size > limits.max_context:
        raise ApiError(
            f"datum {number} has {size} tokens; the model's context ends at {limits.max_context}: "
            "cut it."
        )
    found = datum.tensors.get("target_tokens")
    if found is None:
        raise ApiError(
            f"datum {number} has {', '.join(sorted(datum.tensors)) or 'no tensor'}; every loss "
            "needs target_tokens."
        )
    if found.ndim not in (1, 2) or found.shape[0] != size or not found.size:
        raise ApiError(
            f"target_tokens of datum {number} has shape {found.shape} for {size} input tokens; "
            "give it (N,), or (N, K) for several targets."
        )
    targets = found.astype(np.int64)
    for what, tokens in (("a token", datum.token_ids), ("a target", targets)):
        wrong = tokens[(tokens < 0) | (tokens >= limits.vocab_size)]
        if wrong.size:
            raise ApiError(
                f"datum {number} has {what} {int(wrong.flat[0])}; the model's vocabulary has 0 to "
                f"{limits.vocab_size - 1}."
            )
    return targets


def _columns(
    number: int, datum: WireDatum, targets: Array, kind: Kind
) -> Mapping[str, Float32Array]:
    """What the loss needs, each of the shape of the targets."""
    columns = {}
    for tensor, column in kind.inputs.items():
        found = datum.tensors.get(tensor)
        if found is None:
            if tensor == "weights":  # all the same
                found = np.ones(targets.shape, np.float32)
            else:
                raise ApiError(
                    f"datum {number} lacks {tensor}, which the loss needs beside target_tokens."
                )
        if found.shape != targets.shape:
            raise ApiError(
                f"{tensor} of datum {number} has shape {found.shape}, target_tokens "
                f"{targets.shape}; give both the same."
            )
        values = found.astype(np.float32)
        if not np.isfinite(values).all():
            raise ApiError(
                f"{tensor} of datum {number} has a number that is not finite; nothing can be "
                "learnt from it."
            )
        columns[column] = values
    return columns


def _num_untrained(columns: Mapping[str, Float32Array], size: int) -> int:
    """Positions at the beginning of which nothing is learnt: a prompt, which others may share."""
    told = columns.get("weights", columns.get("advantages"))
    assert told is not None
    trained = np.flatnonzero(told.reshape(size, -1).any(axis=1))
    return int(trained[0]) + 1 if len(trained) else size


def _row(
    number: int,
    datum: WireDatum,
    targets: npt.NDArray[np.int64],
    columns: Mapping[str, Float32Array],
    num_targets: int,
    group: int,
) -> TrainRow:
    size = len(targets)
    own = targets if not num_targets else np.append(datum.token_ids[1:], 0)
    wide: dict[str, npt.NDArray[Any]] = {
        name: _padded(values.reshape(size, -1), max(num_targets, 1)).ravel()
        for name, values in columns.items()
    }
    if num_targets:
        asked = _padded(targets.reshape(size, -1), num_targets)
        # As columns name tokens: K ids, K numbers of theirs and one of all others, of which the
        # loss needs none.
        wide[TARGETS] = np.pad(asked, ((0, 0), (0, num_targets + 1))).astype(np.float32).ravel()
    return TrainRow(
        prompt_token_ids=datum.token_ids[:1].astype(np.int32),
        token_ids=own.astype(np.int32),
        policy_versions=np.zeros(size, np.int32),
        loss_mask=np.ones(size, np.bool_),
        columns={**wide, DATUM: np.full(size, number, np.float32)},
        group_id=group,
        group_size=1,
        group_num_tokens=size,
    )


def _padded(values: npt.NDArray[np.generic], width: int) -> npt.NDArray[np.generic]:
    return np.pad(values, ((0, 0), (0, width - values.shape[1])))
