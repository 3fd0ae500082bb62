"""Metrics that only some passes report: matched by name over passes, updates and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlsys.algorithms.loss_inputs import LossInputs, TokenLoss
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.engines.training.ranks import Ranks
from rlsys.types import StepResult, TrainRow
from scripts.ranks import on_ranks
from tests.engines.training_harness import accumulate, make_engine, make_rows, tiny_model

STEPS = {
    "each rank another name": ([(5, 1.0)], [(3, -1.0)]),
    "one rank without a name": ([(5, 1.0)], [(3, 0.0)]),
    "one rank without rows": ([(5, 1.0)], [(0, 0.0)]),
    "each update another name": ([(5, 1.0), (4, -1.0)], [(3, 1.0), (2, 0.0)]),
}


def by_sign(inputs: LossInputs) -> TokenLoss:
    """Report metrics by the sign of advantages in the pass."""
    reported = {}
    if bool((inputs.advantages > 0).any()):
        reported["good"] = inputs.trainer_logprobs.detach()
    elif bool((inputs.advantages < 0).any()) or not len(inputs.advantages):
        reported["bad"] = inputs.trainer_logprobs.detach() - 100
    return -inputs.trainer_logprobs, reported


def rows_of(count: int, advantage: float, seed: int) -> list[TrainRow]:
    rows = make_rows(count, seed=seed)
    for row in rows:
        row.columns["advantages"][:] = advantage
    return rows


def train(engine: FSDPEngine, updates: list[list[list[TrainRow]]]) -> StepResult:
    """Return the metrics of each update, by micro-batch."""
    for number, parts in enumerate(updates):
        accumulate(engine, parts)
        result = engine.optimizer_step(last=number == len(updates) - 1)
    return result


def updates_of(ranks: Any, name: str) -> list[list[list[TrainRow]]]:
    """Return the rows of some ranks as micro-batches of their own."""
    by_rank = [
        [rows_of(*what, seed=10 * rank + number) for number, what in enumerate(STEPS[name][rank])]
        for rank in ranks
    ]
    return [list(parts) for parts in zip(*by_rank, strict=True)]


def options(name: str) -> dict[str, Any]:
    return {"loss": by_sign, "num_minibatches": len(STEPS[name][0]), "learning_rate": 1e-6}


def two_ranks(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in STEPS:
        engine = make_engine(directory, rank=rank, world_size=world_size, **options(name))
        found[name] = train(engine, updates_of([rank], name)).metrics
    ranks = Ranks(rank, world_size)
    found["union"] = ranks.union(["b", f"of {rank}"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", None)  # must not be called
        found["same"] = ranks.union(["b", "a"])
    return found


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("metrics"))


@pytest.fixture(scope="module")
def ranks(model_path: Path) -> list[dict[str, Any]]:
    return on_ranks(2, two_ranks, model_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_metrics_of_ranks_are_matched_by_their_names(
    name: str, ranks: list[dict[str, Any]], model_path: Path
) -> None:
    alone = train(make_engine(model_path, **options(name)), updates_of([0, 1], name)).metrics
    assert ranks[0][name] == ranks[1][name] == pytest.approx(alone, rel=1e-4)
    signs = {np.sign(sign) for of_rank in STEPS[name] for count, sign in of_rank if count}
    reported = {word for word, sign in (("good", 1), ("bad", -1)) if sign in signs}
    assert {"good", "bad"} & alone.keys() == reported
    uniform = np.log(21)  # nearly that of the fresh model
    assert alone["entropy"] == pytest.approx(uniform, rel=0.2)
    assert "good" not in reported or alone["good"] == pytest.approx(-uniform, rel=0.4)
    assert "bad" not in reported or alone["bad"] == pytest.approx(-100 - uniform, rel=0.02)


def test_names_are_exchanged_if_ranks_differ(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["union"] == ["b", "of 0", "of 1"]
        assert found["same"] == ["a", "b"]


def test_a_metric_of_some_updates_is_a_mean_over_those(model_path: Path) -> None:
    """Weight the first and third update by their tokens."""
    parts = [rows_of(2, 1.0, seed=1), rows_of(3, -1.0, seed=2), rows_of(6, 1.0, seed=3)]
    engine = make_engine(
        model_path, loss=by_sign, num_minibatches=3, learning_rate=1e-12, temperature=1.0
    )
    found = train(engine, [[rows] for rows in parts]).metrics
    of_rows = [engine.infer(rows) for rows in parts]
    logprobs = [
        np.concatenate([x[row.loss_mask] for x, row in zip(outputs, rows, strict=True)])
        for outputs, rows in zip(of_rows, parts, strict=True)
    ]
    good = np.concatenate([logprobs[0], logprobs[2]])
    assert found["good"] == pytest.approx(good.mean(), rel=1e-4)
    assert found["bad"] == pytest.approx(logprobs[1].mean() - 100, rel=1e-4)
