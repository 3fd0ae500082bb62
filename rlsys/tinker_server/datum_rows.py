"""Conversion of a request's data to rows of the training engine.

A datum's tensors are aligned with its input tokens: position i reads token i and predicts target i.
Usually the targets are the input shifted by one. Then the row is an ordinary one: its prompt is the
first token, its completion the targets. Otherwise, or with several targets per position, the
targets are sent as candidates, tokens whose log-probabilities are computed in addition.

A sparse tensor of a few bytes can describe a large array. Numbers of targets are therefore checked
before any tensor is expanded, and expanded data exists only while its command runs.

Shape legend: N input tokens, K targets of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlsys.tinker_server.api_errors import ApiError
from rlsys.tinker_server.api_losses import LossKind
from rlsys.tinker_server.protobuf_messages import Array, WireDatum, dense
from rlsys.types import Float32Array, TrainRow

# Names of columns: the datum of the request that a token belongs to, and candidate targets.
DATUM, TARGETS = "datum", "targets"

# Targets of a position, at most. Distributions that clients distill are cut at 20 to 100 tokens.
MAX_TARGETS = 1024
# Targets of all positions of a request with several targets per position. They need about 50 bytes
# each while the command runs.
MAX_REQUEST_TARGETS = 1 << 23


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """Limits of a model's input."""

    vocab_size: int
    max_context: int  # tokens of a row


@dataclass(frozen=True, kw_only=True)
class DataRows:
    """Rows of one request, in the order of its data.

    Attributes:
        rows: One per datum.
        num_targets: Candidates per position of each row: 0 if its own tokens are the targets, else
            a power of two. Candidates beyond the datum's K have weight 0.
        shapes: Shape of each datum's targets.
    """

    rows: Sequence[TrainRow]
    num_targets: Sequence[int]
    shapes: Sequence[tuple[int, ...]]


def rows_of(data: Sequence[WireDatum], name: str, kind: LossKind, limits: ModelLimits) -> DataRows:
    """Return the rows of a request.

    Raises:
        ApiError: The data does not fit the loss or the model.
    """
    if not data:
        raise ApiError("data", rule="there is none", fix="Send at least one datum.")
    for number, one in enumerate(data):
        _check_names(number, one, name, kind)
    _check_sizes(data, limits)
    targets = [_targets(number, one, limits) for number, one in enumerate(data)]
    aligned = all(
        target.ndim == 1 and np.array_equal(target[:-1], one.token_ids[1:])
        for target, one in zip(targets, data, strict=True)
    )
    num_targets = [0 if aligned else _num_candidates(target.shape) for target in targets]
    groups: dict[bytes, int] = {}
    rows = []
    for number, (one, target) in enumerate(zip(data, targets, strict=True)):
        if target.ndim == 2 and name != "cross_entropy":
            raise ApiError(
                f"data[{number}].target_tokens",
                rule=f"the shape is {target.shape}, and {name} takes one target per position",
                fix="Give targets of shape (N,).",
            )
        columns = _columns(number, one, target, kind)
        head = one.token_ids[: _num_untrained(columns, len(one.token_ids))].tobytes()
        rows.append(
            _row(
                number,
                one,
                target,
                columns,
                num_targets[number],
                groups.setdefault(head, len(groups)),
            )
        )
    return DataRows(rows=rows, num_targets=num_targets, shapes=[one.shape for one in targets])


def _num_candidates(shape: tuple[int, ...]) -> int:
    """Return K rounded up to a power of two, so that rows of similar K share passes."""
    return 1 if len(shape) == 1 else 1 << (shape[1] - 1).bit_length()


def turns(
    data: DataRows, *, max_tokens: int, max_targets: int
) -> Iterator[tuple[int, Sequence[TrainRow]]]:
    """Yield parts of the rows, each with its number of candidates per position.

    A part has at most `max_tokens` tokens and `max_targets` targets, or one row. Its rows have the
    same number of candidates. Otherwise they keep their order.
    """
    part: list[TrainRow] = []
    of_part = num_tokens = num_targets = 0
    for index in sorted(range(len(data.rows)), key=lambda index: data.num_targets[index]):
        row, of_row = data.rows[index], data.num_targets[index]
        tokens = len(row.prompt_token_ids) + len(row.token_ids)
        targets = len(row.token_ids) * of_row
        is_full = num_tokens + tokens > max_tokens or num_targets + targets > max_targets
        if part and (is_full or of_row != of_part):
            yield of_part, part
            part, num_tokens, num_targets = [], 0, 0
        part.append(row)
        of_part, num_tokens, num_targets = of_row, num_tokens + tokens, num_targets + targets
    yield of_part, part


def _check_names(number: int, datum: WireDatum, name: str, kind: LossKind) -> None:
    known = ("target_tokens", *kind.inputs)
    if unknown := sorted(datum.tensors.keys() - set(known)):
        raise ApiError(
            f"data[{number}].{unknown[0]}",
            rule=f"{name} has no such input",
            fix=f"Leave it out of loss_fn_inputs, which may have: {', '.join(known)}.",
        )


