"""How much memory a run takes, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import rlsys
from recipes.grpo import GRPOConfig, grpo
from rlsys.config import (
    AsyncConfig,
    ClusterConfig,
    DataConfig,
    ModelConfig,
    SamplingConfig,
    TrainerConfig,
)
from rlsys.estimate import (
    ModelShape,
    disk_bytes,
    estimate_memory,
    model_shape,
    num_snapshots,
    row_bytes,
    store_bytes,
)
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


def test_a_checkpoint_has_the_bytes_that_are_asked_for(tmp_path: Path) -> None:
    """Less what names and shapes take."""
    model = tiny_model(tmp_path / "model")
    config = GRPOConfig(model=ModelConfig(path=str(model)))
    asked = estimate_memory(config, model_shape(str(model))).checkpoint_bytes
    state = make_engine(model)._local_state()
    held = sum(tensor.nbytes for name, tensor in state.items() if name != "rng")
    num_steps = 4 * sum(name.startswith("step.") for name in state)  # AdamW's own count
    assert held - num_steps == asked


def test_the_disk_holds_what_is_kept_and_what_is_being_written() -> None:
    shape = ModelShape(
        num_parameters=10**9,
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
