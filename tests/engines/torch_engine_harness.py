"""Helpers for the torch engine's tests: tiny models with strong effects, requests, references."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlsys.engines.generation.torch.continuous_batch import ContinuousBatch
from rlsys.engines.models.causal_lm import head_logits, load_causal_lm
from rlsys.launcher.tiny_models import Family, build_tiny_model
from rlsys.types import Generation, GenerationRequest, SamplingParams

FAMILIES: tuple[Family, ...] = ("qwen3", "llama", "gemma2", "gemma3")
SMALL = {"width": 32, "num_layers": 3, "mlp_width": 48, "head_dim": 32, "max_context": 256}

# Windows and a cap that have effect. Every third layer of Gemma 3 attends to all tokens.
CONFIG_CHANGES: Mapping[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 11, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 32},
    "gemma3": {
        "sliding_window": 11,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def build_model(directory: Path, family: Family, **sizes: Any) -> Path:
    """Build a tiny model with large weights, so that a mistake in a mask or position shows."""
    path = build_tiny_model(directory, family=family, **{**SMALL, **sizes})
    config_file = path / "config.json"
    config = json.loads(config_file.read_text()) | CONFIG_CHANGES.get(family, {})
    config_file.write_text(json.dumps(config))
    model = load_causal_lm(path, dtype="float32")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                scale = 0.5 if "embed" in name else 2 * parameter.shape[1] ** -0.5
                parameter.normal_(0, scale, generator=generator)
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(path)
    return path


def request(
    name: str,
    prompt: Sequence[int],
    *,
    seed: int = 0,
    num_prior_tokens: int = 0,
    cache_salt: str = "",
    priority: int = 0,
    num_shared_tokens: int = 0,
    goes_on: bool = True,
    **sampling: Any,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
        seed=seed,
        num_prior_tokens=num_prior_tokens,
        cache_salt=cache_salt,
        priority=priority,
        num_shared_tokens=num_shared_tokens,
        goes_on=goes_on,
    )


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 200, (length,), generator=generator).tolist())


def batch_of(model: Any, **options: Any) -> ContinuousBatch:
    return ContinuousBatch(
        model,
        **{
            "max_running": 8,
            "kv_cache_gib": 0.01,
            "stop_token_ids": (),
            "decode_text": lambda token_ids: "".join(map(chr, token_ids)),
            **options,
        },
    )


def run(batch: ContinuousBatch, requests: Sequence[GenerationRequest]) -> dict[str, Generation]:
    """Submit at once, step until all have ended, and return generations by request id."""
    batch.submit(requests)
    ended: dict[str, Generation] = {}
    while batch.has_work:
        ended |= {one.request_id: one for one in batch.step()}
    return ended


def trainer_logprobs(
    model: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    temperature: float,
) -> list[torch.Tensor]:
    """Compute them like the trainer: right-padded rows through the backbone without a mask."""
    rows = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    device = next(model.parameters()).device
    token_ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long, device=device)
    for i, row in enumerate(rows):
        token_ids[i, : len(row)] = torch.tensor(row)
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=token_ids, use_cache=False).last_hidden_state
        logprobs = (head_logits(model, hidden) / temperature).log_softmax(-1).cpu()
    return [
        logprobs[i, len(prompt) - 1 : len(rows[i]) - 1]
        .gather(1, torch.tensor(completion)[:, None])
        .squeeze(1)
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]
