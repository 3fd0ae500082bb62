"""Ring attention over ranks equals attention of one rank that has all tokens.

All ranks' parts are computed in one process, where keys and gradients are passed by hand.
test_parallel.py covers the transfer between processes.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.engines.models.prefix_tree import Block, IntArray, PrefixTree
from rlsys.engines.models.tree_attention import OfResult, Places, attend, join
from rlsys.engines.training.parallel.ring import RingCalls, RingStep
from tests.engines.test_token_tree import forked
from tests.engines.test_tree_attention import SCALING, masked, random_heads

NO_GROUP: Any = None


def calls_of(blocks: list[Block], size: int, num_ranks: int) -> list[RingCalls]:
    return [
        RingCalls(blocks, size, NO_GROUP, range(num_ranks), index) for index in range(num_ranks)
    ]


def parts(heads: torch.Tensor, size: int, num_ranks: int) -> tuple[torch.Tensor, ...]:
    """Return [1, H, M, D] of all ranks, padded at the end."""
    padding = size * num_ranks - heads.shape[2]
    padded = torch.nn.functional.pad(heads.detach(), (0, 0, 0, padding))
    return torch.split(padded, size, 2)


def coming(calls: list[RingCalls], rank: int) -> list[tuple[RingStep, int, Places]]:
    """Return, by turn, the source of keys and the keys that are sent."""
    found = []
    for distance, turn in enumerate(calls[rank].turns, start=1):
        if turn.source is not None:
            given = calls[turn.source].turns[distance - 1]
            assert (turn.source, given.target) == (rank - distance, rank)
            found.append((turn, turn.source, given.sent))
    return found


@given(
    rows=forked(),
    min_shared=st.sampled_from((None, 1, 3)),
    num_ranks=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_equal_to_attention_with_a_mask(
    rows: list[IntArray], min_shared: int | None, num_ranks: int, seed: int
) -> None:
    torch.manual_seed(seed)
    tree = PrefixTree(rows, min_shared=min_shared)
    num_tokens = tree.num_tokens
    size = -(-num_tokens // num_ranks)
    heads = random_heads(num_tokens)
    weight = torch.randn(1, num_tokens, 4, 16)
    expected = masked(*heads, tree)
    wanted = torch.autograd.grad((expected * weight).sum(), heads)

    calls = calls_of(tree.blocks, size, num_ranks)
    query, key, value, grad = (parts(x, size, num_ranks) for x in (*heads, weight.transpose(1, 2)))
    both = [torch.cat(pair, 1) for pair in zip(key, value, strict=True)]
    found, of_query, of_both = [], [], [torch.zeros_like(x) for x in both]
    for rank in range(num_ranks):
        joined, total = attend(query[rank], key[rank], value[rank], calls[rank].own, SCALING)
        for turn, source, sent in coming(calls, rank):
            arrived = both[source][sent]
            assert arrived.shape[2] == turn.num_received
            keys, values = arrived.chunk(2, 1)
            join(joined, total, query[rank], keys, values, turn.rectangles, SCALING)
        found.append(joined)
        result = OfResult(query[rank], joined, total, grad[rank], SCALING)
        query_grad, *own = result.differentiate(key[rank], value[rank], calls[rank].own)
        of_both[rank] += torch.cat(own, 1)
        for turn, source, sent in coming(calls, rank):
            arrived = both[source][sent]
            keys, values = arrived.chunk(2, 1)
            back = torch.zeros_like(arrived)
            of_keys, of_values = back.chunk(2, 1)
            result.differentiate_joined(keys, values, turn.rectangles, of_keys, of_values)
            of_both[source][sent] += back
        of_query.append(query_grad)

    attended = torch.cat(found, 2)
    torch.testing.assert_close(attended[:, :, :num_tokens].transpose(1, 2), expected)
    assert not attended[:, :, num_tokens:].any()
    gradients = torch.cat(of_query, 2), *torch.cat(of_both, 2).chunk(2, 1)
    for gradient, of_one in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient[:, :, :num_tokens], of_one, rtol=1e-4, atol=2e-5)
        assert not gradient[:, :, num_tokens:].any()


def test_only_visible_keys_are_sent() -> None:
    """Use rows of 4, 6 and 2 tokens on four ranks with three each."""
    tree = PrefixTree([torch.arange(n).numpy() for n in (4, 6, 2)], min_shared=None)
    calls = calls_of(tree.blocks, 3, 4)
    sent = [
        [(turn.target, turn.sent[2]) for turn in of_rank.turns if turn.target is not None]
        for of_rank in calls
    ]
    # The first row ends on rank 1; the second one begins there with tokens 1 and 2, and ends on
    # rank 3 with one token.
    assert sent == [
        [(1, slice(0, 3))],
        [(2, slice(1, 3)), (3, slice(1, 3))],
        [(3, slice(0, 3))],
        [],
    ]
