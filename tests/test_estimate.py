"""How much memory a run takes, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

import rlsys
from recipes.grpo import GRPOConfig, grpo
from rlsys.config import (
    AsyncConfig,
    ClusterConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
)
from rlsys.engines.training.pass_memory import LiveBytes
from rlsys.engines.training.supervised import supervised_row
from rlsys.estimate import (
    ModelShape,
    disk_bytes,
    estimate_activations,
    estimate_memory,
    model_shape,
    num_snapshots,
    row_bytes,
    store_bytes,
)
from rlsys.tiny_models import build_tiny_model
from rlsys.types import MicroBatch
from tests.engines.training_harness import make_engine, tiny_model

# Prompt; token ids, log-probabilities and versions; padding of the block.
ROW_BYTES = 1000 * 4 + 3 * 4000 * 4 + 64


@pytest.mark.parametrize(
    ("prompts_per_step", "group_size", "max_staleness", "over_issue", "store_gib", "expected"),
    [
        (2, 2, 0, 0, 4.0, 64 << 20),  # the least
        # 64 · 2 + 8 groups of 8, twice over, of which half the memory is promised to rows.
        (64, 8, 1, 8, 4.0, 136 * 8 * ROW_BYTES * 4),
        (64, 8, 1, 0, 0.125, 128 << 20),  # the most
    ],
)
def test_the_store_has_room_for_what_can_be_in_flight(
    prompts_per_step: int,
    group_size: int,
    max_staleness: int,
    over_issue: int,
    store_gib: float,
    expected: int,
) -> None:
    config = GRPOConfig(
        prompts_per_step=prompts_per_step,
        group_size=group_size,
        asynchrony=AsyncConfig(
            max_staleness=max_staleness, over_issue=over_issue, order="complete"
        ),
        data=DataConfig(max_prompt_tokens=1000),
        sampling=SamplingConfig(max_tokens=4000),
        cluster=ClusterConfig(store_gib=store_gib),
    )
    flow: rlsys.Dataflow = grpo(config, [lambda rollout: 1.0])
    assert row_bytes(config, flow) == ROW_BYTES
    assert store_bytes(config, flow) == expected


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_checkpoint_has_the_bytes_that_are_asked_for(
    tmp_path: Path, moments: Literal["float32", "bfloat16"]
) -> None:
    """Less what names and shapes take."""
    model = tiny_model(tmp_path / "model")
    trainer = TrainerConfig(optimizer_state=moments)
    config = GRPOConfig(model=ModelConfig(path=str(model)), trainer=trainer)
    asked = estimate_memory(config, model_shape(str(model))).checkpoint_bytes
    state = make_engine(model, optimizer_state=moments)._local_state()
    held = sum(tensor.nbytes for name, tensor in state.items() if name != "rng")
    num_steps = 4 * sum(name.startswith("step.") for name in state)  # AdamW's own count
    assert held - num_steps == asked


def test_the_disk_holds_what_is_kept_and_what_is_being_written() -> None:
    shape = ModelShape(
        num_parameters=10**9,
        layer_parameters=10**8,
        outer_parameters=10**8,
        buffer_bytes=8,
        linear_layers={"layers.0.q_proj": 10**6, "layers.0.v_proj": 10**6},
        kv_values_per_token=1,
        max_context=1,
        config=None,
    )
    state, export = 12 * 10**9 + 8, 2 * 10**9 + 8
    config = GRPOConfig(keep_checkpoints=3, model=ModelConfig(dtype="bfloat16"))
    flow: rlsys.Dataflow = grpo(config, [lambda rollout: 1.0])
    assert disk_bytes(config, flow, shape, warm_start=False) == 2**26 + 4 * state + export
    assert disk_bytes(config, flow, shape, warm_start=True) == 2**26 + 5 * state + 2 * export
    adapted = replace(config, model=replace(config.model, lora="r8:q_proj"))
    state, export = 12 * 8 * 10**6, export + 4 * 8 * 10**6
    assert disk_bytes(adapted, flow, shape, warm_start=True) == 2**26 + 5 * state + 2 * export


@pytest.mark.parametrize(
    ("snapshot_every", "checkpoint_every", "expected"), [(1, 0, 2), (1, 5, 3), (0, 5, 0)]
)
def test_a_snapshot_more_where_checkpoints_are_written_from_one(
    snapshot_every: int, checkpoint_every: int, expected: int
) -> None:
    trainer = TrainerConfig(snapshot_every=snapshot_every)
    config = GRPOConfig(trainer=trainer, checkpoint_every=checkpoint_every)
    assert num_snapshots(config, trainer) == expected


def test_a_rank_by_hand() -> None:
    """Two layers of 10M parameters each and 5M in none: beside masters and gradients of all of them
    a rank of two gathers both layers and the rest, in 16 bits."""
    shape = ModelShape(
        num_parameters=25_000_000,
        layer_parameters=10_000_000,
        outer_parameters=5_000_000,
        buffer_bytes=0,
        linear_layers={},
        kv_values_per_token=1,
        max_context=1,
        config=None,
    )
    config = GRPOConfig(
        model=ModelConfig(dtype="bfloat16"),
        trainer=TrainerConfig(layout="dp2", optimizer_state="bfloat16", snapshot_every=0),
    )
    memory = estimate_memory(config, shape, activation_bytes=7)
    rank = memory.trainer_rank
    assert (rank.weights, rank.gradients, rank.moments) == (50_000_000,) * 3
    assert rank.gathered == 2 * 25_000_000
    assert rank.total == 200_000_007
    assert memory.published_bytes == 2 * 2 * 25_000_000
    assert memory.snapshot_bytes == 8 * 12_500_000


def test_activations_are_those_of_a_pass(tmp_path: Path) -> None:
    """As an engine's own operations make them, which another pass of other tokens shares the
    beginning of; the estimate knows shapes alone."""
    path = build_tiny_model(tmp_path, characters="0123456789", width=64, num_layers=3)
    rows = [supervised_row([3 + k, *[4] * 149], 1) for k in range(2)]
    for how in ("none", "selective", "full"):
        engine = make_engine(path, gradient_checkpointing=how, temperature=1.0)
        with LiveBytes(engine._model.parameters()) as live:
            engine.accumulate(MicroBatch(rows=rows))
        gradients = sum(one.grad.nbytes for one in engine._parameters.values())
        config = RunConfig(
            model=ModelConfig(path=str(path), gradient_checkpointing=how),
            trainer=TrainerConfig(micro_batch_tokens=300),
            data=DataConfig(max_prompt_tokens=1),
            sampling=SamplingConfig(max_tokens=149),
        )
        estimate = estimate_activations(config, model_shape(str(path)))
        assert live.peak - gradients <= estimate <= live.peak + gradients, how
