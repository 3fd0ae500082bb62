"""The controller with small nodes: rollouts go where they have room, over deaths of any kind."""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config import AsyncConfig, ClusterConfig
from rlsys.controller.controller import StallError
from rlsys.controller.simulation.simulated_replicas import SimulatedFleet, SimulatedReplica
from rlsys.controller.simulation.simulated_workers import (
    SimulatedScorer,
    SimulatedTrainer,
    exponential,
)
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.controller.state import OpenWork
from rlsys.controller.worker_protocols import FinishedRollout
from rlsys.dataflow.scheduling.ledger import Ledger
from rlsys.dataflow.store.blocks import BlockRef, layout_of
from rlsys.dataflow.store.stream_store import StreamStore
from rlsys.types import FinishReason
from tests.controller.test_controller import World, world
from tests.errors import error_about
from tests.tiers import examples

ROW_BYTES = 52  # of a simulated rollout: 4 tokens of a prompt, 3 of 12 bytes
LAYOUT = layout_of(
    {
        name: [np.zeros(4 if name == "prompt_token_ids" else 3, np.int32)]
        for name in ("prompt_token_ids", "token_ids", "sampler_logprobs", "policy_versions")
    }
)


@settings(max_examples=examples(400), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_staleness=st.integers(0, 3),
    replicas_on=st.lists(st.integers(1, 2), min_size=1, max_size=3),
    groups_on_each=st.integers(1, 3),
    spare_rows=st.integers(0, 2),
    row_bytes=st.sampled_from([ROW_BYTES, 2 * ROW_BYTES]),
    fewer=st.integers(0, 2),
    order=st.sampled_from(["issued", "complete"]),
    over_issue=st.integers(0, 3),
    deaths=st.lists(
        st.tuples(
            st.floats(0.0, 3.0),
            st.sampled_from(["replica", "replica", "node", "learner", "older learner", "shard"]),
            st.integers(0, 5),
        ),
        max_size=6,
    ),
    start_s=st.sampled_from([0.1, 10.0, 100.0]),
    for_good=st.booleans(),
    row_s=st.sampled_from([0.0, 0.1]),
    score_s=st.sampled_from([0.0, 0.2, 3.0]),
)
def test_nodes_that_hold_little_more_than_a_step_are_enough_whatever_dies(
    seed: int,
    max_staleness: int,
    replicas_on: list[int],
    groups_on_each: int,
    spare_rows: int,
    row_bytes: int,
    fewer: int,
    order: Literal["issued", "complete"],
    over_issue: int,
    deaths: list[tuple[float, str, int]],
    start_s: float,
    for_good: bool,
    row_s: float,
    score_s: float,
) -> None:
    """Each node holds a few groups, and all together hold about a step.

    Rollouts lose their replicas while others fill the remaining nodes. All rollouts get room, no
    node exceeds its limit, and rollouts are on the node of their row. With `for_good`, the first
    node's replicas are not restarted, and the other nodes hold a step.

    This fails without `split` in the router, and in a few examples without `_make_room` in
    rollout_placement.py.
    """
    nodes = [f"node-{i}" for i, n in enumerate(replicas_on) for _ in range(n)]  # by number
    dead: Counter[str] = Counter()

    def prepare(replica: SimulatedReplica) -> None:
        replica.shard = f"{replica.node} {dead[replica.node]}"

    async def chaos(w: World) -> None:
        check_places(w.store)
        for delay_s, kind, which in deaths:
            await asyncio.sleep(delay_s)
            alive = [r for r in [*w.replicas, *w.fleet.started_workers] if not r.dead]
            if kind.endswith("learner"):
                w.trainer_proxy.loses = int(kind == "older learner")
                w.trainer_proxy.die()
            elif alive:
                victim = alive[which % len(alive)]
                on_node = [r for r in alive if r.node == victim.node]
                if kind == "replica":
                    victim.die()
                    continue
                dead[victim.node] += 1
                lost = victim.shard
                for replica in on_node:
                    prepare(replica)
                    if kind == "node":
                        replica.die()
                if kind == "node":  # another comes
                    nodes[:] = [f"{h}'" if h == victim.node else h for h in nodes]
                w.controller.shard_lost(lost)

    class Fleet(SimulatedFleet):
        async def start_worker(self, number: int) -> SimulatedReplica:
            if for_good and len(replicas_on) > 1 and number < replicas_on[0]:
                await asyncio.Event().wait()
            return await SimulatedFleet.start_worker(self, number)

    size, num_lasting = 3, len(replicas_on) - (for_good and len(replicas_on) > 1)
    w = world(
        seed,
        num_replicas=len(nodes),
        group_size=size,
        prompts_per_step=max(1, groups_on_each * num_lasting - fewer),
        asynchrony=AsyncConfig(
            max_staleness=max_staleness,
            order=order,
            over_issue=over_issue if order == "complete" else 0,
        ),
    )
    w.max_row_bytes = row_bytes
    w.store_bytes = (groups_on_each * size + spare_rows) * row_bytes
    rng = random.Random(seed)
    w.fleet = Fleet(
        latency_s=exponential(rng, 1.0),
        start_s=start_s,
        node=lambda number: nodes[number],
        prepare=prepare,
    )
    for replica, node in zip(w.replicas, nodes, strict=True):
        replica.node = node
        prepare(replica)
    w.scorer = SimulatedScorer(latency_s=exponential(rng, score_s) if score_s else lambda: 0.0)
    w.trainer_proxy = SimulatedTrainer(row_s=row_s)
    w.ledger = Ledger(lambda event: None, groups_per_step=w.config.prompts_per_step)
    w.chaos = chaos
    run_in_virtual_time(w.run())
    assert w.ledger.num_trained == w.config.num_steps * w.config.prompts_per_step
    assert max(w.observer.staleness) <= max_staleness
    assert not w.ledger.open_groups


