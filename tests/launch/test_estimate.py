"""Memory estimates, compared with numbers computed by hand and with real engines."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context, set_forkserver_preload
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from transformers import AutoConfig

import rlsys
from actors.run.dry_run import versions_text
from recipes import arithmetic, ppo
from recipes.grpo import GRPOConfig, grpo
from rlsys.algorithms.losses import clipped_surrogate
from rlsys.algorithms.values import value_loss
from rlsys.config import (
    AsyncConfig,
    ClusterConfig,
    DataConfig,
    FrozenModelConfig,
    ModelConfig,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainedRoleConfig,
    TrainerConfig,
)
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.dataflow.graph.stages import Head
from rlsys.engines.models.model_shape import ModelShape, model_shape
from rlsys.engines.training.microbatch_memory import LiveBytes, _alone, holdings_of_ranks
from rlsys.engines.training.supervised import supervised_row
from rlsys.launcher.memory_estimate import (
    checkpoint_bytes,
    disk_bytes,
    estimate_memory,
    num_snapshots,
    row_bytes,
    store_bytes,
)
from rlsys.launcher.rank_estimate import (
    ITS_NODE,
    MAX_PLANNED_RANKS,
    RankMemory,
    estimate_rank,
    planned_links,
)
from rlsys.launcher.tiny_models import build_tiny_model, build_tokenizer
from rlsys.types import MicroBatch, TrainRow
from scripts.bench.layouts import build_model
from scripts.draw_layouts import held
from scripts.ranks import PRELOAD, on_ranks
from tests.engines.scalar_models import scalar_model
from tests.engines.training_harness import make_engine, tiny_model
from tests.tiers import rest_slow

# Prompt; token ids, log-probabilities and versions; padding of the block.
ROW_BYTES = 1000 * 4 + 3 * 4000 * 4 + 64


@pytest.mark.parametrize(
    ("prompts_per_step", "group_size", "max_staleness", "over_issue", "store_gib", "expected"),
    [
        (2, 2, 0, 0, 4.0, 64 << 20),  # the minimum
        # 64 · 2 + 8 groups of 8, times 2, in memory of which rows use half.
        (64, 8, 1, 8, 4.0, 136 * 8 * ROW_BYTES * 4),
        (64, 8, 1, 0, 0.125, 128 << 20),  # the maximum
    ],
)
def test_the_store_holds_all_rollouts_in_flight(
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
def test_a_checkpoint_has_the_estimated_size(
    tmp_path: Path, moments: Literal["float32", "bfloat16"]
) -> None:
    """Names and shapes are not part of the estimate."""
    model = tiny_model(tmp_path / "model")
    trainer = TrainerConfig(optimizer_state=moments)
    config = GRPOConfig(model=ModelConfig(path=str(model)), trainer=trainer)
    flow: rlsys.Dataflow = grpo(config, [lambda rollout: 1.0])
    expected = checkpoint_bytes(config, flow, model_shape(str(model)))
    state = make_engine(model, optimizer_state=moments).local_state()
    held = sum(tensor.nbytes for name, tensor in state.items() if name != "rng")
    num_steps = 4 * sum(name.startswith("step.") for name in state)  # AdamW's own count
    assert held - num_steps == expected


def test_a_version_of_adapters_alone_is_small(tmp_path: Path) -> None:
    rollout = RolloutConfig(engine="vllm", vllm={"enable_lora": True})
    config = RunConfig(model=ModelConfig(lora="r4:q_proj"), rollout=rollout)
    shape = model_shape(str(tiny_model(tmp_path)))
    # Two layers of 32 inputs and 2 heads of width 16.
    version_bytes = 4 * 2 * 4 * (32 + 32)
    assert estimate_memory(config, shape).published_bytes == 2 * version_bytes
    for layout, num_ranks in (("dp1", 1), ("dp3", 3), ("dp2x2", 4)):
        trainer = TrainerConfig(layout=layout)
        links = planned_links(
            replace(config, trainer=trainer, prompts_per_step=12), shape, to="another"
        )
        assert len(links.put) == num_ranks
        assert sum(links.put) == links.read == version_bytes


def test_the_disk_holds_kept_checkpoints_and_one_in_progress() -> None:
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


def test_other_models_are_part_of_the_estimates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint has the states of policy and critic, whose ranks keep three snapshots.

    A reference and a reward model are in the memory of their workers.
    """
    judge = RoleConfig(
        model=FrozenModelConfig(path=str(scalar_model(tmp_path / "judge", "qwen3", vocab_size=15)))
    )
    build_tokenizer(arithmetic.CHARACTERS).save_pretrained(tmp_path / "judge")
    cfg = ppo.Config(reward_model=judge, runs_dir=str(tmp_path), checkpoint_every=1)
    arithmetic.run(ppo.with_reward_model(cfg), ppo.ppo, dry_run=True)
    printed = capsys.readouterr().out

    def mib(line: str) -> float:
        return float(re.search(rf"^# +{line} +([0-9.]+) MiB", printed, re.MULTILINE)[1])  # type: ignore[index]

    policy = model_shape(str(arithmetic.MODEL.build(tmp_path / "policy", seed=0)))
    critic = model_shape(str(tmp_path / "judge"), "value")
    trained = (policy.num_parameters + critic.num_parameters) * 12 / 2**20
    assert mib("checkpoint") == pytest.approx(trained, abs=0.06)
    assert mib("snapshots") == pytest.approx(3 * critic.num_parameters * 12 / 2**20, abs=0.06)
    assert mib("reward_model") == pytest.approx(critic.num_parameters * 4 / 2**20, abs=0.06)
    assert mib("reference") == pytest.approx(policy.num_parameters * 4 / 2**20, abs=0.06)


