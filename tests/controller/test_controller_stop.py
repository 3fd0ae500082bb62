"""An early stop of the controller, with simulated workers in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config import AsyncConfig
from rlsys.controller.controller import Controller
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.controller.state import TrainedStep
from tests.controller.test_controller import World, colocated, until, world

NUM_STEPS = 12


def stop_at(w: World, step: int) -> None:
    """Let the observer stop the run once a step is trained."""
    record = w.observer.step_trained

    def step_trained(trained: TrainedStep) -> None:
        record(trained)
        if trained.step == step:
            w.controller.stop()

    w.observer.step_trained = step_trained  # type: ignore[method-assign]


def check_ended(w: World, last_step: int) -> None:
    """Check that the run has ended after a step as after the last one."""
    assert w.controller.last_step == w.ledger.step == last_step
    assert [one.step for one in w.observer.steps] == [*range(1, last_step + 1)]
    assert w.ledger.num_trained == last_step * 4
    assert not w.ledger.open_groups
    assert w.store.bytes_live == 0
    assert w.checkpoints[-1] == last_step


@pytest.mark.parametrize("make", [world, colocated])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_the_step_that_is_under_way_is_the_last(
    make: Callable[..., World], max_staleness: int
) -> None:
    w = make(num_steps=NUM_STEPS, asynchrony=AsyncConfig(max_staleness=max_staleness))
    stop_at(w, 5)
    run_in_virtual_time(w.run())
    check_ended(w, 6)


@given(
    st.integers(0, 100),
    st.integers(1, NUM_STEPS),
    st.integers(0, 3),
    st.sampled_from([0, 1, 3, "20s"]),
)
def test_a_run_may_stop_at_any_step(
    seed: int, step: int, max_staleness: int, checkpoint_every: int | str
) -> None:
    w = world(
        seed,
        num_steps=NUM_STEPS,
        num_replicas=2,
        checkpoint_every=checkpoint_every,
        asynchrony=AsyncConfig(max_staleness=max_staleness),
    )
    stop_at(w, step)
    run_in_virtual_time(w.run())
    check_ended(w, min(step + 1, NUM_STEPS))


def test_a_stop_between_steps_and_a_death_afterwards() -> None:
    w = world(num_steps=NUM_STEPS)
    w.trainer_proxy.loses = 2

    async def stop_and_die(w: World) -> None:
        await until(w, lambda: len(w.observer.steps) >= 4)
        w.controller.stop()
        w.trainer_proxy.die()

    w.chaos = stop_and_die
    run_in_virtual_time(w.run())
    assert w.controller.last_step == w.ledger.step == 5
    assert not w.ledger.open_groups
    assert w.checkpoints == [5]


def test_a_run_that_is_stopped_before_it_begins_trains_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a crash between the last checkpoint and the export."""
    w = world(num_steps=NUM_STEPS)
    run = Controller.run

    async def stopped(controller: Controller) -> None:
        controller.stop()
        await run(controller)

    monkeypatch.setattr(Controller, "run", stopped)
    run_in_virtual_time(w.run())
    assert w.controller.last_step == 0
    assert w.observer.steps == []
    assert w.ledger.num_issued == 0


def test_checkpoints_that_are_kept_are_written_besides_the_regular_ones() -> None:
    w = world(num_steps=10, checkpoint_every=3, keep_every=5)
    run_in_virtual_time(w.run())
    assert w.checkpoints == [3, 5, 6, 9, 10]
