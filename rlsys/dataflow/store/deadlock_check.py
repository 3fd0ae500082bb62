"""Check that the store cannot fill up with rows while all stages wait.

A stage that takes several rows at once leaves rows in the store while it waits for more. This check
rejects combinations of subscriptions that could deadlock when the store is full.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlsys.dataflow.store.store_schema import Schema
from rlsys.dataflow.store.subscription import Subscription
from rlsys.errors import require


def check_progress(
    schema: Schema, subscriptions: Mapping[str, Subscription], *, max_groups: int
) -> None:
    """Raise InvalidValue for subscriptions that could deadlock.

    `max_groups` is the number of groups that fit together if all rows have the maximum length.

    Proof: suppose that no stage can take anything and no group can be added. Then at least
    max_groups groups are live. Each has a row, or is a group, that is ready for some stage which
    cannot take it: follow the stages upstream to the first that has not taken it. A stage that
    needs n candidates leaves at most n - 1 of them, each from another group in the worst case. So
    there is no deadlock while Σ (n - 1) < max_groups. A stage in issue order leaves more if the
    row that it waits for is left upstream, so no stage upstream of it may leave any.
    """
    num_left = {name: s.least_candidates - 1 for name, s in subscriptions.items()}
    require(
        sum(num_left.values()) < max_groups,
        "rows taken at once",
        {name: s.at_least for name, s in subscriptions.items()},
        rule=f"the store holds only {max_groups} groups of the longest rows, so the stages could "
        "wait for ever",
        fix="Raise max_bytes, shorten the longest rollout, or let a stage take fewer rows.",
    )
    for name in (name for name, s in subscriptions.items() if s.selection.gapless):
        for upstream in sorted(schema.ancestors(name)):
            require(
                num_left.get(upstream, 0) == 0,
                f"stage {upstream!r}: at_least",
                subscriptions[upstream].at_least if upstream in subscriptions else 1,
                rule=f"stage {name!r} takes rows in issue order and could wait for ever for a row "
                "that this stage leaves",
                fix=f"Let {upstream!r} take single rows or groups.",
            )