@pytest.mark.parametrize(
    ("snapshot_every", "checkpoint_every", "expected"),
    [(1, 0, 2), (1, 5, 3), (1, "10min", 3), (0, 5, 0)],
)
def test_there_is_one_more_snapshot_if_checkpoints_are_written(
    snapshot_every: int, checkpoint_every: int | str, expected: int
) -> None:
    trainer = TrainerConfig(snapshot_every=snapshot_every)
    config = GRPOConfig(trainer=trainer, checkpoint_every=checkpoint_every)
    assert num_snapshots(config, trainer) == expected


def config_of(path: Path, layout: str = "dp1", **model: Any) -> RunConfig:
    """Return a configuration whose micro-batches have two rows of 150 tokens."""
    return RunConfig(
        model=ModelConfig(path=str(path), **model),
        trainer=TrainerConfig(layout=layout, micro_batch_tokens=300),
        data=DataConfig(max_prompt_tokens=1),
        sampling=SamplingConfig(max_tokens=149),
    )


def estimated(config: RunConfig, head: Head = "logits") -> RankMemory:
    trained = TrainedRoleConfig(model=config.model, trainer=config.trainer)
    return estimate_rank(config, trained, model_shape(config.model.path, head), head)


@pytest.fixture(scope="module")
def apart() -> Iterator[Executor]:
    """Yield a process in which torch.distributed was not initialised by other tests."""
    set_forkserver_preload(PRELOAD)
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as executor:
        yield executor


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return build_tiny_model(directory, characters="0123456789", width=64, num_layers=4)


