"""Choice of a trainer's layout as places disappear and return."""

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
    """Places by query; a second passes between two queries."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Mapping[int, str]) -> None:
        self._answers = list(answers)
        self.num_queries = 0
        for name in ("POLL_EVERY_S", "WATCH_EVERY_S"):
            monkeypatch.setattr(module, name, 0.0)

    def live_places(self) -> Mapping[int, str]:
        self.num_queries += 1
        answer = self._answers[min(self.num_queries, len(self._answers)) - 1]
        if answer is NO_ANSWER:
            raise ConnectionError("the head is busy")
        return answer

    def layouts(self, *some: ParallelLayout) -> Layouts:
        return Layouts(some, self.live_places, clock=lambda: float(self.num_queries))


Make = Callable[..., World]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda *answers: World(monkeypatch, *answers)


def test_the_preferred_layout_is_chosen_at_once_if_its_places_exist(world: Make) -> None:
    places = world({0: "a", 1: "b", 2: "a", 3: "b"})
    layouts = places.layouts(DP4, DP2)
    asyncio.run(layouts.choose(60))
    assert (layouts.current, list(layouts.places), places.num_queries) == (DP4, [0, 1, 2, 3], 1)
    assert not layouts.can_grow


def test_places_that_return_soon_are_used(world: Make) -> None:
    places = world({0: "a"}, {0: "a"}, {0: "a", 1: "c"})
    layouts = places.layouts(DP2, DP1)
    asyncio.run(layouts.choose(60))
    assert (layouts.current, places.num_queries) == (DP2, 3)


def test_after_a_while_the_largest_layout_with_places_is_chosen(world: Make) -> None:
    places = world({1: "b", 2: "c", 3: "c"})
    layouts = places.layouts(DP4, DP2, DP1)
    asyncio.run(layouts.choose(60))
    assert layouts.current == DP2
    assert list(layouts.places) == [2, 3]  # both on one node
    assert places.num_queries > PATIENCE_S
    assert layouts.can_grow


def test_too_few_places_for_any_layout_are_an_error_after_the_limit(world: Make) -> None:
    layouts = world({}).layouts(DP2, DP1)
    with pytest.raises(ClusterTooSmall) as found:
        asyncio.run(layouts.choose(60))
    assert " 60 s " in found.value.rule
    assert " dp1," in found.value.rule
    assert "resume=True" in found.value.fix
    places = world(*[{}] * 20, {1: "b"})
    layouts = places.layouts(DP2, DP1)
    asyncio.run(layouts.choose(60))
    assert (layouts.current, list(layouts.places)) == (DP1, [1])


def test_a_single_layout_queries_no_places(world: Make) -> None:
    places = world({})
    layouts = places.layouts(DP2)

    async def run() -> int:
        await layouts.choose(60)
        return await layouts.while_placed(asyncio.sleep(0, 7))

    assert asyncio.run(run()) == 7
    assert (layouts.current, list(layouts.places), places.num_queries) == (DP2, [0, 1], 0)


def test_a_place_that_is_lost_during_the_rendezvous_is_an_error(world: Make) -> None:
    places = world(*[{0: "a", 1: "b"}] * 3, {0: "a"})
    layouts = places.layouts(DP2, DP1)

    async def run() -> None:
        await layouts.choose(60)
        with pytest.raises(TrainerDied) as died:
            await layouts.while_placed(asyncio.Event().wait())
        assert "rank 1" in str(died.value)

    asyncio.run(run())


def test_a_query_that_fails_is_repeated(world: Make) -> None:
    places = world(NO_ANSWER, {0: "a"}, *[{0: "a"}] * 9, NO_ANSWER, NO_ANSWER, {0: "a", 1: "b"})
    layouts = places.layouts(DP2, DP1)

    async def run() -> None:
        await layouts.choose(60)
        assert layouts.current == DP1
        await layouts.until_larger()
        assert places.num_queries == 14
        await layouts.choose(60)
        assert layouts.current == DP2

    asyncio.run(run())
    places = world({0: "a", 1: "b"}, NO_ANSWER, NO_ANSWER, {0: "a"})
    layouts = places.layouts(DP2, DP1)

    async def meet() -> None:
        await layouts.choose(60)
        with pytest.raises(TrainerDied) as died:
            await layouts.while_placed(asyncio.Event().wait())
        assert "rank 1" in str(died.value)

    asyncio.run(meet())


def test_growing_waits_for_the_places_of_a_larger_layout(world: Make) -> None:
    three = {0: "a", 2: "c", 3: "d"}
    places = world(*[{0: "a"}] * 9, three)
    layouts = places.layouts(DP4, DP2, DP1)

    async def run() -> None:
        await layouts.choose(60)
        assert layouts.current == DP1
        await layouts.until_larger()
        await layouts.choose(60)

    asyncio.run(run())
    assert layouts.current == DP2
