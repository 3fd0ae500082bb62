"""Attention along a tree equals attention along each row, in values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from rlsys.engines.models.prefix_tree import IntArray, PrefixTree
from rlsys.engines.models.tree_attention import TreeCalls, tree_attention
from tests.engines.test_token_tree import forked, places_of

SCALING = 0.3


def masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: PrefixTree
) -> torch.Tensor:
    mask = torch.zeros(tree.num_tokens, tree.num_tokens, dtype=torch.bool)
    for row in range(len(tree.lengths)):
        places = torch.tensor(places_of(tree, row))
        for position in range(len(places)):
            mask[places[position], places[: position + 1]] = True
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=SCALING, enable_gqa=True
    )
    return attended.transpose(1, 2)


def random_heads(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value."""
    query, key, value = (
        torch.randn(1, num_heads, num_tokens, 16, requires_grad=True) for num_heads in (4, 2, 2)
    )
    return query, key, value


@given(rows=forked(), min_shared=st.sampled_from((None, 1, 3)), seed=st.integers(0, 99))
def test_equal_to_attention_with_a_mask(
    rows: list[IntArray], min_shared: int | None, seed: int
) -> None:
    torch.manual_seed(seed)
    tree = PrefixTree(rows, min_shared=min_shared)
    heads = random_heads(tree.num_tokens)
    weight = torch.randn(1, tree.num_tokens, 4, 16)
    found = tree_attention(*heads, TreeCalls(tree.blocks), SCALING)
    expected = masked(*heads, tree)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad((found * weight).sum(), heads)
    wanted = torch.autograd.grad((expected * weight).sum(), heads)
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_joined_in_float32(dtype: torch.dtype) -> None:
    """The error is about that of a single call over everything."""
    torch.manual_seed(0)
    tokens = np.arange(300)
    rows = [np.concatenate((tokens[:200], tokens[start : start + 60])) for start in (0, 60, 120)]
    tree = PrefixTree(rows, min_shared=16)
    query, key, value = (heads.detach() for heads in random_heads(tree.num_tokens))
    truth = masked(query, key, value, tree)
    rounded = query.to(dtype), key.to(dtype), value.to(dtype)
    plain = masked(*rounded, tree)
    found = tree_attention(*rounded, TreeCalls(tree.blocks), SCALING)
    assert found.dtype == dtype
    assert (found - truth).abs().max() <= 1.5 * (plain - truth).abs().max()
