"""Reallocation plans, by hand and for random layouts, element by element."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config.parallel_layout import ParallelLayout
from rlsys.errors import NOT_GIVEN
from rlsys.reallocation.plan import FINEST_BYTES, Import, Read, ReallocationPlan, plan
from rlsys.reallocation.shards import Box, Holder, TensorShard
from rlsys.reallocation.traffic import Traffic, minimal_bytes
from scripts.bench.weights import Weight, dense_model, replicas, trainer
from tests.errors import invalid
from tests.reallocation.plan_harness import box, check, holder, holding
from tests.tiers import examples

TOP, BOTTOM = box((0, 2), (0, 4)), box((2, 4), (0, 4))
LEFT, RIGHT = box((0, 4), (0, 2)), box((0, 4), (2, 4))


def matrix(part: Box | None = None, dtype: torch.dtype = torch.float32) -> TensorShard:
    return holding("w", (4, 4), part, dtype)


def test_targets_read_the_shards_that_ranks_of_their_node_stage() -> None:
    sources = (holder("t0", "a", matrix(TOP)), holder("t1", "a", matrix(BOTTOM)))
    targets = (holder("r0", "a", matrix()), holder("r1", "a", matrix(LEFT)))
    found = plan(sources, targets)
    [top], [bottom] = found.staged("t0"), found.staged("t1")
    assert (top.box, top.offset, top.nodes) == (TOP, 0, ())
    assert bottom.box == BOTTOM
    assert found.imports("a") == []
    assert found.reads("r0") == [Read(0, TOP, top), Read(0, BOTTOM, bottom)]
    assert found.reads("r1") == [
        Read(0, box((0, 2), (0, 2)), top),
        Read(0, box((2, 4), (0, 2)), bottom),
    ]
    # 16 numbers of 4 bytes are staged; r0 reads all, r1 half of them.
    least = Traffic(staged={"a": 64}, imported={}, read={"r0": 64, "r1": 32})
    assert found.bytes_per_link == minimal_bytes(sources, targets) == least
    check(found, sources, targets)


def test_a_node_imports_once_for_all_of_its_targets() -> None:
    sources = (holder("t0", "a", matrix(TOP)), holder("t1", "b", matrix(BOTTOM)))
    targets = tuple(holder(f"r{n}", node, matrix()) for n, node in enumerate("abb"))
    found = plan(sources, targets)
    [top], [bottom] = found.staged("t0"), found.staged("t1")
    assert (top.nodes, bottom.nodes) == (("b",), ("a",))
    [into_b] = found.imports("b")
    assert into_b == Import(top, replace(top, buffer="b", nodes=()))
    assert [read.origin for read in found.reads("r2")] == [into_b.here, bottom]
    assert found.put == {(t, node): 32 for t in ("t0", "t1") for node in ("a", "b")}
    check(found, sources, targets)


def test_copies_on_each_node_stay_there() -> None:
    sources = (holder("t0", "a", matrix()), holder("t1", "b", matrix()))
    targets = (holder("r0", "a", matrix()), holder("r1", "b", matrix(TOP)))
    found = plan(sources, targets)
    assert found.bytes_per_link.imported == {}
    assert found.put == {("t0", "a"): 64, ("t1", "b"): 32}
    check(found, sources, targets)


def test_copies_share_what_is_sent() -> None:
    sources = (holder("t0", "a", matrix()), holder("t1", "b", matrix()))
    targets = (holder("r0", "c", matrix()), holder("r1", "d", matrix()))
    found = plan(sources, targets, finest_bytes=1)
    assert [one.box for one in found.staged("t0")] == [TOP]
    assert [one.box for one in found.staged("t1")] == [BOTTOM]
    assert set(found.put.values()) == {32}
    check(found, sources, targets)
    # By default such small pieces are not cut.
    coarse = plan(sources, targets)
    assert [len(coarse.staged(rank)) for rank in ("t0", "t1")] in ([0, 1], [1, 0])
    check(coarse, sources, targets)


def test_small_tensors_are_shared_whole() -> None:
    norms = [holding(f"layers.{n}.norm", (8,)) for n in range(5)]
    big = holding("w", (4, 4), TOP), holding("w", (4, 4), BOTTOM)
    sources = tuple(holder(f"t{n}", "a", *norms, big[n]) for n in range(2))
    targets = (holder("r0", "a", *norms, matrix()),)
    found = plan(sources, targets)
    staged = [[one.name for one in found.staged(f"t{n}")] for n in range(2)]
    assert sorted(map(len, staged)) == [3, 4]
    assert {"w", "layers.0.norm", "layers.1.norm"} <= {*staged[0]}
    check(found, sources, targets)


def test_a_rank_does_not_read_what_it_holds() -> None:
    """From dp2 to tp2 on the same ranks, each keeps a quarter and gets a quarter."""
    sources = (holder("t0", "a", matrix(TOP)), holder("t1", "a", matrix(BOTTOM)))
    targets = (holder("t0", "a", matrix(LEFT)), holder("t1", "a", matrix(RIGHT)))
    found = plan(sources, targets)
    [kept, got] = found.reads("t0")
    assert (kept.box, kept.origin) == (box((0, 2), (0, 2)), matrix(TOP))
    assert (got.box, got.origin) == (box((2, 4), (0, 2)), found.staged("t1")[0])
    assert [one.box for one in found.staged("t0")] == [box((0, 2), (2, 4))]
    assert found.bytes_per_link == Traffic(staged={"a": 32}, imported={}, read={"t0": 16, "t1": 16})
    check(found, sources, targets)
    same = plan(sources, sources)
    assert same.bytes_per_link.total == 0
    assert same.describe().count("\n") == 0


def test_bytes_are_counted_in_the_wanted_precision() -> None:
    sources = (holder("t0", "a", matrix()),)
    targets = (
        holder("r0", "b", matrix(dtype=torch.bfloat16)),
        holder("r1", "b", matrix(TOP, torch.float16), matrix(LEFT, torch.bfloat16)),
    )
    found = plan(sources, targets)
    # All of it in bfloat16, its upper half in float16.
    assert found.put == {("t0", "b"): 16 * 2 + 8 * 2}
    check(found, sources, targets)


def test_scalars_and_empty_boxes() -> None:
    scalar, nothing = holding("scale", ()), holding("none", (0, 3))
    rest = matrix(box((4, 4), (0, 4)))  # a tensor with fewer rows than ranks
    sources = (holder("t0", "a", scalar, nothing, matrix()), holder("t1", "a", rest))
    targets = (holder("r0", "b", scalar, nothing, matrix(box((1, 1), (0, 4))), matrix(TOP)),)
    found = plan(sources, targets)
    assert [(one.name, one.offset) for one in found.staged("t0")] == [("scale", 0), ("w", 64)]
    assert found.staged("t1") == []
    check(found, sources, targets)


def test_tensors_on_two_stages_are_one() -> None:
    """A head that is tied to the embedding is on both ends of a pipeline."""
    tied, layer = holding("embed", (4, 4)), holding("layer", (4, 4))
    sources = (holder("t0", "a", tied), holder("t1", "b", layer, tied))
    targets = (holder("r0", "c", layer, tied),)
    found = plan(sources, targets)
    assert found.put == {("t0", "c"): 64, ("t1", "c"): 64}
    check(found, sources, targets)


def test_four_ranks_to_two_on_two_nodes_by_hand() -> None:
    """Move dp2tp2, a node for each half of the rows, to two replicas of tp2.

    The model is a matrix [8, 4] cut along columns, and a norm [4] that tensor ranks hold whole.
    """
    model = [Weight(name="w", shape=(8, 4), cut=1), Weight(name="norm", shape=(4,))]
    sources = trainer(ParallelLayout.parse("dp2tp2"), model, ranks_per_node=2)
    engines = trainer(ParallelLayout.parse("dp2x1tp2"), model, name="engine", ranks_per_node=2)
    targets = tuple(replace(one, node=one.node.replace("engine", "trainer")) for one in engines)
    found = plan(sources, targets)
    # Each rank holds 8 of the 32 numbers, and each node needs all of them.
    least = Traffic(
        staged={"trainers-0": 64 + 8, "trainers-1": 64 + 8},
        imported={"trainers-0": 64 + 8, "trainers-1": 64 + 8},
        read={f"engine-{n}": 64 + 16 for n in range(4)},
    )
    assert found.bytes_per_link == minimal_bytes(sources, targets) == least
    check(found, sources, targets)


def test_plans_are_cached() -> None:
    sources, targets = (holder("t0", "a", matrix()),), (holder("r0", "a", matrix()),)
    again = (holder("t0", "a", matrix()),)
    assert plan(sources, targets) is plan(again, targets)
    others = (holder("r0", "a", matrix(TOP)),)
    assert plan(sources, others) is not plan(sources, targets)
    assert plan(sources, others).bytes_per_link.total == 64


def test_a_table_by_hand() -> None:
    """64 MiB, half on each of two nodes, go to whole copies on one of them and on a third."""
    shape = (2**12, 2**12)
    half = 2**11
    sources = tuple(
        holder(
            f"t{n}", f"node-{n}", holding("w", shape, box((n * half, n * half + half), (0, 2**12)))
        )
        for n in range(2)
    )
    targets = tuple(
        holder(f"r{n}", node, holding("w", shape))
        for n, node in enumerate(("node-0", "node-0", "other"))
    )
    assert plan(sources, targets).describe().splitlines() == [
        "node-0                32.0 MiB  staged by 1 rank",
        "node-0 -> other       32.0 MiB  sent by 1 rank",
        "node-1 -> node-0      32.0 MiB  sent by 1 rank",
        "node-1 -> other       32.0 MiB  sent by 1 rank",
        "node-0               128.0 MiB  read by 2 targets, at most 64.0 MiB each",
        "other                 64.0 MiB  read by 1 target",
    ]


@pytest.mark.parametrize(
    ("sources", "targets", "field", "value", "words"),
    [
        ([matrix()], [holding("v", (4, 4))], "tensors of the targets", ["v"], "r0"),
        ([matrix(), holding("v", (2,))], [matrix()], "tensors of the sources", ["v"], ""),
        ([matrix()], [holding("w", (5, 4))], "shape of tensor w", (5, 4), "(4, 4) on t0"),
        ([matrix()], [matrix(dtype=torch.int64)], "precision of tensor w", "int64", "r0"),
        ([matrix(TOP)], [matrix()], "tensor w", NOT_GIVEN, "[2:4, 0:4]"),
    ],
)
def test_sides_of_different_models(
    sources: Sequence[TensorShard],
    targets: Sequence[TensorShard],
    field: str,
    value: object,
    words: str,
) -> None:
    one, other = (holder("t0", "a", *sources),), (holder("r0", "a", *targets),)
    with invalid(field, value) as refused:
        plan(one, other)
    assert words in refused.value.rule


def test_ranks_and_nodes_must_be_distinct() -> None:
    one = holder("t0", "a", matrix())
    other = holder("t1", "a", matrix(dtype=torch.bfloat16))
    cases: list[tuple[tuple[Holder, ...], tuple[Holder, ...], str, object]] = [
        ((one, one), (), "rank", "t0"),
        ((one,), (holder("t0", "b", matrix()),), "node of rank t0", "b"),
        ((one,), (holder("a", "b", matrix()),), "names", ["a"]),
        ((one, other), (), "precision of tensor w", "bfloat16"),
    ]
    for sources, targets, field, value in cases:
        with invalid(field, value):
            plan(sources, targets)


# Random layouts.

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Draw boxes that partition a tensor, some of them maybe empty."""
    boxes: list[tuple[tuple[int, int], ...]] = [()]
    for size in shape:
        edges = sorted([0, *draw(st.lists(st.integers(0, size), max_size=2)), size])
        spans = list(pairwise(edges))
        boxes = [(*one, span) for one in boxes for span in spans]
    return [Box(bounds) for bounds in boxes]


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    bounds = []
    for size in shape:
        bounds.append(tuple(sorted(draw(st.tuples(*[st.integers(0, size)] * 2)))))
    return Box(tuple((start, stop) for start, stop in bounds))


