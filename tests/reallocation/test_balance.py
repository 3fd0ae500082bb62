"""Assignment of bytes to ranks, by hand; balance in general is tested on whole plans."""

from __future__ import annotations

import numpy as np

from rlsys.reallocation.balance import Line, Run, spread
from tests.reallocation.plan_harness import box


def run(num_tensors: int, *bounds: tuple[int, int], group: int = 0) -> Run:
    return Run(group=group, first=0, stop=num_tensors, box=box(*bounds), itemsize=1)


def test_the_least_loaded_ranks_get_the_bytes() -> None:
    """Loads are 0, 4 and 10, and any rank could take 6 bytes: they get 5, 1 and 0."""
    loads = np.array([0.0, 4.0, 10.0])
    [assigned] = spread([Line((0, 1, 2), [run(1, (0, 6))])], loads, finest_bytes=1)
    assert [(rank, one.box) for rank, one in assigned] == [(0, box((0, 5))), (1, box((5, 6)))]
    assert loads.tolist() == [5.0, 5.0, 10.0]


def test_lines_with_a_choice_avoid_the_rank_of_a_line_without() -> None:
    """Only rank 1 can take 8 bytes, so ranks 0 and 2 take the other 16."""
    loads = np.zeros(3)
    lines = [
        Line((0, 1), [run(1, (0, 8))]),
        Line((1,), [run(1, (0, 8))]),
        Line((1, 2), [run(1, (0, 8))]),
    ]
    assigned = spread(lines, loads, finest_bytes=1)
    assert loads.tolist() == [8.0, 8.0, 8.0]
    assert [[rank for rank, _ in of] for of in assigned] == [[0], [1], [2]]


def test_lines_are_cut_between_tensors_where_these_are_small() -> None:
    """Five tensors of 6 bytes, pieces of at least 4 bytes: the third tensor is not cut."""
    loads = np.zeros(2)
    [assigned] = spread([Line((0, 1), [run(5, (0, 6))])], loads, finest_bytes=4)
    assert sorted(one.stop - one.first for _, one in assigned) == [2, 3]
    loads = np.zeros(2)
    [assigned] = spread([Line((0, 1), [run(5, (0, 1), (0, 6))])], loads, finest_bytes=3)
    assert [(rank, one.first, one.stop, one.box) for rank, one in assigned] == [
        (0, 0, 2, box((0, 1), (0, 6))),
        (0, 2, 3, box((0, 1), (0, 3))),
        (1, 2, 3, box((0, 1), (3, 6))),
        (1, 3, 5, box((0, 1), (0, 6))),
    ]
    assert loads.tolist() == [15.0, 15.0]


def test_bytes_count_as_often_as_they_are_sent() -> None:
    """4 bytes to three nodes count as 12 bytes to one."""
    loads = np.zeros(2)
    lines = [Line((0,), [run(1, (0, 4))], times=3), Line((0, 1), [run(1, (0, 12))])]
    assert [[rank for rank, _ in of] for of in spread(lines, loads, finest_bytes=1)] == [[0], [1]]
    assert loads.tolist() == [12.0, 12.0]


def test_the_next_line_balances_the_last_one() -> None:
    """Three tensors that cannot be cut, twice: each rank gets two and one."""
    loads = np.zeros(2)
    lines = [Line((0, 1), [run(3, (0, 4))]), Line((0, 1), [run(3, (0, 4), group=1)])]
    spread(lines, loads, finest_bytes=4)
    assert loads.tolist() == [12.0, 12.0]
