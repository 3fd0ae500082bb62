"""What a step needs, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from rlsys.types import TrainRow
from scripts.bench.flops import peak_tflops, step_flops
from scripts.bench.train import row

SIZES: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
}
LAYER = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8  # queries, keys and values, output, MLP
HEAD = 10 * 4


def rollout(*tokens: int) -> TrainRow:
    return row(np.array([1, 2]), np.array(tokens), 0, 2)


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_by_hand(tied: bool) -> None:
    """Inputs are 1 2 3 and 1 2 5: four tokens, which see 1, 2, 3 and 3; the head reads three."""
    config = AutoConfig.for_model("qwen3", **SIZES, tie_word_embeddings=tied)
    both = step_flops(config, [rollout(3, 4), rollout(5, 6)])
    assert both == 6 * LAYER * 4 + 12 * (2 * 2) * (1 + 2 + 3 + 3) + 6 * HEAD * 3
    alone = step_flops(config, [rollout(3, 4)])
    assert alone == 6 * LAYER * 3 + 12 * (2 * 2) * (1 + 2 + 3) + 6 * HEAD * 2


def test_what_is_not_counted_is_refused() -> None:
    config = AutoConfig.for_model("mistral", **SIZES, sliding_window=4)
    with pytest.raises(ValueError, match="operations of 'mistral'"):
        step_flops(config, [rollout(3, 4)])


def test_a_cpu_has_no_peak() -> None:
    assert peak_tflops(torch.device("cpu"), "bfloat16") is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("Tesla T4", None),
    ],
)
def test_a_gpu_is_known_by_its_name(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(torch.device("cuda"), "bfloat16") == peak
    assert peak_tflops(torch.device("cuda"), "float32") is None
