"""Which layout is had, over places that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from actors.cluster.placement import ClusterTooSmall
from actors.trainer import elastic as module
from actors.trainer.elastic import PATIENCE_S, Layouts
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.controller.worker_protocols import TrainerDied

NO_ANSWER: Mapping[int, str] = {-1: ""}
DP1, DP2, DP4 = (ParallelLayout(dp_shard=count) for count in (1, 2, 4))


class World:
    """Places by the look at them; a second passes between two looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: Mapping[int, str]) -> None:
        self._looks = list(looks)
        self.num_looks = 0
        for name in ("LOOK_EVERY_S", "WATCH_EVERY_S"):
            monkeypatch.setattr(module, name, 0.0)

    def standing(self) -> Mapping[int, str]:
        self.num_looks += 1
        look = self._looks[min(self.num_looks, len(self._looks)) - 1]
        if look is NO_ANSWER:
            raise ConnectionError("the head is busy")
        return look

    def layouts(self, *some: ParallelLayout) -> Layouts:
        return Layouts(some, self.standing, clock=lambda: float(self.num_looks))


Make = Callable[..., World]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda *looks: World(monkeypatch, *looks)


def test_the_preferred_one_is_had_at_once_where_its_places_are_there(world: Make) -> None:
    of = world({0: "a", 1: "b", 2: "a", 3: "b"})
    layouts = of.layouts(DP4, DP2)
    asyncio.run(layouts.choose(60))
    assert (layouts.current, list(layouts.places), of.num_looks) == (DP4, [0, 1, 2, 3], 1)
    assert not layouts.can_grow


def test_places_that_stand_again_soon_are_waited_for(world: Make) -> None:
    of = world({0: "a"}, {0: "a"}, {0: "a", 1: "c"})
    layouts = of.layouts(DP2, DP1)
    asyncio.run(layouts.choose(60))
    assert (layouts.current, of.num_looks) == (DP2, 3)


def test_after_a_while_the_largest_that_has_places_is_had(world: Make) -> None:
    of = world({1: "b", 2: "c", 3: "c"})
    layouts = of.layouts(DP4, DP2, DP1)
    asyncio.run(layouts.choose(60))
    assert layouts.current == DP2
    assert list(layouts.places) == [2, 3]  # of one node
    assert of.num_looks > PATIENCE_S
    assert layouts.can_grow


def test_with_too_few_places_for_any_it_waits_and_then_says_so(world: Make) -> None:
    layouts = world({}).layouts(DP2, DP1)
    with pytest.raises(
        ClusterTooSmall,
        match=r"for 60 s .* no node had the places of a trainer of dp1, .*resume=True",
    ):
        asyncio.run(layouts.choose(60))
    of = world(*[{}] * 20, {1: "b"})
    layouts = of.layouts(DP2, DP1)
    asyncio.run(layouts.choose(60))
    assert (layouts.current, list(layouts.places)) == (DP1, [1])


def test_one_layout_alone_asks_for_no_places(world: Make) -> None:
    of = world({})
    layouts = of.layouts(DP2)

    async def run() -> int:
        await layouts.choose(60)
        return await layouts.while_standing(asyncio.sleep(0, 7))

    assert asyncio.run(run()) == 7
    assert (layouts.current, list(layouts.places), of.num_looks) == (DP2, [0, 1], 0)


def test_a_place_that_is_lost_while_ranks_meet_is_told(world: Make) -> None:
    of = world(*[{0: "a", 1: "b"}] * 3, {0: "a"})
    layouts = of.layouts(DP2, DP1)

    async def run() -> None:
        await layouts.choose(60)
        with pytest.raises(TrainerDied, match="the place of rank 1 of the trainer is lost"):
            await layouts.while_standing(asyncio.Event().wait())

    asyncio.run(run())


def test_a_look_that_fails_is_taken_again(world: Make) -> None:
    of = world(NO_ANSWER, {0: "a"}, *[{0: "a"}] * 9, NO_ANSWER, NO_ANSWER, {0: "a", 1: "b"})
    layouts = of.layouts(DP2, DP1)

    async def run() -> None:
        await layouts.choose(60)
        assert layouts.current == DP1
        await layouts.until_larger()
        assert of.num_looks == 14
        await layouts.choose(60)
        assert layouts.current == DP2

    asyncio.run(run())
    of = world({0: "a", 1: "b"}, NO_ANSWER, NO_ANSWER, {0: "a"})
    layouts = of.layouts(DP2, DP1)

    async def meet() -> None:
        await layouts.choose(60)
        with pytest.raises(TrainerDied, match="the place of rank 1 of the trainer is lost"):
            await layouts.while_standing(asyncio.Event().wait())

    asyncio.run(meet())


def test_it_can_grow_when_there_are_places_for_a_larger_one(world: Make) -> None:
    three = {0: "a", 2: "c", 3: "d"}
    of = world(*[{0: "a"}] * 9, three)
    layouts = of.layouts(DP4, DP2, DP1)

    async def run() -> None:
        await layouts.choose(60)
        assert layouts.current == DP1
        await layouts.until_larger()
        await layouts.choose(60)

    asyncio.run(run())
    assert layouts.current == DP2