def test_a_rank_by_hand(path: Path, apart: Executor) -> None:
    """Four layers of 98,496 parameters: q and o 64 x 128, k and v 64 x 64, three of 64 x 384, norms
    of 64, 64, 32 and 32; an embedding of 13 tokens, and a last norm of 64."""
    layer = 2 * 64 * 128 + 2 * 64 * 64 + 3 * 64 * 384 + 192
    embedding = 13 * 64
    for layout, number in (
        ("dp1", 4 * layer + embedding + 64),
        ("pp2", 2 * layer + embedding),  # the first stage has two micro-batches in progress
        ("tp2", 4 * (layer - 192) // 2 + 4 * 192 + embedding + 64),  # 13 tokens cannot be sharded
        ("dp2", 4 * layer // 2 + 7 * 64 + 32),  # of 13 tokens the first rank has 7
    ):
        rank = apart.submit(estimated, config_of(path, layout)).result()
        assert (rank.weights, rank.moments) == (4 * number, 8 * number), layout
        assert rank.gradients == rank.weights


LAYOUTS: list[tuple[str, Head, dict[str, Any]]] = [
    ("dp2", "logits", {}),
    ("dp2", "logits", {"dtype": "bfloat16"}),
    ("dp2", "value", {}),
    ("tp2", "logits", {}),
    ("cp2", "logits", {}),
    ("pp2", "logits", {}),
    ("pp2", "value", {"gradient_checkpointing": "selective"}),
]


@pytest.mark.parametrize("how", rest_slow(["none", "selective", "full"], only=("selective",)))
def test_the_memory_of_micro_batches_is_that_of_the_engine(
    how: Any, path: Path, apart: Executor
) -> None:
    """The engine runs its operations; the estimate only uses shapes."""
    found = counted(0, 1, path, [("dp1", "logits", {"gradient_checkpointing": how})])
    config = config_of(path, gradient_checkpointing=how)
    estimate = apart.submit(estimated, config).result()
    assert estimate.passes == pytest.approx(found[0], rel=0.03)


@pytest.mark.slow
def test_the_memory_of_micro_batches_is_that_of_the_fullest_rank(
    path: Path, apart: Executor
) -> None:
    of_ranks = on_ranks(2, counted, path, LAYOUTS)
    for number, (layout, head, model) in enumerate(LAYOUTS):
        rank = apart.submit(estimated, config_of(path, layout, **model), head).result()
        assert not rank.unknown_reason
        found = max(of_rank[number] for of_rank in of_ranks)
        assert rank.passes == pytest.approx(found, rel=0.03), (layout, head, model)


def counted(
    rank: int, world_size: int, path: Path, cases: Sequence[tuple[str, Head, dict[str, Any]]]
) -> list[int]:
    """Return the memory of micro-batches in a real engine that has gradients, for each case."""
    found = []
    for layout, head, model in cases:
        config = config_of(path, layout, **model)
        engine = make_engine(
            path,
            rank=rank,
            world_size=world_size,
            head=head,
            loss=value_loss() if head == "value" else clipped_surrogate(0.2, 0.28),
            temperature=1.0,
            layout=layout,
            micro_batch_tokens=config.trainer.micro_batch_tokens,
            **model,
        )
        num_passes = 4 if config.trainer.parallel.pp > 1 else 1
        batch = MicroBatch(rows=[row_of(3 + k % 10) for k in range(2 * num_passes)])
        engine.accumulate(batch)
        parameters = list(engine.parameters.values())
        grads = [one.grad for one in parameters if one.grad is not None]
        with LiveBytes([*parameters, *grads]) as live:
            engine.accumulate(batch)
        found.append(live.peak)
    return found


def row_of(first: int) -> TrainRow:
    row = supervised_row([first, *[4] * 149], 1)
    return replace(row, columns={**row.columns, "returns": np.ones(149, np.float32)})


@pytest.mark.parametrize("dtype", rest_slow(["float32", "bfloat16"]))
def test_each_token_counts_at_its_experts(dtype: str, tmp_path: Path, apart: Executor) -> None:
    file = build_model(tmp_path, "qwen3_moe") / "config.json"
    # Rows have the same length as in the other tests.
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 2048}))
    found = counted(0, 1, tmp_path, [("dp1", "logits", {"dtype": dtype})])
    estimate = apart.submit(estimated, config_of(tmp_path, dtype=dtype)).result()
    assert not estimate.unknown_reason
    assert estimate.passes == pytest.approx(found[0], rel=0.03)