@st.composite
def sides(draw: st.DrawFn) -> tuple[tuple[Holder, ...], tuple[Holder, ...]]:
    """Draw sources and targets with any boxes of some tensors on any ranks.

    Some tensors are layers with the same sharding. Ranks may hold a part already, or several boxes.
    """
    nodes = {rank: draw(st.sampled_from("abc")) for rank in ("r0", "r1", "r2", "r3", "r4", "r5")}
    ranks = list(nodes)[: draw(st.integers(1, 6))]
    receivers = draw(st.lists(st.sampled_from(list(nodes)), min_size=1, unique=True))
    held: dict[str, list[TensorShard]] = {rank: [] for rank in ranks}
    wanted: dict[str, list[TensorShard]] = {rank: [] for rank in receivers}
    for number in range(draw(st.integers(1, 2))):
        shape = draw(SHAPES)
        names = [f"{number}.{layer}" for layer in range(draw(st.integers(1, 3)))]
        for part in draw(partitions(shape)):
            for rank in draw(st.lists(st.sampled_from(ranks), min_size=1, unique=True)):
                held[rank] += [holding(name, shape, part) for name in names]
        for place, rank in enumerate(receivers):
            boxes = draw(st.lists(parts(shape), max_size=2))
            for part in boxes if boxes or place else [Box.whole(shape)]:
                dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
                wanted[rank] += [holding(name, shape, part, dtype) for name in names]
    return (
        tuple(holder(rank, nodes[rank], *found) for rank, found in held.items()),
        tuple(holder(rank, nodes[rank], *found) for rank, found in wanted.items()),
    )


