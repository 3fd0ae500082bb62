"""Losses of pairs: a trained reward model, and a policy that learns from preferences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from rlsys.algorithms.aggregation import sequence_mean
from rlsys.algorithms.preferences import bradley_terry, dpo
from rlsys.engines.inference.frozen_model import InferenceEngine
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.errors import InvalidValue
from rlsys.types import MicroBatch, TrainRow
from scripts.ranks import on_ranks
from tests.engines.scalar_models import plain_scores, scalar_model, tokens_of
from tests.engines.training_harness import (
    VOCABULARY,
    accumulate,
    assert_same,
    gradients,
    make_engine,
    tiny_model,
    train_step,
)
from tests.errors import invalid
from tests.tiers import rest_slow


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a reward model whose head is random."""
    torch.set_num_threads(1)
    return scalar_model(tmp_path_factory.mktemp("scorer"), "qwen3")


def make_scorer(path: Path, **options: Any) -> FSDPEngine:
    return make_engine(
        path, **{"head": "score", "loss": bradley_terry(), "learning_rate": 3e-3, **options}
    )


def make_pairs(count: int, seed: int = 0) -> list[TrainRow]:
    """Make pairs in order, chosen first: the completion that ends in a larger token."""
    rng = np.random.default_rng(seed)
    rows = []
    for group_id in range(count):
        prompt = rng.integers(3, VOCABULARY, int(rng.integers(1, 6))).astype(np.int32)
        last = sorted(rng.choice(np.arange(3, VOCABULARY), 2, replace=False), reverse=True)
        for token, preference in zip(last, (1, -1), strict=True):
            tokens = rng.integers(3, VOCABULARY, int(rng.integers(1, 9))).astype(np.int32)
            tokens[-1] = token
            rows.append(
                TrainRow(
                    prompt_token_ids=prompt,
                    token_ids=tokens,
                    policy_versions=np.zeros_like(tokens),
                    loss_mask=np.ones(len(tokens), np.bool_),
                    columns={
                        "preference": np.full(len(tokens), preference, np.float32),
                        "reference_logprobs": np.full(len(tokens), -3.0, np.float32),
                    },
                    group_id=group_id,
                    group_size=2,
                    group_num_tokens=20,
                )
            )
    return rows


