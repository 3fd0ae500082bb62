"""The tokens of one episode, as a tree of branches: what was sampled behind what.

In: paths (all tokens that a model was given) and what it sampled behind them. Out: a `Trajectory`,
the columns that the store and the trainer get, in which each sampled token stands once.

    path 1:  a b c | D E        branch 0: prompt a b c, own D E f G
    path 2:  a b c  D E f | G   (goes on where branch 0 ends: the same branch)
    path 3:  a b x | Y          branch 1: own x Y, begins with the first 2 tokens of branch 0

Shape legend: P prompt tokens, T tokens of all branches behind it, B branches, N replies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rlsys.types import INJECTED, Float32Array, Int32Array

Array = npt.NDArray[Any]

NO_PARENT = -1
FIELDS = 4  # of a branch: number of own tokens, parent, at, seat


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """What one episode is in the store.

    `branches` has four numbers a branch: how many of `token_ids` are its own; its parent, an
    earlier branch, or -1; `at`, how many tokens of the parent's path (its prompt included) its own
    path begins with; its seat. The first is (n, -1, P, seat), and its path is the prompt and its
    own tokens. Another without a parent has at = 0, and its own tokens are its path.
    """

    prompt_token_ids: Int32Array  # [P]
    token_ids: Int32Array  # [T], the branches' own tokens one after another
    sampler_logprobs: Float32Array  # [T]; of no meaning where no policy sampled
    policy_versions: Int32Array  # [T], INJECTED where no policy sampled or had no alternative
    turn_rewards: Float32Array  # [T], 0 but at the last trained token of a reply
    branches: Int32Array  # [4 * B]
    reply_ends: Int32Array  # [N]: index in [T] of each reply's last trained token; -1: it has none

    @property
    def num_branches(self) -> int:
        return len(self.branches) // FIELDS

    def paths(self) -> Iterator[Int32Array]:
        """All tokens of each branch, from the first of its prompt."""
        return iter(paths_of(self.prompt_token_ids, self.token_ids, self.branches))


def joined(first: Trajectory, second: Trajectory) -> Trajectory:
    """Both as one, which share nothing: the second's branches follow the first's."""
    if not len(second.prompt_token_ids):
        return first
    if not len(first.prompt_token_ids):
        return second
    num_prompt, num_before = len(second.prompt_token_ids), len(first.token_ids)
    branches = second.branches.reshape(-1, FIELDS).copy()
    branches[0, 0] += num_prompt
    branches[0, 2] = 0
    parents = branches[:, 1]
    parents[parents >= 0] += first.num_branches

    def after(own: Array, injected: float, others: Array) -> Array:
        return np.concatenate([own, np.full(num_prompt, injected, own.dtype), others])

    ends = second.reply_ends
    return Trajectory(
        prompt_token_ids=first.prompt_token_ids,
        token_ids=np.concatenate([first.token_ids, second.prompt_token_ids, second.token_ids]),
        sampler_logprobs=after(first.sampler_logprobs, 0, second.sampler_logprobs),
        policy_versions=after(first.policy_versions, INJECTED, second.policy_versions),
        turn_rewards=after(first.turn_rewards, 0, second.turn_rewards),
        branches=np.concatenate([first.branches, branches.reshape(-1)]),
        reply_ends=np.concatenate(
            [first.reply_ends, np.where(ends < 0, ends, ends + num_prompt + num_before)]
        ),
    )


def paths_of(
    prompt_token_ids: Int32Array, token_ids: Int32Array, branches: Int32Array
) -> list[Int32Array]:
    """All tokens of each branch, as they stand in a Trajectory's columns."""
    paths: list[Int32Array] = []
    start = 0
    for num_own, parent, at, _ in branches.reshape(-1, FIELDS).tolist():
        own = token_ids[start : start + num_own]
        start += num_own
        before = prompt_token_ids if not paths else paths[parent][:at] if parent >= 0 else own[:0]
        paths.append(np.concatenate([before, own]))
    return paths


@dataclass(frozen=True, slots=True)
class TreePlace:
    """Behind `length` tokens of a branch's path."""

    branch: int
    length: int


