"""Checks of writes to the store that do not depend on the states of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlsys.dataflow.store.blocks import BlockRef
from rlsys.dataflow.store.store_schema import StagePlan


class StoreError(ValueError):
    """A call that breaks a rule of the store and changed nothing."""


def check_columns(
    plan: StagePlan,
    rows: Sequence[int],
    block: BlockRef | None,
    places: Sequence[int],
    scalars: Mapping[str, Sequence[float]],
) -> None:
    """Raise StoreError unless a write has exactly the stage's columns, with a value per row."""
    tensors = block.layout.columns if block else ()
    if plan.tensor_writes != set(tensors) or plan.scalar_writes != set(scalars):
        raise StoreError(
            f"stage {plan.name!r}: rows {list(rows)} have the tensors {sorted(tensors)} and the "
            f"scalars {sorted(scalars)}. Write the tensors {sorted(plan.tensor_writes)} in a block "
            f"and the scalars {sorted(plan.scalar_writes)}, all in one call."
        )
    counts = {"places": len(places), **{name: len(values) for name, values in scalars.items()}}
    if any(count != len(rows) for count in counts.values()):
        raise StoreError(
            f"stage {plan.name!r}: {len(rows)} rows have {counts} values. Give one per row."
        )
    if block and not (len(set(places)) == len(places) and block.layout.has_places(places)):
        raise StoreError(
            f"stage {plan.name!r}: the block has {block.layout.num_rows} rows, and the places are "
            f"{list(places)}. Give each row its own place."
        )


def check_source(
    plan: StagePlan,
    rows: Sequence[int],
    versions: Sequence[tuple[int, int]] | None,
    num_tokens: Sequence[int] | None,
) -> None:
    """Raise StoreError unless a source, and no other stage, gives versions and lengths."""
    given = [len(values) for values in (versions, num_tokens) if values is not None]
    expected = [] if plan.needs else [len(rows), len(rows)]
    if given != expected:
        raise StoreError(
            f"stage {plan.name!r}: {len(rows)} rows have {given} versions and num_tokens. A stage "
            "that reads nothing gives one of each per row; any other stage gives none."
        )