def two_nodes(*, groups_on_each: int, seconds: Sequence[float], **changes: Any) -> World:
    """Return a run with one replica on each of two nodes with room for `groups_on_each` groups.

    A rollout takes `seconds[i]` on node i. Replicas that die are restarted after 1000 s.
    """
    w = world(num_replicas=2, **changes)
    for i, replica in enumerate(w.replicas):
        replica.node, replica.latency_s = f"node-{i}", functools.partial(float, seconds[i])
    w.max_row_bytes = ROW_BYTES
    w.store_bytes = groups_on_each * w.config.group_size * ROW_BYTES
    w.fleet = SimulatedFleet(start_s=1000.0)
    w.ledger = Ledger(lambda event: None, groups_per_step=w.config.prompts_per_step)
    return w


def test_groups_go_where_their_rollouts_have_room() -> None:
    """6 groups are in flight, and 2 fit on each node."""
    w = two_nodes(groups_on_each=2, seconds=[1.0, 1.0], num_steps=3, prompts_per_step=3)
    run_in_virtual_time(w.run())
    ids = [[int(name.split(".")[0]) for name in r.submitted[:4:2]] for r in w.replicas]
    assert ids == [[0, 2], [1, 3]]
    assert [len(replica.submitted) for replica in w.replicas] == [10, 8]
    assert w.observer.waited_s["generate", "store"] > 0


def test_later_groups_make_room_for_what_a_dead_replica_left_behind() -> None:
    """Groups 0 and 2 are sampled on one node; 1 and 3 fill the other.

    The trainer takes groups in order, so groups 0 and 1 must both fit on the remaining node.
    """

    async def chaos(w: World) -> None:
        await asyncio.sleep(5.0)
        w.replicas[0].die()

    w = two_nodes(groups_on_each=2, seconds=[9.0, 1.0], num_steps=4, prompts_per_step=2)
    w.chaos = chaos
    run_in_virtual_time(w.run())
    names = w.replicas[1].submitted
    assert names[:4] == ["1.0.0", "1.1.0", "3.0.0", "3.1.0"]
    assert names[4:6] == ["0.0.0", "0.1.0"]  # goes on, in the place of 3
    assert {"2.0.0", "3.0.1"} <= set(names)  # later, 3 from its beginning
    assert w.observer.waited_s["train", "groups"] < 100  # not until another replica is there
    assert w.ledger.num_trained == 8
    assert w.ledger.num_dropped == 0


