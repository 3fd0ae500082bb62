"""Partial rollouts of running requests, as parts in the store."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlsys.controller.partials import PartialRollouts
from rlsys.controller.worker_protocols import StepPart
from rlsys.dataflow.store.blocks import BlockRef, layout_of
from rlsys.dataflow.store.stream_store import StageSpec, StreamStore

LAYOUT = layout_of({"token_ids": [np.zeros(2, np.int32)]})


def parts_and_freed() -> tuple[PartialRollouts, list[Mapping[str, Mapping[int, int]]]]:
    freed: list[Mapping[str, Mapping[int, int]]] = []
    store = StreamStore(
        tensors=["token_ids"],
        scalars=[],
        stages=[
            StageSpec(name="generate", writes=("token_ids",)),
            StageSpec(name="train", reads=("token_ids",)),
        ],
        group_size=1,
        max_bytes=100,
        max_row_bytes=10,
        on_free=freed.append,
    )
    return PartialRollouts(store), freed


def part(start: int, *, lease: int, shard: str = "a") -> StepPart:
    return StepPart(
        request_id="0.0.0",
        start=start,
        cell=(BlockRef(shard, lease, 0, LAYOUT), 0),
        num_tokens=2,
        min_version=3,
    )


def test_parts_follow_on_one_another() -> None:
    partials, freed = parts_and_freed()
    first, second = part(0, lease=1), part(2, lease=2)
    partials.add(first)
    partials.add(second)
    assert partials.of("0.0.0") == [first, second]
    partials.add(part(6, lease=3))  # tokens 4 and 5 are missing
    assert partials.of("0.0.0") == [first, second]
    assert freed == [{"a": {3: 1}}]
    partials.forget("0.0.0")
    assert freed[1] == {"a": {1: 1, 2: 1}}
    assert partials.of("0.0.0") == ()


def test_a_request_that_lost_a_part_has_nothing_to_go_on_with() -> None:
    partials, freed = parts_and_freed()
    partials.add(part(0, lease=1, shard="a"))
    partials.add(part(2, lease=2, shard="b"))
    partials.shard_lost("a")
    assert partials.of("0.0.0") == ()
    partials.add(part(4, lease=3, shard="b"))  # the replica does not know
    assert partials.of("0.0.0") == ()
    assert freed == [{"a": {1: 1}, "b": {2: 1}}, {"b": {3: 1}}]


def test_what_somebody_reads_stays_though_it_is_forgotten() -> None:
    partials, freed = parts_and_freed()
    partials.add(part(0, lease=1))
    with partials.reading() as parts:
        assert [one.cell[0].lease for one in parts] == [1]
        partials.forget("0.0.0")
        assert freed == []
    assert freed == [{"a": {1: 1}}]
