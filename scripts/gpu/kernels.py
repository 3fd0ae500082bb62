"""Micro-benchmarks of a GPU: rates that a cost model needs.

    python -m scripts.gpu.kernels [--device cpu --small]

GEMM (bf16, TFLOP/s), memory copy (GB/s), host link (GB/s), attention forward and backward (packed
rows, this project's kernel and torch's causal kernel), the vocabulary head, the optimizer step
(bytes/s), and the host overhead of one decoder layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from scripts.gpu.records import Settings, emit, measured, parse_settings, seconds_of

GEMMS = ((8192, 8192, 8192), (8192, 4096, 24576), (8192, 12288, 4096), (512, 4096, 6144))
SMALL_GEMMS = ((64, 64, 64),)


def main() -> None:
    """Measure and print result lines."""
    settings = parse_settings(__doc__)
    emit(kind="device", **describe_device(settings))
    gemm(settings)
    bandwidth(settings)
    attention(settings)
    head(settings)
    optimizer(settings)
    layer_overhead(settings)


def describe_device(settings: Settings) -> dict[str, Any]:
    """Return the name and limits of the device."""
    if not settings.on_gpu:
        return {"name": "cpu", "torch": torch.__version__}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _random(*shape: int, settings: Settings) -> torch.Tensor:
    return torch.randn(*shape, device=settings.device, dtype=torch.bfloat16)


def _times(count: int, function: Callable[..., Any], *arguments: Any) -> None:
    for _ in range(count):
        function(*arguments)


def gemm(settings: Settings) -> None:
    """Measure matrix products."""
    for m, k, n in SMALL_GEMMS if settings.small else GEMMS:
        with measured(kind="gemm", m=m, k=k, n=n) as values:
            a, b = _random(m, k, settings=settings), _random(k, n, settings=settings)
            seconds = seconds_of(partial(_times, 10, torch.matmul, a, b), repeats=5) / 10
            values |= {
                "us": round(1e6 * seconds, 1),
                "tflops": round(2 * m * k * n / seconds / 1e12, 1),
            }


def bandwidth(settings: Settings) -> None:
    """Measure memory copies on the device and over the host link."""
    size = 1 << (20 if settings.small else 30)
    with measured(kind="copy_device", gib=size / 2**30) as values:
        source = torch.ones(size, dtype=torch.uint8, device=settings.device)
        target = torch.empty_like(source)
        seconds = seconds_of(lambda: target.copy_(source))
        values["gb_per_s"] = round(2 * size / seconds / 1e9, 1)
    for pinned in (True, False) if settings.on_gpu else ():
        for direction in ("to_host", "to_device"):
            with measured(kind="copy_host", pinned=pinned, direction=direction) as values:
                on_device = torch.ones(size, dtype=torch.uint8, device=settings.device)
                on_host = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
                source, target = (
                    (on_device, on_host) if direction == "to_host" else (on_host, on_device)
                )
                seconds = seconds_of(partial(target.copy_, source))
                values["gb_per_s"] = round(size / seconds / 1e9, 1)


def attention(settings: Settings) -> None:
    """Measure packed rows of 2,048 tokens with the heads of an 8B model."""
    from rlsys.engines.models.attention import AttentionRule, packed_attention
    from rlsys.engines.models.row_packing import Packing, tree_of

    row, num_rows = (32, 2) if settings.small else (2048, 4)
    num_heads, num_kv_heads, width = (4, 2, 32) if settings.small else (32, 8, 128)
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 500, row).astype(np.int64) for _ in range(num_rows)]
    packing = Packing(tree_of(rows, shares=False), settings.device)
    rule = AttentionRule(scaling=width**-0.5)
    num_pairs = num_rows * row * (row + 1) / 2
    flops = 4 * num_heads * width * num_pairs

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return packed_attention(q, k, v, rule, packing)

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            one[0].unflatten(1, (num_rows, row)).transpose(0, 1).contiguous() for one in (q, k, v)
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    for name, function in (("rlsys_packed", packed), ("torch_causal", causal)):
        with measured(kind="attention", kernel=name, tokens=num_rows * row, row=row) as values:
            query, key, value = (
                _random(1, heads, num_rows * row, width, settings=settings).requires_grad_()
                for heads in (num_heads, num_kv_heads, num_kv_heads)
            )

            def forward(f: Any = function, q: Any = query, k: Any = key, v: Any = value) -> Any:
                return f(q, k, v)

            def both() -> None:
                forward().sum().backward()

            with torch.no_grad():
                forward_s = seconds_of(forward, repeats=5)
            both_s = seconds_of(both, repeats=5)
            values |= {
                "forward_ms": round(1e3 * forward_s, 3),
                "forward_tflops": round(flops / forward_s / 1e12, 1),
                "both_ms": round(1e3 * both_s, 3),
                "both_tflops": round(3.5 * flops / both_s / 1e12, 1),
            }


def head(settings: Settings) -> None:
    """Measure log-probabilities and their gradient at a vocabulary of 152k, as the trainer does.

    `operations` counts 6 per weight and token.
    """
    from rlsys.engines.models.causal_lm import Head
    from rlsys.engines.models.token_policy import token_logprobs

    tokens, width, vocab = (16, 32, 512) if settings.small else (441, 4096, 151_936)
    with measured(kind="head", tokens=tokens, width=width, vocab=vocab) as values:
        model = _HeadOnly(width, vocab).to(settings.device, torch.bfloat16)
        hidden = _random(tokens, width, settings=settings).requires_grad_()
        targets = torch.randint(vocab, (tokens,), device=settings.device)

        def both() -> None:
            logits = Head(model)(hidden)
            token_logprobs(logits, targets)[0].sum().backward()

        seconds = seconds_of(both, repeats=5)
        values |= {
            "ms": round(1e3 * seconds, 3),
            "tflops": round(6 * tokens * width * vocab / seconds / 1e12, 1),
        }


class _TextConfig:
    def get_text_config(self) -> object:
        return self


class _HeadOnly(torch.nn.Module):
    """The parts of a Hugging Face model that `Head` reads."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.lm_head = torch.nn.Linear(width, vocab, bias=False)
        self.config = _TextConfig()

    def get_output_embeddings(self) -> Any:
        """Return the head."""
        return self.lm_head


