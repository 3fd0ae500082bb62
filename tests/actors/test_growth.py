"""Growing to a larger layout under the controller: no step is lost or trained twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from actors.trainer.elastic import growth
from rlsys.config import AsyncConfig, TrainerConfig
from rlsys.controller.simulation.simulated_workers import SimulatedTrainer
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.controller.worker_protocols import StepRowsRef, TrainerDied
from tests.controller.test_controller import world


@dataclass(kw_only=True)
class GrowingTrainer(SimulatedTrainer):
    """Trainer with places for two ranks from some version on."""

    model: str = "policy"
    from_version: int = 2
    snapshots: list[int] = field(default_factory=list)  # versions of the snapshots
    restarted: list[tuple[int, int]] = field(default_factory=list)  # from, to which version
    num_shares: list[int] = field(default_factory=list)  # of each micro-batch

    @property
    def can_grow_now(self) -> bool:
        return self.num_data == 1 and self.version >= self.from_version

    async def accumulate(self, micro_batches: Sequence[Sequence[StepRowsRef]]) -> None:
        self.num_shares += map(len, micro_batches)
        await super().accumulate(micro_batches)

    async def snapshot(self) -> None:
        self.snapshots.append(self.version)

    async def restart(self, step: int) -> int:
        before = self.version
        reached = await super().restart(step)
        self.restarted.append((before, reached))
        self.num_data = 2 if self.can_grow_now else self.num_data
        return reached


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("answer_s", [0.0, 3.0])
def test_growing_costs_a_restart_and_nothing_else(max_staleness: int, answer_s: float) -> None:
    w = world(
        num_steps=6,
        checkpoint_every=2,
        asynchrony=AsyncConfig(max_staleness=max_staleness),
        trainer=TrainerConfig(layout="dp2,dp1", micro_batch_tokens=16),
    )
    trainer_proxy = w.trainer_proxy = GrowingTrainer(row_s=0.3, step_s=0.5, answer_s=answer_s)
    trainer_proxies: Any = [trainer_proxy]
    w.between.append(growth(trainer_proxies, first_step=0, num_steps=6))
    run_in_virtual_time(w.run())
    [(before, reached)] = trainer_proxy.restarted
    assert before == reached == trainer_proxy.snapshots[0] >= 2
    [reason] = w.observer.restarts
    assert "policy" in reason
    assert [step.step for step in w.observer.steps] == [1, 2, 3, 4, 5, 6]
    assert trainer_proxy.version == 6
    assert w.checkpoints == [2, 4, 6]
    assert w.ledger.num_trained == 24
    # From then on micro-batches are for two ranks.
    assert set(trainer_proxy.num_shares) == {1, 2}
    assert trainer_proxy.num_shares == sorted(trainer_proxy.num_shares)


def test_places_that_appear_during_a_step_are_used_after_it() -> None:
    # The trainer may have finished the step by then and overwritten the state before it.
    trainer_proxy = GrowingTrainer(from_version=1)
    trainer_proxies: Any = [trainer_proxy]
    between = growth(trainer_proxies, first_step=0, num_steps=9)
    assert not between.is_due(3)  # when step 3 is sent
    trainer_proxy.version = 1
    assert trainer_proxy.can_grow_now
    assert not between.wants(3)
    assert between.is_due(4)
    assert not between.wants(3)
    assert between.wants(4)
    between.go_back(2)  # a death: no step is running
    assert between.wants(2)
    assert between.is_due(3)


def test_no_trainer_grows_after_the_last_step() -> None:
    w = world(num_steps=2)
    trainer_proxy = w.trainer_proxy = GrowingTrainer()
    trainer_proxies: Any = [trainer_proxy]
    w.between.append(growth(trainer_proxies, first_step=0, num_steps=2))
    run_in_virtual_time(w.run())
    assert not trainer_proxy.restarted


def test_all_models_keep_a_snapshot_of_the_step_after_which_one_grows() -> None:
    trainer_proxy, critic = GrowingTrainer(), GrowingTrainer(model="critic", from_version=99)
    trainer_proxies: Any = [critic, trainer_proxy]
    between = growth(trainer_proxies, first_step=0, num_steps=9)
    for one in trainer_proxies:
        one.version = 3
    assert between.wants(3)
    with pytest.raises(TrainerDied) as died:
        run_in_virtual_time(between.after(3))
    assert str(died.value).endswith("of policy")
    assert (trainer_proxy.snapshots, critic.snapshots) == ([3], [3])
