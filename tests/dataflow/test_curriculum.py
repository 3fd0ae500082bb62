from __future__ import annotations

from rlsys.dataflow.scheduling.curriculum import Curriculum
from tests.errors import invalid


def test_a_row_is_retired_by_the_mean_of_its_group() -> None:
    curriculum = Curriculum(0.75, num_rows=10)
    curriculum.scored(3, [1.0, 1.0, 1.0, 0.0])  # 0.75
    curriculum.scored(4, [1.0, 1.0, 0.0, 0.0])
    assert curriculum.retired == [3]
    assert (curriculum.has_retired(3), curriculum.has_retired(4)) == (True, False)


def test_once_retired_it_stays_and_a_resumed_run_remembers() -> None:
    curriculum = Curriculum(0.75, num_rows=10, retired=[7])
    curriculum.scored(7, [0.0, 0.0])
    assert curriculum.has_retired(7)


def test_without_a_bound_nothing_is_retired() -> None:
    curriculum = Curriculum()
    curriculum.scored(3, [1.0])
    assert not curriculum.has_retired(3)


def test_a_run_without_prompts_says_so() -> None:
    curriculum = Curriculum(1.0, num_rows=2)
    curriculum.scored(0, [1.0])
    assert not curriculum.has_retired(1)
    curriculum.scored(1, [1.0])
    with invalid("data.retire_at", 1.0):
        curriculum.has_retired(0)


def test_what_other_runs_share_retires_no_row() -> None:
    curriculum = Curriculum(0.5, num_rows=2)
    curriculum.scored(-1, [1.0, 1.0])
    assert curriculum.retired == []
