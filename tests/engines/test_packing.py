"""Attention along rows packed into one gives the same numbers as padded rows."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.models.collate import collate
from rlsys.engines.models.prefix_tree import IntArray
from rlsys.engines.models.row_packing import Packing, tree_of
from rlsys.engines.models.token_policy import TokenPolicy
from tests.engines.test_token_tree import forked
from tests.engines.torch_engine_harness import FAMILIES, build_model
from tests.engines.training_harness import (
    assert_same_sums,
    make_engine,
    make_rows,
    tiny_model,
)
from tests.tiers import rest_slow


def test_two_rows_by_hand() -> None:
    packing = Packing(tree_of([np.array([7]), np.array([8, 9, 9])], shares=False))
    assert packing.position_ids.tolist() == [[0, 0, 1, 2]]
    packed = torch.tensor([10.0, 20.0, 21.0, 22.0]).view(1, 1, 4, 1)
    padded = packing.pad(packed)
    assert padded[1, 0, :, 0].tolist() == [20, 21, 22]
    assert padded[0, 0, 0, 0] == 10
    assert packing.unpad(padded.transpose(1, 2)).flatten().tolist() == [10, 20, 21, 22]


@given(rows=forked(), shares=st.booleans())
def test_what_is_padded_comes_back_with_its_gradient(rows: list[IntArray], shares: bool) -> None:
    packing = Packing(tree_of(rows, shares=shares))
    packed = torch.randn(1, 2, packing.tree.num_tokens, 3, requires_grad=True)
    returned = packing.unpad(packing.pad(packed).transpose(1, 2))  # [1, N, H, D]
    assert torch.equal(returned.transpose(1, 2), packed)
    weight = torch.randn_like(packed)
    (returned.transpose(1, 2) * weight).sum().backward()
    assert packed.grad is not None
    assert torch.equal(packed.grad, weight)


@given(rows=forked(), shares=st.booleans())
def test_padded_rows_are_the_rows_and_copies_add_up(rows: list[IntArray], shares: bool) -> None:
    packing = Packing(tree_of(rows, shares=shares))
    tree = packing.tree
    packed = torch.zeros(1, 1, tree.num_tokens, 1)
    packed[0, 0, tree.places, 0] = torch.from_numpy(np.concatenate(rows)).float()
    padded = packing.pad(packed.requires_grad_())
    for number, row in enumerate(tree.owners):
        assert padded[number, 0, : len(rows[row]), 0].tolist() == rows[row].tolist()
    real = torch.zeros_like(padded)
    for number, row in enumerate(tree.owners):
        real[number, 0, : len(rows[row])] = 1
    (padded * real).sum().backward()
    owned = [rows[row] for row in tree.owners]
    assert packed.grad is not None
    assert packed.grad.sum() == sum(map(len, owned))  # each copy has its part


@pytest.mark.parametrize("family", rest_slow(FAMILIES, only=("gemma3",)))
def test_packed_rows_give_what_padded_rows_give(family: Any, tmp_path: Path) -> None:
    """Compare values and gradients, with sliding windows and soft caps too."""
    model = load_causal_lm(build_model(tmp_path, family), dtype="float32")
    policy = TokenPolicy(model)
    assert policy.packs
    results, sums = [], []
    for packed in (True, False):
        model.zero_grad()
        logprobs, entropy, _ = policy(collate(make_rows(9), packed=packed), 0.7)
        loss = logprobs.sum() + entropy.sum()
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        results.append([logprobs, entropy, *gradients])
        norm = torch.stack([one.double().norm() for one in gradients]).norm()
        sums.append({"loss": loss.item(), "grad_norm": norm.item()})
    assert_same_sums(*sums)
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("family", rest_slow(FAMILIES, only=("gemma3",)))
def test_shared_prefixes_give_what_separate_rows_give(
    family: Any, long: bool, tmp_path: Path
) -> None:
    """Share prompts within and between groups, equal completions, and completions that fork."""
    model = load_causal_lm(build_model(tmp_path, family), dtype="float32")
    policy = TokenPolicy(model)
    assert policy.shares
    prompts = [np.arange(1, 12 * (12 if long else 1)) % 31 + 1, np.array([3, 1, 2])]
    rows = [
        replace(row, prompt_token_ids=prompts[index // 3 % 2].astype(np.int32))
        for index, row in enumerate(make_rows(12))
    ]
    one = rows[0]
    rows.append(replace(one, loss_mask=~one.loss_mask | (one.token_ids > 0)))
    forked = np.concatenate((one.token_ids[:-1], one.token_ids[-1:] % 31 + 1)).astype(np.int32)
    rows.append(replace(one, token_ids=forked))
    results = []
    for shares in (True, False):
        model.zero_grad()
        batch = collate(rows, shares=shares)
        logprobs, entropy, _ = policy(batch, 0.7)
        weights = torch.linspace(-1, 2, len(logprobs))
        loss = (weights * (logprobs + 0.5 * entropy)).sum()
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        results.append((loss, logprobs, entropy, gradient))
    assert batch.input_ids.shape[1] > 1.5 * collate(rows).input_ids.shape[1]
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()


def test_a_model_with_state_along_the_row_gets_padded_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that runs along a packed row would leak from one sequence into the next."""
    path, rows = tiny_model(tmp_path / "model"), make_rows(5)
    kind = type(load_causal_lm(path, dtype="float32").get_decoder())
    whole = kind.forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        output = whole(self, *args, **options)
        hidden = output.last_hidden_state
        output.last_hidden_state = hidden + 0.1 * hidden.cumsum(1)
        return output

    functools.update_wrapper(forward, whole)
    monkeypatch.setattr(kind, "forward", forward)
    assert not TokenPolicy(load_causal_lm(path, dtype="float32")).packs
    found = make_engine(path).infer(rows)
    for row, logprobs in zip(rows, found, strict=True):
        (alone,) = make_engine(path).infer([row])
        np.testing.assert_allclose(logprobs, alone, rtol=1e-4, atol=1e-4)
