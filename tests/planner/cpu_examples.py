"""A CPU with rates that a test can compute by hand, and a small model."""

from __future__ import annotations

from itertools import product

from rlsys.planner.architecture import Architecture
from rlsys.planner.cpu_device import CpuProbe, ProductTime
from rlsys.planner.model_config import architecture_from_config

RATE = 50e9  # FLOP/s of any product
ROWS, WIDTHS = (1, 8, 64, 512, 2048), (64, 128, 512, 1536)

TINY_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "vocab_size": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}


def tiny_model() -> Architecture:
    """Return a model of 0.8 million parameters."""
    return architecture_from_config(TINY_CONFIG, name="tiny")


def cpu_probe(
    *, cores: int = 2, host_s: float = 1e-4, dtypes: tuple[str, ...] = ("float32",)
) -> CpuProbe:
    """Return the probe of a machine whose products all run at `RATE`."""
    return CpuProbe(
        processor="a processor",
        cores=cores,
        memory_gib=24.0,
        products=tuple(
            ProductTime(dtype, rows, width, 2 * rows * width**2 / RATE)
            for dtype, rows, width in product(dtypes, ROWS, WIDTHS)
        ),
        bandwidth=100.0,
        layer_forward_s=host_s,
        layer_train_s=4 * host_s,
        traffic=1.0,
    )
