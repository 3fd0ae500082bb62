"""Fused rotary embeddings and gated activations equal their definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.models.fused_elementwise import (
    _compiled,
    _gated,
    _gated_grads,
    _rotated,
    _rotated_back,
    gated_silu,
    rotate,
    use_fused_elementwise,
)
from tests.engines.torch_engine_harness import FAMILIES, build_model


def test_rotation_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    cos, sin = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    # The pair (1, 3) is rotated by a right angle, (2, 4) is not.
    assert rotate(x, cos.view(1, 1, 4), sin.view(1, 1, 4)).flatten().tolist() == [-3, 2, 1, 4]


def test_rotation_and_its_gradient_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 8, requires_grad=True) for heads in (4, 2))
    cos, sin = torch.randn(2, 2, 5, 8)
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    found = rotate(q, cos, sin), rotate(k, cos, sin)
    torch.testing.assert_close(found, expected)
    weights = [torch.randn_like(one) for one in expected]
    wanted = torch.autograd.grad(expected, (q, k), weights)
    given = torch.autograd.grad(found, (q, k), weights)
    torch.testing.assert_close(given, wanted)


def test_the_gated_activation_and_its_gradients_are_autograds() -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(3, 7, requires_grad=True) for _ in range(2))
    weight = torch.randn(3, 7)
    expected, found = F.silu(gate) * up, gated_silu(gate, up)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad((expected * weight).sum(), (gate, up))
    given = torch.autograd.grad((found * weight).sum(), (gate, up))
    torch.testing.assert_close(given, wanted)


def test_half_precision_rounds_once() -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(64, 64).bfloat16() for _ in range(2))
    exact = F.silu(gate.double()) * up.double()
    torch.testing.assert_close(gated_silu(gate, up).double(), exact, rtol=2**-8, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_the_same(family: Any, tmp_path: Path) -> None:
    model = load_causal_lm(build_model(tmp_path, family), dtype="float32")
    token_ids = torch.arange(12).view(2, 6)
    results = []
    for fused in (False, True):
        if fused:
            use_fused_elementwise(model)
            kinds = {type(m).__name__ for m in model.modules() if hasattr(m, "gate_proj")}
            # Gemma has another activation.
            assert all(kind.startswith("Fused") == ("emma" not in family) for kind in kinds)
        model.zero_grad()
        logits = model(input_ids=token_ids, use_cache=False).logits
        logits.square().mean().backward()
        results.append([logits, *(parameter.grad.clone() for parameter in model.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_kernels_compute_the_same(dtype: torch.dtype) -> None:
    """Compile as on a GPU, for two numbers of tokens and transposed heads."""
    for num_tokens in (5, 7):
        x = torch.randn(1, num_tokens, 4, 8, dtype=dtype).transpose(1, 2)
        cos, sin = torch.randn(2, 1, num_tokens, 8, dtype=dtype)
        for function, arguments in (
            (_rotated, (x, cos, sin)),
            (_rotated_back, (x, cos, sin)),
            (_gated, (x, x)),
            (_gated_grads, (x, x, x)),
        ):
            expected = function(*arguments)
            torch.testing.assert_close(_compiled(function)(*arguments), expected)
