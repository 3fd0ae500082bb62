"""The controller with groups that other runs have sampled, over deaths and crashes.

A group of the ledger keeps its shared rollouts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config import AsyncConfig
from rlsys.controller.simulation.simulated_workers import SimulatedPrompts
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.data.swarm.external_log import ExternalLog, check_issued, read_external
from rlsys.data.swarm.external_prompts import ExternalPrompts
from rlsys.data.swarm.shared_pool import Shared, SharedCompletion, SharedGroup, SharedPool
from rlsys.dataflow.scheduling.ledger import Ledger
from rlsys.types import Completion, Prompt
from tests.controller.test_controller import World, world
from tests.tiers import examples

NODE = Shared(peers=["*"], groups_per_step=2)


def shared_group(number: int, peer: str) -> SharedGroup:
    return SharedGroup(
        peer=peer,
        group_id=number,
        asked="?",
        row={},
        completions=[SharedCompletion(text=peer + text, truncated=False) for text in ("x", "y")],
        rewards=[0.0, 1.0],
    )


def encode(index: int, group: SharedGroup) -> Prompt:
    completions = tuple(
        Completion(text=f"{group.key} {one.text}", token_ids=(1, 2, 3)) for one in group.completions
    )
    own = SimulatedPrompts().at(index)
    return dataclasses.replace(own, completions=completions, shared_by=group.peer, row=-1)


class Node:
    """The prompts of a run whose peers offer `offers` groups before each request."""

    def __init__(self, path: Path, *, seed: int, offers: float, peer: str) -> None:
        self.chance = random.Random(seed)
        self.offers = offers
        self.peer = peer
        self.num_offered = 0
        self.log = ExternalLog(path)
        self.pool = SharedPool(seed=seed, groups_per_step=NODE.groups_per_step, taken=self.log.keys)
        self.prompts = ExternalPrompts(
            SimulatedPrompts(),  # type: ignore[arg-type]
            groups_per_step=NODE.groups_per_step,
            prompts_per_step=4,
            take=self.take,
            encode=encode,
            log=self.log,
        )

    def take(self, index: int) -> SharedGroup | None:
        while self.chance.random() < self.offers:
            self.num_offered += 1
            self.pool.add([shared_group(self.num_offered, self.peer)])
        return self.pool.take(index)


def trained(w: World) -> dict[int, tuple[str, ...]]:
    """Return the completions by prompt index; () for those that the own policy sampled."""
    return {
        group.prompt.index: tuple(one.text for one in group.prompt.completions)
        for step in w.observer.steps
        for group in step.groups
    }


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_staleness=st.integers(0, 3),
    offers=st.sampled_from([0.0, 0.4, 0.8]),
    deaths=st.integers(0, 3),
    crash_at=st.integers(1, 3),
)
def test_a_group_keeps_what_it_was_given(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    max_staleness: int,
    offers: float,
    deaths: int,
    crash_at: int,
) -> None:
    path = tmp_path_factory.mktemp("run") / "external.jsonl"
    chance = random.Random(seed)
    events: list[dict[str, Any]] = []
    w = world(seed, num_replicas=2, asynchrony=AsyncConfig(max_staleness=max_staleness))
    w.ledger = Ledger(events.append, groups_per_step=4)
    node = Node(path, seed=seed, offers=offers, peer="first")
    w.prompts = node.prompts

    async def kill(w: World) -> None:
        for _ in range(deaths):
            await asyncio.sleep(chance.uniform(0, 6))
            victim: Any = chance.choice([w.trainer_proxy, *w.replicas])
            if victim is w.trainer_proxy:
                victim.loses = chance.randint(0, 1)
            victim.die()

    w.chaos = kill
    run_in_virtual_time(w.run())
    assert len(w.observer.steps) == w.trainer_proxy.version == 4
    before = trained(w)
    decided = read_external(path)
    assert {index for index, texts in before.items() if texts} == {
        index for index, group in decided.items() if group is not None and index in before
    }
    assert sum(map(bool, before.values())) <= 2 * 4

    # The process dies after a step, and what its peers offer has changed.
    node.log.close()
    steps = [i for i, e in enumerate(events) if e["event"] == "trained" and e["step"] == crash_at]
    later = world(seed + 1, asynchrony=AsyncConfig(max_staleness=max_staleness))
    later.ledger = Ledger.replay(events[: steps[-1] + 1], lambda event: None, groups_per_step=4)
    later.ledger.resume(step=crash_at)
    check_issued(path, NODE, 4, range(later.ledger.next_prompt))
    node = Node(path, seed=seed + 1, offers=0.9, peer="second")
    later.prompts = node.prompts
    later.first_step = later.trainer_proxy.version = later.observer.first_step = crash_at
    later.replicas[0].version = crash_at
    run_in_virtual_time(later.run())
    after = trained(later)
    given_before = {
        index: tuple(c.text for c in encode(index, group).completions) if group else ()
        for index, group in decided.items()
    }
    for index, texts in after.items():
        if index in decided:
            assert texts == given_before[index]
    taken = [group.key for group in read_external(path).values() if group is not None]
    assert len(set(taken)) == len(taken)
    node.log.close()
