"""Who stages how much, by hand; that it is even in general is told of whole plans."""

from __future__ import annotations

import numpy as np

from rlsys.reallocation.balance import Line, Run, spread
from tests.reallocation.plan_harness import box


def run(num_tensors: int, *bounds: tuple[int, int], group: int = 0) -> Run:
    return Run(group=group, first=0, stop=num_tensors, box=box(*bounds), itemsize=1)


def test_what_ranks_share_goes_where_least_is() -> None:
    """Loads 0, 4 and 10, and 6 bytes that any of them could take: 5 and 1."""
    loads = np.array([0.0, 4.0, 10.0])
    [taken] = spread([Line((0, 1, 2), [run(1, (0, 6))])], loads, finest_bytes=1)
    assert [(rank, one.box) for rank, one in taken] == [(0, box((0, 5))), (1, box((5, 6)))]
    assert loads.tolist() == [5.0, 5.0, 10.0]


def test_a_line_gives_way_to_one_that_has_less_choice() -> None:
    """Rank 1 alone has 8 bytes, so that ranks 0 and 2 share the other 16."""
    loads = np.zeros(3)
    lines = [
        Line((0, 1), [run(1, (0, 8))]),
        Line((1,), [run(1, (0, 8))]),
        Line((1, 2), [run(1, (0, 8))]),
    ]
    taken = spread(lines, loads, finest_bytes=1)
    assert loads.tolist() == [8.0, 8.0, 8.0]
    assert [[rank for rank, _ in of] for of in taken] == [[0], [1], [2]]


def test_lines_are_cut_between_tensors_where_these_are_small() -> None:
    """Five tensors of 6 bytes, pieces of at least 4: the third is left whole."""
    loads = np.zeros(2)
    [taken] = spread([Line((0, 1), [run(5, (0, 6))])], loads, finest_bytes=4)
    assert sorted(one.stop - one.first for _, one in taken) == [2, 3]
    loads = np.zeros(2)
    [taken] = spread([Line((0, 1), [run(5, (0, 1), (0, 6))])], loads, finest_bytes=3)
    assert [(rank, one.first, one.stop, one.box) for rank, one in taken] == [
        (0, 0, 2, box((0, 1), (0, 6))),
        (0, 2, 3, box((0, 1), (0, 3))),
        (1, 2, 3, box((0, 1), (3, 6))),
        (1, 3, 5, box((0, 1), (0, 6))),
    ]
    assert loads.tolist() == [15.0, 15.0]


def test_bytes_count_as_often_as_they_are_sent() -> None:
    """4 bytes to three nodes weigh as much as 12 to one."""
    loads = np.zeros(2)
    lines = [Line((0,), [run(1, (0, 4))], times=3), Line((0, 1), [run(1, (0, 12))])]
    assert [[rank for rank, _ in of] for of in spread(lines, loads, finest_bytes=1)] == [[0], [1]]
    assert loads.tolist() == [12.0, 12.0]


def test_what_a_rank_was_owed_it_gets_from_the_next_line() -> None:
    """Three tensors that cannot be cut: two to one rank, then the next two are not halved."""
    loads = np.zeros(2)
    lines = [Line((0, 1), [run(3, (0, 4))]), Line((0, 1), [run(3, (0, 4), group=1)])]
    spread(lines, loads, finest_bytes=4)
    assert loads.tolist() == [12.0, 12.0]
