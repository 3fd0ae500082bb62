"""The order in which a rank of a pipeline computes its pieces of the passes; pure functions.

    pp2v2: passes a to d in the first piece of each rank, A to D in the second, a' backward
    rank 0   a b A B · A'c B'd a'C b'D C'· D'c'd'
    rank 1   · a b A A'B B'c a'd b'C C'D D'c'd'

Of p ranks with v pieces each, rank r has the pieces r, p + r, 2p + r, ... of a model cut into v·p:
a pass goes around the ranks v times (interleaved 1F1B; 2104.04473, section 2.2). Passes go in
groups: the first piece of all passes of a group, then the second one, and so on. With v = 1 that is
1F1B (PipeDream-Flush; 2006.09503).

With n ≥ p passes of equal cost, each rank is idle while p - 1 pieces, not p - 1 stages, go forward
and back: for (p - 1) / (v·n + p - 1) of the time. Groups have p passes, or a few more if p does not
divide n, and never grow: otherwise ranks would wait for each other. Sends do not block, so a rank
starts no more passes ahead than in 1F1B, v·p pieces in groups of p; ranks that send and receive in
step, as in the paper, need up to p - 1 more.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class PipelineTask:
    """Forward or backward of one piece of a rank over one pass."""

    number: int
    """Number of the pass."""
    piece: int
    """Number of the piece on this rank."""
    is_forward: bool = True


def forwards(num_ranks: int, num_pieces: int, num_passes: int) -> list[PipelineTask]:
    """Return the tasks of any rank for inference."""
    return [
        PipelineTask(number, piece)
        for group in _groups(num_ranks, num_passes)
        for piece in range(num_pieces)
        for number in group
    ]


def one_forward_one_backward(
    rank: int, num_ranks: int, num_pieces: int, num_passes: int
) -> list[PipelineTask]:
    """Return the tasks of one rank for training.

    It runs forward until the first gradient can arrive, then alternates forward and backward.
    """
    begun = forwards(num_ranks, num_pieces, num_passes)
    ended = [
        PipelineTask(task.number, num_pieces - 1 - task.piece, is_forward=False) for task in begun
    ]
    largest = len(_groups(num_ranks, num_passes)[0])
    ahead = min((num_pieces - 1) * largest + num_ranks - 1 - rank, len(begun))
    in_turn = [task for pair in zip(begun[ahead:], ended, strict=False) for task in pair]
    return begun[:ahead] + in_turn + ended[len(begun) - ahead :]


def _groups(num_ranks: int, num_passes: int) -> list[range]:
    """Return passes that go through a piece consecutively, larger groups first."""
    count = max(1, num_passes // num_ranks)
    sizes = [num_passes // count + (number < num_passes % count) for number in range(count)]
    starts = accumulate(sizes, initial=0)
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=False)]
