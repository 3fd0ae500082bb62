"""Scheduling of a trainer process: owners take turns, and parts of passes run together."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from rlsys.tinker_server.trainer_scheduling import TrainerScheduler

MAX_TOKENS = 10


@dataclass(eq=False)
class Call:
    owner: str
    model: str
    num_tokens: int | None = None
    older: int = 0  # calls that waited when it came
    takes: int = 0  # since it came


@dataclass
class Process:
    """A scheduler, and the calls that wait or run."""

    scheduler: TrainerScheduler[Call] = field(
        default_factory=lambda: TrainerScheduler(max_tokens=MAX_TOKENS)
    )
    waiting: list[Call] = field(default_factory=list)

    def add(self, model: str, num_tokens: int | None = None) -> Call:
        """Add a call of a model, whose first letter is its owner."""
        call = Call(model[0], model, num_tokens, older=len(self.waiting))
        self.waiting.append(call)
        self.scheduler.add(call, owner=call.owner, model=model, num_tokens=num_tokens)
        return call

    def take(self) -> list[Call]:
        taken = self.scheduler.take()
        self.waiting = [one for one in self.waiting if one not in taken]
        return taken

    def next(self) -> list[Call]:
        """End what runs, and take the next calls."""
        self.scheduler.ended()
        return self.take()


def test_parts_that_wait_run_together_up_to_the_tokens_of_a_pass() -> None:
    process = Process()
    first = process.add("a", 4)
    assert process.take() == [first]
    second, third, fourth, fifth = (process.add(model, 4) for model in "bcde")
    assert process.take() == []  # while others run
    assert process.next() == [second, third]
    assert process.next() == [fourth, fifth]
    large, small = process.add("a", 11), process.add("b", 1)
    assert process.next() == [large]
    assert process.next() == [small]
    process.scheduler.ended()
    assert process.take() == []


def test_a_command_runs_alone_in_its_turn() -> None:
    process = Process()
    process.add("x")
    process.take()
    part, command, other = process.add("a", 4), process.add("b"), process.add("c", 4)
    assert process.next() == [part, other]
    assert process.next() == [command]


def test_a_part_after_a_command_of_its_model_waits_for_it() -> None:
    process = Process()
    process.add("x")
    process.take()
    step, part, other = process.add("a"), process.add("a", 4), process.add("b", 4)
    assert process.next() == [step]
    assert process.next() == [other]
    assert process.next() == [part]


def test_an_owner_of_many_models_gets_one_part_before_the_others_get_theirs() -> None:
    process = Process()
    process.add("x")
    process.take()
    flood = [process.add(f"f{number}", 4) for number in range(3)]
    other = process.add("a", 4)
    assert process.next() == [flood[0], other]
    assert process.next() == [flood[1], flood[2]]


def test_a_flood_costs_another_owner_at_most_the_call_that_runs() -> None:
    """The flood always has another call, of the same size: half of the time is left."""
    process = Process()
    flood = process.add("f", 5)
    assert process.take() == [flood]
    for _ in range(5):
        process.add("f", 5)
        own = process.add("a", 5)
        assert process.next() == [own]  # not with the owner that has just run
        (flood,) = process.next()
        assert flood.owner == "f"


def test_owners_that_come_while_others_run_form_two_groups() -> None:
    """Eight clients, each with its next part when the one before has ended: full passes."""
    process = Process(TrainerScheduler(max_tokens=100))
    process.add("a", 4)
    running = process.take()
    for model in "bcdefgh":
        process.add(model, 4)
    sizes = []
    for _ in range(6):
        for one in running:
            process.add(one.model, 4)
        running = process.next()
        sizes.append(len(running))
    assert sizes == [7, 1, 7, 1, 7, 1]


def test_a_removed_call_does_not_run() -> None:
    process = Process()
    first, second = process.add("a"), process.add("b")
    assert process.scheduler.remove(first)
    assert not process.scheduler.remove(first)
    assert process.take() == [second]
    assert not process.scheduler.remove(second)


MODELS = st.sampled_from(["a1", "a2", "b1", "b2", "c1", "d1"])
SIZES = st.one_of(st.none(), st.integers(1, MAX_TOKENS + 2))


@given(st.lists(st.one_of(st.none(), st.tuples(MODELS, SIZES)), max_size=60))
def test_every_call_runs_once_in_a_bounded_number_of_turns(
    events: list[tuple[str, int | None] | None],
) -> None:
    """An event is a new call, or the end of what runs."""
    process = Process()
    num_added = 0
    order: dict[str, list[Call]] = {}
    last_owners: set[str] = set()
    is_running = False
    num_taken = 0
    for event in [*events, *[None] * len(events)]:
        if event is not None:
            call = process.add(*event)
            order.setdefault(call.model, []).append(call)
            num_added += 1
        elif is_running:
            process.scheduler.ended()
            is_running = False
        if is_running:
            assert process.take() == []
            continue
        waited = list(process.waiting)
        taken = process.take()
        is_running = bool(taken)
        assert is_running == bool(waited)
        if not taken:
            continue
        num_taken += len(taken)
        sizes = [one.num_tokens for one in taken]
        assert len(taken) == 1 or sum(size or MAX_TOKENS + 1 for size in sizes) <= MAX_TOKENS
        assert len({one.model for one in taken}) == len(taken)
        owners = {one.owner for one in taken}
        if {one.owner for one in waited} - last_owners:
            assert not owners & last_owners
        last_owners = owners
        for one in taken:
            assert order[one.model].pop(0) is one
        for one in waited:
            one.takes += 1
            assert one.takes <= 2 * (one.older + 1)
    assert num_taken == num_added
