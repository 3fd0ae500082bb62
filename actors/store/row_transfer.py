"""Rows as a worker uses them: read from the store, computed on, and written back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlsys.controller.worker_protocols import RolloutMetadata, RolloutText, StepRowsRef, Written
from rlsys.dataflow.graph.stages import (
    BRANCHES_COLUMN,
    EXPERTS_COLUMN,
    SEATS_COLUMN,
    VERSIONS_COLUMN,
)
from rlsys.text.tokenizer_boundary import TokenizerBoundary
from rlsys.types import (
    BRANCH_FIELDS,
    INJECTED,
    Float32Array,
    Generation,
    Rollout,
    TrainRow,
)

from .store_actor import StoreClient

if TYPE_CHECKING:
    from rlsys.dataflow.graph.stages import PerBatchStage

# Columns that are fields of a TrainRow; all others are in its `columns`.
FIELDS = ("prompt_token_ids", "token_ids", VERSIONS_COLUMN)
OPTIONAL_FIELDS = (EXPERTS_COLUMN, BRANCHES_COLUMN)

# Columns that functions over texts need.
TEXT_COLUMNS = ("prompt_token_ids", "token_ids")


def read_rows(rows: StepRowsRef, store: StoreClient) -> list[TrainRow]:
    """Return rows with all their columns; a value per row is repeated for each token.

    Raises:
        RowsLost: The shard with their bytes has died.
    """
    if not len(rows):
        return []
    arrays = store.get_batch(rows.cells)
    return [_row(rows, arrays, i) for i in range(len(rows))]


def _row(rows: StepRowsRef, arrays: Mapping[str, Sequence[Any]], i: int) -> TrainRow:
    num_tokens = len(arrays["token_ids"][i])
    loss_mask = arrays[VERSIONS_COLUMN][i] != INJECTED
    if rows.seats is not None:
        loss_mask &= np.isin(arrays[SEATS_COLUMN][i], rows.seats)
    columns: dict[str, Float32Array] = {
        name: of_column[i]
        for name, of_column in arrays.items()
        if name not in (*FIELDS, *OPTIONAL_FIELDS)
    }
    for name, values in rows.scalars.items():
        columns[name] = np.full(num_tokens, values[i], np.float32)
    optional = {name: arrays[name][i] for name in OPTIONAL_FIELDS if name in arrays}
    if len(optional.get(BRANCHES_COLUMN, ())) <= BRANCH_FIELDS:
        optional.pop(BRANCHES_COLUMN, None)  # a single branch is a linear rollout
    return TrainRow(
        **{name: arrays[name][i] for name in FIELDS},
        **optional,
        loss_mask=loss_mask,
        columns=columns,
        group_id=rows.group_ids[i],
        group_size=rows.group_sizes[i],
        group_num_tokens=rows.group_num_tokens[i],
        recorded_as=rows.recorded_as[i] if rows.recorded_as else None,
    )


def as_rollouts(
    origins: Sequence[RolloutMetadata],
    arrays: Mapping[str, Sequence[Any]],
    boundary: TokenizerBoundary,
    stop: Sequence[str],
) -> list[Rollout]:
    """Return rollouts as reward functions see them.

    Args:
        origins: Metadata of each rollout.
        arrays: The TEXT_COLUMNS of each rollout.
        boundary: Decoder with the policy's tokenizer.
        stop: Strings that end a completion and remain part of it.
    """
    return [
        Rollout(
            group_id=origin.group_id,
            index=origin.index,
            prompt_text=origin.prompt_text,
            completion_text=boundary.completion_text(
                token_ids.tolist(), origin.finish_reason, stop
            ),
            prompt_token_ids=prompt_ids,
            token_ids=token_ids,
            finish_reason=origin.finish_reason,
            metadata=origin.metadata,
        )
        for origin, prompt_ids, token_ids in zip(
            origins, arrays["prompt_token_ids"], arrays["token_ids"], strict=True
        )
    ]


def recorded(
    generation: Generation, boundary: TokenizerBoundary, stop: Sequence[str]
) -> RolloutText:
    """Return the text of a completion as a reward function reads it, without its prompt."""
    token_ids = generation.token_ids.tolist()
    return RolloutText(
        prompt="",
        completion=boundary.completion_text(token_ids, generation.finish_reason, stop),
        token_ids=token_ids,
        policy_versions=generation.policy_versions.tolist(),
    )


def compute_columns(stage: PerBatchStage, rows: StepRowsRef, store: StoreClient) -> Written:
    """Compute a stage's function over rows and write its columns.

    The function gets a mask of sampled tokens instead of their versions.

    Raises:
        RowsLost: The shard with their bytes has died. Errors of run_batch_function are raised too.
    """
    import torch

    from rlsys.algorithms.batch_functions import run_batch_function

    arrays = store.get_batch(rows.cells)
    loss_masks = [torch.from_numpy(versions != INJECTED) for versions in arrays[VERSIONS_COLUMN]]
    per_token = stage.writes[0].per == "token"
    computed = run_batch_function(
        stage.function,
        [
            torch.from_numpy(np.concatenate(arrays[column.name]))
            if column.name in arrays
            else torch.tensor(rows.scalars[column.name], dtype=torch.float32)
            for column in stage.reads
        ],
        stage=stage.name,
        group_ids=rows.group_ids,
        loss_masks=loss_masks,
        writes=[column.name for column in stage.writes],
        per_token=per_token,
    )
    if not per_token:
        return Written(scalars={name: values.tolist() for name, values in computed.items()})
    lengths = [len(mask) for mask in loss_masks]
    columns = {
        name: [part.numpy() for part in values.float().split(lengths)]
        for name, values in computed.items()
    }
    return Written(block=store.put(columns))


def write_column(
    name: str, values: Sequence[Float32Array], store: StoreClient, *, per_token: bool
) -> Written:
    """Write what a model computed of rows: an array each, or a single number per row."""
    if not values:
        return Written()
    if per_token:
        return Written(block=store.put({name: list(values)}))
    return Written(scalars={name: [float(value[0]) for value in values]})
