"""float16: a scaled loss, updates beyond its range repeated, exact resumption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys import metrics
from rlsys.algorithms.loss_inputs import LossInputs, TokenLoss
from rlsys.algorithms.losses import reinforce
from rlsys.engines.training import loss_scale
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.engines.training.loss_scale import DIVISOR, FIRST, LOWEST, UPDATES_TO_CLIMB, LossScale
from rlsys.types import StepResult, TrainRow
from scripts.bench.layouts import build_model
from scripts.ranks import on_ranks
from tests.engines.training_harness import (
    Weights,
    accumulate,
    assert_same,
    make_engine,
    make_rows,
    save,
    tiny_model,
    train_step,
    weights,
)

TOO_HIGH = FIRST * DIVISOR**5


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("float16"))


def set_scale(engine: FSDPEngine, value: float) -> None:
    engine.local_state()["buffer.loss_scale"][0] = value


def unscaled(result: StepResult) -> dict[str, float]:
    own = (metrics.LOSS_SCALE, metrics.UPDATES_REPEATED)
    return {name: value for name, value in result.metrics.items() if name not in own}


def test_a_scale_rises_slowly_and_falls_at_once() -> None:
    scale = LossScale(torch.float16)
    for number in range(1, 11):  # at first at every update, until it is too high
        scale.updated()
        assert scale.value == 2**number * FIRST
    assert scale.lower()
    lowered = 2**10 * FIRST / DIVISOR
    for _ in range(UPDATES_TO_CLIMB - 1):
        scale.updated()
    assert (scale.value, scale.num_lowered) == (lowered, 1)
    scale.updated()
    assert scale.value == 2 * lowered
    for _ in range(UPDATES_TO_CLIMB - 1):
        scale.updated()
    assert scale.lower()
    assert (scale.value, scale.num_lowered) == (2 * lowered / DIVISOR, 2)
    scale.updated()  # the count begins again
    assert scale.value == 2 * lowered / DIVISOR


def test_a_scale_has_a_minimum() -> None:
    scale = LossScale(torch.float16)
    while scale.lower():
        assert scale.num_lowered < 10
    assert LOWEST / DIVISOR < scale.value <= LOWEST


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions_have_no_scale(dtype: torch.dtype) -> None:
    scale = LossScale(dtype)
    for _ in range(2 * UPDATES_TO_CLIMB):
        scale.updated()
    assert not scale.lower()
    assert scale.value == 1
    assert scale.tensors == {}


def test_gradients_do_not_depend_on_the_scale(model_path: Path) -> None:
    """Expect exact equality, except below the smallest number, because scales are powers of two."""
    results, after = [], []
    for value in (1.0, 64.0):
        engine = make_engine(model_path, dtype="float16")
        set_scale(engine, value)
        results.append(train_step(engine, make_rows(4)))
        after.append(weights(engine))
    assert results[0].metrics[metrics.LOSS] == results[1].metrics[metrics.LOSS]
    assert results[0].metrics[metrics.GRAD_NORM] == pytest.approx(
        results[1].metrics[metrics.GRAD_NORM], rel=1e-4
    )
    assert {tensor.dtype for tensor in after[0].values()} == {torch.float16}
    exact = train_step(make_engine(model_path), make_rows(4)).metrics
    assert unscaled(results[0]) == pytest.approx(exact, rel=2e-3, abs=1e-4)


def test_an_overflowing_update_is_repeated_with_a_lower_scale(model_path: Path) -> None:
    parts = [make_rows(6, seed=1)[:3], [], make_rows(6, seed=1)[3:]]
    engine = make_engine(model_path, dtype="float16")
    set_scale(engine, TOO_HIGH)
    found = train_step(engine, *parts)
    num_lowered = found.metrics[metrics.UPDATES_REPEATED]
    assert 1 <= num_lowered <= 5
    assert found.metrics[metrics.LOSS_SCALE] == TOO_HIGH / DIVISOR**num_lowered

    plain = make_engine(model_path, dtype="float16")
    set_scale(plain, found.metrics[metrics.LOSS_SCALE])
    expected = train_step(plain, *parts)
    assert expected.metrics[metrics.UPDATES_REPEATED] == 0
    assert unscaled(found) == unscaled(expected)
    assert found.num_tokens == expected.num_tokens
    assert found.policy_version == 1
    assert_same(weights(engine), weights(plain), rtol=0, atol=0)
    again = train_step(engine, *parts)  # contains its own rows only
    assert again.metrics[metrics.UPDATES_REPEATED] == num_lowered
    set_scale(plain, found.metrics[metrics.LOSS_SCALE])
    assert unscaled(again) == unscaled(train_step(plain, *parts))


def test_each_update_of_a_batch_is_repeated_on_its_own(model_path: Path) -> None:
    rows = make_rows(8)
    after = []
    for value in (TOO_HIGH, None):
        engine = make_engine(model_path, dtype="float16", num_minibatches=2)
        accumulate(engine, [rows[:4]])
        first = engine.optimizer_step(last=False)
        if value is not None:
            set_scale(engine, value)
        second = train_step(engine, rows[4:])
        after.append((weights(engine), first.num_tokens, second.num_tokens))
    assert after[0][1:] == after[1][1:]
    # Scales differ in the digits that they lose below float16's smallest numbers.
    assert_same(after[0][0], after[1][0], rtol=1e-2, atol=1e-3)


def test_supervised_steps_are_scaled_too(model_path: Path) -> None:
    batch = ([[3, 4, 5, 6], [7, 8, 9]], [1, 2])
    engine, exact = make_engine(model_path, dtype="float16"), make_engine(model_path)
    set_scale(engine, TOO_HIGH)
    for _ in range(3):
        assert engine.sft_step(*batch) == pytest.approx(exact.sft_step(*batch), rel=1e-2)
    assert train_step(engine, make_rows(4)).metrics[metrics.UPDATES_REPEATED] > 0


def infinite_gradient(inputs: LossInputs) -> TokenLoss:
    """Return 0 at each token, where the square root has an infinite gradient."""
    logprobs = inputs.trainer_logprobs
    return (logprobs - logprobs.detach()).abs().sqrt(), {}


def test_overflow_at_any_scale_is_an_error_and_changes_nothing(model_path: Path) -> None:
    engine = make_engine(model_path, dtype="float16", loss=infinite_gradient)
    before = weights(engine)
    accumulate(engine, [make_rows(4)])
    with pytest.raises(FloatingPointError) as found:
        engine.optimizer_step()
    assert "optimizer step 1" in str(found.value)
    assert "bfloat16" in str(found.value)
    assert_same(weights(engine), before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_loss_that_is_not_finite_is_an_error_at_once(model_path: Path, dtype: str) -> None:
    engine = make_engine(model_path, dtype=dtype, loss=reinforce())
    [row] = make_rows(1)
    bad = replace(
        row, columns=dict(row.columns) | {"advantages": np.full(len(row.token_ids), np.inf, "f4")}
    )
    accumulate(engine, [[bad]])
    with pytest.raises(FloatingPointError):
        engine.optimizer_step()
    result = train_step(engine, make_rows(4))
    assert result.metrics.get(metrics.UPDATES_REPEATED, 0) == 0
    assert np.isfinite(result.metrics[metrics.LOSS])


def test_checkpoints_hold_the_scale(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scale, "UPDATES_TO_CLIMB", 3)
    engine = make_engine(model_path, dtype="float16")
    set_scale(engine, TOO_HIGH)
    for seed in range(2):
        train_step(engine, make_rows(4, seed=seed))
    save(engine, tmp_path / "saved")
    resumed = make_engine(model_path, dtype="float16")
    resumed.load(tmp_path / "saved")
    for seed in range(2, 4):  # the scale grows in between
        expected = train_step(engine, make_rows(4, seed=seed))
        assert train_step(resumed, make_rows(4, seed=seed)) == expected
    assert expected.metrics[metrics.UPDATES_REPEATED] > 0
    assert_same(weights(resumed), weights(engine), rtol=0, atol=0)


def overflow_of_one(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """Make the gradients of rank 1's rows alone too large."""
    found = {}
    for layout in ("dp2", "tp2", "pp2"):
        engine = make_engine(
            directory / "model", rank=rank, world_size=world_size, layout=layout, dtype="float16"
        )
        mine = own_rows(rank) if layout == "dp2" else [*own_rows(0), *own_rows(1)]
        found[layout] = train_step(engine, mine), weights(engine)
        engine.close()
    return found


