"""Can the store fill up with rows for which everyone waits for ever?

Stages that wait for several rows at once leave some behind while they wait. This check, over all
subscriptions, refuses the combinations that could get stuck when the store is full.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlsys.config import require
from rlsys.dataflow.store.store_schema import Schema
from rlsys.dataflow.store.subscription import Subscription


def check_progress(
    schema: Schema, subscriptions: Mapping[str, Subscription], *, max_groups: int
) -> None:
    """max_groups: groups that fit together when every row is as long as can be, each in one node.

    Suppose no stage can take anything, and no group can be added. Then at least max_groups groups
    are live, and each has a row or is a group that some stage finds ready but cannot take: follow
    the stages upstream to the first that has not taken it. A stage that needs n candidates leaves
    at most n - 1 of them there, each from another group at worst. So no stop is possible while
    Σ (n - 1) < max_groups. A stage in issue order leaves more behind when the one it waits for is
    left behind upstream, so nobody upstream of it may leave any.

    Raises ValueError naming the stages.
    """
    unassigned = {name: s.least_candidates - 1 for name, s in subscriptions.items()}
    require(
        sum(unassigned.values()) < max_groups,
        "the stages wait for "
        + ", ".join(f"{name}: {s.at_least} rows" for name, s in subscriptions.items())
        + f" at once, and the store's bound admits only {max_groups} groups of the longest rows; "
        "they could wait for ever. Raise max_bytes, shorten the longest rollout, or let a stage "
        "take fewer rows.",
    )
    for name in (name for name, s in subscriptions.items() if s.selection.gapless):
        for upstream in sorted(schema.ancestors(name)):
            require(
                unassigned.get(upstream, 0) == 0,
                f"stage {name!r} takes rows in issue order, and {upstream!r} before it may leave "
                f"{unassigned.get(upstream)} of them behind while it waits for more: each could "
                f"wait for the other for ever. Let {upstream!r} take what is there.",
            )
