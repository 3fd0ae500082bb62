"""Boxes, and grids of them, by hand and against sets of elements."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlsys.reallocation.box_grid import Grid
from rlsys.reallocation.shards import Box
from tests.reallocation.plan_harness import box

SIZE = 5
spans = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(
    lambda pair: (min(pair), max(pair))
)
pairs = st.integers(0, 3).flatmap(
    lambda num_dims: st.tuples(*[st.tuples(*[spans] * num_dims).map(Box)] * 2)
)


def elements(one: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(start, stop) for start, stop in one.bounds)))


def test_overlap_and_rest_by_hand() -> None:
    one, other = box((0, 4), (0, 4)), box((2, 6), (1, 3))
    assert one.overlap(other) == box((2, 4), (1, 3))
    assert one.without(other) == [
        box((0, 2), (0, 4)),
        box((2, 4), (0, 1)),
        box((2, 4), (3, 4)),
    ]
    assert one.overlap(box((4, 6), (0, 4))) is None
    assert box((2, 4), (1, 3)).slices_in(box((2, 6), (1, 3))) == (slice(0, 2), slice(0, 2))


@given(pairs)
def test_overlap_and_rest_are_those_of_elements(both: tuple[Box, Box]) -> None:
    one, other = both
    shared = one.overlap(other)
    assert (elements(shared) if shared else set()) == elements(one) & elements(other)
    rest = one.without(other)
    assert all(piece.num_elements for piece in rest)
    assert sum(piece.num_elements for piece in rest) == len(elements(one) - elements(other))
    assert set().union(*map(elements, rest)) == elements(one) - elements(other)


def test_cells_of_a_grid_by_hand() -> None:
    """The boxes are rows 0:2 and 1:3 of three, with all columns."""
    grid = Grid([box((0, 2), (0, 4)), box((1, 3), (0, 4))])
    found = {covering: grid.boxes(cells) for covering, cells in grid.classes()}
    assert found == {
        (0,): [box((0, 1), (0, 4))],
        (0, 1): [box((1, 2), (0, 4))],
        (1,): [box((2, 3), (0, 4))],
    }


@given(
    st.integers(0, 3).flatmap(
        lambda num_dims: st.lists(st.tuples(*[spans] * num_dims).map(Box), min_size=1, max_size=5)
    )
)
def test_cells_of_a_grid_are_those_of_elements(boxes: list[Box]) -> None:
    boxes = [one for one in boxes if one.num_elements]
    if not boxes:
        return
    grid = Grid(boxes)
    seen: set[tuple[int, ...]] = set()
    for covering, cells in grid.classes():
        pieces = grid.boxes(cells)
        inside = set().union(*map(elements, pieces))
        assert len(inside) == sum(piece.num_elements for piece in pieces)
        assert not inside & seen
        seen |= inside
        for place in inside:
            assert tuple(n for n, one in enumerate(boxes) if place in elements(one)) == covering
    # Cells between boxes are in none of them.
    assert seen >= set().union(*map(elements, boxes))


def test_few_boxes_make_up_an_odd_shape() -> None:
    grid = Grid([box((0, 4), (0, 1)), box((3, 4), (0, 4))])
    cells = np.concatenate([cells for covering, cells in grid.classes() if covering])
    assert grid.boxes(cells) == [box((0, 3), (0, 1)), box((3, 4), (0, 4))]