def optimizer(settings: Settings) -> None:
    """Measure the optimizer step."""
    from rlsys.config import TrainerConfig
    from rlsys.engines.training.optimizer import build_adamw

    size = 1 << (12 if settings.small else 27)
    for state in ("float32", "bfloat16", "cpu_bfloat16") if settings.on_gpu else ("bfloat16",):
        with measured(kind="optimizer", state=state, parameters=size) as values:
            parameter = torch.nn.Parameter(
                torch.randn(size // 64, 64, device=settings.device, dtype=torch.float32)
            )
            adamw = build_adamw({"weight": parameter}, TrainerConfig(optimizer_state=state))
            parameter.grad = torch.randn_like(parameter)
            seconds = seconds_of(adamw.step)
            values |= {
                "ms": round(1e3 * seconds, 2),
                "parameters_per_s": round(size / seconds),
            }


def layer_overhead(settings: Settings) -> None:
    """Measure one decoder layer on one token: the host's time for its kernel launches."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

    from scripts.gpu.shapes import SHAPES

    config = replace(SHAPES["tiny"], num_layers=8).config()
    with measured(kind="layer_overhead") as values:
        with torch.device(settings.device):
            model = Qwen3Model._from_config(config, dtype=torch.bfloat16)
        tokens = torch.zeros(1, 1, dtype=torch.long, device=settings.device)
        with torch.no_grad():
            seconds = seconds_of(lambda: [model(tokens, use_cache=False) for _ in range(5)])
        values["forward_us_per_layer"] = round(1e6 * seconds / 5 / config.num_hidden_layers, 1)

        def both() -> None:
            for _ in range(5):
                model(tokens, use_cache=False).last_hidden_state.sum().backward()

        values["both_us_per_layer"] = round(
            1e6 * seconds_of(both) / 5 / config.num_hidden_layers, 1
        )


if __name__ == "__main__":
    main()
