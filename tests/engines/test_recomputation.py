"""Recomputation in the backward pass changes memory, but no results."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlsys.config import Checkpointing, ModelConfig
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.engines.training.microbatch_memory import LiveBytes
from rlsys.engines.training.recomputation import checkpoint_layers
from rlsys.launcher.tiny_models import Family, build_tiny_model
from tests.engines.training_harness import accumulate, gradients, make_engine, make_row, make_rows
from tests.errors import invalid
from tests.tiers import rest_slow

HOW: tuple[Checkpointing, ...] = ("none", "selective", "full")


def engine_of(path: Path, how: Checkpointing, **options: object) -> FSDPEngine:
    return make_engine(path, gradient_checkpointing=how, **options)


def gradient(path: Path, how: Checkpointing, **options: object) -> dict[str, torch.Tensor]:
    """Return the gradient of rows that share prompts, some too long to be padded."""
    rng = np.random.default_rng(0)
    long = [make_row(rng, num_prompt=90, num_tokens=tokens) for tokens in (70, 50, 60)]
    for row in long[1:]:
        row.prompt_token_ids[:] = long[0].prompt_token_ids
    engine = engine_of(path, how, **options)
    accumulate(engine, [make_rows(6), long])
    assert engine.role.shares
    return gradients(engine)


@pytest.mark.parametrize(
    ("family", "dtype"),
    rest_slow([("qwen3", "float32"), ("gemma2", "float32"), ("qwen3", "bfloat16")]),
)
def test_gradients_are_the_same_to_the_last_bit(family: Family, dtype: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    path = build_tiny_model(
        tmp_path, family=family, width=32, num_layers=2, head_dim=16, mlp_width=48
    )
    expected = gradient(path, "none", dtype=dtype)
    for how in HOW[1:]:
        found = gradient(path, how, dtype=dtype)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], one) for name, one in expected.items()), how


def test_peak_memory_is_lower(tmp_path: Path) -> None:
    path = build_tiny_model(tmp_path, width=64, num_layers=6)
    rows = make_rows(16)
    peaks = {}
    for how in HOW:
        engine = engine_of(path, how)
        with LiveBytes(engine.model.parameters()) as live:
            accumulate(engine, [rows])
        peaks[how] = live.peak - sum(x.nbytes for x in gradients(engine).values())
        assert live.now < 0.1 * live.peak + sum(x.nbytes for x in gradients(engine).values())
    assert peaks["full"] < 0.6 * peaks["selective"]
    assert peaks["selective"] < 0.7 * peaks["none"]


class Changing(nn.Module):
    """A layer that changes its product in place and saves it for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.linear(x)
        product.mul_(2)
        result: torch.Tensor = product.square() * self.linear(x).exp()
        return result


def test_a_product_changed_in_place_is_recomputed() -> None:
    found = []
    for how in HOW:
        torch.manual_seed(0)
        model: Any = nn.Sequential(Changing(), Changing())
        model._no_split_modules = ["Changing"]
        checkpoint_layers(SimpleNamespace(model=model), how)
        x = torch.ones(2, 3, requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    assert found[0].abs().sum() > 0
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_only_gpus_recompute_by_themselves() -> None:
    assert ModelConfig().checkpointing(on_gpu=False) == "none"
    assert ModelConfig().checkpointing(on_gpu=True) == "selective"
    chosen = ModelConfig(gradient_checkpointing="full")
    assert {chosen.checkpointing(on_gpu=on_gpu) for on_gpu in (True, False)} == {"full"}


def test_former_values_are_rejected() -> None:
    with invalid("model.gradient_checkpointing", True) as found:
        ModelConfig(gradient_checkpointing=True)  # type: ignore[arg-type]
    assert "auto, none, selective, full" in found.value.fix