def test_a_run_that_has_lost_the_room_for_a_step_waits_and_says_what_is_missing() -> None:
    """Two nodes of 2 groups each hold a step of 3; one does not."""

    async def chaos(w: World) -> None:
        await asyncio.sleep(0.5)
        w.replicas[0].die()

    w = two_nodes(
        groups_on_each=2,
        seconds=[1.0, 1.0],
        prompts_per_step=3,
        cluster=ClusterConfig(call_timeout_s=50.0),
    )
    w.chaos = chaos
    with error_about(StallError, "650 s", "prompts_per_step=3", " 2 groups", " 1 node"):
        run_in_virtual_time(w.run())


def test_a_run_that_has_lost_the_room_for_a_step_goes_on_with_the_node_that_comes() -> None:
    async def chaos(w: World) -> None:
        await asyncio.sleep(0.5)
        w.replicas[0].die()

    w = two_nodes(
        groups_on_each=2,
        seconds=[1.0, 1.0],
        prompts_per_step=3,
        cluster=ClusterConfig(call_timeout_s=50.0),  # a start may take longer than a call
    )
    w.fleet = SimulatedFleet(start_s=400.0, node=lambda number: "node-2")
    w.chaos = chaos
    run_in_virtual_time(w.run())
    assert w.observer.waited_s["generate", "store"] > 300
    assert w.ledger.num_trained == 4 * 3
    assert w.store.nodes == ["node-1", "node-2"]


def test_restored_rollouts_have_their_place_where_they_lie() -> None:
    """They are on a node without a replica until they are trained.

    Rollouts without room are discarded and sampled again.
    """
    w = world(num_steps=2, prompts_per_step=2)
    w.store_bytes, w.max_row_bytes = 2 * 2 * ROW_BYTES, ROW_BYTES
    w.ledger = Ledger(lambda event: None, groups_per_step=2)
    for group_id in range(4):
        w.ledger.issue(group_id, prompt_index=group_id, version=0)
    block = BlockRef("lone 0", 0, 0, LAYOUT)
    w.carried = OpenWork(
        finished=[
            FinishedRollout(
                request_id=f"{group_id}.{index}.0",
                cell=(block, 0),
                num_prompt_tokens=4,
                num_tokens=3,
                min_version=0,
                max_version=0,
                finish_reason=FinishReason.STOP,
            )
            for group_id in range(3)
            for index in range(2)
        ],
        nodes=dict.fromkeys(range(3), "lone"),
    )
    w.replicas[0].shard = "node 0"

    async def chaos(w: World) -> None:
        check_places(w.store)

    w.chaos = chaos
    run_in_virtual_time(w.run())
    assert {name.split(".")[0] for name in w.replicas[0].submitted} == {"2", "3"}
    assert {"lone 0": {0: 2}} in w.freed  # of group 2
    assert w.store.nodes == ["node"]
    assert w.ledger.num_trained == 4


def check_places(store: StreamStore) -> None:
    """Check from now on that no node is too full and that bytes are on the node of their row."""
    notify, write = store.more_room.notify, store.write

    def checked_notify() -> None:
        assert all(store.room(node) >= 0 for node in store.nodes)
        assert store.bytes_live <= store.bytes_reserved
        notify()

    def checked_write(stage: str, rows: Sequence[int], **what: Any) -> None:
        if (block := what.get("block")) is not None:
            assert {store.node_of(row) for row in rows} == {block.shard.split()[0]}
        write(stage, rows, **what)

    store.more_room.notify = checked_notify  # type: ignore[method-assign]
    store.write = checked_write  # type: ignore[method-assign]
