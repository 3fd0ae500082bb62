"""Cache of ended sequences for requests that continue them: a tree of keys and values.

    a request ends ──► park(tokens, copy) ──► segments: keys and values of a path, from where it
                                                 │     leaves its parent's path to its end
    a request comes ─► find(prompt) ─► Prefix ◄──┘     a segment that continues a leaf replaces it
    memory is needed ► shrink_to(tokens)               leaves go, the least recently used first

A dictionary lists the places where a path may fork, by hash of all tokens up to there: every block
of BLOCK tokens, and a sequence's end. So a look-up costs one numpy pass over the prompt and some
dictionary look-ups, however many sequences are parked. Hits are compared token by token.

Effect on results: keys and values that were computed token by token, or after cached ones, differ
from those of a whole pass in the last bits. So a request reuses only what reaches up to a sampled
token, or up to num_shared_tokens if its caller declares that it continues an earlier one. First
turns of episodes, and requests of one turn, share system prompts and examples with others, but must
not depend on which of these ran before.

The cache belongs to one version of the weights; callers `clear` it when they change.

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

# Paths may fork after each multiple of it, and are reused in multiples: kernels then see few
# shapes, and new parts never have fewer rows than kernels need (kv_cache.ROW_BLOCK).
BLOCK = 16

State = TypeVar("State")  # keys and values of some tokens, and what is stored with them


@dataclass(eq=False, slots=True)
class _Fork(Generic[State]):
    """A place where other paths may leave a segment."""

    key: int
    num_matched: int  # tokens that a prompt must start with
    num_kept: int  # those with keys and values: the last sampled token has none
    is_sampled: bool  # the last of these tokens was sampled
    segment: _Segment[State]


@dataclass(eq=False, slots=True)
class _Segment(Generic[State]):
    """Keys and values of `tokens` from `start` to `end`; its parent has those before."""

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
    """Cached first tokens of a prompt, valid as long as it is referenced."""

    num_tokens: int
    pieces: Sequence[tuple[int, int, State]]
    """(start, end, state) in order; a state begins at `start` and may reach beyond `end`."""


class Prefixes(Generic[State]):
    """The parked sequences. Sizes are in tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._forks: dict[int, _Fork[State]] = {}
        self._order: OrderedDict[_Segment[State], None] = OrderedDict()  # least recent first

    def __len__(self) -> int:
        return len(self._order)

    def find(self, request: GenerationRequest) -> Prefix[State] | None:
        """Return the longest prefix that a request may reuse.

        It has whole blocks, and not the prompt's last token. The running request has a copy, so the
        original becomes the first to be dropped.
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
        path = [*_path(fork.segment)]  # from its segment to the root
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
        """Keep a sequence `tokens` [T], sampled from `first_sampled` on.

        Its last token has no keys and values; copy(start, end) returns those of others. The cache
        stays within `max_tokens`: older sequences are dropped, larger ones not kept.
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
        size = end - start  # 0 if paths differ only in their last tokens
        if sum(segment.end - segment.start for segment in path) + size > max_tokens:
            return
        self.shrink_to(max_tokens - size)  # keeps the path, which was used last and fits
        inherited: list[_Fork[State]] = []
        if found is not None and parent is not None and _is_extended(parent, found):
            # One piece of memory for the whole, so that long conversations have few segments.
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
        for segment in _path(child):  # using a descendant uses its ancestors
            self._order[segment] = None
            self._order.move_to_end(segment)

    def shrink_to(self, num_tokens: int) -> None:
        """Drop the least recently used segments until at most `num_tokens` are kept."""
        while self.num_tokens > max(0, num_tokens):
            self._drop(next(one for one in self._order if not one.num_children))

    def clear(self) -> None:
        """Drop all sequences."""
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
        """Return the allowed fork that matches most of `tokens`."""
        for num_matched in range(len(tokens), BLOCK - 1, -1):
            fork = self._forks.get(keys[num_matched - 1])
            if fork is not None and may_leave(fork) and _is_on(fork, tokens, num_matched, salt):
                return fork
        return None

    def _mark_sampled(
        self, tokens: Int32Array, salt: str, keys: Sequence[int], lengths: range
    ) -> None:
        """Mark forks on existing paths that follow a token sampled in this sequence."""
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
        assert segment.num_children == 0, "other segments continue it"
        del self._order[segment]
        self.num_tokens -= segment.end - segment.start
        for fork in segment.forks:
            del self._forks[fork.key]
        if segment.parent is not None:
            segment.parent.num_children -= 1


def _is_on(fork: _Fork[State], tokens: Int32Array, num_matched: int, salt: str) -> bool:
    """Return whether the first `num_matched` of `tokens` lead to this fork, as their key says."""
    segment = fork.segment
    return (
        fork.num_matched == num_matched
        and segment.salt == salt
        and np.array_equal(segment.tokens[:num_matched], tokens[:num_matched])
    )


def _is_extended(segment: _Segment[State], fork: _Fork[State]) -> bool:
    """Return whether a path from this fork continues all of the segment, and no other path does."""
    return fork.num_matched == len(segment.tokens) and segment.num_children == 0


def _places(segment: _Segment[State]) -> Iterator[tuple[int, int]]:
    """Yield where its path may fork: tokens to match, and how many of them are kept."""
    end, next_block = segment.end, (segment.start // BLOCK + 1) * BLOCK
    yield from ((number, number) for number in range(next_block, end, BLOCK))
    yield end, end
    yield end + 1, end


def _path(segment: _Segment[State] | None) -> Iterator[_Segment[State]]:
    """Yield the segments from this one to its root."""
    while segment is not None:
        yield segment
        segment = segment.parent


def _keys(tokens: Int32Array, salt: str) -> list[int]:
    """Return a hash of the first 1 .. T tokens, [T]: the sum of tokens mixed with positions."""
    places = np.arange(1, len(tokens) + 1, dtype=np.uint64) << np.uint64(32)
    numbers: UInt64Array = mixed(places + tokens.astype(np.uint64))
    numbers[:1] += np.uint64(hash(salt) & 0xFFFF_FFFF_FFFF_FFFF)
    keys: list[int] = np.cumsum(numbers).tolist()
    return keys
