"""A trained critic: results by the definition, initial values, export."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.algorithms.aggregation import sequence_mean
from rlsys.algorithms.values import clipped_value_loss, value_loss
from rlsys.engines.inference.frozen_model import InferenceEngine
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.types import MicroBatch, TrainRow
from scripts.ranks import on_ranks
from tests.engines.scalar_models import plain_values, scalar_model, tokens_of
from tests.engines.training_harness import (
    accumulate,
    assert_same,
    gradients,
    make_engine,
    make_rows,
    save,
    tiny_model,
    train_step,
)
from tests.errors import invalid
from tests.tiers import rest_slow

CLIP = 0.05


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a critic whose head is random."""
    torch.set_num_threads(1)
    return scalar_model(tmp_path_factory.mktemp("critic"), "qwen3")


def make_critic(path: Path, **options: Any) -> FSDPEngine:
    return make_engine(path, **{"head": "value", "loss": clipped_value_loss(CLIP), **options})


def critic_rows(count: int, seed: int = 0) -> list[TrainRow]:
    rng = np.random.default_rng(seed)
    rows = []
    for row in make_rows(count, seed):
        shape = row.token_ids.shape
        columns = {
            "values": rng.normal(size=shape).astype(np.float32),
            "returns": rng.normal(size=shape).astype(np.float32),
        }
        rows.append(replace(row, columns=columns))
    return rows


