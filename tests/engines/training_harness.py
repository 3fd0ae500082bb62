"""Helpers for the training engine's tests: rows and engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.algorithms.aggregation import Aggregation, token_mean
from rlsys.algorithms.loss_inputs import LossFn
from rlsys.algorithms.losses import clipped_surrogate
from rlsys.config import ModelConfig, TrainerConfig
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.engines.training.trainer_state import HeldState, finish_state
from rlsys.launcher.tiny_models import Family, build_tiny_model
from rlsys.reallocation.shards import whole
from rlsys.types import MicroBatch, StepResult, TrainRow
from tests.engines.published import read_all

VOCABULARY = 21  # 18 characters and three special tokens


Weights = dict[str, torch.Tensor]


def tiny_model(directory: Path, family: Family = "qwen3") -> Path:
    """Build a model of two layers, width 32 and VOCABULARY tokens."""
    return build_tiny_model(
        directory,
        family=family,
        characters="0123456789+-*/=. #",
        width=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        mlp_width=48,
        max_context=128,
    )


def make_engine(model_path: Path, **options: Any) -> FSDPEngine:
    """Make an engine; `options` are fields of trainer and model, and arguments of the engine."""
    trainer = {
        name: options.pop(name)
        for name in list(options)
        if name in TrainerConfig.__dataclass_fields__
    }
    model = {
        name: options.pop(name)
        for name in list(options)
        if name in ModelConfig.__dataclass_fields__
    }
    loss: LossFn = clipped_surrogate(0.2, 0.28)
    aggregation: Aggregation = token_mean
    world_size = 1 if "layout" in trainer else options.get("world_size", 1)
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "trainer": TrainerConfig(**{"learning_rate": 1e-2, "layout": f"dp{world_size}", **trainer}),
        "model": ModelConfig(**model),
        "loss": loss,
        "aggregation": aggregation,
        "temperature": 0.8,
        "num_total_steps": 10,
        "seed": 0,
    }
    return FSDPEngine(**(arguments | options))


def make_row(
    rng: np.random.Generator, *, num_prompt: int, num_tokens: int, group_id: int = 0
) -> TrainRow:
    """Make a rollout with equal sampler log-probabilities, masked tokens and versions −1 and 0."""
    tokens = rng.integers(0, VOCABULARY, num_prompt + num_tokens).astype(np.int32)
    mask = rng.random(num_tokens) < 0.8
    return TrainRow(
        prompt_token_ids=tokens[:num_prompt],
        token_ids=tokens[num_prompt:],
        policy_versions=np.sort(rng.integers(-1, 1, num_tokens)).astype(np.int32),
        loss_mask=mask,
        columns={
            "sampler_logprobs": np.full(num_tokens, -3.0, np.float32),
            "advantages": np.full(num_tokens, rng.normal(), np.float32),
        },
        group_id=group_id,
        group_size=4,
        group_num_tokens=40,
    )


def make_rows(count: int, seed: int = 0) -> list[TrainRow]:
    """Make rollouts of very different lengths."""
    rng = np.random.default_rng(seed)
    return [
        make_row(
            rng,
            num_prompt=int(rng.integers(1, 9)),
            num_tokens=int(rng.integers(1, 20)),
            group_id=index // 4,
        )
        for index in range(count)
    ]


def accumulate(engine: FSDPEngine, parts: Sequence[Sequence[TrainRow]]) -> None:
    for rows in parts:
        engine.accumulate(MicroBatch(rows=rows))


def train_step(engine: FSDPEngine, *parts: Sequence[TrainRow]) -> StepResult:
    """Update the weights once, with a micro-batch of each part."""
    accumulate(engine, parts)
    return engine.optimizer_step()


def memory(path: Path, num_bytes: int) -> str:
    """Create memory for snapshots: an ordinary file that tests map."""
    path.write_bytes(bytes(num_bytes))
    return str(path)


def hold(engine: FSDPEngine, directory: Path) -> HeldState:
    """Hold the current state. A collective the first time."""
    name = f"held-{engine.ranks.rank}-{len(list(directory.glob('held-*')))}"
    path = memory(directory / name, engine.snapshot_bytes(1))
    return engine.hold(engine.open_snapshots(path, name))


def save(engine: FSDPEngine, directory: Path) -> None:
    """Save a checkpoint as a trainer's ranks do. A collective."""
    write(engine, hold(engine, directory.parent), directory)


def write(engine: FSDPEngine, held: HeldState, directory: Path) -> None:
    """Write a held state. A collective."""
    parts = engine.ranks.all(held.write(directory))
    if engine.ranks.rank == 0:
        finish_state(directory, parts)
    engine.ranks.max(0)  # wait until it is finished


def whole_state(engine: FSDPEngine) -> Weights:
    """Return parameters, buffers and moments. A collective."""
    return {
        name: whole(tensor).clone()
        for name, tensor in engine.local_state().items()
        if name != "rng"
    }


def assert_same_sums(found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    """Check that sums differ by rounding only, 1e-6 of each."""
    for name in ("loss", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6), name


def gradients(engine: FSDPEngine) -> Weights:
    """Return gradients summed over all ranks, not normalised. A collective."""
    return {
        name: whole(parameter.grad).clone()
        for name, parameter in engine.parameters.items()
        if parameter.grad is not None
    }


def weights(engine: FSDPEngine) -> Weights:
    """Return published weights; empty on ranks other than the first. A collective."""
    manifest = engine.publish()
    found = {} if manifest is None else read_all(manifest)
    engine.ranks.max(0)  # ranks keep their shares until the first one has read them
    return found


def assert_same(found: Weights, expected: Weights, *, rtol: float, atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        difference = (tensor - expected[name]).abs()
        assert bool((difference <= atol + rtol * expected[name].abs()).all()), (
            f"{name} differs by up to {float(difference.max())}"
        )
