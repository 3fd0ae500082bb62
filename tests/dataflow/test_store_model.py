"""StreamStore against a model, under any order of calls.

For each row, the model keeps the sets of stages that have written, taken and released it. They
determine the ready rows of each stage, the bytes, and the freed rows. The store must agree after
every call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rlsys.dataflow.store.blocks import BlockLayout, BlockRef, ColumnRef
from rlsys.dataflow.store.row_states import GroupRows
from rlsys.dataflow.store.selection import (
    FIRST_COMPLETE,
    IN_ORDER,
    OLDEST_VERSION_FIRST,
    Selection,
    length_bucketed,
    whole_groups,
)
from rlsys.dataflow.store.stream_store import (
    RowBatch,
    StageSpec,
    StoreError,
    StreamStore,
    Subscription,
)
from rlsys.dataflow.store.tensor_memory import FreedRows, Memory, NodeBudget
from tests.errors import error_about
from tests.tiers import examples

GROUP = 3
MAX_ROW_BYTES = 24  # 3 tokens and 3 log-probabilities
MAX_GROUPS = 4  # in all nodes
HOMES = ("x", "y")
HOME_BYTES = MAX_GROUPS // len(HOMES) * GROUP * MAX_ROW_BYTES

STAGES = [
    StageSpec(name="generate", writes=("tokens",)),
    StageSpec(name="infer", reads=("tokens",), writes=("logprobs",)),
    StageSpec(name="score", reads=("tokens",), writes=("reward",)),
    StageSpec(name="advantage", reads=("reward",), writes=("advantage",)),
    StageSpec(name="train", reads=("tokens", "logprobs", "advantage")),
]
TENSORS = {"generate": "tokens", "infer": "logprobs"}
SCALARS = {"score": "reward", "advantage": "advantage"}
UPSTREAM = {
    "infer": {"generate"},
    "score": {"generate"},
    "advantage": {"score"},
    "train": {"generate", "infer", "advantage"},
}


@dataclass
class Row:
    """The expected state of a row. `written`: the value of a scalar, or the cell of a tensor."""

    group_id: int
    node: str | None
    written: dict[str, float | ColumnRef] = field(default_factory=dict)  # by stage
    num_bytes: int = 0
    taken: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)
    is_dropped: bool = False

    @property
    def reserved(self) -> int:
        if self.node is None:
            return 0
        return self.num_bytes if self.written.keys() >= TENSORS.keys() else MAX_ROW_BYTES

    @property
    def in_flight(self) -> set[str]:
        return self.taken - self.released

    @property
    def is_needed(self) -> bool:
        return bool(self.in_flight) if self.is_dropped else self.released != UPSTREAM.keys()

    def is_open(self, stage: str) -> bool:
        return not self.is_dropped and stage not in self.taken

    def is_ready(self, stage: str) -> bool:
        return self.is_open(stage) and self.written.keys() >= UPSTREAM[stage]


EVERYTHING = set(range(99))
row_choices = st.sets(st.integers(0, GROUP * MAX_GROUPS - 1), min_size=1)


class StoreMachine(RuleBasedStateMachine):
    @initialize(
        infer=st.sampled_from([FIRST_COMPLETE, length_bucketed(), IN_ORDER]),
        train=st.sampled_from(
            [
                OLDEST_VERSION_FIRST,
                IN_ORDER,
                whole_groups(IN_ORDER),
                whole_groups(length_bucketed(OLDEST_VERSION_FIRST)),
            ]
        ),
        units=st.integers(1, 2),
        num_groups=st.integers(0, MAX_GROUPS),
        first=row_choices,
    )
    def start(
        self, infer: Selection, train: Selection, units: int, num_groups: int, first: set[int]
    ) -> None:
        self.rows: dict[int, Row] = {}  # all there ever were
        self.freed: Counter[tuple[str, int]] = Counter()
        self.due: Counter[tuple[str, int]] = Counter()  # of discarded bytes
        self.shard = 0  # the number of the one that is alive
        self.num_blocks = 0
        self.store = StreamStore(
            tensors=TENSORS.values(),
            scalars=SCALARS.values(),
            stages=STAGES,
            group_size=GROUP,
            max_bytes=HOME_BYTES,
            max_row_bytes=MAX_ROW_BYTES,
            on_free=self.on_free,
        )
        self.nodes = set(HOMES)  # where rows may be placed
        for node in HOMES:
            self.store.add_node(node)
        each = GROUP if train.groups else 1
        self.subscriptions: dict[str, Subscription] = {
            "infer": self.store.subscribe("infer", at_most=4, selection=infer),
            "score": self.store.subscribe("score", at_most=2),
            "advantage": self.store.subscribe("advantage", at_most=GROUP, selection=whole_groups()),
            "train": self.store.subscribe(
                "train", at_least=units * each, at_most=2 * each, selection=train
            ),
        }
        for number in range(num_groups):
            self.add_group(again=False, node=HOMES[number % 2])
        self.generate(first, [1, 2, 3])

    def on_free(self, freed: FreedRows) -> None:
        for shard, leases in freed.items():
            assert shard == f"shard-{self.shard}", "freed on a lost shard"
            for lease, num_rows in leases.items():
                self.freed[shard, lease] += num_rows

    # What the model expects.

    def live(self, keep: Callable[[Row], bool]) -> list[int]:
        return [r for r, row in self.rows.items() if not row.is_dropped and keep(row)]

    def num_available(self, stage: str) -> int:
        """Return the rows that a take could return."""
        selection = self.subscriptions[stage].selection
        each = GROUP if selection.groups else 1
        num_available = 0
        for start in range(0, len(self.rows), each):
            unit = [self.rows[row] for row in range(start, start + each)]
            if all(row.is_ready(stage) for row in unit):
                num_available += each
            elif selection.gapless and any(row.is_open(stage) for row in unit):
                break
        return num_available

    # What a controller does.

    @rule(again=st.booleans(), node=st.sampled_from([*HOMES, None]))
    def add_group(self, again: bool, node: str | None) -> None:
        """Add a new group, or one that has ended, which gets new rows."""
        in_store = {self.rows[row].group_id for row in self.live(lambda row: row.is_needed)}
        ended = sorted({row.group_id for row in self.rows.values()} - in_store)
        group_id = ended[0] if again and ended else 1000 + len(self.rows)
        if node is not None and self.room(node) < GROUP:
            with error_about(StoreError, f"group {group_id}:", f"'{node}'"):
                self.store.add_group(group_id, node=node)
            return
        if node is None and len(self.rows) > 200 * GROUP:  # they cost nothing
            return
        rows = self.store.add_group(group_id, node=node)
        assert list(rows) == list(range(len(self.rows), len(self.rows) + GROUP))
        self.rows |= {row: Row(group_id, node) for row in rows}

    @rule(choice=row_choices, node=st.sampled_from(HOMES))
    def place(self, choice: set[int], node: str) -> None:
        rows = chosen(self.live(lambda row: row.is_needed and row.node is None), choice)
        if self.room(node) < len(rows) or node not in self.nodes:
            with error_about(StoreError, f"'{node}'"):
                self.store.place(rows, node)
            return
        self.store.place(rows, node)
        for row in rows:
            self.rows[row].node = node

    @rule(choice=row_choices)
    def withdraw(self, choice: set[int]) -> None:
        """The replica of these rows has died."""
        rows = chosen(self.live(lambda row: row.node is not None and not row.written), choice)
        self.store.withdraw(rows)
        for row in rows:
            self.rows[row].node = None

    @rule(node=st.sampled_from(HOMES), there=st.booleans())
    def home_comes_or_goes(self, node: str, there: bool) -> None:
        if there:
            self.store.add_node(node)
            self.nodes.add(node)
        else:
            self.store.remove_node(node)
            self.nodes.discard(node)

    @rule(choice=row_choices, lengths=st.lists(st.integers(0, 3), min_size=12, max_size=12))
    def generate(self, choice: set[int], lengths: list[int]) -> None:
        rows = chosen(
            self.live(lambda row: row.node is not None and "generate" not in row.written), choice
        )
        self.write_tensors("generate", rows, lengths, with_dropped=True)

    @rule(stage=st.sampled_from(sorted(UPSTREAM)))
    def take(self, stage: str) -> None:
        self.check_take(stage, self.subscriptions[stage].take_now())

    @rule(release=st.booleans())
    def everybody_works(self, release: bool) -> None:
        for stage in UPSTREAM:
            self.take(stage)
            if stage != "train":
                self.write(stage, EVERYTHING, [2])
            if release:
                self.release(stage, EVERYTHING)

    @rule(
        stage=st.sampled_from(["infer", "score", "advantage"]),
        choice=row_choices,
        lengths=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    )
    def write(self, stage: str, choice: set[int], lengths: list[int]) -> None:
        rows = chosen(
            self.live(lambda row: stage in row.taken and stage not in row.written), choice
        )
        if stage in TENSORS:
            self.write_tensors(stage, rows, lengths)
        elif rows:
            values = [float(row) for row in rows]
            self.store.write(stage, rows, scalars={SCALARS[stage]: values})
            for row, value in zip(rows, values, strict=True):
                self.rows[row].written[stage] = value

    @rule(stage=st.sampled_from(sorted(UPSTREAM)), choice=row_choices)
    def release(self, stage: str, choice: set[int]) -> None:
        rows = chosen([r for r, row in self.rows.items() if stage in row.in_flight], choice)
        self.store.release(stage, rows)
        for row in rows:
            self.rows[row].released.add(stage)

    @rule(number=st.integers(0, 3), choice=row_choices)
    def worker_dies(self, number: int, choice: set[int]) -> None:
        """A worker of a stage dies, and its rows or groups are requeued."""
        holders = [name for name in UPSTREAM if self.held(name)]
        if not holders:
            return
        stage = holders[number % len(holders)]
        rows = [row for unit in chosen(self.held(stage), choice) for row in unit]
        self.store.requeue(stage, rows)
        for row in rows:
            if self.rows[row].is_dropped:
                self.rows[row].released.add(stage)
            else:
                self.rows[row].taken.remove(stage)

    @rule(choice=st.integers(0, MAX_GROUPS - 1))
    def drop_group(self, choice: int) -> None:
        group_ids = sorted({self.rows[r].group_id for r in self.live(lambda row: row.is_needed)})
        if group_ids:
            group_id = group_ids[choice % len(group_ids)]
            self.store.drop_group(group_id)
            self.mark_dropped([group_id])

    @precondition(lambda self: self.num_blocks > 3 * (self.shard + 1))
    @rule()
    def lose_shard(self) -> None:
        lost = f"shard-{self.shard}"
        cells = {row: self.cells(row) for row in self.live(lambda row: row.is_needed)}
        expected = {
            self.rows[row].group_id
            for row, of_row in cells.items()
            if any(block.shard == lost for block, _ in of_row)
        }
        self.shard += 1
        assert set(self.store.lost(lost)) == expected
        self.mark_dropped(expected)

    @precondition(lambda self: self.rows)
    @rule(choice=row_choices, stage=st.sampled_from(["infer", "score", "train", "generate"]))
    def break_a_rule(self, choice: set[int], stage: str) -> None:
        """Rejected calls change nothing: the invariants still hold."""
        row = chosen(list(self.rows), choice)[0]
        if stage == "score":
            model = self.rows[row]
            if "score" in model.written or "score" not in model.taken or model.is_dropped:
                with error_about(StoreError, f"row {row} "):
                    self.store.write("score", [row], scalars={"reward": [9.0]})
        elif stage == "generate":
            with error_about(StoreError, f"row {len(self.rows)} "):
                self.store.release("score", [len(self.rows)])
        elif stage not in self.rows[row].in_flight:
            with error_about(StoreError, f"row {row} "):
                self.store.release(stage, [row])

    @invariant()
    def store_agrees(self) -> None:
        if not hasattr(self, "store"):
            return
        needed = [row for row in self.rows.values() if row.is_needed]
        assert self.store.num_rows == len(needed)
        assert self.store.bytes_live == sum(row.num_bytes for row in needed)
        assert self.store.bytes_reserved == sum(row.reserved for row in needed)
        assert self.store.bytes_live <= self.store.bytes_reserved
        for node in HOMES:
            assert self.reserved(node) <= HOME_BYTES
            assert self.store.room(node) == self.room(node)
        assert set(self.store.nodes) == self.nodes
        here = f"shard-{self.shard}"
        expected = self.due.copy()
        live: Counter[int] = Counter()
        for number, row in self.rows.items():
            for block, _ in self.cells(number):
                if row.is_needed and block.shard == here:
                    live[block.lease] += 1
                elif not row.is_needed:
                    expected[block.shard, block.lease] += 1
        assert {at: n for at, n in self.freed.items() if at[0] == here} == {
            at: n for at, n in expected.items() if at[0] == here
        }
        assert self.store.live_rows(here) == live

    def teardown(self) -> None:
        """Every schedule drains: all rows can be completed, and all are freed.

        If an early row has no room, later rows are dropped, as the controller does.
        """
        if not hasattr(self, "store"):
            return
        for node in HOMES:
            self.home_comes_or_goes(node, there=True)
        while self.store.num_rows:
            before = self.store.describe()
            for row in self.live(lambda row: row.is_needed and row.node is None):
                last = max(self.live(lambda row: row.is_needed and row.node is not None), default=0)
                if not any(map(self.room, HOMES)) and last > row:
                    self.store.drop_group(self.rows[last].group_id)
                    self.mark_dropped({self.rows[last].group_id})
                if not self.rows[row].is_needed:
                    continue
                if nodes := [node for node in HOMES if self.room(node)]:
                    self.store.place([row], nodes[0])
                    self.rows[row].node = nodes[0]
            rows = self.live(lambda row: row.node is not None and "generate" not in row.written)
            self.write_tensors("generate", rows, [1])
            for stage in UPSTREAM:
                each = GROUP if self.subscriptions[stage].selection.groups else 1
                self.check_take(stage, self.subscriptions[stage].take_now(at_least=each), each)
                if stage != "train":
                    self.write(stage, EVERYTHING, [1])
                self.release(stage, EVERYTHING)
            assert self.store.describe() != before, f"stuck: {before}"
        self.store_agrees()

    # Helpers of the rules.

    def reserved(self, node: str) -> int:
        needed = (row for row in self.rows.values() if row.is_needed and row.node == node)
        return sum(row.reserved for row in needed)

    def room(self, node: str) -> int:
        free = HOME_BYTES - self.reserved(node)
        return free // MAX_ROW_BYTES if node in self.nodes else 0

    def cells(self, row: int) -> list[ColumnRef]:
        written = self.rows[row].written
        return [written[s] for s in TENSORS if s in written]  # type: ignore[misc]

    def held(self, stage: str) -> list[range]:
        """Return rows, or whole groups, that the stage has taken and not written."""
        each = GROUP if self.subscriptions[stage].selection.groups else 1
        return [
            range(start, start + each)
            for start in range(0, len(self.rows), each)
            if all(
                stage in self.rows[row].in_flight and stage not in self.rows[row].written
                for row in range(start, start + each)
            )
        ]

    def mark_dropped(self, group_ids: Iterable[int]) -> None:
        for row in self.rows.values():
            if row.group_id in group_ids and not row.is_dropped:
                row.is_dropped = row.is_needed

    def write_tensors(
        self, stage: str, rows: Sequence[int], lengths: Sequence[int], with_dropped: bool = False
    ) -> None:
        """Write in one block, in reverse order; its first place belongs to a dropped row."""
        if not rows:
            return
        extra = int(with_dropped)
        sizes = np.resize(np.array(lengths, np.int32), len(rows) + extra)
        layout = BlockLayout((TENSORS[stage],), ("int32",), sizes.tobytes())
        block = BlockRef(f"shard-{self.shard}", self.num_blocks, 0, layout)
        self.num_blocks += 1
        places = list(reversed(range(extra, len(rows) + extra)))
        versions = [(place, place + 1) for place in places]
        self.store.write(
            stage,
            rows,
            block=block,
            places=places,
            versions=versions if stage == "generate" else None,
            num_tokens=[int(sizes[place]) for place in places] if stage == "generate" else None,
        )
        if with_dropped:
            self.store.discard(block, [0])
            self.due[block.shard, block.lease] += 1
        for row, place in zip(rows, places, strict=True):
            self.rows[row].written[stage] = (block, place)
            self.rows[row].num_bytes += 4 * int(sizes[place])

    def check_take(self, stage: str, batch: RowBatch | None, at_least: int | None = None) -> None:
        subscription = self.subscriptions[stage]
        num_available = self.num_available(stage)
        if num_available < (at_least or subscription.at_least):
            assert batch is None
            return
        assert batch is not None, f"{stage} was not given any of {num_available} rows"
        assert len(batch) == min(num_available, subscription.at_most)
        for i, number in enumerate(batch.rows):
            row = self.rows[number]
            assert row.is_ready(stage), f"{stage} was given row {number}: {row}"
            assert (batch.group_ids[i], batch.indices[i]) == (row.group_id, number % GROUP)
            for writer in UPSTREAM[stage]:
                if writer in TENSORS:
                    assert batch.cells[TENSORS[writer]][i] == row.written[writer]
                else:
                    assert batch.scalars[SCALARS[writer]][i] == row.written[writer]
            row.taken.add(stage)


T = TypeVar("T")


def chosen(items: Sequence[T], choice: set[int]) -> list[T]:
    """Return the items at the chosen places, modulo their number."""
    return [items[i] for i in sorted({i % len(items) for i in choice})] if items else []


EXAMPLES = settings(max_examples=examples(150), stateful_step_count=50, deadline=None)


def test_store_agrees_with_the_model() -> None:
    run_state_machine_as_test(StoreMachine, settings=EXAMPLES)


def admits_by_live_bytes(self: Memory, node: NodeBudget) -> int:
    return (self.max_bytes - node.bytes_live) // self.max_row_bytes


def frees_under_the_readers_eyes(self: GroupRows, index: int) -> bool:
    return False


@pytest.mark.parametrize(
    ("owner", "method", "mutation"),
    [
        (Memory, "room", admits_by_live_bytes),
        (GroupRows, "in_flight", frees_under_the_readers_eyes),
    ],
)
def test_the_model_notices_mutations(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, mutation: object
) -> None:
    """The test above fails if a rule of the store is broken."""
    monkeypatch.setattr(owner, method, mutation)
    with pytest.raises((AssertionError, StoreError, pytest.fail.Exception)):
        run_state_machine_as_test(
            StoreMachine, settings=settings(EXAMPLES, phases=[Phase.generate], database=None)
        )
