"""The store: rejected calls, wake-ups, and freedom from deadlocks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.dataflow.store.blocks import BlockLayout, BlockRef
from rlsys.dataflow.store.selection import FIRST_COMPLETE, IN_ORDER, Selection, whole_groups
from rlsys.dataflow.store.stream_store import StageSpec, StoreError, StreamStore, Subscription
from rlsys.dataflow.store.tensor_memory import FreedRows
from tests.errors import error_about, invalid
from tests.tiers import examples

GENERATE = StageSpec(name="generate", writes=("tokens",))
SCORE = StageSpec(name="score", reads=("tokens",), writes=("reward",))
TRAIN = StageSpec(name="train", reads=("tokens", "reward"))

FOUR_BYTES = BlockLayout(("tokens",), ("int32",), np.ones(1, np.int32).tobytes())


def make_store(
    stages: Iterable[StageSpec] = (GENERATE, SCORE, TRAIN), **changes: Any
) -> StreamStore:
    options: dict[str, Any] = {
        "tensors": ["tokens"],
        "scalars": ["reward"],
        "group_size": 2,
        "max_bytes": 80,
        "max_row_bytes": 10,
        "on_free": lambda freed: None,
    }
    store = StreamStore(stages=stages, **(options | changes))
    store.add_node("n")
    return store


def running_store(**changes: Any) -> tuple[StreamStore, Subscription, Subscription]:
    """Return a store with its subscriptions for score and train."""
    store = make_store(**changes)
    return store, store.subscribe("score", at_most=8), store.subscribe("train", at_most=8)


def block(num_rows: int, *, num_tokens: int = 1, shard: str = "a", lease: int = 0) -> BlockRef:
    lengths = np.full(num_rows, num_tokens, np.int32)
    return BlockRef(shard, lease, 0, BlockLayout(("tokens",), ("int32",), lengths.tobytes()))


def generate(store: StreamStore, rows: Iterable[int], **where: Any) -> None:
    rows = list(rows)
    store.write(
        "generate",
        rows,
        block=block(len(rows), **where),
        versions=[(3, 4)] * len(rows),
        num_tokens=[1] * len(rows),
    )


# Refused at construction


@pytest.mark.parametrize(
    ("stages", "changes", "field", "value"),
    [
        (
            [GENERATE, StageSpec(name="train", reads=("tokens", "values"))],
            {},
            "stage 'train'",
            "values",
        ),
        (
            [GENERATE, StageSpec(name="train", reads=("tokens", "reward"))],
            {},
            "stage 'train'",
            "reward",
        ),
        (
            [
                GENERATE,
                SCORE,
                TRAIN,
                StageSpec(name="judge", reads=("tokens",), writes=("reward",)),
            ],
            {},
            "stage 'judge'",
            "reward",
        ),
        (
            [
                GENERATE,
                StageSpec(name="score", reads=("weight",), writes=("reward",)),
                StageSpec(name="weigh", reads=("reward", "tokens"), writes=("weight",)),
            ],
            {"scalars": ["reward", "weight"]},
            "stages",
            "score -> weigh -> score",
        ),
        (
            [GENERATE, StageSpec(name="score", reads=("tokens", "reward"), writes=("reward",))],
            {},
            "stages",
            "score -> score",
        ),
        (
            [GENERATE, SCORE, StageSpec(name="train", reads=("tokens",))],
            {},
            "columns",
            "reward",
        ),
        ([GENERATE, SCORE, TRAIN, SCORE], {}, "stages", "score"),
        (
            [GENERATE, SCORE, TRAIN],
            {"scalars": ["reward", "tokens"]},
            "scalars",
            ["tokens"],
        ),
        ([GENERATE, SCORE, TRAIN], {"tensors": []}, "tensors", []),
        ([GENERATE, SCORE, TRAIN], {"group_size": 0}, "max_bytes", 80),
        ([GENERATE, SCORE, TRAIN], {"max_row_bytes": 41}, "max_bytes", 80),
    ],
)
def test_stages_that_cannot_work_are_refused(
    stages: list[StageSpec], changes: Mapping[str, Any], field: str, value: object
) -> None:
    with invalid(field, value):
        make_store(stages, **changes)


def test_batches_that_would_wait_for_ever_are_refused() -> None:
    store = make_store()  # four groups of the longest rows
    with invalid("rows taken at once", {"train": 10}):
        store.subscribe("train", at_least=10, at_most=10, selection=whole_groups())
    store.subscribe("train", at_least=8, at_most=8, selection=whole_groups())
    with invalid("rows taken at once", {"train": 8, "score": 2}):
        store.subscribe("score", at_least=2, at_most=2)
    store.subscribe("score", at_most=2)


def test_issue_order_behind_a_stage_that_keeps_rows_back_is_refused() -> None:
    store = make_store()
    store.subscribe("train", at_most=2, selection=IN_ORDER)
    with invalid("stage 'score': at_least", 2):
        store.subscribe("score", at_least=2, at_most=2)


def test_refused_subscriptions() -> None:
    store = make_store()
    with invalid("stage", "generate"):
        store.subscribe("generate", at_most=1)
    with error_about(StoreError, "'trian'"):
        store.subscribe("trian", at_most=1)
    with invalid("stage 'train': at_least, at_most", (2, 3)):
        store.subscribe("train", at_most=3, selection=whole_groups())
    train = store.subscribe("train", at_most=2)
    with invalid("stage", "train"):
        store.subscribe("train", at_most=2)
    with error_about(StoreError, "['score']"):
        store.add_group(0, node="n")
    with invalid("stage 'train': at_least", 2):
        train.take_now(at_least=2)


# Refused at the call


def test_bad_writes_name_row_column_and_rule() -> None:
    store, _, _ = running_store()
    rows = store.add_group(7, node="n")
    with error_about(StoreError, "['text']", "['tokens']"):
        store.write(
            "generate",
            rows,
            block=BlockRef("a", 0, 0, FOUR_BYTES._replace(columns=("text",))),
            versions=[(0, 0)] * 2,
            num_tokens=[1] * 2,
        )
    with error_about(StoreError, "2 rows", "[2]"):
        store.write("generate", rows, block=block(2), versions=[(0, 0)] * 2)
    with error_about(StoreError, "{'places': 3}"):
        generate_into(store, rows, block(3))
    with error_about(StoreError, "[0, 0]"):
        generate_into(store, rows, block(2), places=[0, 0])
    with error_about(StoreError, "[1, 2]"):
        generate_into(store, rows, block(2), places=[1, 2])
    with error_about(StoreError, "row 0 (group 7, index 0)", "12 bytes", "=10"):
        generate(store, rows, num_tokens=3)
    with error_about(StoreError, "row 9"):
        generate(store, [9])
    with error_about(StoreError, "[0, 0]"):
        generate(store, [0, 0])
    generate(store, rows)
    with error_about(StoreError, "'score': row 1 (group 7, index 1)"):
        store.write("score", [1], scalars={"reward": [1.0]})
    with error_about(StoreError, "row 0", "['tokens']"):
        generate(store, [0])


def generate_into(store: StreamStore, rows: range, into: BlockRef, **places: Any) -> None:
    store.write("generate", rows, block=into, versions=[(0, 0)] * 2, num_tokens=[1] * 2, **places)


def test_writes_to_rows_that_have_ended_are_refused() -> None:
    store, score, train = running_store()
    rows = store.add_group(7, node="n")
    generate(store, rows)
    assert score.take_now() is not None
    store.write("score", rows, scalars={"reward": [1.0, 2.0]})
    store.release("score", rows)
    assert train.take_now() is not None
    store.release("train", rows)
    with error_about(StoreError, "row 0"):
        generate(store, rows)
    with error_about(StoreError, "row 0"):
        store.release("train", rows)

    rows = store.add_group(7, node="n")
    generate(store, rows)
    assert score.take_now() is not None
    store.drop_group(7)
    assert not store.is_live(rows[0])
    with error_about(StoreError, "row 2 (group 7, index 0)"):
        store.write("score", rows, scalars={"reward": [1.0, 2.0]})
    with error_about(StoreError, "group 7"):
        store.drop_group(7)


def test_a_block_on_a_lost_shard_is_refused() -> None:
    freed: list[FreedRows] = []
    store, _, _ = running_store(on_free=freed.append)
    kept, hit = store.add_group(1, node="n"), store.add_group(2, node="n")
    generate(store, kept, shard="b")
    generate(store, hit[:1], shard="a")
    generate(store, hit[1:], shard="b", lease=5)
    assert store.lost("a") == [2]
    assert freed == [{"b": {5: 1}}]  # the rest of the group; nothing goes to a dead shard
    assert store.is_lost("a")
    assert not store.is_live(hit[1])
    with error_about(StoreError, "shard 'a'"):
        generate(store, store.add_group(2, node="n"), shard="a")
    assert store.lost("c") == []


def test_rows_that_are_being_read_are_freed_when_their_reader_is_done() -> None:
    freed: list[FreedRows] = []
    store, score, _ = running_store(on_free=freed.append)
    rows = store.add_group(0, node="n")
    generate(store, rows)
    assert score.take_now() is not None
    store.drop_group(0)
    assert freed == []  # their bytes may not be overwritten under the reader's eyes
    store.release("score", rows[:1])
    assert freed == [{"a": {0: 1}}]
    store.requeue("score", rows[1:])  # the other reader died: nobody gets the row again
    assert freed == [{"a": {0: 1}}, {"a": {0: 1}}]
    assert store.num_rows == store.bytes_reserved == 0
    assert score.take_now() is None


def test_parts_of_groups_are_not_given_back() -> None:
    store = make_store()
    score = store.subscribe("score", at_most=4, selection=whole_groups())
    store.subscribe("train", at_most=4)
    rows = store.add_group(3, node="n")
    generate(store, rows)
    assert score.take_now() is not None
    with error_about(StoreError, "{3: 1}"):
        store.requeue("score", rows[:1])
    store.write("score", rows[:1], scalars={"reward": [1.0]})
    with error_about(StoreError, "row 0"):
        store.requeue("score", rows)


# Waits


def test_a_waiting_stage_is_woken_by_the_write_that_completes_its_rows() -> None:
    async def run() -> None:
        store = make_store()
        score = store.subscribe("score", at_most=1)
        train = store.subscribe("train", at_least=4, at_most=4, selection=whole_groups())
        rows = [*store.add_group(0, node="n"), *store.add_group(1, node="n")]
        waiting = asyncio.create_task(train.take(timeout_s=5))
        scoring = [asyncio.create_task(score.take(timeout_s=5)) for _ in rows]
        await asyncio.sleep(0)  # all of them wait now
        generate(store, rows)  # one write, four waiting for a row each: all wake
        for number, batch in enumerate(await asyncio.gather(*scoring)):
            assert not waiting.done()
            store.write("score", batch.rows, scalars={"reward": [float(number)]})
        batch = await waiting
        assert batch.rows == rows
        assert batch.scalars == {"reward": [0.0, 1.0, 2.0, 3.0]}
        assert batch.cells["tokens"][3] == (block(4), 3)
        assert (batch.min_versions, batch.max_versions) == ([3] * 4, [4] * 4)

    asyncio.run(run())


def test_a_drop_lets_a_stage_in_issue_order_go_on() -> None:
    async def run() -> None:
        store = make_store()
        score = store.subscribe("score", at_most=2, selection=whole_groups(IN_ORDER))
        store.subscribe("train", at_most=2)
        store.add_group(0, node="n")
        generate(store, store.add_group(1, node="n"))
        waiting = asyncio.create_task(score.take(timeout_s=5))
        await asyncio.sleep(0)
        assert not waiting.done()
        store.drop_group(0)
        assert (await waiting).group_ids == [1, 1]

    asyncio.run(run())


def test_a_producer_waits_for_room_until_the_last_reader_is_done() -> None:
    async def run() -> None:
        store = make_store(max_bytes=20)  # one group
        score = store.subscribe("score", at_most=2)
        train = store.subscribe("train", at_most=2)
        rows = store.add_group(0, node="n")
        waiting = asyncio.create_task(store.more_room.until(lambda: store.room("n") == 2))
        generate(store, rows)
        assert await score.take(timeout_s=5)
        store.write("score", rows, scalars={"reward": [0.0, 0.0]})
        store.release("score", rows)
        assert await train.take(timeout_s=5)
        await asyncio.sleep(0)
        assert not waiting.done()
        store.release("train", rows)
        await waiting
        store.add_group(1, node="n")

    asyncio.run(run())


def test_waits_that_take_too_long_say_what_is_missing() -> None:
    async def run() -> None:
        store, _, train = running_store(max_bytes=20)
        generate(store, store.add_group(0, node="n")[:1])
        with error_about(TimeoutError, "0.01 s", "score 1, train 0"):
            await train.take(timeout_s=0.01)

    asyncio.run(run())


# Progress

selections = st.sampled_from([FIRST_COMPLETE, IN_ORDER, whole_groups(), whole_groups(IN_ORDER)])


@settings(max_examples=examples(300), deadline=None)
@given(
    max_groups=st.integers(1, 5),
    score=st.tuples(selections, st.integers(1, 5)),
    infer=st.tuples(selections, st.integers(1, 5)),
    train=st.tuples(selections, st.integers(1, 5)),
    order=st.randoms(use_true_random=False),
)
def test_whatever_is_accepted_never_gets_stuck(
    max_groups: int,
    score: tuple[Selection, int],
    infer: tuple[Selection, int],
    train: tuple[Selection, int],
    order: Any,
) -> None:
    """Rows of the largest size, a store that is always full, and every order of events.

    This fails without `check_progress` in `subscribe` within a few examples, such as max_groups=1
    and a stage that waits for five rows.
    """
    store = make_store(
        [
            GENERATE,
            SCORE,
            StageSpec(name="infer", reads=("tokens",), writes=("value",)),
            StageSpec(name="train", reads=("tokens", "reward", "value")),
        ],
        scalars=["reward", "value"],
        group_size=2,
        max_row_bytes=4,
        max_bytes=max_groups * 8,
    )
    written = {"score": "reward", "infer": "value"}
    stages = {"score": score, "infer": infer, "train": train}
    try:
        subscriptions = [
            store.subscribe(
                stage,
                at_least=units * (2 if selection.groups else 1),
                at_most=units * (2 if selection.groups else 1),
                selection=selection,
            )
            for stage, (selection, units) in stages.items()
        ]
    except ValueError:
        return
    ungenerated: list[int] = []
    num_added = num_trained = 0
    while num_trained < 40:
        happened = False
        for event in order.sample(range(5), 5):
            if event == 0 and store.room("n") >= 2:
                ungenerated += store.add_group(num_added, node="n")
                num_added += 1
                happened = True
            elif event == 1 and ungenerated:
                generate(store, [ungenerated.pop(order.randrange(len(ungenerated)))])
                happened = True
            elif event >= 2 and (batch := subscriptions[event - 2].take_now()):
                if batch.stage in written:
                    values = {written[batch.stage]: [0.0] * len(batch)}
                    store.write(batch.stage, batch.rows, scalars=values)
                store.release(batch.stage, batch.rows)
                num_trained += len(batch) if batch.stage == "train" else 0
                happened = True
        assert happened, f"stuck: {store.describe()}"


# Bytes that others read or keep


def test_pinned_rows_keep_their_bytes_until_they_are_unpinned() -> None:
    freed: list[FreedRows] = []
    store, score, train = running_store(on_free=freed.append)
    rows = store.add_group(0, node="n")
    generate(store, rows)
    store.pin(rows)
    store.drop_group(0)
    assert freed == []
    assert store.bytes_live == 8
    store.unpin(rows)
    assert freed == [{"a": {0: 2}}]
    assert store.bytes_live == store.bytes_reserved == 0
    assert score.take_now() is None
    assert train.take_now() is None


def test_a_pinned_row_that_everybody_has_read_is_freed_when_it_is_unpinned() -> None:
    freed: list[FreedRows] = []
    store = make_store(
        [GENERATE, StageSpec(name="train", reads=("tokens",))], scalars=[], on_free=freed.append
    )
    train = store.subscribe("train", at_most=8)
    rows = store.add_group(0, node="n")
    generate(store, rows)
    store.pin(rows)
    batch = train.take_now()
    assert batch is not None
    store.release("train", batch.rows)
    assert freed == []
    assert store.is_live(rows[0])
    store.unpin(rows)
    assert freed == [{"a": {0: 2}}]
    assert not store.is_live(rows[0])


def test_bytes_outside_of_rows_are_kept_from_a_dead_writers_reclaim() -> None:
    freed: list[FreedRows] = []
    store, _, _ = running_store(on_free=freed.append)
    part = block(1, lease=7)
    store.keep((part, 0))
    store.keep((part, 0))
    generate(store, store.add_group(0, node="n"), lease=7)
    assert store.live_rows("a") == {7: 4}
    store.release_kept([(part, 0)])
    assert freed == [{"a": {7: 1}}]
    assert store.live_rows("a") == {7: 3}
    store.lost("a")
    store.release_kept([(part, 0)])  # went with the shard
    store.keep((part, 0))
    assert store.live_rows("a") == {}
    assert len(freed) == 1


def test_whether_a_stage_has_written_all_of_some_rows() -> None:
    store, _, _ = running_store()
    rows = store.add_group(0, node="n")
    generate(store, rows[:1])
    assert store.has_written("generate", rows[:1])
    assert not store.has_written("generate", rows)
