"""Functions over a step whose tokens are in the store, as the trainer's rank computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from actors.store.row_transfer import compute_columns
from recipes.arithmetic import correct
from recipes.ppo import PPOConfig, ppo
from recipes.reinforce_pp import ReinforcePPConfig, reinforce_pp
from rlsys.controller.worker_protocols import StepRowsRef
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import Column, PerBatchStage
from rlsys.types import INJECTED

# One rollout has two tokens of the policy, three of an interruption and one of the policy; another
# has two tokens. The sampler reports 0 for tokens that it did not sample, the reference its own
# values.
VERSIONS = [[3, 3, INJECTED, INJECTED, INJECTED, 4], [4, 4]]
LOGPROBS = [[-1.0, -1.0, 0.0, 0.0, 0.0, -1.0], [-1.0, -2.0]]
REFERENCE = [[-1.0, -1.0, -5.0, -5.0, -5.0, -1.0], [-1.0, -2.0]]
VALUES = [[0.5, 0.5, 9.0, 9.0, 9.0, 0.5], [0.0, 0.0]]
SCORES = [1.0, 0.0]
SAMPLED = np.concatenate(VERSIONS) != INJECTED


class Store:
    """Store that returns these columns and keeps what is written."""

    def __init__(self, columns: Mapping[str, Sequence[Sequence[float]]]) -> None:
        self.columns = columns
        self.kept: dict[str, list[Any]] = {}

    def get_batch(self, cells: Any) -> dict[str, list[Any]]:
        types = {"policy_versions": np.int32}
        return {
            name: [np.array(row, types.get(name, np.float32)) for row in rows]
            for name, rows in self.columns.items()
        }

    def put(self, columns: dict[str, list[Any]]) -> None:
        self.kept = columns


def computed(stage: PerBatchStage) -> dict[str, np.ndarray[Any, Any]]:
    columns: dict[str, Sequence[Sequence[float]]] = {
        "policy_versions": VERSIONS,
        "sampler_logprobs": LOGPROBS,
        "reference_logprobs": REFERENCE,
        "values": VALUES,
    }
    store = Store(columns)
    rows = StepRowsRef(
        cells={},
        scalars={"score": SCORES, "reward": SCORES},
        group_ids=[0, 1],
        group_sizes=[1, 1],
        group_num_tokens=[3, 2],
    )
    written = compute_columns(stage, rows, store)  # type: ignore[arg-type]
    if written.scalars:
        return {name: np.array(values) for name, values in written.scalars.items()}
    assert [[len(row) for row in column] for column in store.kept.values()] == [
        [6, 2] for _ in stage.writes
    ]
    return {name: np.concatenate(column) for name, column in store.kept.items()}


def step_stage(flow: Dataflow) -> PerBatchStage:
    (stage,) = flow.all(PerBatchStage)
    return stage


def test_ppo_gives_no_credit_to_tokens_that_the_policy_did_not_sample() -> None:
    # On-policy, so the reward is the score alone. With lambda 1 the first rollout's tokens have an
    # advantage of 1 - 0.5 each, the second's 0. Whitening: mean 0.3, variance 0.06.
    found = computed(step_stage(ppo(PPOConfig(trace_decay=1.0), [correct])))
    expected = (np.array([0.5, 0.5, 0.5, 0.0, 0.0]) - 0.3) / np.sqrt(0.06)
    np.testing.assert_allclose(found["advantages"][SAMPLED], expected, rtol=1e-5, atol=1e-6)
    assert found["advantages"][~SAMPLED].tolist() == [0, 0, 0]
    np.testing.assert_allclose(found["returns"][SAMPLED], [1, 1, 1, 0, 0], atol=1e-6)


def test_reinforce_plus_plus_has_no_penalty_for_tokens_that_the_policy_did_not_sample() -> None:
    # Advantages of 1, 1, 1, 0, 0 before normalisation: mean 0.6, variance 0.24.
    found = computed(step_stage(reinforce_pp(ReinforcePPConfig(kl_coefficient=1.0), [correct])))
    expected = (np.array([1.0, 1.0, 1.0, 0.0, 0.0]) - 0.6) / np.sqrt(0.24)
    np.testing.assert_allclose(found["advantages"][SAMPLED], expected, rtol=1e-5, atol=1e-6)
    assert found["advantages"][~SAMPLED].tolist() == [0, 0, 0]


@pytest.mark.parametrize("per", ["row", "token"])
def test_a_function_over_tokens_gets_the_loss_mask_by_name(per: Any) -> None:
    seen = []

    def mine(
        logprobs: torch.Tensor, row_offsets: torch.Tensor, loss_mask: torch.Tensor
    ) -> torch.Tensor:
        seen.extend([row_offsets.tolist(), loss_mask.tolist()])
        return logprobs[: 2 if per == "row" else None]

    stage = PerBatchStage(
        name="mine",
        reads=(Column("sampler_logprobs", "token"),),
        writes=(Column("x", per),),
        function=mine,
    )
    assert (
        computed(stage)["x"].tolist()
        == np.concatenate(LOGPROBS)[: 2 if per == "row" else 8].tolist()
    )
    assert seen == [[0, 6, 8], SAMPLED.tolist()]


def test_token_columns_may_be_computed_from_row_columns() -> None:
    def spread(reward: torch.Tensor, row_offsets: torch.Tensor) -> torch.Tensor:
        return reward.repeat_interleave(row_offsets.diff())

    stage = PerBatchStage(
        name="spread", reads=(Column("reward"),), writes=(Column("x", "token"),), function=spread
    )
    assert computed(stage)["x"].tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