def _check_sizes(data: Sequence[WireDatum], limits: ModelLimits) -> None:
    """Check the shapes of the targets, before any of them is expanded."""
    num_targets = 0
    for number, one in enumerate(data):
        shape = _target_shape(number, one, limits)
        if len(shape) == 2:
            num_targets += shape[0] * shape[1]
    if num_targets > MAX_REQUEST_TARGETS:
        raise ApiError(
            "data",
            rule=f"its positions have {num_targets:,} targets together, and a request has at most "
            f"{MAX_REQUEST_TARGETS:,}",
            fix="Divide it into several requests, or send fewer targets per position.",
        )


def _target_shape(number: int, datum: WireDatum, limits: ModelLimits) -> tuple[int, ...]:
    """Return the shape of a datum's targets."""
    size = len(datum.token_ids)
    if not size:
        raise ApiError(
            f"data[{number}]", rule="it has no input token", fix="Send at least one token."
        )
    if size > limits.max_context:
        raise ApiError(
            f"data[{number}]",
            rule=f"it has {size} tokens, and the model's context has {limits.max_context}",
            fix="Shorten it.",
        )
    found = datum.tensors.get("target_tokens")
    if found is None:
        raise ApiError(
            f"data[{number}]",
            rule=f"it has {', '.join(sorted(datum.tensors)) or 'no tensor'}, and every loss needs "
            "target_tokens",
            fix="Add target_tokens.",
        )
    shape: tuple[int, ...] = found.shape
    if len(shape) not in (1, 2) or shape[0] != size or 0 in shape:
        raise ApiError(
            f"data[{number}].target_tokens",
            rule=f"the shape is {shape} for {size} input tokens",
            fix="Give the shape (N,), or (N, K) for several targets.",
        )
    most = min(MAX_TARGETS, limits.vocab_size)
    if len(shape) == 2 and shape[1] > most:
        raise ApiError(
            f"data[{number}].target_tokens",
            rule=f"a position has {shape[1]} targets, and at most {most} are allowed: {MAX_TARGETS}"
            ", or all tokens of a smaller vocabulary",
            fix="Send the most likely tokens only.",
        )
    return shape


def _targets(number: int, datum: WireDatum, limits: ModelLimits) -> npt.NDArray[np.int64]:
    """Return the targets of a datum, [N] or [N, K]."""
    found: Any = dense(datum.tensors["target_tokens"])
    if found.dtype.kind == "f":
        _check_whole(number, found)
    # Floating-point targets are compared before the conversion, which would wrap large ones.
    for what, tokens in (("tokens", datum.token_ids), ("target_tokens", found)):
        wrong = tokens[(tokens < 0) | (tokens >= limits.vocab_size)]
        if wrong.size:
            raise ApiError(
                f"data[{number}].{what}",
                wrong.flat[0].item(),
                rule=f"must be from 0 to {limits.vocab_size - 1}, the model's vocabulary",
                fix="Use the tokenizer of this model.",
            )
    targets: npt.NDArray[np.int64] = found.astype(np.int64)
    return targets


def _check_whole(number: int, targets: Array) -> None:
    is_whole = np.isfinite(targets) & (targets == np.floor(targets))
    if not is_whole.all():
        raise ApiError(
            f"data[{number}].target_tokens",
            float(targets[~is_whole].flat[0]),
            rule="must be whole numbers",
            fix="Send token ids, as int64.",
        )


def _columns(
    number: int, datum: WireDatum, targets: Array, kind: LossKind
) -> Mapping[str, Float32Array]:
    """Return the columns that the loss needs, each of the shape of the targets."""
    columns = {}
    for tensor, column in kind.inputs.items():
        found: Any = datum.tensors.get(tensor)
        if found is None:
            if tensor == "weights":  # equal weights
                found = np.ones(targets.shape, np.float32)
            else:
                raise ApiError(
                    f"data[{number}].{tensor}",
                    rule="it is missing, and the loss needs it",
                    fix="Add it to loss_fn_inputs.",
                )
        if found.shape != targets.shape:
            raise ApiError(
                f"data[{number}].{tensor}",
                rule=f"the shape is {found.shape}, and that of target_tokens is {targets.shape}",
                fix="Give both the same shape.",
            )
        values = dense(found).astype(np.float32)
        if not np.isfinite(values).all():
            raise ApiError(
                f"data[{number}].{tensor}",
                rule="all numbers must be finite",
                fix="Check how it was computed.",
            )
        if tensor in kind.masks and not np.isin(values, (0, 1)).all():
            raise ApiError(
                f"data[{number}].{tensor}",
                float(values[~np.isin(values, (0, 1))].flat[0]),
                rule="must be 0 or 1",
                fix="Use 1 for tokens that count, and 0 for others.",
            )
        columns[column] = values
    return columns


def _num_untrained(columns: Mapping[str, Float32Array], size: int) -> int:
    """Return the length of the untrained beginning: a prompt, which other rows may share."""
    weights = columns.get("weights", columns.get("advantages"))
    assert weights is not None
    trained = np.flatnonzero(weights.reshape(size, -1).any(axis=1))
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
        candidates = _padded(targets.reshape(size, -1), num_targets)
        # The format of candidates: K ids, K values for them and one for all other tokens. The loss
        # needs none of the values.
        wide[TARGETS] = (
            np.pad(candidates, ((0, 0), (0, num_targets + 1))).astype(np.float32).ravel()
        )
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
