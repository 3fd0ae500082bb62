"""The order of a trainer process's calls: owners take turns, and no call is lost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from rlsys.tinker_server.trainer_scheduling import TrainerScheduler


@dataclass(eq=False)
class Call:
    owner: str


def added(scheduler: TrainerScheduler[Call], *owners: str) -> list[Call]:
    calls = [Call(owner) for owner in owners]
    for one in calls:
        scheduler.add(one, owner=one.owner)
    return calls


def run_all(scheduler: TrainerScheduler[Call]) -> list[Call]:
    found = []
    while (call := scheduler.take()) is not None:
        found.append(call)
        scheduler.ended()
    return found


def test_calls_of_one_owner_run_in_order_one_at_a_time() -> None:
    scheduler: TrainerScheduler[Call] = TrainerScheduler()
    first, second = added(scheduler, "a", "a")
    assert scheduler.take() is first
    assert scheduler.take() is None
    scheduler.ended()
    assert scheduler.take() is second


def test_owners_take_turns() -> None:
    scheduler: TrainerScheduler[Call] = TrainerScheduler()
    added(scheduler, "a", "a", "a", "b", "b", "c")
    assert "".join(one.owner for one in run_all(scheduler)) == "abcaba"


def test_two_floods_cost_another_owner_one_call_each() -> None:
    scheduler: TrainerScheduler[Call] = TrainerScheduler()
    added(scheduler, *"ababab")
    running = scheduler.take()
    assert running is not None
    assert running.owner == "a"
    added(scheduler, "c")
    scheduler.ended()
    assert "".join(one.owner for one in run_all(scheduler)) == "bcabab"


def test_clients_that_return_at_once_do_not_keep_another_waiting() -> None:
    """Each of b, c and d adds its next call when the one before has ended."""
    scheduler: TrainerScheduler[Call] = TrainerScheduler()
    added(scheduler, *"aaaabcd")
    order = ""
    for _ in range(12):
        call = scheduler.take()
        assert call is not None
        order += call.owner
        scheduler.ended()
        if call.owner != "a":
            added(scheduler, call.owner)
    assert order == "abcd" * 3


def test_a_removed_call_does_not_run() -> None:
    scheduler: TrainerScheduler[Call] = TrainerScheduler()
    first, second = added(scheduler, "a", "b")
    assert scheduler.remove(first)
    assert not scheduler.remove(first)
    assert scheduler.take() is second
    assert not scheduler.remove(second)


@given(st.lists(st.one_of(st.none(), st.sampled_from("abcd")), max_size=60))
def test_every_call_runs_once_after_one_call_of_each_other_owner_at_most(
    events: list[str | None],
) -> None:
    """An event is a new call of an owner, or the end of the call that runs."""
    scheduler: TrainerScheduler[Call] = TrainerScheduler()
    waiting: dict[str, deque[Call]] = {}
    passed: dict[str, list[str]] = {}  # owners served since the owner's oldest call could run
    running: Call | None = None
    for event in [*events, *[None] * len(events)]:
        if event is not None:
            (call,) = added(scheduler, event)
            if not waiting.setdefault(event, deque()):
                passed[event] = []
            waiting[event].append(call)
        elif running is not None:
            scheduler.ended()
            running = None
        taken = scheduler.take()
        if running is not None:
            assert taken is None
            continue
        running = taken
        if taken is None:
            assert not any(waiting.values())
            continue
        assert waiting[taken.owner].popleft() is taken
        passed[taken.owner] = []
        for owner, calls in waiting.items():
            if calls and owner != taken.owner:
                passed[owner].append(taken.owner)
                assert len(set(passed[owner])) == len(passed[owner]) <= 3
    assert not any(waiting.values())
