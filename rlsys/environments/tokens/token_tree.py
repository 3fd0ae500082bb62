"""Tree of the tokens of one episode, with a branch wherever two conversations diverge.

In: paths (all tokens of a prompt) and the tokens sampled after them. Out: a `Trajectory`, the
columns for the store and the trainer, which contain each sampled token once.

    path 1:  a b c | D E        branch 0: prompt a b c, own D E f G
    path 2:  a b c  D E f | G   (continues branch 0 at its end: the same branch)
    path 3:  a b x | Y          branch 1: own x Y, shares the first 2 tokens of branch 0

Shape legend: P prompt tokens, T tokens of all branches after the prompt, B branches, N replies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rlsys.errors import require
from rlsys.types import INJECTED, Float32Array, Int32Array

Array = npt.NDArray[Any]

NO_PARENT = -1
FIELDS = 4  # numbers per branch: number of own tokens, parent, at, seat


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """Columns of one episode in the store.

    `branches` has four numbers per branch: the number of its own tokens in `token_ids`; its parent,
    an earlier branch or -1; `at`, the number of tokens of the parent's path (with prompt) that it
    shares; its seat. The first branch is (n, -1, P, seat): its path is the prompt and its own
    tokens. Other branches without a parent have at = 0: their path is their own tokens.
    """

    prompt_token_ids: Int32Array  # [P]
    token_ids: Int32Array  # [T], the own tokens of the branches, concatenated
    sampler_logprobs: Float32Array  # [T]; meaningless for tokens that no policy sampled
    policy_versions: Int32Array  # [T], INJECTED for tokens not sampled or without an alternative
    turn_rewards: Float32Array  # [T], 0 except at the last trained token of a reply
    branches: Int32Array  # [4 * B]
    reply_ends: Int32Array  # [N]: index in [T] of each reply's last trained token; -1: it has none

    @property
    def num_branches(self) -> int:
        """Number of branches."""
        return len(self.branches) // FIELDS

    def paths(self) -> Iterator[Int32Array]:
        """Return all tokens of each branch, the prompt included."""
        return iter(paths_of(self.prompt_token_ids, self.token_ids, self.branches))


def joined(first: Trajectory, second: Trajectory) -> Trajectory:
    """Return one trajectory of two that share no tokens; the second one's branches come last."""
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
    """Return all tokens of each branch of a Trajectory's columns."""
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
    """Position after `length` tokens of a branch's path."""

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
    sampled_start: int = -1  # index of its first sampled token in its own tokens; -1: none
    sampled_end: int = 0  # end of its last one

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
    """Branches of an episode, to which replies are added. Branches of two seats share nothing."""

    def __init__(self) -> None:
        self._branches: list[_Branch] = []
        # After the last trained token of each reply; length -1: it has none.
        self._ends: list[TreePlace] = []

    @property
    def num_replies(self) -> int:
        """Number of replies added."""
        return len(self._ends)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all branches, the prompt included."""
        return sum(len(branch.token_ids) for branch in self._branches)

    def tokens(self, place: TreePlace) -> list[int]:
        """Return the path up to a place, as a new list."""
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
        """Return the seat of a branch."""
        return self._branches[branch].seat

    def has_continuation(self, place: TreePlace) -> bool:
        """Return whether the branch of the place has tokens after it."""
        return self._branches[place.branch].length > place.length

    def contains(self, place: TreePlace, branch: int) -> bool:
        """Return whether the path of the branch passes through the place or ends there."""
        length = self._branches[branch].length
        while branch != place.branch:
            length, branch = self._branches[branch].at, self._branches[branch].parent
            if branch == NO_PARENT:
                return False
        return place.length <= length

    def find(self, token_ids: Sequence[int], seat: int) -> TreePlace | None:
        """Return the end of the longest prefix of these tokens in a branch of the seat.

        None: no branch starts with the first token.
        """
        shared: list[int] = []  # by branch
        best: TreePlace | None = None
        for number, branch in enumerate(self._branches):
            if branch.parent != NO_PARENT and shared[branch.parent] < branch.at:
                shared.append(0)  # its parent shares at least as much
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
        """Add a reply and return its end.

        Args:
            token_ids: The path that the reply was sampled after.
            sampled: Tokens of the reply.
            logprobs: Their log-probabilities.
            versions: Their policy versions.
            seat: Seat of the reply.
            known: Result of `find` for the path, or the end of a branch that is a prefix of it.
            num_replies: Number of replies when `known` was found. If it has changed since, `known`
                is found again.
        """
        if num_replies != self.num_replies and (known is None or self.has_continuation(known)):
            known = self.find(token_ids, seat)
        if known is not None and not self.has_continuation(known):
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
        """Return the columns of the episode.

        Args:
            turn_rewards: Reward of each reply, in the order of `add`. The reward of a reply without
                tokens goes to the last one before it that has some, else to the first that has.
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
        offsets: dict[int, int] = {}  # index in [T] of position 0 of a branch's path
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
        """Return the branches of the trajectory, numbered as in the results of `add`."""
        return [number for number, length in enumerate(self._lengths_kept()) if length > 0]

    def _lengths_kept(self) -> list[int]:
        """Return the number of own tokens of each branch up to its last needed one.

        A token is needed if it was sampled or a sampled token follows it on a path.
        """
        lengths = [branch.sampled_end for branch in self._branches]
        for number in reversed(range(len(lengths))):
            branch = self._branches[number]
            if branch.parent != NO_PARENT and lengths[number]:
                needed = branch.at - self._branches[branch.parent].at
                lengths[branch.parent] = max(lengths[branch.parent], needed)
        if self._branches and not any(lengths):  # only empty replies: keep the first prompt
            lengths[0] = len(self._branches[0].token_ids)
        return lengths


def without_tokens(prompt_token_id: int) -> Trajectory:
    """Return the trajectory of an episode without a reply of the policy.

    Its prompt is one token, since models need one. It has no completion, so it is not trained.
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
    """Return the length of the common prefix of `some` and `others[start:]`."""
    longest = min(len(some), len(others) - start)
    done, step = 0, 64
    while done < longest:  # compare slices, which is faster than comparing elements
        step = min(step, longest - done)
        if some[done : done + step] == others[start + done : start + done + step]:
            done, step = done + step, step * 2
        elif step == 1:
            break
        else:
            step = max(1, step // 4)
    return max(done, 0)


def _rewards(turn_rewards: Sequence[float], ends: Sequence[int], num_tokens: int) -> Float32Array:
    require(
        len(turn_rewards) <= len(ends),
        "turn_rewards",
        rule=f"has {len(turn_rewards)} rewards for {len(ends)} replies",
        fix="Pass at most one reward for each reply.",
    )
    placed = np.zeros(num_tokens, np.float32)
    at = next((end for end in ends if end >= 0), -1)
    for reward, end in zip(turn_rewards, ends, strict=False):
        at = end if end >= 0 else at
        if at >= 0:
            placed[at] += reward
    return placed
