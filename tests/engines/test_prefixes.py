"""The tree of parked sequences: what is found, what is dropped. States are tokens here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.engines.generation.torch.prefix_cache import BLOCK, Prefixes
from tests.engines.torch_engine_harness import request
from tests.tiers import examples

UNLIMITED = 10**9

Path = tuple[int, ...]


def park(
    tree: Prefixes[Path],
    tokens: Sequence[int],
    *,
    num_prompt: int,
    salt: str = "",
    max_tokens: int = UNLIMITED,
) -> None:
    tree.park(
        np.array(tokens, np.int32),
        first_sampled=num_prompt,
        salt=salt,
        max_tokens=max_tokens,
        copy=lambda start, end: tuple(tokens[start:end]),
    )


def found(
    tree: Prefixes[Path], prompt: Sequence[int], *, salt: str = "", num_shared: int = 0
) -> Path:
    """Return the tokens whose state a prompt finds, contiguous from the start."""
    asked = request("r", prompt, cache_salt=salt, num_shared_tokens=num_shared)
    prefix = tree.find(asked)
    if prefix is None:
        return ()
    path: Path = ()
    for start, end, state in prefix.pieces:
        assert start == len(path)
        path += state[: end - start]
        assert len(path) == end
    assert len(path) == prefix.num_tokens
    return path


def numbers(first: int, last: int) -> list[int]:
    return [*range(first, last)]


def test_a_later_turn_finds_whole_blocks_of_the_earlier_one() -> None:
    tree: Prefixes[Path] = Prefixes()
    park(tree, numbers(0, 60), num_prompt=40)  # keys and values of 59
    assert tree.num_tokens == 59
    assert found(tree, numbers(0, 70)) == tuple(range(48))
    assert found(tree, numbers(0, 60)) == tuple(range(48))  # like an aborted request that continues
    assert found(tree, [*numbers(0, 59), 99]) == tuple(range(48))  # another last token
    assert found(tree, [*numbers(0, 50), 99]) == tuple(range(48))  # from within the completion
    assert found(tree, numbers(0, 49)) == tuple(range(48))
    assert found(tree, numbers(0, 48)) == tuple(range(32))  # its last token must run
    assert found(tree, numbers(0, 47)) == ()  # no sampled token ends one of its blocks


def test_a_shared_prompt_alone_finds_nothing() -> None:
    tree: Prefixes[Path] = Prefixes()
    park(tree, numbers(0, 60), num_prompt=40)
    assert found(tree, numbers(0, 40)) == ()
    assert found(tree, [*numbers(0, 40), *numbers(100, 140)]) == ()
    assert found(tree, [*numbers(0, 40), *numbers(100, 140)], num_shared=40) == tuple(range(32))
    assert found(tree, [*numbers(0, 40), *numbers(100, 140)], num_shared=31) == tuple(range(16))


def test_a_completion_of_one_token_can_be_continued() -> None:
    """Use a token without keys and values, which still identifies the sequence."""
    tree: Prefixes[Path] = Prefixes()
    for answer in (7, 8):
        park(tree, [*numbers(0, 32), answer], num_prompt=32)
    assert tree.num_tokens == 32
    for answer in (7, 8):
        assert found(tree, [*numbers(0, 32), answer, 1, 2]) == tuple(range(32))
    assert found(tree, [*numbers(0, 32), 9, 1, 2]) == ()


def test_shared_parts_are_kept_once_and_a_long_conversation_is_one_segment() -> None:
    tree: Prefixes[Path] = Prefixes()
    for sample in range(4):
        park(tree, [*numbers(0, 40), *[100 + sample] * 20], num_prompt=40)
    assert tree.num_tokens == 59 + 3 * 27  # the others from the third block on
    path = [*numbers(0, 40), *[101] * 20]
    for turn in range(5):
        path += [200 + turn] * 24
        park(tree, path, num_prompt=len(path) - 9)
    assert len(tree) == 4
    assert tree.num_tokens == 59 + 2 * 27 + len(path) - 1 - 32
    prefix = tree.find(request("r", [*path, 1]))
    assert prefix is not None
    assert [(start, end) for start, end, _ in prefix.pieces] == [(0, 32), (32, 176)]


def test_the_least_recently_used_is_dropped_first() -> None:
    tree: Prefixes[Path] = Prefixes()
    paths = [[name] * 33 for name in range(3)]
    for path in paths:
        park(tree, path, num_prompt=1, max_tokens=3 * 32)
    tree.find(request("r", [*paths[0], 9]))  # runs now, and has a copy
    tree.shrink_to(2 * 32)
    assert found(tree, [*paths[0], 9]) == ()
    park(tree, [3] * 33, num_prompt=1, max_tokens=2 * 32)
    assert [bool(found(tree, [*path, 9])) for path in paths] == [False, False, True]
    park(tree, paths[2], num_prompt=1)  # its request has ended: used last
    tree.shrink_to(32)
    assert found(tree, [*paths[2], 9]) == (2,) * 32
    park(tree, [5] * 64, num_prompt=1, max_tokens=40)  # more than fits
    assert tree.num_tokens == 32
    tree.clear()
    assert (tree.num_tokens, found(tree, [*paths[2], 9])) == (0, ())


TOKEN = st.sampled_from([1, 1, 1, 2])
PIECE = st.lists(TOKEN, min_size=1, max_size=24)


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[str, list[int], int]]:
    """Draw salt, tokens and prompt length; many share a prefix."""
    made: list[tuple[str, list[int], int]] = []
    for _ in range(draw(st.integers(1, 12))):
        earlier = draw(st.sampled_from([[], *(tokens for _, tokens, _ in made)]))
        kept = draw(st.integers(0, len(earlier)))
        prompt = [*earlier[:kept], *draw(PIECE)]
        made.append((draw(st.sampled_from(["", "a"])), [*prompt, *draw(PIECE)], len(prompt)))
    return made


def in_common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def reusable(parked: Sequence[tuple[list[int], int]], prompt: list[int]) -> tuple[int, int]:
    """Return the reusable tokens by the rule, without a tree.

    The two results count sampled tokens of each path alone, and those sampled by other paths as
    well.
    """
    common = [in_common(tokens, prompt) for tokens, _ in parked]
    own = any_path = 0
    for (tokens, num_prompt), same in zip(parked, common, strict=True):
        end = len(tokens) - 1
        for place in {*range(BLOCK, end, BLOCK), end, end + 1}:
            if place > same:
                continue
            found = min(place, end, len(prompt) - 1) // BLOCK * BLOCK
            if place > num_prompt:
                own = max(own, found)
            if any(q < place <= c for (_, q), c in zip(parked, common, strict=True)):
                any_path = max(any_path, found)
    return own, any_path


@settings(max_examples=examples(100), deadline=None)
@given(conversations(), PIECE)
def test_results_follow_the_rule(made: list[tuple[str, list[int], int]], more: list[int]) -> None:
    """Look up prompts that continue each sequence, or parts of it."""
    tree: Prefixes[Path] = Prefixes()
    for salt, tokens, num_prompt in made:
        park(tree, tokens, num_prompt=num_prompt, salt=salt)
    for salt, tokens, _ in made:
        parked = [(t, num_prompt) for s, t, num_prompt in made if s == salt]
        for prompt in (tokens, [*tokens, *more], [*tokens[: len(tokens) // 2], *more]):
            path = found(tree, prompt, salt=salt)
            assert path == tuple(prompt[: len(path)])
            own, any_path = reusable(parked, prompt)
            assert own <= len(path) <= any_path


@settings(max_examples=examples(100), deadline=None)
@given(conversations(), st.integers(0, 120))
def test_it_stays_within_its_bound(made: list[tuple[str, list[int], int]], max_tokens: int) -> None:
    tree: Prefixes[Path] = Prefixes()
    for salt, tokens, num_prompt in made:
        path = found(tree, tokens[:num_prompt], salt=salt)
        assert path == tuple(tokens[: len(path)])
        park(tree, tokens, num_prompt=num_prompt, salt=salt, max_tokens=max_tokens)
        assert tree.num_tokens <= max_tokens
    tree.shrink_to(0)
    assert tree.num_tokens == 0
    assert all(found(tree, [*tokens, 1], salt=salt) == () for salt, tokens, _ in made)