@dataclass(slots=True)
class _Branch:
    parent: int
    at: int
    seat: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sampled_start: int = -1  # of its first sampled token, in own tokens; -1: there is none
    sampled_end: int = 0  # behind its last

    @property
    def length(self) -> int:
        return self.at + len(self.token_ids)

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)


class TokenTree:
    """Grows by one reply at a time; branches of different seats share nothing."""

    def __init__(self) -> None:
        self._branches: list[_Branch] = []
        # Behind each reply's last token that is trained on; length -1: it has none.
        self._ends: list[TreePlace] = []

    @property
    def num_replies(self) -> int:
        return len(self._ends)

    @property
    def num_tokens(self) -> int:
        return sum(len(branch.token_ids) for branch in self._branches)

    def tokens(self, place: TreePlace) -> list[int]:
        """The path up to there; a new list."""
        parts: list[list[int]] = []
        number, length = place.branch, place.length
        while number != NO_PARENT:
            branch = self._branches[number]
            if length > branch.at:
                parts.append(branch.token_ids[: length - branch.at])
                length = branch.at
            number = branch.parent
        return parts[0] if len(parts) == 1 else [one for part in parts[::-1] for one in part]

    def seat(self, branch: int) -> int:
        return self._branches[branch].seat

    def goes_on(self, place: TreePlace) -> bool:
        """Whether there are tokens behind it in its branch."""
        return self._branches[place.branch].length > place.length

    def holds(self, place: TreePlace, branch: int) -> bool:
        """Whether the branch's path goes on from there, or ends there."""
        length = self._branches[branch].length
        while branch != place.branch:
            length, branch = self._branches[branch].at, self._branches[branch].parent
            if branch == NO_PARENT:
                return False
        return place.length <= length

    def find(self, token_ids: Sequence[int], seat: int) -> TreePlace | None:
        """Where the longest beginning of these tokens stands that a branch of the seat has; None:
        not even the first does.
        """
        shared: list[int] = []  # by branch
        best: TreePlace | None = None
        for number, branch in enumerate(self._branches):
            if branch.parent != NO_PARENT and shared[branch.parent] < branch.at:
                shared.append(0)  # whatever it shares, its parent does
                continue
            length = 0
            if branch.seat == seat:
                length = branch.at + num_shared(branch.token_ids, token_ids, branch.at)
            shared.append(length)
            if length > (best.length if best else 0):
                best = TreePlace(number, length)
        return best

    def add(
        self,
        token_ids: Sequence[int],
        sampled: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        *,
        seat: int = 0,
        known: TreePlace | None = None,
        num_replies: int = -1,
    ) -> TreePlace:
        """Put a reply behind the path that it was sampled behind; returns where it ends.

        known: what `find` says of the path, or a place that it begins with where a branch ends.
        num_replies: how many there were when that was so; the path is looked for again where there
        are others now.
        """
        if num_replies != self.num_replies and (known is None or self.goes_on(known)):
            known = self.find(token_ids, seat)
        if known is not None and not self.goes_on(known):
            number = known.branch
        else:
            number = len(self._branches)
            parent, at = (known.branch, known.length) if known else (NO_PARENT, 0)
            self._branches.append(_Branch(parent, at, seat))
        branch = self._branches[number]
        context = token_ids[branch.length :]
        branch.add(context, [0.0] * len(context), [INJECTED] * len(context))
        if len(sampled):
            if branch.sampled_start < 0:
                branch.sampled_start = len(branch.token_ids)
            branch.sampled_end = len(branch.token_ids) + len(sampled)
        branch.add(sampled, logprobs, versions)
        end = TreePlace(number, branch.length)
        trained = [i for i, version in enumerate(versions) if version != INJECTED]
        length = end.length - len(sampled) + trained[-1] + 1 if trained else -1
        self._ends.append(TreePlace(number, length))
        return end

    def trajectory(self, turn_rewards: Sequence[float] = ()) -> Trajectory:
        """turn_rewards: by reply, in the order of `add`; of one without tokens it goes to the reply
        before it that has some, or the first that has.
        """
        lengths = self._lengths_kept()
        kept = self.numbers()
        numbers = {number: new for new, number in enumerate(kept)}
        num_prompt = 0
        if kept:
            sampled_start = self._branches[kept[0]].sampled_start
            num_prompt = sampled_start if sampled_start >= 0 else lengths[kept[0]]
        token_ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        branches: list[int] = []
        offsets: dict[int, int] = {}  # where position 0 of a branch's path would stand in [T]
        for number in kept:
            branch, first = self._branches[number], num_prompt if number == kept[0] else 0
            own = slice(first, lengths[number])
            offsets[number] = len(token_ids) - branch.at - first
            parent = numbers.get(branch.parent, NO_PARENT)
            branches += [own.stop - first, parent, first or branch.at, branch.seat]
            token_ids += branch.token_ids[own]
            logprobs += branch.logprobs[own]
            versions += branch.versions[own]
        ends = [
            offsets[end.branch] + end.length - 1 if end.length >= 0 else -1 for end in self._ends
        ]
        prompt = self._branches[kept[0]].token_ids[:num_prompt] if kept else []
        return Trajectory(
            prompt_token_ids=np.array(prompt, np.int32),
            token_ids=np.array(token_ids, np.int32),
            sampler_logprobs=np.array(logprobs, np.float32),
            policy_versions=np.array(versions, np.int32),
            turn_rewards=_rewards(turn_rewards, ends, len(token_ids)),
            branches=np.array(branches, np.int32),
            reply_ends=np.array(ends, np.int32),
        )

    def numbers(self) -> list[int]:
        """The branches of a trajectory, as those of the places that `add` returned."""
        return [number for number, length in enumerate(self._lengths_kept()) if length > 0]

    def _lengths_kept(self) -> list[int]:
        """How many own tokens of each branch something sampled stands behind, or is."""
        lengths = [branch.sampled_end for branch in self._branches]
        for number in reversed(range(len(lengths))):
            branch = self._branches[number]
            if branch.parent != NO_PARENT and lengths[number]:
                needed = branch.at - self._branches[branch.parent].at
                lengths[branch.parent] = max(lengths[branch.parent], needed)
        if self._branches and not any(lengths):  # only empty replies: the first one's prompt
            lengths[0] = len(self._branches[0].token_ids)
        return lengths


