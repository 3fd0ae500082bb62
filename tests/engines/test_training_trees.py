"""A rollout that is a tree: trained like its separate branches, counted as one rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rlsys import metrics
from rlsys.algorithms.aggregation import (
    Aggregation,
    constant_length,
    prompt_mean,
    sequence_mean,
    token_mean,
)
from rlsys.algorithms.losses import gspo, reinforce
from rlsys.engines.inference.frozen_model import InferenceEngine
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.types import Float32Array, MicroBatch, TrainRow
from scripts.ranks import on_ranks
from tests.engines.scalar_models import scalar_model
from tests.engines.training_harness import (
    VOCABULARY,
    assert_same,
    gradients,
    make_engine,
    make_rows,
)
from tests.engines.tree_rows import Branch, apart, tree_row, trees
from tests.errors import invalid


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return build_tiny_model(
        tmp_path_factory.mktemp("trees"),
        characters="0123456789+-*/=. #",
        width=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        mlp_width=48,
        max_context=512,
    )


@pytest.fixture(scope="module")
def frozen(model: Path) -> InferenceEngine:
    return InferenceEngine(model, head="logits", temperature=0.8)


def _tokens(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, VOCABULARY, count).tolist())


def deep_tree(group_id: int = 0) -> tuple[TrainRow, list[Branch]]:
    """Make a tree long enough for tree attention.

    It has branches of branches, one that starts at the root, and some injected tokens.
    """
    rng = np.random.default_rng(group_id)
    branches, lengths = [], []
    for own, parent, at in [
        *((60, -1, 150), (40, 0, 180), (30, 1, 210), (20, 0, 150), (90, -1, 0), (25, 4, 60)),
        *((10, 2, 240), (15, 0, 20)),
    ]:
        sampled = rng.random(own) < 0.8
        sampled[0] = False
        branches.append(Branch(_tokens(rng, own), parent, at, tuple(sampled.tolist())))
        lengths.append(at + own)
    assert max(lengths) > 128
    return tree_row(_tokens(rng, 150), branches, group_id), branches


def _trained(model: Path, rows: Sequence[TrainRow], **options: Any) -> FSDPEngine:
    engine = make_engine(model, micro_batch_tokens=4096, **options)
    engine.accumulate(MicroBatch(rows=rows))
    return engine


@pytest.mark.parametrize("layout", [(True, True), (True, False), (False, False)])
def test_a_tree_is_trained_like_its_separate_branches(
    model: Path, layout: tuple[bool, bool]
) -> None:
    row, branches = deep_tree()
    expected = gradients(_trained(model, apart(row, branches)))
    engine = make_engine(model, micro_batch_tokens=4096)
    engine.role.network.packs, engine.role.network.shares = layout
    engine.accumulate(MicroBatch(rows=[row]))
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    assert_same(gradients(engine), expected, rtol=1e-5, atol=1e-5 * largest)
    result = engine.optimizer_step()
    assert result.num_tokens == int(row.loss_mask.sum())


def _of_branches(
    engine: InferenceEngine, row: TrainRow, branches: Sequence[Branch]
) -> Float32Array:
    """Return the outputs of each separate branch, at the places of its tokens."""
    all_sampled = [replace(b, sampled=(True,) * len(b.own)) for b in branches]
    found = iter(engine.infer(apart(row, all_sampled)))
    parts = []
    for branch in branches:
        if not branch.own:
            continue
        outputs = next(found)
        parts.append(outputs if branch.at else np.concatenate((np.zeros(1, np.float32), outputs)))
    return np.concatenate(parts)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(tree=trees(), layout=st.sampled_from([(True, True), (True, False), (False, False)]))
def test_outputs_of_a_tree_equal_those_of_its_branches(
    frozen: InferenceEngine, tree: tuple[TrainRow, list[Branch]], layout: tuple[bool, bool]
) -> None:
    row, branches = tree
    assume(row.token_ids.size)
    expected = _of_branches(frozen, row, branches)
    network = frozen.role.network
    network.packs, network.shares = layout
    line = make_rows(1)[0]
    found = frozen.infer([line, row])[1]
    network.packs, network.shares = True, True
    assert found == pytest.approx(expected, abs=1e-5)


def test_outputs_of_a_long_tree(frozen: InferenceEngine) -> None:
    row, branches = deep_tree()
    (found,) = frozen.infer([row])
    assert found == pytest.approx(_of_branches(frozen, row, branches), abs=1e-5)
    (start,) = np.flatnonzero(found == 0.0)
    assert start == 60 + 40 + 30 + 20  # on the branch that starts at the root


def test_the_likeliest_tokens_of_a_tree(model: Path) -> None:
    row, branches = deep_tree()
    engine = InferenceEngine(model, head="logits", temperature=0.8, top_k=2)
    (found,) = engine.infer([row])
    of_first = engine.infer(apart(row, [replace(branches[0], sampled=(True,) * 60)]))[0]
    assert found.shape == (5 * len(row.token_ids),)
    assert found[: len(of_first)] == pytest.approx(of_first, abs=1e-5)
    assert not found.reshape(-1, 5)[150].any()


def test_values_of_a_tree(tmp_path: Path) -> None:
    critic = InferenceEngine(scalar_model(tmp_path, "qwen3"), head="value")
    branches = [
        Branch((3, 4, 5), -1, 2, (True,) * 3),
        Branch((6, 7), 0, 3, (True,) * 2),
        Branch((8, 9), -1, 0, (False, True)),
    ]
    row = tree_row([1, 2], branches)
    (found,) = critic.infer([row])
    assert found == pytest.approx(_of_branches(critic, row, branches), abs=1e-5)


def test_a_score_is_that_of_the_last_branch(tmp_path: Path) -> None:
    scorer = InferenceEngine(scalar_model(tmp_path, "qwen3"), head="score")
    branches = [Branch((3, 4, 5), -1, 2, (True,) * 3), Branch((6, 7), 0, 3, (True,) * 2)]
    row = tree_row([1, 2], branches)
    alone = apart(row, branches)[1]
    assert alone.prompt_token_ids.tolist() == [1, 2, 3]
    assert scorer.infer([row])[0] == pytest.approx(scorer.infer([alone])[0], abs=1e-6)


def test_the_context_limits_each_branch_not_their_sum(model: Path) -> None:
    engine = InferenceEngine(model, head="logits")
    long = Branch((3,) * 400, -1, 10, (True,) * 400)
    row = tree_row([1] * 10, [long, Branch((4,) * 300, 0, 100, (True,) * 300)])
    assert engine.infer([row])[0].shape == (700,)
    too_long = tree_row([1] * 10, [long, Branch((4,) * 303, 0, 210, (True,) * 303)])
    with invalid("tokens of a row", 513) as found:
        engine.infer([too_long])
    assert "512" in found.value.rule


def _two_rollouts(frozen: InferenceEngine) -> tuple[list[TrainRow], list[Float32Array]]:
    """Make a tree of 2 + 1 sampled tokens and a line of 1, with log π of their sampled tokens."""
    branches = [Branch((3, 4, 5), -1, 2, (True, False, True)), Branch((6, 7), 0, 3, (False, True))]
    tree = tree_row([1, 2], branches)
    line = replace(tree_row([1, 2], [Branch((8,), -1, 2, (True,))]), branches=None)
    tree, line = (replace(row, group_num_tokens=4) for row in (tree, line))
    found = frozen.infer([tree, line])
    rows = [tree, line]
    return rows, [outputs[row.loss_mask] for row, outputs in zip(rows, found, strict=True)]


@pytest.mark.parametrize(
    ("aggregation", "weights", "denominator"),
    [
        (token_mean, (1, 1), 4),
        (sequence_mean, (1 / 3, 1), 2),
        (prompt_mean, (1 / 4, 1 / 4), 1),
        (constant_length(10), (1, 1), 20),
    ],
)
def test_each_aggregation_counts_a_tree_as_one_rollout(
    model: Path,
    frozen: InferenceEngine,
    aggregation: Aggregation,
    weights: tuple[float, float],
    denominator: float,
) -> None:
    rows, logprobs = _two_rollouts(frozen)
    engine = _trained(model, rows, loss=reinforce(), aggregation=aggregation)
    advantages = [row.columns["advantages"][row.loss_mask] for row in rows]
    result = engine.optimizer_step()
    expected = sum(
        weight * float((-advantage * of_row).sum())
        for weight, advantage, of_row in zip(weights, advantages, logprobs, strict=True)
    )
    assert result.metrics[metrics.LOSS] == pytest.approx(expected / denominator, rel=1e-4)
    assert result.num_tokens == 4
    assert result.metrics[metrics.STALENESS_MEAN] == 0.0


def test_a_sequences_ratio_is_that_of_the_whole_rollout(
    model: Path, frozen: InferenceEngine
) -> None:
    rows, logprobs = _two_rollouts(frozen)
    rows = [
        replace(row, columns={**row.columns, "advantages": np.full(len(row.token_ids), 1.5, "f4")})
        for row in rows
    ]
    engine = _trained(model, rows, loss=gspo(0.5, 9.0), aggregation=sequence_mean)
    result = engine.optimizer_step()
    ratios = [
        np.exp((of_row - row.columns["sampler_logprobs"][row.loss_mask]).mean())
        for row, of_row in zip(rows, logprobs, strict=True)
    ]
    assert result.metrics[metrics.LOSS] == pytest.approx(-1.5 * sum(ratios) / 2, rel=1e-4)


def test_one_branch_changes_no_bit(model: Path) -> None:
    lines = make_rows(8)
    as_trees = [
        replace(
            row,
            branches=np.array([len(row.token_ids), -1, len(row.prompt_token_ids), 0], np.int32),
        )
        for row in lines
    ]
    found, expected = gradients(_trained(model, as_trees)), gradients(_trained(model, lines))
    assert all(found[name].equal(expected[name]) for name in expected)


def test_a_token_that_nothing_predicts_is_not_trained_on(model: Path) -> None:
    row = tree_row([1], [Branch((2,), -1, 1, (True,)), Branch((3, 4), -1, 0, (True, True))])
    with invalid("branches"):
        _trained(model, [row])


LAYOUTS = ("dp2", "tp2", "cp2", "pp2")


def _updated(
    model: Path, layout: str, rank: int = 0, world_size: int = 1
) -> tuple[list[float], list[Float32Array]]:
    """Return loss and gradient norm of a step on two trees, and the outputs after it."""
    rows = [deep_tree(group_id)[0] for group_id in range(2)]
    engine = make_engine(
        model, layout=layout, rank=rank, world_size=world_size, micro_batch_tokens=4096
    )
    engine.accumulate(MicroBatch(rows=rows[rank : rank + 1] if layout == "dp2" else rows))
    result = engine.optimizer_step().metrics
    return [result[metrics.LOSS], result[metrics.GRAD_NORM]], engine.infer(rows)


def _on_each_layout(rank: int, world_size: int, model: Path) -> list[Any]:
    return [_updated(model, layout, rank, world_size) for layout in LAYOUTS]


@pytest.mark.slow
def test_ranks_share_a_tree(model: Path) -> None:
    sums, outputs = _updated(model, "dp1")
    result = on_ranks(2, _on_each_layout, model)[1]  # of the last pipeline stage
    for layout, (of_layout, inferred) in zip(LAYOUTS, result, strict=True):
        assert of_layout == pytest.approx(sums, rel=1e-5), layout
        for one, other in zip(inferred, outputs, strict=True):
            assert one == pytest.approx(other, abs=1e-3), layout
