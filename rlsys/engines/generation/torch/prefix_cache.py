"""Sequences that have ended, kept for requests that go on from them: a tree of keys and values.

    a request ends ─► park(tokens, copy) ──► segments: each has the keys and values of a path from
                                                 │     where it leaves its parent's path to its end
    a request comes ─► find(prompt) ─► Prefix ◄──┘     one that goes on from a leaf takes its place
    memory is wanted ─► shrink_to(tokens)              leaves go, the least recently used first

Where a path may be left is listed in a dictionary, by hash of all tokens up to there: in every
block of BLOCK tokens, and at a sequence's end. So a look-up costs a pass of numpy over the prompt
and some look-ups in the dictionary, however many sequences are parked; what it finds is compared
token by token.

What reuse may change. Keys and values that were computed a token at a time, or behind other ones,
differ from those of a whole pass in the last bits. So a request reuses nothing but what reaches up
to a sampled token (or as far as its author says that it goes on from an earlier one, in
num_shared_tokens): the first turns of episodes, and requests of one turn, share system prompts and
examples with others, but must not depend on which of these ran before.

All of it belongs to one version of the weights: whoever changes them calls `clear`.

Shape legend: P prompt tokens, T tokens of a path, L·K experts of a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from rlsys.engines.generation.sampling import UInt64Array, mixed
from rlsys.types import GenerationRequest, Int32Array

# Paths may be left after each multiple of it, and it is reused in multiples: kernels then meet few
# shapes of what is new, and what is new never has fewer rows than they need (kv_cache.ROW_BLOCK).
BLOCK = 16

State = TypeVar("State")  # keys and values of some tokens, and what else is kept of these


@dataclass(eq=False, slots=True)
class _Fork(Generic[State]):
    """A place at which other paths may leave a segment."""

    key: int
    num_matched: int  # tokens that a prompt must begin with
    num_kept: int  # of these, tokens that have keys and values: the last sampled one has none
    is_sampled: bool  # the last of these tokens is a sampled one
    segment: _Segment[State]


@dataclass(eq=False, slots=True)
class _Segment(Generic[State]):
    """Of the path `tokens`, keys and values from `start` to `end`; its parent has those before."""

    salt: str
    tokens: Int32Array  # [T]
    start: int
    end: int  # T, or T − 1
    state: State
    parent: _Segment[State] | None
    num_children: int = 0
    forks: list[_Fork[State]] = field(default_factory=list)


@dataclass(frozen=True)
class Prefix(Generic[State]):
    """What is there of a prompt's first tokens; it stays whole as long as somebody has it."""

    num_tokens: int
    pieces: Sequence[tuple[int, int, State]]
    """Of the tokens from .. to, in order; a state begins at `from` and may reach beyond `to`."""


