"""Attention in blocks equals attention with a mask, in values and gradients.

torch has the kernel for GPUs only. On the CPU it computes the same from the same mask.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention

from rlsys.engines.models import block_attention as block_attention_module
from rlsys.engines.models.attention import AttentionRule, packed_attention
from rlsys.engines.models.block_attention import (
    BLOCK,
    Sight,
    block_attention,
    flex_along_tree,
    takes,
)
from rlsys.engines.models.prefix_tree import IntArray, PrefixTree
from rlsys.engines.models.row_packing import Packing
from tests.engines.test_token_tree import forked
from tests.engines.test_tree_attention import random_heads
from tests.tiers import examples

Bound = st.none() | st.integers(1, 6)


@pytest.fixture(autouse=True)
def differentiable_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow gradients on the CPU, which torch can compute but refuses."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


def seen(tree: PrefixTree, window: int | None, chunk: int | None) -> np.ndarray:
    """Return the visibility [M, M], computed from the rows."""
    found = np.zeros((tree.num_tokens, tree.num_tokens), bool)
    for row, length in enumerate(tree.lengths):
        places = tree.places[tree.row_starts[row] :][:length]
        for here in range(length):
            for there in range(here + 1):
                near = window is None or here - there < window
                same = chunk is None or here // chunk == there // chunk
                found[places[here], places[there]] |= near and same
    return found


def test_sight_by_hand() -> None:
    tree = PrefixTree([np.array(row) for row in ([1, 2, 3, 4], [1, 2, 5], [7])], min_shared=1)
    # Places: 1 2 3 4 | 5 | 7
    assert tree.ends.tolist() == [5, 5, 4, 4, 5, 6]
    sight = Sight.of(tree, window=2)
    assert sight.firsts.tolist() == [-1 + 1, 0, 1, 2, 1, 0]
    assert Sight.of(tree, chunk=3).firsts.tolist() == [0, 0, 0, 3, 0, 0]


@given(rows=forked(), min_shared=st.sampled_from((None, 1, 3)), window=Bound, chunk=Bound)
def test_sight_is_what_rows_see(
    rows: list[IntArray], min_shared: int | None, window: int | None, chunk: int | None
) -> None:
    tree = PrefixTree(rows, min_shared=min_shared)
    sight = Sight.of(tree, window=window, chunk=chunk)
    place = np.arange(tree.num_tokens)
    query, key = place[:, None], place[None]
    found = (key <= query) & (query < sight.ends[key])
    found &= sight.positions[key] >= sight.firsts[query]
    assert np.array_equal(found, seen(tree, window, chunk))


@settings(max_examples=examples(40), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    shared=st.integers(0, 200),
    window=st.none() | st.integers(1, 400),
    chunk=st.none() | st.integers(1, 400),
)
def test_no_block_is_left_out_and_full_ones_are(
    lengths: list[int], shared: int, window: int | None, chunk: int | None
) -> None:
    rows = [np.r_[np.zeros(shared), np.full(n, i + 1)] for i, n in enumerate(lengths)]
    tree = PrefixTree([row.astype(np.int64) for row in rows], min_shared=1)
    some, every = Sight.of(tree, window=window, chunk=chunk).blocks
    visible = seen(tree, window, chunk)
    assert not (some & every).any()
    for query, key in np.ndindex(*some.shape):
        block = visible[query * BLOCK :, key * BLOCK :][:BLOCK, :BLOCK]
        assert some[query, key] or every[query, key] or not block.any()
        assert not every[query, key] or (block.size == BLOCK**2 and block.all())


@settings(max_examples=examples(40), deadline=None)
@given(
    rows=forked(),
    min_shared=st.sampled_from((None, 1)),
    window=Bound,
    chunk=Bound,
    softcap=st.sampled_from((None, 2.0)),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equal_to_attention_of_padded_rows(
    rows: list[IntArray],
    min_shared: int | None,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    has_sinks: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    packing = Packing(PrefixTree(rows, min_shared=min_shared))
    num_tokens = packing.tree.num_tokens
    query, key, value = random_heads(num_tokens)
    sinks = torch.randn(4, requires_grad=True) if has_sinks else None
    rule = AttentionRule(
        scaling=0.3, sliding_window=window, chunk=chunk, softcap=softcap, sinks=sinks
    )
    expected = packed_attention(query, key, value, rule, packing)
    found = block_attention(
        query, key, value, packing.mask(window, chunk), scaling=0.3, softcap=softcap, sinks=sinks
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(found)
    trained = [query, key, value, *([] if sinks is None else [sinks])]
    gradients = torch.autograd.grad((found * weight).sum(), trained)
    wanted = torch.autograd.grad((expected * weight).sum(), trained)
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=2e-5)


def test_rows_of_several_blocks() -> None:
    torch.manual_seed(0)
    rows = [np.arange(300), np.r_[np.arange(200), np.arange(150)], np.arange(5, 140)]
    packing = Packing(PrefixTree(rows, min_shared=1))
    query, key, value = random_heads(packing.tree.num_tokens)
    for window in (None, 100):
        rule = AttentionRule(scaling=0.25, sliding_window=window)
        expected = packed_attention(query, key, value, rule, packing)
        found = block_attention(query, key, value, packing.mask(window, None), scaling=0.25)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_one_compilation_serves_passes_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile as on a GPU, without its kernel and without the gradient."""
    compiled = torch.compile(flex_along_tree, dynamic=True, fullgraph=True)
    monkeypatch.setattr(block_attention_module, "_kernel", lambda device: compiled)
    counts: list[int] = []
    for length in (200, 350, 500, 650):
        rows = [np.arange(length), np.r_[np.arange(150), np.arange(90)], np.arange(5, 140)]
        packing = Packing(PrefixTree(rows, min_shared=1))
        query, key, value = random_heads(packing.tree.num_tokens)
        for window, softcap in ((None, None), (100, None), (None, 20.0)):
            rule = AttentionRule(scaling=0.25, sliding_window=window, softcap=softcap)
            expected = packed_attention(query, key, value, rule, packing)
            mask = packing.mask(window, None)
            with torch.no_grad():
                found = block_attention(query, key, value, mask, scaling=0.25, softcap=softcap)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        counts.append(counters["stats"]["unique_graphs"])
    assert counts[1] == counts[2] == counts[3]


def test_masks_are_made_once_for_all_layers() -> None:
    packing = Packing(PrefixTree([np.arange(5)], min_shared=None))
    assert packing.mask(None, None) is packing.mask(None, None)
    assert packing.mask(3, None) is not packing.mask(None, None)


def test_it_is_for_gpus() -> None:
    heads = torch.zeros(1, 2, 4, 16)
    assert not takes(heads, heads)
    on_gpu = torch.empty(1, 2, 4, 16, device="meta")
    assert not takes(on_gpu, on_gpu)
