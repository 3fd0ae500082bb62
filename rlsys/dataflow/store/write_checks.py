"""What a write to the store must look like: the checks that need no row's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlsys.dataflow.store.blocks import BlockRef
from rlsys.dataflow.store.store_schema import StagePlan


class StoreError(ValueError):
    """A call that breaks a rule of the store; nothing was changed by it."""


def check_columns(
    plan: StagePlan,
    rows: Sequence[int],
    block: BlockRef | None,
    places: Sequence[int],
    scalars: Mapping[str, Sequence[float]],
) -> None:
    """All columns of the stage, none other, and one value per row in each."""
    tensors = block.layout.columns if block else ()
    if plan.tensor_writes != set(tensors) or plan.scalar_writes != set(scalars):
        raise StoreError(
            f"stage {plan.name!r} writes rows {list(rows)} with the tensors {sorted(tensors)} and "
            f"the scalars {sorted(scalars)}; it must write the tensors "
            f"{sorted(plan.tensor_writes)} in a block and the scalars "
            f"{sorted(plan.scalar_writes)}, all in one call."
        )
    counts = {"places": len(places), **{name: len(values) for name, values in scalars.items()}}
    if any(count != len(rows) for count in counts.values()):
        raise StoreError(
            f"stage {plan.name!r} writes {len(rows)} rows with {counts} values; give one per row."
        )
    if block and not (len(set(places)) == len(places) and block.layout.has_places(places)):
        raise StoreError(
            f"stage {plan.name!r} names the places {list(places)} of a block with "
            f"{block.layout.num_rows} rows; each row needs a place of its own in it."
        )


def check_source(
    plan: StagePlan,
    rows: Sequence[int],
    versions: Sequence[tuple[int, int]] | None,
    num_tokens: Sequence[int] | None,
) -> None:
    """A source says how old and how long its rows are; no other stage does."""
    given = [len(values) for values in (versions, num_tokens) if values is not None]
    expected = [] if plan.needs else [len(rows), len(rows)]
    if given != expected:
        raise StoreError(
            f"stage {plan.name!r} writes {len(rows)} rows with {given} versions and num_tokens; a "
            "stage that reads nothing gives one of each per row, any other stage gives none."
        )