class Prefixes(Generic[State]):
    """Sizes are in tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._forks: dict[int, _Fork[State]] = {}
        self._order: OrderedDict[_Segment[State], None] = OrderedDict()  # the first goes first

    def __len__(self) -> int:
        return len(self._order)

    def find(self, request: GenerationRequest) -> Prefix[State] | None:
        """The longest prefix of a request's prompt that it may reuse, of whole blocks, without the
        prompt's last token. As long as the request runs, it has a copy: the original is the first
        to go.
        """
        if not self._forks:
            return None
        prompt = np.asarray(request.prompt_token_ids, np.int32)
        shared = request.num_shared_tokens
        salt = request.cache_salt
        fork = self._deepest(
            prompt,
            salt,
            _keys(prompt, salt),
            lambda one: one.is_sampled or one.num_matched <= shared,
        )
        if fork is None:
            return None
        num_tokens = min(fork.num_kept, len(prompt) - 1) // BLOCK * BLOCK
        if num_tokens == 0:
            return None
        path = [*_path(fork.segment)]  # from its end to the root
        for segment in reversed(path):
            self._order.move_to_end(segment, last=False)
        pieces, end = [], num_tokens
        for segment in path:
            if segment.start < end:
                pieces.append((segment.start, end, segment.state))
                end = segment.start
        return Prefix(num_tokens, pieces[::-1])

    def park(
        self,
        tokens: Int32Array,
        *,
        first_sampled: int,
        salt: str,
        max_tokens: int,
        copy: Callable[[int, int], State],
    ) -> None:
        """Keep a sequence `tokens` [T], sampled from `first_sampled` on, whose last token has no
        keys and values; copy(start, end) returns those of others. All that is kept stays within
        `max_tokens`: older sequences make room, and what is larger is not kept.
        """
        end = len(tokens) - 1
        if end < BLOCK:
            return
        keys = _keys(tokens, salt)
        found = self._deepest(tokens, salt, keys, lambda fork: True)
        parent = None if found is None else found.segment
        start = 0 if found is None else min(found.num_kept, end)
        path = [*_path(parent)]
        for segment in path:
            self._order.move_to_end(segment)
        self._mark_sampled(tokens, salt, keys, range(first_sampled + 1, start + 2))
        if keys[-1] in self._forks:
            return
        size = end - start  # 0, where paths differ in nothing but their last tokens
        if sum(segment.end - segment.start for segment in path) + size > max_tokens:
            return
        self.shrink_to(max_tokens - size)  # not the path: it was used last, and fits
        inherited: list[_Fork[State]] = []
        if found is not None and parent is not None and _is_outgrown(parent, found):
            # One piece of memory for the whole, so that long conversations are not read in many.
            inherited, parent.forks = parent.forks, []
            start = parent.start
            self._drop(parent)
            parent = parent.parent
        child = _Segment(salt, tokens, start, end, copy(start, end), parent, forks=inherited)
        for fork in inherited:
            fork.segment = child
        self._add_forks(child, keys, first_sampled)
        if parent is not None:
            parent.num_children += 1
        self.num_tokens += end - start
        for segment in _path(child):  # an ancestor has been used whenever a descendant has
            self._order[segment] = None
            self._order.move_to_end(segment)

    def shrink_to(self, num_tokens: int) -> None:
        """Let go of the least recently used until no more than so many are kept."""
        while self.num_tokens > max(0, num_tokens):
            self._drop(next(one for one in self._order if not one.num_children))

    def clear(self) -> None:
        self.num_tokens = 0
        self._forks = {}
        self._order = OrderedDict()

    def _deepest(
        self,
        tokens: Int32Array,
        salt: str,
        keys: Sequence[int],
        may_leave: Callable[[_Fork[State]], bool],
    ) -> _Fork[State] | None:
        """The fork after most of `tokens`."""
        for num_matched in range(len(tokens), BLOCK - 1, -1):
            fork = self._forks.get(keys[num_matched - 1])
            if fork is not None and may_leave(fork) and _is_on(fork, tokens, num_matched, salt):
                return fork
        return None

    def _mark_sampled(
        self, tokens: Int32Array, salt: str, keys: Sequence[int], lengths: range
    ) -> None:
        """Of the forks along a path of others, those that are behind a token sampled here."""
        for num_matched in lengths:
            fork = self._forks.get(keys[num_matched - 1])
            if fork is not None and _is_on(fork, tokens, num_matched, salt):
                fork.is_sampled = True

    def _add_forks(self, segment: _Segment[State], keys: Sequence[int], first_sampled: int) -> None:
        for num_matched, num_kept in _places(segment):
            key = keys[num_matched - 1]
            if key not in self._forks:
                is_sampled = num_matched > first_sampled
                fork = _Fork(key, num_matched, num_kept, is_sampled, segment)
                self._forks[key] = fork
                segment.forks.append(fork)

    def _drop(self, segment: _Segment[State]) -> None:
        assert segment.num_children == 0, "others go on from it"
        del self._order[segment]
        self.num_tokens -= segment.end - segment.start
        for fork in segment.forks:
            del self._forks[fork.key]
        if segment.parent is not None:
            segment.parent.num_children -= 1


def _is_on(fork: _Fork[State], tokens: Int32Array, num_matched: int, salt: str) -> bool:
    """Do the first `num_matched` of `tokens` lead there, as their key says?"""
    segment = fork.segment
    return (
        fork.num_matched == num_matched
        and segment.salt == salt
        and np.array_equal(segment.tokens[:num_matched], tokens[:num_matched])
    )


def _is_outgrown(segment: _Segment[State], fork: _Fork[State]) -> bool:
    """Does a path that leaves it there go on from all of it, and no other one from any?"""
    return fork.num_matched == len(segment.tokens) and segment.num_children == 0


def _places(segment: _Segment[State]) -> Iterator[tuple[int, int]]:
    """Where its path may be left: tokens to match, and tokens kept of these."""
    end, next_block = segment.end, (segment.start // BLOCK + 1) * BLOCK
    yield from ((number, number) for number in range(next_block, end, BLOCK))
    yield end, end
    yield end + 1, end


def _path(segment: _Segment[State] | None) -> Iterator[_Segment[State]]:
    """From a segment to its root."""
    while segment is not None:
        yield segment
        segment = segment.parent


def _keys(tokens: Int32Array, salt: str) -> list[int]:
    """[T]: of the first 1 .. T tokens, a sum of their numbers, each mixed with its place."""
    places = np.arange(1, len(tokens) + 1, dtype=np.uint64) << np.uint64(32)
    numbers: UInt64Array = mixed(places + tokens.astype(np.uint64))
    numbers[:1] += np.uint64(hash(salt) & 0xFFFF_FFFF_FFFF_FFFF)
    keys: list[int] = np.cumsum(numbers).tolist()
    return keys
