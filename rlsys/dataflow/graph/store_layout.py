"""The store of a graph: its columns, its readers and the size of a row.

All stages of a step are one reader, called "train". Columns that they write are never in the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rlsys.dataflow.graph.stages import (
    BRANCHES_COLUMN,
    EXPERTS_COLUMN,
    IMPLICIT_COLUMNS,
    PADDING_BYTES,
    PROMPT_COLUMN,
    Column,
    SourceStage,
    Stage,
    TrainStage,
    names_of,
)
from rlsys.dataflow.store.store_schema import StageSpec
from rlsys.dataflow.store.stream_store import StreamStore
from rlsys.dataflow.store.tensor_memory import FreedRows
from rlsys.types import MAX_BRANCHES

if TYPE_CHECKING:
    from rlsys.dataflow.graph.run_graph import RunGraph
    from rlsys.dataflow.graph.stage_graph import StageGraph


def row_bytes(flow: StageGraph, *, max_prompt_tokens: int, max_tokens: int) -> int:
    """Return the maximum number of bytes that the store holds of one row."""
    late = flow.step_columns
    lengths = {
        PROMPT_COLUMN: max_prompt_tokens,
        EXPERTS_COLUMN: max_prompt_tokens + max_tokens,
        BRANCHES_COLUMN: MAX_BRANCHES,
    }
    num_bytes = 0
    for stage in flow.stages:
        columns = [c for c in stage.writes if c.per == "token" and c.name not in late]
        for column in columns:
            length = lengths.get(column.name, max_tokens)
            num_bytes += length * column.width * column.value_bytes
        if columns:
            num_bytes += PADDING_BYTES
    return num_bytes


def open_store(
    flow: RunGraph, *, max_bytes: int, max_row_bytes: int, on_free: Callable[[FreedRows], None]
) -> StreamStore:
    """Create a store for a graph. The other arguments are those of StreamStore.

    The tokens of a row stay in the store until its step is done, even if no stage reads them.
    """
    late = flow.step_columns
    in_step = (*flow.step_stages, *flow.all(TrainStage))
    in_store = [stage for stage in flow.stages if stage not in in_step]
    columns = {c for stage in in_store for c in stage.writes if c.name not in late}
    source = flow.source
    specs = [
        StageSpec(name=stage.name, reads=_waits_for(stage), writes=names_of(stage.writes))
        for stage in in_store
    ]
    step = dict.fromkeys((*source.writes, *flow.step_reads))
    return StreamStore(
        tensors=[column.name for column in columns if column.per == "token"],
        scalars=[column.name for column in columns if column.per == "row"],
        stages=[*specs, StageSpec(name="train", reads=names_of(tuple(step)))],
        group_size=source.group_size,
        max_bytes=max_bytes,
        max_row_bytes=max_row_bytes,
        on_free=on_free,
    )


def _waits_for(stage: Stage) -> tuple[str, ...]:
    """Return the stored columns that a stage needs.

    A stage that reads only implicit columns waits for the completions.
    """
    if isinstance(stage, SourceStage):
        return ()
    return _stored(stage.reads) or ("token_ids",)


def _stored(columns: Iterable[Column]) -> tuple[str, ...]:
    return tuple(column.name for column in columns if column not in IMPLICIT_COLUMNS)
