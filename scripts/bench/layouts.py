"""Compare loss, gradient and updated weights of every layout with plain transformers.

    python scripts/bench/layouts.py [LAYOUT ...] [--families qwen3,llama] [--heads 1]

Small random models in float32 train on rows of mixed lengths that share prompts, in several
micro-batches. They have four heads, or `--heads` over one key/value head, and one layer for each
piece of a pipeline. The reference runs each row alone through transformers' eager attention in one
process, with autograd and torch's AdamW. Ranks are processes on this machine (gloo). Prints one
line of JSON last: for each layout the largest relative error of loss, gradient and weights over the
model families, and the families that it refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlsys.algorithms.aggregation import token_mean
from rlsys.algorithms.losses import clipped_surrogate
from rlsys.config import ModelConfig, TrainerConfig
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.engines.models.causal_lm import hide_progress_bars
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.launcher.tiny_models import build_tokenizer
from rlsys.reallocation.shards import Box, whole
from rlsys.reallocation.transport.weight_views import Weights
from rlsys.types import MicroBatch, TrainRow
from scripts.ranks import on_ranks

LAYOUTS = (
    *("dp2", "tp2", "pp2", "pp2v2", "cp2", "ep2"),
    *("dp2tp2", "dp2pp2", "tp2pp2", "dp2cp2", "dp2ep2", "tp2cp2", "tp2ep2", "dp2x2"),
)
SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"attention_bias": True},
    "gemma3_text": {**WINDOWS, "query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": 8},
    "olmo2": {"head_dim": None},
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "norm_topk_prob": True},
    "gpt_oss": {
        **WINDOWS,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "deepseek_v3": {
        **EXPERTS,
        "head_dim": None,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}
# With the default epsilon, Adam's first step is the sign of the gradient, also of rounding errors.
# A large epsilon makes it follow the gradient.
RATE, EPSILON, TEMPERATURE = 1e-2, 1e-3, 0.8


@dataclass(frozen=True)
class Step:
    """Results of one optimizer step."""

    loss: float
    gradient: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def build_model(
    directory: Path, family: str, *, num_layers: int = 2, num_heads: int | None = None
) -> Path:
    """Write a random model in float32, norms included, with a tokenizer of as many characters.

    Heads, widths, vocabulary and experts are divisible by 2 and 4. With `num_heads`, that many
    heads share one key/value head.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = SIZES | FAMILIES[family] | {"num_hidden_layers": num_layers}
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"] * (num_layers // 2)
    if num_heads is not None:
        every_head = family == "deepseek_v3"  # has keys of its own
        shared = {"num_key_value_heads": num_heads if every_head else 1}
        sizes |= {"num_attention_heads": num_heads, **shared}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **sizes), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.15 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    model.save_pretrained(directory)
    build_tokenizer("0123456789+-*/=. #abc").save_pretrained(directory)
    return directory


def rows(seed: int = 0) -> list[TrainRow]:
    """Return four groups of four rows of 2 to 30 tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for group in range(4):
        prompt = rng.integers(3, 24, int(rng.integers(1, 10))).astype(np.int32)
        for _ in range(4):
            length = int(rng.integers(1, 21))
            tokens = rng.integers(0, 24, length).astype(np.int32)
            made.append(
                TrainRow(
                    prompt_token_ids=prompt,
                    token_ids=tokens,
                    policy_versions=np.zeros(length, np.int32),
                    loss_mask=np.ones(length, np.bool_),
                    columns={
                        "sampler_logprobs": np.full(length, -3.0, np.float32),
                        "advantages": np.full(length, rng.normal(), np.float32),
                    },
                    group_id=group,
                    group_size=4,
                    group_num_tokens=40,
                )
            )
    return made


def reference(path: Path) -> Step:
    """Return the step by transformers, each row alone: -sum min(r A, clip(r) A) / tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").train(False)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0
    )
    total, num_tokens = torch.zeros(()), 0
    for row in rows():
        tokens = torch.from_numpy(np.concatenate([row.prompt_token_ids, row.token_ids])).long()
        logits = model(input_ids=tokens[None]).logits[0, len(row.prompt_token_ids) - 1 : -1]
        logprobs = torch.log_softmax(logits / TEMPERATURE, -1)
        own = logprobs.gather(-1, tokens[len(row.prompt_token_ids) :, None])[:, 0]
        ratio = (own - torch.from_numpy(row.columns["sampler_logprobs"])).exp()
        advantages = torch.from_numpy(row.columns["advantages"])
        clipped = ratio.clamp(0.8, 1.28)
        total = total - torch.minimum(ratio * advantages, clipped * advantages).sum()
        num_tokens += len(own)
    (total / num_tokens).backward()
    gradient = {
        name: torch.zeros_like(one) if one.grad is None else one.grad.clone()
        for name, one in parameters.items()
    }
    torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
    optimizer.step()
    weights = {name: one.detach().clone() for name, one in parameters.items()}
    return Step(float(total.detach() / num_tokens), gradient, weights)