def test_fragmentation_is_not_estimated_on_gpus() -> None:
    rank = RankMemory(weights=100, gradients=100, moments=200, passes=600)
    assert rank.total == 1120
    assert replace(rank, on_gpu=True).total == 1000


def test_unknown_memory_is_not_counted(tmp_path: Path, apart: Executor) -> None:
    """The number of tokens for the experts of other ranks depends on their values."""
    build_model(tmp_path, "qwen3_moe")
    rank = apart.submit(estimated, config_of(tmp_path, "ep2")).result()
    assert rank.passes == 0
    assert "Qwen3MoeForCausalLM" in rank.unknown_reason
    # FSDP2 shards the other weights over both ranks too.
    assert rank.total == int(1.12 * 16 * model_shape(str(tmp_path)).num_parameters / 2)


@pytest.mark.parametrize("layout", [pytest.param("dp2tp2", marks=pytest.mark.slow), "pp2"])
def test_the_estimate_of_ranks_is_their_memory(
    layout: str, tmp_path: Path, apart: Executor
) -> None:
    path = build_tiny_model(tmp_path, num_layers=2)
    parsed, config = ParallelLayout.parse(layout), AutoConfig.from_pretrained(path)
    planned = apart.submit(
        holdings_of_ranks, config, head="logits", dtype="float32", layout=parsed
    ).result()
    assert planned == on_ranks(parsed.num_ranks, held, parsed, path)


@pytest.mark.slow
def test_each_byte_of_a_version_is_put_once_and_ranks_share_the_work(
    tmp_path: Path, apart: Executor
) -> None:
    path = build_tiny_model(tmp_path)
    config = config_of(path, "dp2tp2", dtype="bfloat16")
    shape = model_shape(str(path))
    for to in (ITS_NODE, "another"):
        links = apart.submit(planned_links, config, shape, to=to).result()
        assert sum(links.put) == links.read == 2 * shape.num_parameters
        assert max(links.put) < 1.1 * min(links.put)
    with pytest.raises(ValueError, match=str(MAX_PLANNED_RANKS)):
        planned_links(config_of(path, "dp32tp2"), shape, to=ITS_NODE)


def hooks_of_a_rank() -> list[str]:
    """Return the module of the exception hook before, while and after a process is a rank."""
    found = [sys.excepthook.__module__]
    with _alone(1, 2):
        found.append(sys.excepthook.__module__)
    return [*found, sys.excepthook.__module__]


def test_a_process_that_was_a_rank_prints_exceptions_as_before(apart: Executor) -> None:
    before, as_rank, after = apart.submit(hooks_of_a_rank).result()
    assert before == after
    assert as_rank == "torch.distributed.distributed_c10d"  # its hook names the rank in every line


@pytest.mark.parametrize(
    ("settings", "num_versions", "text"),
    rest_slow(
        [
            ({}, 1, "previous weight version, kept while replicas read it"),
            ({"model": ModelConfig(dtype="bfloat16")}, 2, "at most two versions, shared memory"),
            ({"model": ModelConfig(lora="r4")}, 2, "at most two versions, shared memory"),
            ({"trainer": TrainerConfig(layout="dp2")}, 2, "at most two versions, shared memory"),
            ({"trainer": TrainerConfig(num_gpus=1)}, 2, "at most two versions, shared memory"),
        ],
        first=2,
    ),
)
def test_a_float32_ranks_own_weights_are_a_published_version(
    settings: dict[str, Any], num_versions: int, text: str, tmp_path: Path
) -> None:
    config = RunConfig(**settings)
    shape = model_shape(str(tiny_model(tmp_path)))
    memory = estimate_memory(config, shape)
    itemsize = 2 if config.model.dtype == "bfloat16" else 4
    assert memory.published_bytes == num_versions * shape.num_parameters * itemsize
    assert versions_text(memory) == text