def without_tokens(prompt_token_id: int) -> Trajectory:
    """Return the trajectory of an episode in which the policy said nothing.

    Its prompt is one token, since models take no empty text. It has no completion, so that nothing
    of it is trained.
    """
    none_i, none_f = np.empty(0, np.int32), np.empty(0, np.float32)
    return Trajectory(
        prompt_token_ids=np.array([prompt_token_id], np.int32),
        token_ids=none_i,
        sampler_logprobs=none_f,
        policy_versions=none_i,
        turn_rewards=none_f,
        branches=np.array([0, NO_PARENT, 1, 0], np.int32),
        reply_ends=none_i,
    )


def num_shared(some: Sequence[Any], others: Sequence[Any], start: int = 0) -> int:
    """How many of `some` stand at the beginning of `others[start:]`."""
    longest = min(len(some), len(others) - start)
    done, step = 0, 64
    while done < longest:  # whole stretches first: comparing lists is quick
        step = min(step, longest - done)
        if some[done : done + step] == others[start + done : start + done + step]:
            done, step = done + step, step * 2
        elif step == 1:
            break
        else:
            step = max(1, step // 4)
    return max(done, 0)


def _rewards(turn_rewards: Sequence[float], ends: Sequence[int], num_tokens: int) -> Float32Array:
    if len(turn_rewards) > len(ends):
        raise ValueError(
            f"{len(turn_rewards)} turn rewards were given, and {len(ends)} replies were sampled; "
            "give one a reply at most."
        )
    placed = np.zeros(num_tokens, np.float32)
    at = next((end for end in ends if end >= 0), -1)
    for reward, end in zip(turn_rewards, ends, strict=False):
        at = end if end >= 0 else at
        if at >= 0:
            placed[at] += reward
    return placed