def by_definition(path: Path, rows: list[TrainRow]) -> tuple[float, dict[str, torch.Tensor]]:
    """Compute clipped loss and gradient over all trained tokens by transformers, row by row."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager")
    total, count = torch.zeros(()), 0
    for row in rows:
        hidden = model.base_model(input_ids=tokens_of(row)[None]).last_hidden_state
        values = model.score(hidden)[0, len(row.prompt_token_ids) - 1 : -1, 0]
        old, returns = (torch.from_numpy(row.columns[name]) for name in ("values", "returns"))
        near = old + (values - old).clamp(-CLIP, CLIP)
        losses = torch.maximum((values - returns) ** 2, (near - returns) ** 2) / 2
        total = total + losses[torch.from_numpy(row.loss_mask)].sum()
        count += int(row.loss_mask.sum())
    (total / count).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return total.item() / count, found


def test_one_step_by_the_definition(model_path: Path) -> None:
    rows = critic_rows(6)
    loss, expected = by_definition(model_path, rows)
    engine = make_critic(model_path, max_grad_norm=1e9, micro_batch_tokens=50)
    accumulate(engine, [rows])
    found = gradients(engine)
    result = engine.optimizer_step()
    assert result.metrics["loss"] == pytest.approx(loss, rel=1e-5)
    found = {name: gradient / result.num_tokens for name, gradient in found.items()}
    assert_same(found, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("split", rest_slow([[12], [1, 0, 11], [4, 4, 4]], only=([1, 0, 11],)))
def test_micro_batches_change_nothing(model_path: Path, split: list[int]) -> None:
    rows = critic_rows(12)
    whole = make_critic(model_path, aggregation=sequence_mean)
    accumulate(whole, [rows])
    parts = make_critic(model_path, aggregation=sequence_mean, micro_batch_tokens=30)
    edges = np.cumsum([0, *split])
    accumulate(parts, [rows[a:b] for a, b in pairwise(edges)])
    assert_same(gradients(parts), gradients(whole), rtol=1e-3, atol=1e-5)
    found, expected = parts.optimizer_step(), whole.optimizer_step()
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
    assert found.num_tokens == expected.num_tokens


def test_the_explained_variance_is_that_of_the_batch(model_path: Path) -> None:
    rows = critic_rows(6)
    values = np.concatenate(plain_values(model_path, rows))
    mask = np.concatenate([row.loss_mask for row in rows])
    returns = np.concatenate([row.columns["returns"] for row in rows])
    engine = make_critic(model_path, micro_batch_tokens=40)
    found = train_step(engine, rows[:2], rows[2:]).metrics
    expected = 1 - (returns - values)[mask].var() / returns[mask].var()
    assert found["value/explained_variance"] == pytest.approx(expected, rel=1e-3)
    assert found["value/mean"] == pytest.approx(values[mask].mean(), rel=1e-4)


def test_a_critic_made_from_a_policy_starts_at_zero_and_learns(tmp_path: Path) -> None:
    engine = make_critic(tiny_model(tmp_path), loss=value_loss())
    rows = critic_rows(6)
    assert not np.concatenate(engine.infer(rows)).any()
    # What the critic can learn: each text's share of a token.
    for row in rows:
        row.columns["returns"][:] = (row.token_ids == row.token_ids[-1]).mean()
    variances = []
    for _ in range(40):
        variances.append(train_step(engine, rows).metrics["value/explained_variance"])
    assert variances[0] == pytest.approx(0, abs=1e-6)
    assert variances[-1] > 0.8


@pytest.mark.parametrize("dtype", rest_slow(["float32", "bfloat16", "float16"], only=("bfloat16",)))
def test_a_critic_is_a_reward_model_that_transformers_loads(
    model_path: Path, tmp_path: Path, dtype: str
) -> None:
    from transformers import AutoModelForSequenceClassification

    engine = make_critic(model_path, dtype=dtype)
    rows = critic_rows(6)
    before = engine.infer(rows)
    for values, expected in zip(before, plain_values(model_path, rows), strict=True):
        np.testing.assert_allclose(values, expected, atol=1e-5 if dtype == "float32" else 0.2)
    train_step(engine, rows)
    engine.export(tmp_path / "hf")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf", dtype="auto")
    assert model.dtype == getattr(torch, dtype)
    assert model.config.num_labels == 1
    after = engine.infer(rows)
    assert np.abs(np.concatenate(after) - np.concatenate(before)).max() > 1e-3
    again = InferenceEngine(tmp_path / "hf", head="value", dtype=dtype).infer(rows)
    for values, expected in zip(again, after, strict=True):
        np.testing.assert_allclose(values, expected, atol=1e-6 if dtype == "float32" else 0.02)


def test_a_family_without_such_a_class_gets_one(tmp_path: Path) -> None:
    path = scalar_model(tmp_path / "granite", "granite", causal=True)
    engine = make_critic(path, loss=value_loss())
    rows = critic_rows(6)
    train_step(engine, rows)
    engine.export(tmp_path / "hf")
    frozen = InferenceEngine(tmp_path / "hf", head="value")
    for one, other in zip(frozen.infer(rows), engine.infer(rows), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("way", rest_slow(["checkpoint", "snapshot"]))
def test_a_restored_critic_continues_exactly(model_path: Path, tmp_path: Path, way: str) -> None:
    engine, other = make_critic(model_path), make_critic(model_path)
    train_step(engine, critic_rows(4))
    if way == "checkpoint":
        save(engine, tmp_path / "kept")
        other.load(tmp_path / "kept")
    else:
        (tmp_path / "kept").write_bytes(bytes(engine.snapshot_bytes(2)))
        engine.snapshot(engine.open_snapshots(str(tmp_path / "kept"), "kept"))
        other.restore(other.open_snapshots(str(tmp_path / "kept"), "kept"), 1)
    for one in (engine, other):
        accumulate(one, [critic_rows(4, seed=1)])
    assert engine.optimizer_step() == other.optimizer_step()


def test_unsupported_calls_on_a_critic_are_rejected(model_path: Path, tmp_path: Path) -> None:
    engine = make_critic(model_path)
    with invalid("publish"):
        engine.publish()
    with invalid("sft_step"):
        engine.sft_step([[1, 2]], [1])
    with invalid("loss clipped_value_loss(clip=0.05): column", "values"):
        engine.accumulate(MicroBatch(rows=make_rows(1)))
    engine.close()
    bert = scalar_model(tmp_path, "bert", type_vocab_size=2)
    with invalid("model class", "BertForSequenceClassification"):
        make_critic(bert)


def two_ranks(rank: int, world_size: int, directory: Path) -> Any:
    found = []
    for dtype in ("float32", "bfloat16", "float16"):
        engine = make_critic(directory / "model", rank=rank, world_size=world_size, dtype=dtype)
        rows = critic_rows(9)
        result = train_step(engine, rows[rank:3:2], rows[3:] if rank == 0 else [])
        found.append((result.metrics, engine.infer(rows if rank == 1 else [])))
        if dtype == "float32":
            engine.export(directory / "hf")
    return found


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    scalar_model(tmp_path / "model", "qwen3")
    first, second = on_ranks(2, two_ranks, tmp_path)
    rows = critic_rows(9)
    for index, dtype in enumerate(("float32", "bfloat16", "float16")):
        alone = make_critic(tmp_path / "model", dtype=dtype)
        accumulate(alone, [rows])
        tolerance = 1e-4 if dtype == "float32" else 0.05
        expected = alone.optimizer_step().metrics
        assert first[index][0] == second[index][0]
        assert first[index][0] == pytest.approx(expected, rel=tolerance, abs=tolerance)
        assert first[index][1] == []
        for one, other in zip(second[index][1], alone.infer(rows), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-3 if dtype == "float32" else 0.3)
    exported = InferenceEngine(tmp_path / "hf", head="value").infer(rows)
    for one, other in zip(second[0][1], exported, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