def trained(path: Path, layout: ParallelLayout, rank: int) -> Step:
    """Return the step of a rank."""
    engine = FSDPEngine(
        model_path=path,
        trainer=TrainerConfig(
            learning_rate=RATE, layout=str(layout), micro_batch_tokens=60, max_grad_norm=1.0
        ),
        model=ModelConfig(),
        loss=clipped_surrogate(0.2, 0.28),
        aggregation=token_mean,
        temperature=TEMPERATURE,
        num_total_steps=1,
        seed=0,
        rank=rank,
        world_size=layout.num_ranks,
    )
    for group in engine.optimizer.param_groups:
        group["eps"] = EPSILON
    share = rows()[layout.data_index(rank) :: layout.num_data]
    engine.accumulate(MicroBatch(rows=share))
    parameters = engine.parameters
    num_tokens = sum(len(row.token_ids) for row in rows())
    copies = {name: one.grad.detach().clone() for name, one in parameters.items()}
    engine.gradient_sums.add_up(list(parameters.values()))
    gradient = {name: whole(one.grad) / num_tokens for name, one in parameters.items()}
    for name, one in parameters.items():  # as the step does once more
        one.grad.copy_(copies[name])
    result = engine.optimizer_step()
    manifest = engine.publish()
    tensors = {}
    if manifest is not None:
        with Weights(manifest) as weights:
            for name, shape in weights.shapes.items():
                tensors[name] = weights.read(name, Box.whole(shape)).clone()
    engine.ranks.max(0)  # no rank may end while the first one reads its shard
    return Step(result.metrics["loss"], gradient, tensors)


def errors(found: Step, expected: Step) -> dict[str, float]:
    """Return the relative errors."""
    return {
        "loss": abs(found.loss - expected.loss) / abs(expected.loss),
        "gradient": _relative(found.gradient, expected.gradient),
        "weights": _relative(found.weights, expected.weights),
    }


def _relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    apart = torch.stack([(found[name] - tensor).norm() for name, tensor in expected.items()])
    return float(apart.norm() / torch.stack([x.norm() for x in expected.values()]).norm())


def _families(
    rank: int, _: int, layout: ParallelLayout, families: Sequence[str], directory: Path
) -> dict[str, Step | str]:
    found: dict[str, Step | str] = {}
    for family in families:
        try:
            found[family] = trained(directory / family, layout, rank)
        except ValueError as refusal:
            found[family] = str(refusal)
    return found


def measure(
    layout: ParallelLayout, families: Sequence[str], directory: Path, num_heads: int | None
) -> dict[str, Any]:
    """Return the largest errors of a layout and the families that it refused."""
    num_layers = max(2, layout.pp * layout.num_pieces)
    directory = directory / f"{num_layers} layers"
    for family in families:
        if not (directory / family).exists():
            build_model(directory / family, family, num_layers=num_layers, num_heads=num_heads)
    ranks: list[dict[str, Step | str]] = on_ranks(
        layout.num_ranks, _families, layout, families, directory
    )
    worst = {"loss": 0.0, "gradient": 0.0, "weights": 0.0}
    refused = {}
    for family, step in ranks[0].items():
        if isinstance(step, str):
            refused[family] = step
            continue
        gradient: dict[str, torch.Tensor] = {}
        for rank in ranks:  # each stage of a pipeline has some
            of_rank = rank[family]
            gradient |= of_rank.gradient if isinstance(of_rank, Step) else {}
        step = replace(step, gradient=gradient)
        for name, error in errors(step, reference(directory / family)).items():
            worst[name] = max(worst[name], error)
    results = {name: float(f"{error:.2g}") for name, error in worst.items()}
    for family, sentence in refused.items():
        print(f"  {layout} {family}: {sentence}")
    return results | ({"refused": sorted(refused)} if refused else {})


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("layouts", nargs="*", default=LAYOUTS, metavar="LAYOUT")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--heads", type=int, help="heads of all models, over one key/value head")
    arguments = parser.parse_args()
    families = arguments.families.split(",")
    if unknown := sorted(set(families) - set(FAMILIES)):
        sys.exit(f"error: unknown families {unknown}; use some of {', '.join(FAMILIES)}.")
    hide_progress_bars()
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        for layout in map(ParallelLayout.parse, arguments.layouts):
            found = measure(layout, families, Path(directory), arguments.heads)
            results[str(layout)] = found
            print(f"{layout!s:8}", found, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
