"""Several updates of the weights per batch: versions and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.algorithms.loss_inputs import LossInputs, TokenLoss
from rlsys.algorithms.losses import clipped_surrogate, reinforce
from rlsys.config import TrainerConfig
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.types import INJECTED, FinishReason, Generation, Sampled, StepResult, TrainRow
from scripts.ranks import on_ranks
from tests.engines.training_harness import (
    accumulate,
    assert_same,
    gradients,
    make_engine,
    make_rows,
    save,
    tiny_model,
    train_step,
    weights,
)
from tests.errors import invalid


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("updates"))


@dataclass
class Spy:
    seen: list[LossInputs] = field(default_factory=list)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        self.seen.append(inputs)
        return reinforce()(inputs)


def train(engine: FSDPEngine, parts: list[list[TrainRow]]) -> StepResult:
    """Make one update per part."""
    for number, rows in enumerate(parts):
        accumulate(engine, [rows])
        result = engine.optimizer_step(last=number == len(parts) - 1)
    return result


def test_a_greedy_baseline_changes_no_gradient(model_path: Path) -> None:
    """Compare with a batch without the baseline rows.

    Their tokens, advantages and log-probabilities change neither gradients, metrics nor tokens of
    the others.
    """

    def trained(baseline: TrainRow | None) -> tuple[StepResult, Any]:
        engine = make_engine(model_path)
        rows = [replace(row, group_num_tokens=40) for row in make_rows(3)]
        accumulate(engine, [rows if baseline is None else [*rows, baseline]])
        found = gradients(engine)
        return engine.optimizer_step(), found

    def baseline(seed: int) -> TrainRow:
        row = make_rows(4, seed)[-1]
        generation = Generation(
            request_id="0.3.0",
            token_ids=row.token_ids,
            sampler_logprobs=row.columns["sampler_logprobs"] * (seed + 1),
            policy_versions=np.zeros(len(row.token_ids), np.int32),
            finish_reason=FinishReason.STOP,
        ).as_baseline
        assert Sampled.of(generation.policy_versions).num_injected == len(row.token_ids)
        return replace(
            row,
            policy_versions=generation.policy_versions,
            loss_mask=generation.policy_versions != INJECTED,
            columns={**row.columns, "sampler_logprobs": generation.sampler_logprobs},
        )

    expected, of_others = trained(None)
    for seed in (1, 2):
        found, grads = trained(baseline(seed))
        assert_same(grads, of_others, rtol=1e-5, atol=1e-7)
        assert found.num_tokens == expected.num_tokens
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-7)


def test_only_the_last_update_makes_a_version(model_path: Path) -> None:
    rows = make_rows(12)
    engine = make_engine(model_path, num_minibatches=3, max_grad_norm=0.1)
    result = train(engine, [rows[:4], rows[4:8], rows[8:]])
    assert result.policy_version == engine.policy_version == 1
    # The weights are those of three steps, with moments and clipping per update.
    plain = make_engine(model_path, max_grad_norm=0.1)
    for part in (rows[:4], rows[4:8], rows[8:]):
        train_step(plain, part)
    assert_same(weights(engine), weights(plain), rtol=0, atol=0)


def test_metrics_are_means_over_all_updates(model_path: Path) -> None:
    rows = make_rows(7)
    parts = [rows[:2], rows[2:]]
    engine = make_engine(model_path, num_minibatches=2)
    found = train(engine, parts)
    plain = make_engine(model_path)
    alone = []
    for part in parts:
        alone.append(train_step(plain, part))
    counts = np.array([result.num_tokens for result in alone])
    for name in ("loss", "entropy", "kl/sampler_trainer"):
        expected = np.average([result.metrics[name] for result in alone], weights=counts)
        assert found.metrics[name] == pytest.approx(expected)
    norms = [result.metrics["grad_norm"] for result in alone]
    assert found.metrics["grad_norm"] == pytest.approx(np.mean(norms))
    assert found.num_tokens == counts.sum()


def test_staleness_counts_updates(model_path: Path) -> None:
    """Count two updates per version: a token three versions old, in the second update."""
    spy = Spy()
    engine = make_engine(model_path, loss=spy, num_epochs=2)
    engine.policy_version = 3
    row = make_rows(1)[0]
    ones = np.ones(len(row.token_ids), np.bool_)
    versions = np.array([0, *[3] * (len(row.token_ids) - 1)], np.int32)
    row = replace(row, policy_versions=versions, loss_mask=ones)
    fresh = replace(row, policy_versions=np.full_like(versions, 3))
    result = train(engine, [[row, fresh], [row, fresh]])
    first, second = (inputs.staleness.reshape(2, -1).tolist() for inputs in spy.seen)
    assert first[0] == [6, *[0] * (len(versions) - 1)]
    assert second[0] == [7, *[1] * (len(versions) - 1)]
    assert result.metrics["staleness/max"] == 7
    assert result.metrics["staleness/mean"] == (6 + 0 + 7 + 1) / 4


def test_proximal_logprobs_of_a_column_stay_while_the_policy_moves(model_path: Path) -> None:
    seen: list[LossInputs] = []

    def spy(inputs: LossInputs) -> TokenLoss:
        seen.append(inputs)
        return clipped_surrogate(0.2, 0.2)(inputs)

    engine = make_engine(model_path, loss=spy, num_epochs=2)
    rows = make_rows(3)
    proximal = engine.infer(rows)
    rows = [
        replace(row, columns={**row.columns, "proximal_logprobs": logprobs})
        for row, logprobs in zip(rows, proximal, strict=True)
    ]
    train(engine, [rows, rows])
    first, second = [(i.proximal_logprobs, i.trainer_logprobs.detach()) for i in seen]
    torch.testing.assert_close(*first, rtol=0, atol=1e-5)
    assert torch.equal(first[0], second[0])
    assert not torch.allclose(*second, atol=1e-3)


def test_a_token_of_an_unknown_sampler_uses_the_proximal_policy(
    model_path: Path,
) -> None:
    """Use NaN as sampler log-probability: the proximal policy's counts, or the policy's own."""
    own, external = make_rows(2)
    unknown = np.full(len(external.token_ids), np.nan, np.float32)
    external = replace(external, columns={**external.columns, "sampler_logprobs": unknown})
    for proximal in (None, -2.0):
        spy = Spy()
        columns = (
            {}
            if proximal is None
            else {"proximal_logprobs": np.full(len(external.token_ids), proximal, np.float32)}
        )
        row = replace(external, columns={**external.columns, **columns})
        engine = make_engine(model_path, loss=spy)
        accumulate(engine, [[row]])
        (seen,) = spy.seen
        assert torch.equal(seen.sampler_logprobs, seen.proximal_logprobs)
        assert proximal is None or bool((seen.proximal_logprobs == proximal).all())
    spy = Spy()
    engine = make_engine(model_path, loss=spy)
    result = train_step(engine, [own, external])
    assert all(np.isfinite(value) for value in result.metrics.values())
    (seen,) = spy.seen
    assert int((seen.sampler_logprobs == -3.0).sum()) == int(own.loss_mask.sum())
    k1 = seen.sampler_logprobs - seen.proximal_logprobs
    assert result.metrics["kl/sampler_trainer"] == pytest.approx(float(k1.mean()), rel=1e-4)


def test_all_updates_of_a_version_have_its_learning_rate(model_path: Path) -> None:
    engine = make_engine(model_path, schedule="linear", final_lr_frac=0.0, num_epochs=2)
    rates = []
    for _ in range(3):
        for last in (False, True):
            accumulate(engine, [make_rows(2)])
            rates.append(engine.optimizer_step(last=last).metrics["learning_rate"])
    of_versions = [1e-2 * share for share in (1, 8 / 9, 7 / 9)]  # of ten steps, down to 0
    assert rates == pytest.approx(np.repeat(of_versions, 2))


def test_no_snapshot_is_taken_within_a_batch(model_path: Path, tmp_path: Path) -> None:
    engine = make_engine(model_path, num_epochs=2)
    accumulate(engine, [make_rows(2)])
    engine.optimizer_step(last=False)
    with pytest.raises(AssertionError):
        save(engine, tmp_path / "saved")
    with invalid("sft_step"):
        engine.sft_step([[1, 2]], [1])


def test_a_failed_update_is_named_and_ends_the_batch(model_path: Path) -> None:
    engine = make_engine(model_path, num_epochs=2)
    accumulate(engine, [make_rows(2)])
    engine.optimizer_step(last=False)
    rows = make_rows(2)
    rows[0].columns["advantages"][:] = np.inf
    accumulate(engine, [rows])
    with pytest.raises(FloatingPointError) as failed:
        engine.optimizer_step()
    assert "optimizer step 1, update 2" in str(failed.value)
    found = train(engine, [make_rows(3), make_rows(3)])
    assert found.policy_version == 1
    assert np.isfinite(found.metrics["loss"])


def two_ranks(rank: int, world_size: int, directory: Path) -> Any:
    engine = make_engine(directory / "model", rank=rank, world_size=world_size, num_minibatches=2)
    rows = make_rows(9)
    result = train(engine, [rows[rank:5:2], rows[5:] if rank == 0 else []])
    return result, weights(engine)


@pytest.mark.slow
def test_two_ranks_update_as_one(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    (found, moved), (other, _) = on_ranks(2, two_ranks, tmp_path)
    alone = make_engine(tmp_path / "model", num_minibatches=2)
    rows = make_rows(9)
    expected = train(alone, [rows[:5], rows[5:]])
    assert found == other
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-3, abs=1e-5)
    assert_same(moved, weights(alone), rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", ["num_minibatches", "num_epochs"])
def test_zero_updates_are_rejected(name: str) -> None:
    options: Any = {name: 0}
    with invalid(f"trainer.{name}", 0):
        TrainerConfig(**options)
