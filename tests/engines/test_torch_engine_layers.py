"""Attention and linear layers that sampler and trainer share, against those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlsys.engines.devices.onednn_linear import OneDNNLinear, use_onednn
from rlsys.engines.models.attention import AttentionRule, causal_attention
from rlsys.engines.models.causal_lm import backbone, head_logits, load_causal_lm
from rlsys.launcher.tiny_models import Family
from tests.engines.torch_engine_harness import FAMILIES, build_model
from tests.errors import invalid


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers_eager_attention(
    family: Family, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    path = build_model(tmp_path, family)
    ours = load_causal_lm(path, dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    token_ids = torch.randint(3, 200, (3, 40), generator=torch.Generator().manual_seed(1))
    hidden = backbone(ours)(input_ids=token_ids, use_cache=False).last_hidden_state
    logits = head_logits(ours, hidden)
    expected = theirs(input_ids=token_ids, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()
    for (name, ours_p), theirs_p in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        scale = theirs_p.grad.abs().max()
        assert (ours_p.grad - theirs_p.grad).abs().max() < 1e-4 * scale, name


def test_windows_caps_chunks_and_sinks_by_hand() -> None:
    """Use one head of width 1 and keys 0, so that all visible tokens count alike."""
    zeros, value = torch.zeros(1, 1, 4, 1), torch.tensor([8.0, 4.0, 2.0, 1.0]).view(1, 1, 4, 1)

    def attend(**rule: Any) -> list[float]:
        return (
            causal_attention(
                zeros,
                zeros,
                value,
                AttentionRule(scaling=1.0, **rule),
            )
            .flatten()
            .tolist()
        )

    assert attend() == pytest.approx([8, 6, 14 / 3, 15 / 4])
    assert attend(sliding_window=2) == pytest.approx([8, 6, 3, 1.5])
    assert attend(sliding_window=2, softcap=5.0) == pytest.approx([8, 6, 3, 1.5])
    assert attend(chunk=3) == pytest.approx([8, 6, 14 / 3, 1])
    # A sink of score log 2 weighs as much as two tokens.
    sinks = torch.tensor([2.0]).log()
    assert attend(sinks=sinks) == pytest.approx([8 / 3, 12 / 4, 14 / 5, 15 / 6])
    assert attend(sinks=sinks, chunk=2) == pytest.approx([8 / 3, 12 / 4, 2 / 3, 3 / 4])


def test_softcap_by_hand() -> None:
    # Scores 0 and 3, capped at 1: 0 and tanh(3).
    query = torch.tensor([1.0, 1.0]).view(1, 1, 2, 1)
    key = torch.tensor([0.0, 3.0]).view(1, 1, 2, 1)
    value = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    attended = causal_attention(query, key, value, AttentionRule(scaling=1.0, softcap=1.0))
    weight = torch.tanh(torch.tensor(3.0)).exp()
    assert attended[0, 1].item() == pytest.approx(float(weight / (1 + weight)))


@pytest.mark.parametrize("bias", [False, True])
def test_onednn_layer_is_the_linear_layer(bias: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.Linear(24, 40, bias=bias)
    ours = nn.Linear(24, 40, bias=bias)
    ours.load_state_dict(theirs.state_dict())
    use_onednn(ours)
    assert type(ours) is OneDNNLinear
    inputs = [torch.randn(2, 9, 24, requires_grad=True) for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    outputs = [theirs(inputs[0]), ours(inputs[1])]
    torch.testing.assert_close(outputs[0], outputs[1])
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-4)
    for one, other in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_outputs_of_a_onednn_layer_can_be_changed_in_place() -> None:
    """Change it as Gemma 3n does."""
    layer = nn.Linear(8, 4)
    use_onednn(layer)
    for shape in ((8,), (3, 8), (2, 3, 8)):
        output = layer(torch.ones(shape))
        output += 1
        output.sum().backward()
        assert output.shape == (*shape[:-1], 4)


def test_onednn_layer_leaves_other_precisions_and_no_rows_to_torch() -> None:
    layer = nn.Linear(8, 4)
    use_onednn(layer)
    assert layer(torch.empty(0, 8)).shape == (0, 4)
    assert layer.to(torch.bfloat16)(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with invalid("model.path", str(tmp_path)):
        load_causal_lm(tmp_path, dtype="float32")