@settings(deadline=None, max_examples=examples(200))
@given(both=sides(), finest_bytes=st.sampled_from([1, 16, FINEST_BYTES]))
def test_any_boxes(both: tuple[tuple[Holder, ...], tuple[Holder, ...]], finest_bytes: int) -> None:
    sources, targets = both
    found = plan(sources, targets, finest_bytes=finest_bytes)
    check(found, sources, targets)
    assert minimal_bytes(sources, targets) == found.bytes_per_link
    again = plan.__wrapped__(sources, targets, finest_bytes=finest_bytes)
    assert everything(again, sources, targets) == everything(found, sources, targets)
    assert found.describe()


def everything(
    found: ReallocationPlan, sources: Sequence[Holder], targets: Sequence[Holder]
) -> object:
    return (
        [found.staged(one.rank) for one in sources],
        [found.imports(node) for node in sorted({one.node for one in (*sources, *targets)})],
        [found.reads(one.rank) for one in targets],
    )


layouts = st.builds(
    ParallelLayout,
    dp_replicate=st.integers(1, 2),
    dp_shard=st.integers(1, 3),
    tp=st.integers(1, 2),
    pp=st.integers(1, 2),
    cp=st.integers(1, 2),
    ep=st.integers(1, 2),
)
MODEL = [
    Weight(name="embed", shape=(6, 4), cut=0),
    *(
        Weight(name=f"{layer}.{name}", shape=shape, cut=cut, layer=layer, is_expert=is_expert)
        for layer in range(4)
        for name, shape, cut, is_expert in (
            ("q", (4, 6), 0, False),
            ("o", (6, 4), 1, False),
            ("norm", (5,), None, False),
            ("scale", (), None, False),
            ("experts", (8, 2, 3), 0, True),
        )
    ),
    Weight(name="norm", shape=(5,), is_last=True),
]


