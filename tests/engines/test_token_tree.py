"""Prefix trees store each token once, and each token sees its own row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlsys.engines.models.prefix_tree import Block, IntArray, PrefixTree


def rows_of(*rows: str) -> list[IntArray]:
    return [np.array([ord(token) for token in row]) for row in rows]


def places_of(tree: PrefixTree, row: int) -> list[int]:
    start = tree.row_starts[row]
    places: list[int] = tree.places[start : start + tree.lengths[row]].tolist()
    return places


def visible(tree: PrefixTree) -> IntArray:
    """Count how often each token [row] sees each other [column]."""
    seen = np.zeros((tree.num_tokens, tree.num_tokens), np.int64)
    for block in tree.blocks:
        shape = (len(block), block.key_end - block.key_start)
        part = np.tril(np.ones(shape, np.int64)) if block.is_causal else np.ones(shape, np.int64)
        seen[block.query_start : block.query_end, block.key_start : block.key_end] += part
    return seen


def test_the_drawing_by_hand() -> None:
    tree = PrefixTree(rows_of("abcd", "abcef", "xy"), min_shared=1)
    assert tree.num_tokens == 8
    assert tree.position_ids.tolist() == [0, 1, 2, 3, 3, 4, 0, 1]
    assert [places_of(tree, row) for row in range(3)] == [[0, 1, 2, 3], [0, 1, 2, 4, 5], [6, 7]]
    assert tree.blocks == [
        Block(0, 3, 0, 3),
        Block(3, 4, 3, 4),
        Block(4, 6, 4, 6),
        Block(6, 8, 6, 8),
        Block(3, 6, 0, 3),
    ]


def test_a_fork_before_another_cuts_what_they_share() -> None:
    tree = PrefixTree(rows_of("aabbx", "aabby", "aaz"), min_shared=1)
    assert tree.position_ids.tolist() == [0, 1, 2, 3, 4, 4, 2]
    assert [block for block in tree.blocks if not block.is_causal] == [
        Block(4, 6, 2, 4),
        Block(2, 7, 0, 2),
    ]


def test_a_row_that_another_begins_with_adds_nothing() -> None:
    tree = PrefixTree(rows_of("ab", "abc", "abc"), min_shared=1)
    assert tree.num_tokens == 3
    assert tree.blocks == [Block(0, 3, 0, 3)]
    assert tree.owners.tolist() == [1]


def test_short_prefixes_are_not_shared() -> None:
    rows = rows_of("abcd", "abce", "abxy")
    assert PrefixTree(rows, min_shared=1).num_tokens == 7
    assert PrefixTree(rows, min_shared=3).num_tokens == 4 + 1 + 4  # "ab" is too short
    assert PrefixTree(rows, min_shared=4).num_tokens == 12
    assert places_of(PrefixTree(rows, min_shared=None), 2) == [8, 9, 10, 11]


@st.composite
def forked(draw: st.DrawFn) -> list[IntArray]:
    """Draw rows of few different tokens, many of which extend a prefix of another."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 8))):
        beginning: list[int] = []
        if rows:
            one = draw(st.sampled_from(rows))
            beginning = one[: draw(st.integers(0, len(one)))]
        least = 0 if beginning else 1
        rows.append(beginning + draw(st.lists(st.integers(0, 2), min_size=least, max_size=8)))
    return [np.array(row) for row in rows]


@given(rows=forked(), min_shared=st.none() | st.integers(1, 4))
def test_a_tree_holds_its_rows_and_their_past(rows: list[IntArray], min_shared: int | None) -> None:
    tree = PrefixTree(rows, min_shared=min_shared)
    tokens = np.full(tree.num_tokens, -1)
    expected = np.zeros((tree.num_tokens, tree.num_tokens), np.int64)
    for number, row in enumerate(rows):
        places = places_of(tree, number)
        assert len(set(places)) == len(row)
        for position, place in enumerate(places):
            assert tokens[place] in (-1, row[position])
            tokens[place] = row[position]
            assert tree.position_ids[place] == position
            expected[place, places[: position + 1]] = 1
    assert (tokens >= 0).all()
    assert (visible(tree) == expected).all()
    if min_shared is None:
        assert tree.num_tokens == sum(map(len, rows))
    if min_shared == 1:
        assert tree.num_tokens == len(
            {tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)}
        )
