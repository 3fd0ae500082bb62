"""The same results for every layout, with two real processes over gloo.

One spawn of two ranks runs all scenarios and returns its results. The tests compare them with one
rank in this process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.algorithms.aggregation import prompt_mean, sequence_mean
from rlsys.algorithms.composed import entropy_bonus
from rlsys.algorithms.losses import gspo
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.launcher.tiny_models import Family
from rlsys.reallocation.transport.staging import StagingBuffer
from rlsys.types import Float32Array, StepResult, TrainRow
from scripts.ranks import on_ranks
from tests.engines.training_harness import (
    Weights,
    accumulate,
    assert_same,
    assert_same_sums,
    gradients,
    hold,
    make_engine,
    make_rows,
    save,
    tiny_model,
    train_step,
    weights,
    whole_state,
    write,
)
from tests.tiers import rest_slow

FAMILIES: tuple[Family, ...] = ("qwen3", "llama", "gemma2", "gemma3")
VARIANTS: dict[str, dict[str, Any]] = {
    "offloaded": {"optimizer_state": "cpu_float32"},
    "checkpointed": {"gradient_checkpointing": "selective", "aggregation": sequence_mean},
    "gspo with entropy": {
        "loss": entropy_bonus(gspo(0.1, 0.1), 0.01),
        "aggregation": prompt_mean,
    },
}
SFT_BATCH = ([[3, 4, 5, 6], [7, 8, 9], [3, 5], [6, 6, 6, 6, 6]], [1, 2, 1, 3])


@dataclass
class Trained:
    """Results of two optimizer steps."""

    gradients: Weights
    results: list[StepResult] = field(default_factory=list)
    weights: Weights = field(default_factory=dict)


def train(engine: FSDPEngine, first: list[list[TrainRow]], second: list[list[TrainRow]]) -> Trained:
    accumulate(engine, first)
    trained = Trained(gradients(engine))
    trained.results.append(engine.optimizer_step())
    accumulate(engine, second)
    trained.results.append(engine.optimizer_step())
    trained.weights = weights(engine)
    engine.close()
    return trained


def shares(rank: int) -> tuple[list[list[TrainRow]], list[list[TrainRow]]]:
    """Return fewer rollouts, once none, and other micro-batches for rank 1 than for rank 0."""
    first, second = make_rows(12), make_rows(8, seed=1)
    if rank == 0:
        return [first[:5], first[5:8], first[8:9]], [second, []]
    return [first[9:], [], []], [[], []]


def one_rank(model_path: Path, **options: Any) -> Trained:
    return train(make_engine(model_path, **options), [make_rows(12)], [make_rows(8, seed=1)])


def family_on_two_ranks(rank: int, world_size: int, path: Path) -> Trained:
    engine = make_engine(path, rank=rank, world_size=world_size, micro_batch_tokens=40)
    return train(engine, *shares(rank))


def two_ranks(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    def engine(**options: Any) -> FSDPEngine:
        options = {"micro_batch_tokens": 40} | options
        return make_engine(directory / "qwen3", rank=rank, world_size=world_size, **options)

    found: dict[str, Any] = {"qwen3": train(engine(), *shares(rank))}
    for name, options in VARIANTS.items():
        found[name] = train(engine(**options), *shares(rank))
    found["again"] = train(engine(), *shares(rank))
    found["bfloat16"] = train(engine(dtype="bfloat16"), *shares(rank))

    scored = engine()
    found["logprobs"] = scored.infer(make_rows(5) if rank == 0 else [])
    found["sft"] = [scored.sft_step(*SFT_BATCH, learning_rate=1e-2) for _ in range(2)]

    resumed = engine()
    resumed.load(directory / "saved-by-one")
    found["resumed"] = train(resumed, *shares(rank))
    saving = engine()
    accumulate(saving, shares(rank)[0])
    saving.optimizer_step()
    found["held"] = whole_state(saving)
    held = hold(saving, directory)
    saving.export(directory / "exported")
    accumulate(saving, shares(rank)[1])
    saving.optimizer_step()
    write(saving, held, directory / "saved-by-two")
    found["errors"] = errors(engine(), rank)
    return found


def no_room(self: StagingBuffer, version: int, read: Any) -> Any:
    raise OSError(f"no room for version {version}")


def errors(engine: FSDPEngine, rank: int) -> list[str]:
    """Return the message and type of two errors, of which only one rank is the cause."""
    found: list[str] = []
    rows = make_rows(2)
    if rank == 1:
        rows[0].columns["advantages"][:] = np.nan
    accumulate(engine, [rows])
    try:
        engine.optimizer_step()
    except FloatingPointError as error:
        found.append(str(error))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(StagingBuffer, "write", no_room)
        try:
            engine.publish()
        except (OSError, RuntimeError) as error:
            found.append(type(error).__name__)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("layouts")
    tiny_model(directory / "qwen3")
    engine = make_engine(directory / "qwen3")
    train_step(engine, make_rows(12))
    save(engine, directory / "saved-by-one")
    return directory


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    return on_ranks(2, two_ranks, directory)


def assert_same_training(found: Trained, expected: Trained) -> None:
    assert_same(found.gradients, expected.gradients, rtol=1e-4, atol=1e-5)
    assert_same_sums(found.results[0].metrics, expected.results[0].metrics)
    for result, other in zip(found.results, expected.results, strict=True):
        assert result.metrics == pytest.approx(other.metrics, rel=1e-4, abs=1e-6)
        assert result.num_tokens == other.num_tokens
    # Adam moves a weight by about the learning rate, 1e-2, even if its gradient is only rounding.
    # The second step's metrics depend on the weights too.
    assert_same(found.weights, expected.weights, rtol=0, atol=2e-3)


@pytest.mark.parametrize("family", rest_slow(FAMILIES))
def test_two_ranks_train_as_one(family: Family, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / family, family)
    found = on_ranks(2, family_on_two_ranks, path)
    assert_same_training(found[0], one_rank(path))


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_train_as_one_whatever_the_loss(
    variant: str, ranks: list[dict[str, Any]], directory: Path
) -> None:
    plain = {"gradient_checkpointing": "none", "optimizer_state": "float32"}
    options = VARIANTS[variant] | plain
    assert_same_training(ranks[0][variant], one_rank(directory / "qwen3", **options))


def test_every_rank_reports_the_global_batch(ranks: list[dict[str, Any]]) -> None:
    for result, other in zip(ranks[0]["qwen3"].results, ranks[1]["qwen3"].results, strict=True):
        assert result.metrics == other.metrics
        assert result.num_tokens == other.num_tokens


def test_two_runs_on_two_ranks_are_bitwise_equal(ranks: list[dict[str, Any]]) -> None:
    first, again = ranks[0]["qwen3"], ranks[0]["again"]
    assert_same(first.weights, again.weights, rtol=0, atol=0)
    assert [r.metrics for r in first.results] == [r.metrics for r in again.results]


def test_bfloat16_keeps_float32_masters_on_any_number_of_ranks(
    ranks: list[dict[str, Any]], directory: Path
) -> None:
    two: Trained = ranks[0]["bfloat16"]
    one = one_rank(directory / "qwen3", dtype="bfloat16")
    exact = one_rank(directory / "qwen3")
    for trained in (one, two):
        assert {tensor.dtype for tensor in trained.weights.values()} == {torch.bfloat16}
        assert {tensor.dtype for tensor in trained.gradients.values()} == {torch.float32}
        assert trained.results[0].metrics["loss"] == pytest.approx(
            exact.results[0].metrics["loss"], rel=0.05
        )
    assert one.results[0].metrics == pytest.approx(two.results[0].metrics, rel=0.02, abs=1e-3)


def test_logprobs_do_not_depend_on_the_ranks(ranks: list[dict[str, Any]], directory: Path) -> None:
    expected = make_engine(directory / "qwen3").infer(make_rows(5))
    found: list[Float32Array] = ranks[0]["logprobs"]
    assert ranks[1]["logprobs"] == []
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_supervised_steps_share_the_batch_over_the_ranks(
    ranks: list[dict[str, Any]], directory: Path
) -> None:
    engine = make_engine(directory / "qwen3")
    expected = [engine.sft_step(*SFT_BATCH, learning_rate=1e-2) for _ in range(2)]
    assert ranks[0]["sft"] == ranks[1]["sft"] == pytest.approx(expected, rel=1e-4)


def test_a_checkpoint_may_change_the_number_of_ranks(
    ranks: list[dict[str, Any]], directory: Path
) -> None:
    resumed = make_engine(directory / "qwen3")
    resumed.load(directory / "saved-by-one")
    assert resumed.policy_version == 1
    expected = train(resumed, [make_rows(12)], [make_rows(8, seed=1)])
    assert_same_training(ranks[0]["resumed"], expected)

    of_one, of_two = make_engine(directory / "qwen3"), make_engine(directory / "qwen3")
    of_one.load(directory / "saved-by-one")
    of_two.load(directory / "saved-by-two")
    assert_same(weights(of_two), weights(of_one), rtol=0, atol=2e-3)


def test_one_rank_loads_the_held_state_of_two_exactly(
    ranks: list[dict[str, Any]], directory: Path
) -> None:
    """Train on between the snapshot and the write."""
    loaded = make_engine(directory / "qwen3")
    loaded.load(directory / "saved-by-two")
    assert loaded.policy_version == 1
    assert_same(whole_state(loaded), ranks[0]["held"], rtol=0, atol=0)


def test_two_ranks_export_what_transformers_loads(
    ranks: list[dict[str, Any]], directory: Path
) -> None:
    from transformers import AutoModelForCausalLM

    trained = make_engine(directory / "qwen3")
    trained.load(directory / "saved-by-two")
    exported = dict(AutoModelForCausalLM.from_pretrained(directory / "exported").named_parameters())
    assert_same({n: p.detach() for n, p in exported.items()}, weights(trained), rtol=0, atol=0)


def test_no_rank_waits_for_one_that_failed(ranks: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        not_finite, unpublished = ranks[rank]["errors"]
        assert "optimizer step 1" in not_finite
        assert "nan" in not_finite
        assert unpublished == ("OSError" if rank == 0 else "RuntimeError")