def test_one_step_by_the_definition(model_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    rows = make_pairs(5)
    engine = make_scorer(model_path, max_grad_norm=1e9, micro_batch_tokens=30)
    accumulate(engine, [rows])
    found = gradients(engine)
    result = engine.optimizer_step()

    model = AutoModelForSequenceClassification.from_pretrained(
        model_path, attn_implementation="eager"
    )
    scores = torch.stack([model(input_ids=tokens_of(row)[None]).logits[0, 0] for row in rows])
    margins = scores[::2] - scores[1::2]
    loss = -logsigmoid(margins).mean()
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_same({n: g / len(rows) for n, g in found.items()}, expected, rtol=1e-3, atol=1e-6)
    assert result.metrics["preference/accuracy"] == pytest.approx((margins > 0).float().mean())
    assert result.metrics["preference/margin"] == pytest.approx(margins.mean().item(), rel=1e-3)
    assert result.metrics["score/mean"] == pytest.approx(scores.mean().item(), rel=1e-3)
    assert result.num_tokens == sum(len(row.token_ids) for row in rows)


@pytest.mark.parametrize("split", rest_slow([[2, 0, 10], [12], [4, 4, 4]]))
def test_micro_batches_change_nothing(model_path: Path, split: list[int]) -> None:
    rows = make_pairs(6)
    whole, parts = make_scorer(model_path), make_scorer(model_path, micro_batch_tokens=20)
    accumulate(whole, [rows])
    edges = np.cumsum([0, *split])
    accumulate(
        parts, [rows[edge - size : edge] for edge, size in zip(edges[1:], split, strict=True)]
    )
    assert_same(gradients(parts), gradients(whole), rtol=1e-3, atol=1e-5)
    found, expected = parts.optimizer_step(), whole.optimizer_step()
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_a_reward_model_learns_from_a_language_model(tmp_path: Path) -> None:
    """Start from even odds; the frozen export gives the same scores."""
    engine = make_scorer(tiny_model(tmp_path / "policy"))
    rows = make_pairs(64)
    assert not np.concatenate(engine.infer(rows)).any()
    steps = []
    for _ in range(30):
        steps.append(train_step(engine, rows).metrics)
    assert steps[0]["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert steps[-1]["preference/accuracy"] > 0.9
    assert steps[-1]["loss"] < 0.3
    engine.export(tmp_path / "hf")
    scores = np.concatenate(engine.infer(rows))
    assert np.mean(scores[::2] > scores[1::2]) > 0.9
    frozen = np.concatenate(InferenceEngine(tmp_path / "hf", head="score").infer(rows))
    np.testing.assert_allclose(frozen, scores, atol=1e-5)
    np.testing.assert_allclose(frozen, plain_scores(tmp_path / "hf", rows), atol=1e-5)


def test_a_model_of_another_kind_can_be_trained(tmp_path: Path) -> None:
    engine = make_scorer(scalar_model(tmp_path / "bert", "bert", type_vocab_size=2))
    rows = make_pairs(16)
    losses = []
    for _ in range(15):
        losses.append(train_step(engine, rows).metrics["loss"])
    assert losses[-1] < losses[0] - 0.2
    engine.export(tmp_path / "hf")
    scores = np.concatenate(engine.infer(rows))
    np.testing.assert_allclose(scores, plain_scores(tmp_path / "hf", rows), atol=1e-5)


def test_a_policy_learns_from_preferences(tmp_path: Path) -> None:
    """Compute DPO's loss by the definition, with passes of one row."""
    path = tiny_model(tmp_path)
    reference = InferenceEngine(path, head="logits", temperature=0.8)
    rows = make_pairs(6)
    rows = [
        replace(row, columns={**row.columns, "reference_logprobs": logprobs})
        for row, logprobs in zip(rows, reference.infer(rows), strict=True)
    ]
    engine = make_engine(path, loss=dpo(beta=0.5), aggregation=sequence_mean, micro_batch_tokens=1)
    expected = float(np.log(2))
    for _ in range(10):
        assert train_step(engine, rows).metrics["loss"] == pytest.approx(expected, rel=1e-4)
        sums = [
            float((now - row.columns["reference_logprobs"]).sum())
            for row, now in zip(rows, engine.infer(rows), strict=True)
        ]
        margins = torch.tensor(sums[::2]) - torch.tensor(sums[1::2])
        expected = -logsigmoid(0.5 * margins).mean().item()
    assert expected < 0.2


def test_metrics_of_a_policys_pairs_are_means_over_pairs(tmp_path: Path) -> None:
    """Use several lengths and updates."""
    rows = make_pairs(5)
    engine = make_engine(
        tiny_model(tmp_path), loss=dpo(beta=0.5), aggregation=sequence_mean, learning_rate=1e-9
    )
    sums = torch.tensor(
        [
            float((now - row.columns["reference_logprobs"]).sum())
            for row, now in zip(rows, engine.infer(rows), strict=True)
        ]
    )
    margins = sums[::2] - sums[1::2]
    accumulate(engine, [rows[:2]])
    engine.optimizer_step(last=False)
    metrics = train_step(engine, rows[2:6], rows[6:]).metrics
    assert metrics["preference/margin"] == pytest.approx(0.5 * margins.mean().item(), rel=1e-4)
    assert metrics["preference/accuracy"] == pytest.approx((margins > 0).float().mean().item())
    assert metrics["preference/incomplete_frac"] == 0


def test_a_pair_in_different_micro_batches_is_rejected(model_path: Path, tmp_path: Path) -> None:
    rows = make_pairs(2)
    for engine in (make_scorer(model_path), make_engine(tiny_model(tmp_path), loss=dpo())):
        with pytest.raises(InvalidValue) as found:
            engine.accumulate(MicroBatch(rows=rows[:3]))
        assert found.value.field.endswith(": rows of group 1 in a micro-batch")
        assert found.value.value == 1


def test_a_pair_without_a_completion_has_no_preference(model_path: Path) -> None:
    rows = make_pairs(1)
    none = np.zeros(0, np.float32)
    columns = {"preference": none}
    rows[1] = replace(rows[1], token_ids=none.astype(np.int32), columns=columns)
    with invalid("preference") as found:
        make_scorer(model_path).accumulate(MicroBatch(rows=rows))
    assert "group 0" in found.value.rule


def two_ranks(rank: int, world_size: int, directory: Path) -> Any:
    engine = make_scorer(directory / "model", rank=rank, world_size=world_size)
    rows = make_pairs(5)
    result = train_step(engine, rows[4 * rank : 4 * rank + 4], rows[8:] if rank == 0 else [])
    return result.metrics, engine.infer(rows if rank == 1 else [])


@pytest.mark.slow
@pytest.mark.parametrize("kind", rest_slow(["qwen3", "bert"]))
def test_two_ranks_train_as_one(kind: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"type_vocab_size": 2} if kind == "bert" else {}
    scalar_model(tmp_path / "model", kind, **settings)
    (found, none), (other, scores) = on_ranks(2, two_ranks, tmp_path)
    alone = make_scorer(tmp_path / "model")
    rows = make_pairs(5)
    accumulate(alone, [rows])
    assert found == other
    assert found == pytest.approx(alone.optimizer_step().metrics, rel=1e-3, abs=1e-5)
    assert none == []
    np.testing.assert_allclose(scores, alone.infer(rows), atol=5e-3)


def refused_ranks(rank: int, world_size: int, directory: Path) -> str:
    with invalid("model.path", str(directory / "model")) as refusal:
        make_scorer(directory / "model", rank=rank, world_size=world_size)
    return refusal.value.fix


def test_several_ranks_need_a_padding_token(tmp_path: Path) -> None:
    scalar_model(tmp_path / "model", "bert", type_vocab_size=2, pad_token_id=None)
    for fix in on_ranks(2, refused_ranks, tmp_path):
        assert "pad_token_id" in fix
        assert "trainer.layout=dp1" in fix