@settings(deadline=None, max_examples=40)
@given(
    before=layouts,
    after=layouts,
    nodes=st.tuples(*[st.integers(1, 5)] * 2),
    same=st.booleans(),
)
def test_any_layouts(
    before: ParallelLayout, after: ParallelLayout, nodes: tuple[int, int], same: bool
) -> None:
    """Change the layout of the trainer's ranks, or send to other ranks on some of its nodes."""
    sources = trainer(before, MODEL, ranks_per_node=nodes[0])
    to = trainer(after, MODEL, dtype=torch.bfloat16, name="engine", ranks_per_node=nodes[1])
    if same:
        node_of = {one.rank: one.node for one in sources}
        renamed = [(one.rank.replace("engine", "trainer"), one) for one in to]
        targets = tuple(
            Holder(rank, node_of.get(rank, one.node), one.holdings) for rank, one in renamed
        )
    else:
        targets = tuple(replace(one, node=one.node.replace("engine", "trainer")) for one in to)
    found = plan(sources, targets)
    check(found, sources, targets)
    assert minimal_bytes(sources, targets) == found.bytes_per_link


# Boxes are multiples of so many elements, much larger than FINEST_BYTES.
UNIT = 2**12


@st.composite
def copies(draw: st.DrawFn) -> tuple[tuple[Holder, ...], dict[str, list[tuple[Box, list[str]]]]]:
    """Draw ranks that hold copies of boxes, and for each box its ranks."""
    ranks = [f"r{n}" for n in range(draw(st.integers(1, 5)))]
    held: dict[str, list[TensorShard]] = {rank: [] for rank in ranks}
    of_tensor: dict[str, list[tuple[Box, list[str]]]] = {}
    for number in range(draw(st.integers(1, 3))):
        shape = (draw(st.integers(1, 4)) * UNIT, draw(st.integers(1, 2)) * UNIT)
        units = tuple(size // UNIT for size in shape)
        for part in draw(partitions(units)):
            large = Box(tuple((start * UNIT, stop * UNIT) for start, stop in part.bounds))
            holders = draw(st.lists(st.sampled_from(ranks), min_size=1, unique=True))
            for rank in holders:
                held[rank].append(holding(str(number), shape, large))
            of_tensor.setdefault(str(number), []).append((large, sorted(holders)))
    return tuple(holder(rank, "a", *found) for rank, found in held.items()), of_tensor


@settings(deadline=None, max_examples=examples(100))
@given(both=copies(), num_nodes=st.integers(0, 2))
def test_copies_share_the_work(
    both: tuple[tuple[Holder, ...], dict[str, list[tuple[Box, list[str]]]]], num_nodes: int
) -> None:
    """No rank moves over 10 % more bytes than the busiest rank of the best plan.

    All is sent to `num_nodes` nodes, or stays on the node.
    """
    sources, of_tensor = both
    names = {one.name: one.shape for each in sources for one in each.holdings}
    whole = [holding(name, shape) for name, shape in names.items()]
    targets = tuple(
        holder(f"t{n}", f"b{n}" if num_nodes else "a", *whole) for n in range(num_nodes or 1)
    )
    found = plan(sources, targets)
    pieces = [(held.num_elements * 4, ranks) for some in of_tensor.values() for held, ranks in some]
    loads = {one.rank: 0 for one in sources}
    for (rank, _), num_bytes in found.put.items():
        loads[rank] += num_bytes
    assert sum(loads.values()) == max(1, num_nodes) * sum(num_bytes for num_bytes, _ in pieces)
    # Only these ranks can stage what no other rank holds.
    least = max(
        max(1, num_nodes) * sum(n for n, ranks in pieces if {*ranks} <= {*some}) / len(some)
        for count in range(1, len(loads) + 1)
        for some in combinations(loads, count)
    )
    assert max(loads.values()) <= 1.1 * least


def test_many_ranks_are_planned_fast() -> None:
    """Plan 256 sources and 32 replicas; scripts/bench/weights.py plans more."""
    model = dense_model(18)
    sources, targets = trainer(ParallelLayout.parse("dp32tp8"), model), replicas(32, 8, model)
    start = time.process_time()
    found = plan(sources, targets)
    assert time.process_time() - start < 3
    assert found.bytes_per_link == minimal_bytes(sources, targets)
