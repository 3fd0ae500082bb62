"""Schedules of a pipeline, simulated by ranks that wait for their inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from rlsys.engines.training.parallel.pipeline_schedule import (
    PipelineTask,
    forwards,
    one_forward_one_backward,
)

RANKS, PIECES, PASSES = st.integers(1, 5), st.integers(1, 4), st.integers(1, 17)


@dataclass
class Played:
    """Ranks that run a task once the previous one is done and its input has arrived.

    Sends do not block; messages between two ranks in one direction arrive in order.
    """

    orders: list[list[PipelineTask]]
    num_pieces: int
    forward_s: int = 1
    backward_s: int = 1
    ended: dict[tuple[int, int, bool], int] = field(default_factory=dict)
    """When, by pass, place of the piece in the model, and direction."""

    def __post_init__(self) -> None:
        next_task, clock = [0] * len(self.orders), [0] * len(self.orders)
        is_stuck = False
        while not is_stuck:
            is_stuck = True
            for rank, order in enumerate(self.orders):
                while next_task[rank] < len(order):
                    task = order[next_task[rank]]
                    needs = self.needs(rank, task)
                    if not needs <= self.ended.keys():
                        break
                    begin = max([clock[rank], *(self.ended[each] for each in needs)])
                    took = self.forward_s if task.is_forward else self.backward_s
                    self.ended[self.key(rank, task)] = clock[rank] = begin + took
                    next_task[rank] += 1
                    is_stuck = False
        self.is_finished = next_task == list(map(len, self.orders))

    def key(self, rank: int, task: PipelineTask) -> tuple[int, int, bool]:
        return task.number, task.piece * len(self.orders) + rank, task.is_forward

    def needs(self, rank: int, task: PipelineTask) -> set[tuple[int, int, bool]]:
        number, place, is_forward = self.key(rank, task)
        if is_forward:
            return {(number, place - 1, True)} if place else set()
        last = len(self.orders) * self.num_pieces - 1
        return {(number, place, True)} | ({(number, place + 1, False)} if place < last else set())

    @property
    def length(self) -> int:
        return max(self.ended.values())


def orders(num_ranks: int, num_pieces: int, num_passes: int) -> list[list[PipelineTask]]:
    return [
        one_forward_one_backward(rank, num_ranks, num_pieces, num_passes)
        for rank in range(num_ranks)
    ]


@given(RANKS, PIECES, st.integers(0, 17))
def test_every_piece_runs_forward_and_backward_once_without_deadlock(
    num_ranks: int, num_pieces: int, num_passes: int
) -> None:
    of_ranks = orders(num_ranks, num_pieces, num_passes)
    every = {
        PipelineTask(number, piece, is_forward)
        for number in range(num_passes)
        for piece in range(num_pieces)
        for is_forward in (True, False)
    }
    for order in of_ranks:
        assert len(order) == len(every)
        assert set(order) == every
    assert Played(of_ranks, num_pieces).is_finished


@given(RANKS, PIECES, PASSES)
def test_messages_are_received_in_the_order_of_sending(
    num_ranks: int, num_pieces: int, num_passes: int
) -> None:
    """Check each direction between two ranks, which is a queue for all pieces."""
    of_ranks = orders(num_ranks, num_pieces, num_passes)
    for rank, order in enumerate(of_ranks):
        behind = (rank + 1) % num_ranks
        last = num_ranks * num_pieces - 1
        # By pass, and by the place in the model of the piece that receives it.
        given = [
            (task.number, task.piece * num_ranks + rank + 1)
            for task in order
            if task.is_forward and task.piece * num_ranks + rank < last
        ]
        taken = [
            (task.number, task.piece * num_ranks + behind)
            for task in of_ranks[behind]
            if task.is_forward and task.piece * num_ranks + behind
        ]
        assert given == taken
        given_back = [
            (task.number, task.piece * num_ranks + behind)
            for task in of_ranks[behind]
            if not task.is_forward and task.piece * num_ranks + behind
        ]
        taken_back = [
            (task.number, task.piece * num_ranks + rank + 1)
            for task in order
            if not task.is_forward and task.piece * num_ranks + rank < last
        ]
        assert given_back == taken_back


@given(RANKS, PIECES, PASSES)
def test_few_activations_are_held(num_ranks: int, num_pieces: int, num_passes: int) -> None:
    """Expect the activations of v·p pieces if p divides the passes, as with v·p whole stages."""
    groups = max(1, num_passes // num_ranks)
    largest = -(-num_passes // groups)
    for rank, order in enumerate(orders(num_ranks, num_pieces, num_passes)):
        held = most = 0
        for task in order:
            held += 1 if task.is_forward else -1
            most = max(most, held)
        assert most <= (num_pieces - 1) * largest + num_ranks - rank
        if num_passes % num_ranks == 0:
            assert most <= num_pieces * num_ranks


@given(RANKS, PIECES, PASSES, st.integers(1, 3), st.integers(1, 3))
def test_idle_time_is_that_of_pieces_not_stages(
    num_ranks: int, num_pieces: int, num_passes: int, forward_s: int, backward_s: int
) -> None:
    def idle(pieces: int) -> int:
        # With whole stages, whose tasks take as long as all pieces together.
        longer = num_pieces // pieces
        played = Played(
            orders(num_ranks, pieces, num_passes), pieces, longer * forward_s, longer * backward_s
        )
        return played.length - num_passes * num_pieces * (forward_s + backward_s)

    of_stages = (num_ranks - 1) * num_pieces * (forward_s + backward_s)
    assert idle(1) == of_stages
    if num_passes >= num_ranks:
        assert idle(num_pieces) == of_stages / num_pieces
    else:
        assert idle(num_pieces) <= of_stages


@given(RANKS, PIECES, PASSES)
def test_inference_waits_for_the_first_pass_only(
    num_ranks: int, num_pieces: int, num_passes: int
) -> None:
    order = forwards(num_ranks, num_pieces, num_passes)
    played = Played([order] * num_ranks, num_pieces)
    assert played.is_finished
    if num_passes >= num_ranks:
        assert played.length == num_passes * num_pieces + num_ranks - 1


def test_two_ranks_with_two_pieces_by_hand() -> None:
    def diagram(rank: int) -> str:
        """Parse the diagram in the module's docstring."""
        letters = []
        for task in one_forward_one_backward(rank, 2, 2, 4):
            letter = "abcd"[task.number]
            letters.append(letter.upper() if task.piece else letter)
            if not task.is_forward:
                letters.append("'")
        return "".join(letters)

    assert diagram(0) == "abABA'cB'da'Cb'DC'D'c'd'"
    assert diagram(1) == "abAA'BB'ca'db'CC'DD'c'd'"
