"""Every registered loss of a policy gives the same step for any split of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlsys.algorithms.aggregation import Aggregation, prompt_mean, sequence_mean
from rlsys.algorithms.loss_inputs import LossFn, of_pairs
from rlsys.algorithms.registry import parse
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.types import Float32Array, TrainRow
from scripts.ranks import on_ranks
from tests.algorithms.examples import LOSSES, WIDE_LOSSES
from tests.engines.training_harness import (
    VOCABULARY,
    Weights,
    accumulate,
    assert_same,
    gradients,
    make_engine,
    tiny_model,
)
from tests.tiers import rest_slow

EVERY_LOSS = (*LOSSES, *WIDE_LOSSES)
# Per token, per sequence, with a correction, with a penalty, of pairs, supervised and wide.
ONE_OF_EACH_KIND = (
    "clipped_surrogate(0.2, 0.28)",
    "corrected(gspo(denominator='proximal'), sequence_tis(2.0, geometric_mean=True))",
    "corrected(with_kl(reinforce, 'unbiased_k3', 0.1), opsm(0.5))",
    "cross_entropy",
    "dpo",
    "entropy_bonus(top_k_distill, 0.01)",
)
TOP_K = 3
# So low that probabilities and entropies of the tiny model differ, and clips and masks have effect.
TEMPERATURE = 0.15


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("losses")
    tiny_model(directory / "model")
    return directory


@pytest.fixture(scope="module")
def rows(directory: Path) -> list[TrainRow]:
    return make_pairs(engine_of(directory))


def engine_of(directory: Path, text: str = "reinforce", **options: Any) -> FSDPEngine:
    loss: LossFn = parse(text, "loss")
    aggregation: Aggregation = sequence_mean if of_pairs(loss) else prompt_mean
    return make_engine(
        directory / "model",
        loss=loss,
        aggregation=aggregation,
        temperature=TEMPERATURE,
        **options,
    )


def make_pairs(engine: FSDPEngine) -> list[TrainRow]:
    """Make six prompts with two completions each, of 1 to 12 tokens.

    Some tokens are masked, of one completion all. Some are a version old. Columns are those of all
    losses: policies around the engine's own, in every other row close to it.
    """
    rng = np.random.default_rng(0)
    rows = []
    for group_id in range(6):
        prompt = rng.integers(0, VOCABULARY, int(rng.integers(1, 6))).astype(np.int32)
        lengths = rng.integers(1, 13, 2)
        masks = [rng.random(length) < 0.8 for length in lengths]
        if group_id == 5:
            masks[1][:] = False
        for mask, preference in zip(masks, (1, -1), strict=True):
            rows.append(
                TrainRow(
                    prompt_token_ids=prompt,
                    token_ids=rng.integers(0, VOCABULARY, len(mask)).astype(np.int32),
                    policy_versions=np.sort(rng.integers(-1, 1, len(mask))).astype(np.int32),
                    loss_mask=mask,
                    columns={"preference": np.full(len(mask), preference, np.float32)},
                    group_id=group_id,
                    group_size=2,
                    group_num_tokens=int(sum(mask.sum() for mask in masks)),
                )
            )
    return [
        replace(row, columns={**row.columns, **columns_around(rng, own, (0.05, 1.2)[index % 2])})
        for index, (row, own) in enumerate(zip(rows, engine.infer(rows), strict=True))
    ]


def columns_around(
    rng: np.random.Generator, own: Float32Array, spread: float
) -> dict[str, Float32Array]:
    """Make the columns of a row whose tokens [T] have these log-probabilities by the engine."""
    teacher = np.sort(rng.dirichlet(np.ones(TOP_K + 1), len(own)))[:, ::-1]
    ids = np.stack([rng.permutation(VOCABULARY)[:TOP_K] for _ in own])
    columns = {
        "sampler_logprobs": own + rng.normal(0, spread, own.shape),
        "proximal_logprobs": own + rng.normal(0, spread, own.shape),
        "reference_logprobs": own + rng.normal(0, spread, own.shape),
        "teacher_logprobs": own + rng.normal(0, spread, own.shape),
        "advantages": np.full(own.shape, rng.normal()),
        "importance_weights": rng.uniform(0.5, 1.5, own.shape),
        "teacher_top_k": np.concatenate([ids, np.log(teacher)], 1).ravel(),
    }
    return {name: column.astype(np.float32) for name, column in columns.items()}


Step = tuple[Weights, dict[str, float]]


def step(engine: FSDPEngine, parts: Sequence[Sequence[TrainRow]]) -> Step:
    """Return the unnormalised gradients and the metrics of a step."""
    accumulate(engine, parts)
    found = gradients(engine)
    metrics = engine.optimizer_step().metrics
    engine.close()
    return found, metrics


def assert_same_step(found: Step, expected: Step) -> None:
    assert found[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-5)
    scale = max(float(gradient.abs().max()) for gradient in expected[0].values())
    assert_same(found[0], expected[0], rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("text", rest_slow(EVERY_LOSS, only=ONE_OF_EACH_KIND))
def test_one_pass_and_many_give_the_same_step(
    text: str, directory: Path, rows: list[TrainRow]
) -> None:
    """Compare one packed pass, passes of 30 tokens in three micro-batches, and padded passes."""
    expected = step(engine_of(directory, text), [rows])
    assert expected[1]["grad_norm"] > 0.01
    small = engine_of(directory, text, micro_batch_tokens=30)
    assert_same_step(step(small, [rows[a:b] for a, b in pairwise((0, 2, 2, 8, 12))]), expected)
    padded = engine_of(directory, text, micro_batch_tokens=60)
    network = padded.role.network
    network.packs = network.shares = False
    assert_same_step(step(padded, [rows[::-1]]), expected)


def two_ranks(rank: int, world_size: int, directory: Path, rows: list[TrainRow]) -> dict[str, Step]:
    """Use other micro-batches on each rank, on the second also empty ones."""
    parts = [rows[:2], rows[2:8], rows[8:10]] if rank == 0 else [[], rows[10:], []]
    place: dict[str, Any] = {"rank": rank, "world_size": world_size, "micro_batch_tokens": 30}
    return {text: step(engine_of(directory, text, **place), parts) for text in EVERY_LOSS}


@pytest.mark.slow
def test_two_ranks_give_the_same_step(directory: Path, rows: list[TrainRow]) -> None:
    first, second = on_ranks(2, two_ranks, directory, rows)
    for text in EVERY_LOSS:
        assert first[text][1] == second[text][1], text
        assert_same_step(first[text], step(engine_of(directory, text), [rows]))
