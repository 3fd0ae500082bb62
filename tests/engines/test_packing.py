"""Rows packed into one: attention along each, the same numbers as padded rows."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.engines.causal_lm import load_causal_lm
from rlsys.engines.packing import Packing
from rlsys.engines.training.collate import collate
from rlsys.engines.training.token_policy import TokenPolicy
from tests.engines.torch_engine_harness import FAMILIES, build_model
from tests.engines.training_harness import make_engine, make_rows, tiny_model


def test_two_rows_by_hand() -> None:
    packing = Packing(np.array([1, 3]))
    assert packing.position_ids.tolist() == [[0, 0, 1, 2]]
    packed = torch.tensor([10.0, 20.0, 21.0, 22.0]).view(1, 1, 4, 1)
    padded = packing.pad(packed)
    assert padded[1, 0, :, 0].tolist() == [20, 21, 22]
    assert padded[0, 0, 0, 0] == 10
    assert packing.unpad(padded.transpose(1, 2)).flatten().tolist() == [10, 20, 21, 22]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_what_is_padded_comes_back_with_its_gradient(lengths: list[int]) -> None:
    packing = Packing(np.array(lengths))
    packed = torch.randn(1, 2, sum(lengths), 3, requires_grad=True)
    returned = packing.unpad(packing.pad(packed).transpose(1, 2))  # [1, N, H, D]
    assert torch.equal(returned.transpose(1, 2), packed)
    weight = torch.randn_like(packed)
    (returned.transpose(1, 2) * weight).sum().backward()
    assert packed.grad is not None
    assert torch.equal(packed.grad, weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_give_what_padded_rows_give(family: Any, tmp_path: Path) -> None:
    """With sliding windows and soft caps too; values and gradients."""
    model = load_causal_lm(build_model(tmp_path, family), dtype="float32")
    policy = TokenPolicy(model)
    assert policy.packs
    results = []
    for packed in (True, False):
        model.zero_grad()
        logprobs, entropy = policy(collate(make_rows(9), packed=packed), 0.7)
        (logprobs.sum() + entropy.sum()).backward()
        results.append([logprobs, entropy, *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=2e-4)


def test_a_model_that_looks_along_rows_by_other_means_gets_padded_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that runs along the row would run from one sequence into the next."""
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