def own_rows(rank: int) -> list[TrainRow]:
    rows = make_rows(4, seed=rank)
    factor = np.float32(1e5 if rank else 1)
    return [
        replace(row, columns=dict(row.columns) | {"advantages": row.columns["advantages"] * factor})
        for row in rows
    ]


@pytest.mark.slow
def test_ranks_agree_on_the_scale(tmp_path: Path) -> None:
    build_model(tmp_path / "model", "qwen3")
    ranks = on_ranks(2, overflow_of_one, tmp_path)
    alone = make_engine(tmp_path / "model", dtype="float16")
    expected = train_step(alone, [*own_rows(0), *own_rows(1)])
    assert expected.metrics[metrics.UPDATES_REPEATED] > 0
    after = weights(alone)
    for layout in ("dp2", "tp2", "pp2"):
        results: list[StepResult] = [found[layout][0] for found in ranks]
        assert results[0] == results[1], layout
        assert results[0].metrics == pytest.approx(expected.metrics, rel=1e-2, abs=1e-3), layout
        close_to(ranks[0][layout][1], after)


def close_to(found: Weights, expected: Weights) -> None:
    """Allow for Adam's first step, which follows the gradient's sign even if it is noise."""
    for name, tensor in expected.items():
        near = (found[name] - tensor).abs() <= 2e-3
        assert near.float().mean() > 0.98, name
