"""Cores that simulated workers share: times by hand, and the work that they do."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.controller.simulation.shared_cores import SharedCores
from rlsys.controller.simulation.virtual_time import run_in_virtual_time


def ends_s(jobs: list[tuple[float, float]], num_cores: float) -> list[float]:
    """Return the times at which jobs, (start, seconds), end."""
    found: dict[int, float] = {}

    async def job(number: int, cores: SharedCores, start_s: float, seconds: float) -> None:
        await asyncio.sleep(start_s)
        await cores.work(seconds)
        found[number] = asyncio.get_running_loop().time()

    async def all_jobs() -> None:
        cores = SharedCores(num_cores=num_cores)
        await asyncio.gather(*(job(number, cores, *one) for number, one in enumerate(jobs)))
        assert cores.num_busy == 0

    run_in_virtual_time(all_jobs())
    return [found[number] for number in range(len(jobs))]


def test_two_workers_on_one_core_take_turns() -> None:
    # both run at half speed until the short one ends at 2; the long one has 2 of 3 left
    assert ends_s([(0, 1), (0, 3)], 1) == pytest.approx([2, 4])


def test_a_late_worker_slows_down_a_running_one() -> None:
    # one second alone, then both at half speed: 1 + 2 * 1 for the first, and the second has
    # done 1 of 2 by then
    assert ends_s([(0, 2), (1, 2)], 1) == pytest.approx([3, 4])


def test_enough_cores_slow_nobody_down() -> None:
    jobs = [(0.0, 5.0), (1.0, 2.0), (1.0, 3.0)]
    assert ends_s(jobs, 3) == ends_s(jobs, math.inf) == pytest.approx([5, 3, 4])


def test_processes_of_one_worker_count() -> None:
    async def work() -> float:
        cores = SharedCores(num_cores=2)
        await cores.work(3.0, num_workers=4)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(work()) == pytest.approx(6.0)


def test_a_cancelled_timer_does_not_fire() -> None:
    async def work() -> list[int]:
        cores, fired = SharedCores(num_cores=1), list[int]()
        cores.call_at(1.0, lambda: fired.append(1))
        cores.call_at(2.0, lambda: fired.append(2)).cancel()
        await cores.work(3.0)
        return fired

    assert run_in_virtual_time(work()) == [1]


@given(
    jobs=st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 10)), min_size=1, max_size=8),
    num_cores=st.integers(1, 4),
)
def test_no_core_does_more_than_its_time_and_no_job_is_faster_than_alone(
    jobs: list[tuple[float, float]], num_cores: int
) -> None:
    ends = ends_s(jobs, num_cores)
    for (start_s, seconds), end_s in zip(jobs, ends, strict=True):
        assert end_s >= start_s + seconds - 1e-6
    first = min(start_s for start_s, _ in jobs)
    total = sum(seconds for _, seconds in jobs)
    assert max(ends) - first >= total / num_cores - 1e-6
    # work-conserving: while a job waits to end, the cores are busy or no job is there
    assert max(ends) <= max(start_s for start_s, _ in jobs) + total + 1e-6
