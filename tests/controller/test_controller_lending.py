"""The controller with borrowed replicas: the trainer's devices generate while it would wait.

`SharedDevices` raises if a borrowed replica and the trainer have memory at the same time. The
ledger raises if a group ends twice.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config import AsyncConfig, RolloutConfig, TrainerConfig
from rlsys.controller.simulation.simulated_replicas import SimulatedReplica
from rlsys.controller.simulation.simulated_workers import (
    SharedDevices,
    SimulatedTrainer,
    exponential,
)
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.controller.worker_protocols import Withdrawn
from rlsys.dataflow.scheduling.lending import NO_REPLICA, LendingSettings
from rlsys.types import WeightManifest
from tests.controller.test_controller import World, world
from tests.tiers import examples

# Lends whenever the predicted wait is longer than the hand-over.
EAGER = LendingSettings(margin=1.0, least_limit_s=2.0)

Hang = Literal["wake", "withdraw", "sleep"]


@dataclass(kw_only=True)
class BorrowedReplica(SimulatedReplica):
    """A replica that starts asleep. It never answers a call of the kind `hangs`."""

    hangs: Hang | None = None
    num_wakes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.devices is not None
        self.devices.release(self.name)
        self._is_released = True

    async def update_weights(self, manifest: WeightManifest, *, delayed: bool) -> float:
        self.num_wakes += 1
        if self.hangs == "wake":
            assert self.devices is not None
            self.devices.generation_takes(self.name)
            await asyncio.Event().wait()
        return await super().update_weights(manifest, delayed=delayed)

    async def withdraw(self, request_ids: Sequence[str]) -> Withdrawn:
        if self.hangs == "withdraw":
            await asyncio.Event().wait()
        return await super().withdraw(request_ids)

    async def release(self) -> None:
        if self.hangs == "sleep":
            await asyncio.Event().wait()
        await super().release()

    async def clean_up(self, live_rows: object) -> None:
        self.die()


def lending(
    seed: int = 0,
    *,
    num_own: int = 1,
    num_borrowed: int = 1,
    max_staleness: int = 0,
    stream: bool = True,
    order: Literal["issued", "complete"] = "issued",
    num_steps: int = 6,
    latency_s: float | None = None,
    num_slots: int = 1,
) -> World:
    """Return a run in which generation takes longer than training."""
    w = world(
        seed,
        num_steps=num_steps,
        rollout=RolloutConfig(num_replicas=num_own, borrow=num_borrowed),
        trainer=TrainerConfig(micro_batch_tokens=16, layout="dp4"),
        asynchrony=AsyncConfig(max_staleness=max_staleness, stream=stream, order=order),
    )
    rng, devices = random.Random(seed), SharedDevices()
    draw = exponential(rng, 1.0) if latency_s is None else lambda: latency_s
    w.replicas = [
        SimulatedReplica(name=f"rollout-{i}", latency_s=draw, load_s=0.01, num_slots=num_slots)
        for i in range(num_own)
    ]
    w.borrowed = [
        BorrowedReplica(
            name=f"rollout-{num_own + i}",
            latency_s=draw,
            load_s=0.01,
            num_slots=num_slots,
            devices=devices,
        )
        for i in range(num_borrowed)
    ]
    w.trainer_proxy = SimulatedTrainer(row_s=0.1, step_s=0.1, devices=devices, num_data=4)
    w.lending = EAGER
    return w


def elapsed_s(w: World) -> float:
    async def run() -> float:
        await w.run()
        return asyncio.get_running_loop().time()

    return run_in_virtual_time(run())


def require_complete(w: World) -> None:
    assert len(w.observer.steps) == w.config.num_steps
    assert max(w.observer.staleness) <= w.config.asynchrony.max_staleness
    assert not w.ledger.open_groups
    assert w.ledger.num_trained == w.config.num_steps * w.config.prompts_per_step
    assert [sum(map(len, step)) for step in w.trainer_proxy.trained[:-1]] == [
        w.config.rollouts_per_step
    ] * w.config.num_steps


def trained_groups(w: World) -> list[list[int]]:
    steps = w.trainer_proxy.trained
    return [sorted({group for rows in step for group in rows.group_ids}) for step in steps]


@settings(max_examples=examples(200), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_own=st.integers(1, 2),
    num_borrowed=st.integers(1, 3),
    max_staleness=st.integers(0, 2),
    stream=st.booleans(),
    order=st.sampled_from(["issued", "complete"]),
    num_slots=st.integers(1, 4),
    hangs=st.sampled_from([None, None, "wake", "withdraw", "sleep"]),
    deaths=st.lists(
        st.tuples(
            st.floats(0.0, 15.0),
            st.sampled_from(["own", "borrowed", "trainer", "trainer back to an older step"]),
        ),
        max_size=4,
    ),
)
def test_every_schedule_ends_each_group_once_within_the_bound(
    seed: int,
    num_own: int,
    num_borrowed: int,
    max_staleness: int,
    stream: bool,
    order: Literal["issued", "complete"],
    num_slots: int,
    hangs: Hang | None,
    deaths: list[tuple[float, str]],
) -> None:
    w = lending(
        seed,
        num_own=num_own,
        num_borrowed=num_borrowed,
        max_staleness=max_staleness,
        stream=stream,
        order=order,
        num_slots=num_slots,
    )
    chance = random.Random(seed)
    victim = w.borrowed[0]
    assert isinstance(victim, BorrowedReplica)
    victim.hangs = hangs

    async def kill(w: World) -> None:
        for wait_s, kind in deaths:
            await asyncio.sleep(wait_s)
            if kind == "own":
                chance.choice([*w.replicas, *w.fleet.started_workers]).die()
            elif kind == "borrowed":
                chance.choice(w.borrowed).die()
            else:
                w.trainer_proxy.loses = 1 if kind.endswith("step") else 0
                w.trainer_proxy.die()

    w.chaos = kill
    run_in_virtual_time(w.run())
    require_complete(w)


def test_lending_shortens_steps_that_wait_for_generation() -> None:
    alone, lent = lending(latency_s=1.0, num_steps=8), lending(latency_s=1.0, num_steps=8)
    alone.borrowed = []
    alone_s, lent_s = elapsed_s(alone), elapsed_s(lent)
    # Eight rollouts of 1 s one after another, then training of 0.3 s. Two replicas need 4 s.
    assert alone_s == pytest.approx(8 * 8.3, rel=0.05)
    assert lent_s < 0.75 * alone_s
    assert sum(num for _, num in lent.observer.lent) >= 3 * 6
    require_complete(lent)


@pytest.mark.parametrize("stream", [False, True])
def test_on_policy_the_same_groups_are_trained_in_each_step(stream: bool) -> None:
    alone, lent = lending(stream=stream), lending(stream=stream)
    alone.borrowed = []
    run_in_virtual_time(alone.run())
    run_in_virtual_time(lent.run())
    assert lent.observer.lent
    assert trained_groups(lent) == trained_groups(alone)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_moved_rollouts_continue_from_their_tokens(max_staleness: int) -> None:
    """On policy, the torch engine samples them again, since recomputed keys differ by rounding."""
    w = lending(num_slots=4, num_steps=8, max_staleness=max_staleness)
    run_in_virtual_time(w.run())
    require_complete(w)
    assert w.observer.lent
    continued = [name for replica in (*w.replicas, *w.borrowed) for name in replica.continued]
    assert bool(continued) == (max_staleness > 0)
    sampled = [name for replica in (*w.replicas, *w.borrowed) for name in replica.submitted]
    assert len(set(sampled)) == w.config.num_steps * w.config.rollouts_per_step


def test_a_trainer_that_never_waits_lends_nothing() -> None:
    w = lending(latency_s=0.01, num_slots=8, max_staleness=1)
    w.trainer_proxy.row_s = 5.0
    run_in_virtual_time(w.run())
    assert not w.observer.lent
    assert all(replica.num_releases == 0 for replica in w.borrowed)
    assert len(w.observer.reasons) == w.config.num_steps


@pytest.mark.parametrize("hangs", ["wake", "withdraw", "sleep"])
def test_a_hung_replica_delays_one_step_by_two_limits_at_most(hangs: Hang) -> None:
    # At staleness 1, requests of the next step run there when the devices are taken back.
    alone, w = (lending(latency_s=1.0, max_staleness=1) for _ in range(2))
    alone.borrowed = []
    (replica,) = w.borrowed
    assert isinstance(replica, BorrowedReplica)
    replica.hangs = hangs
    assert elapsed_s(w) <= elapsed_s(alone) + 2 * EAGER.least_limit_s + 1.0
    require_complete(w)
    assert w.observer.deaths == [replica.name]
    assert replica.num_wakes == 1
    assert w.observer.reasons[-1] == NO_REPLICA


def test_a_replica_that_dies_asleep_is_not_awaited() -> None:
    w = lending(latency_s=1.0)

    async def kill(w: World) -> None:
        w.borrowed[0].die()

    w.chaos = kill
    run_in_virtual_time(w.run())
    require_complete(w)
    assert not w.observer.lent
