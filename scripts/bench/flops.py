"""Floating-point operations of a training step, and the peak rates of devices.

    rows ──► tree of tokens: M tokens that differ in themselves or in their past, at positions t
               └─► 6 · weights · M  +  12 · layers · heads · head width · Σ (t + 1)  +  6 · head · P

A matrix product takes 6 operations per weight and token: a multiplication and an addition forward,
twice as many backward. Attention takes the same for scores and values of each of the t + 1 visible
tokens (PaLM, 2204.02311, appendix B). The head counts at the P places with a prediction. Tokens
that rows share count once; padding and recomputation do not count. The result is the useful work,
however it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rlsys.engines.models.collate import collate
from rlsys.planner.hardware import find_gpu
from rlsys.types import TrainRow


def step_flops(config: Any, rows: Sequence[TrainRow]) -> int:
    """Return the operations of forward and backward over these rows of a dense model.

    Raises:
        InvalidValue: The model has experts or sliding windows, which are not counted.
    """
    from transformers import AutoModelForCausalLM

    if getattr(config, "sliding_window", None) or hasattr(config, "num_experts_per_tok"):
        raise ValueError(
            f"operations of {config.model_type!r} are not counted here; use a dense model without "
            "sliding windows."
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    weights: int = sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not head
    )
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    batch = collate(rows, shares=True)
    assert batch.packing is not None
    positions = batch.packing.tree.position_ids
    num_seen = int(np.sum(positions.astype(np.int64) + 1))
    attention = config.num_hidden_layers * config.num_attention_heads * head_dim * num_seen
    at_head: int = head.weight.numel() * len(batch.positions.unique())
    return 6 * weights * len(positions) + 12 * int(attention) + 6 * at_head


def peak_tflops(device: torch.device, dtype: str) -> float | None:
    """Return the peak rate of 16-bit products in TFLOP/s.

    None for CPUs and other unknown devices, and for other precisions.
    """
    if device.type != "cuda" or dtype == "float32":
        return None
    gpu = find_gpu(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.bf16
