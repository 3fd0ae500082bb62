"""Forward and backward passes of an update on one rank, and the sums that they add to.

micro-batches of rows ─► passes within the token limit ─► loss ─► backward: gradients, summed
└────► StepStatistics, TokenGaps
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from rlsys import metrics
from rlsys.algorithms.aggregation import Aggregation
from rlsys.algorithms.loss_inputs import whole_groups
from rlsys.config import TrainerConfig
from rlsys.engines.devices.cpu import Pieces
from rlsys.engines.models.branches import check_trained
from rlsys.engines.models.collate import CollatedBatch, split_passes
from rlsys.engines.models.loss_calls import call_aggregation
from rlsys.engines.models.model_roles import Loss, Role
from rlsys.engines.models.step_statistics import StepStatistics
from rlsys.engines.training.draft_training import DraftTraining
from rlsys.engines.training.loss_scale import LossScale
from rlsys.engines.training.parallel.pipeline import PipelineStage
from rlsys.engines.training.ranks import Ranks
from rlsys.engines.training.token_gaps import TokenGaps
from rlsys.types import TrainRow


class Objective(NamedTuple):
    """A loss of the outputs of a model, and the weights of its rows."""

    role: Role
    loss: Loss
    aggregation: Aggregation


class Pass(NamedTuple):
    """The rows of a forward and backward pass."""

    rows: Sequence[TrainRow]
    batch: CollatedBatch
    weights: torch.Tensor  # of each place [N]


class Accumulation:
    """Passes since the last update. Gradients stay in the parameters.

    Attributes:
        statistics: Sums of the current update.
        gaps: Differences of log-probabilities in the current batch.
        accumulated: Micro-batches of the current update, if it may have to be repeated.
    """

    def __init__(
        self,
        config: TrainerConfig,
        ranks: Ranks,
        device: torch.device,
        scale: LossScale,
        draft: DraftTraining | None,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._device = device
        self._scale = scale
        self._draft = draft
        self._counts = config.parallel.counts(ranks.rank)
        self._pieces = Pieces()
        self.begin_batch()
        self.begin_update()

    def begin_batch(self) -> None:
        """Forget the differences of the last batch."""
        self.gaps = TokenGaps()

    def begin_update(self) -> None:
        """Forget the sums of the last update."""
        self.statistics = StepStatistics(counts=self._counts)
        self.accumulated: list[tuple[Objective, Sequence[Sequence[TrainRow]]]] = []

    def add(
        self,
        objective: Objective,
        micro_batches: Sequence[Sequence[TrainRow]],
        *,
        policy_version: int,
        num_updates: int,
    ) -> None:
        """Run the passes of micro-batches. A collective.

        Args:
            objective: The model and its loss.
            micro_batches: Rows of this rank.
            policy_version: Version of the weights.
            num_updates: Updates behind the weights, at `updates_per_step` for each version.
        """
        self._policy_version, self._num_updates = policy_version, num_updates
        role, loss, _ = objective
        columns = role.columns(loss, [row for rows in micro_batches for row in rows])
        passes = [one for rows in micro_batches for one in self._split(objective, rows)]
        # FSDP2 gathers and reduces in every pass, so all ranks run equally many.
        num_passes = self._ranks.max(len(passes))

        def pass_of(number: int) -> Pass:
            chosen = passes[number] if number < len(passes) else []
            rows = [row for row, _ in chosen]
            batch = role.collate(rows, columns)
            weights = torch.tensor([weight for _, weight in chosen])
            return Pass(rows, batch, weights.to(self._device)[batch.row_index])

        if role.stage is not None:
            self._pipeline(objective, role.stage, [pass_of(i) for i in range(num_passes)])
        else:
            for number in range(num_passes):
                self._learn(objective, pass_of(number))
        if self._scale.adapts:
            self.accumulated.append((objective, micro_batches))

    def _learn(self, objective: Objective, one: Pass) -> None:
        """Run the forward and backward pass of the whole model."""
        with nullcontext() if self._draft is None else self._draft.watching():
            total = self._loss_of(objective, one)
        if self._draft is not None:
            self._draft.learn(one.batch)
        self._pieces.release()
        total.backward()

    def _pipeline(self, objective: Objective, stage: PipelineStage, passes: Sequence[Pass]) -> None:
        """Run the passes of one pipeline stage."""
        role = objective.role

        def forward(number: int, received: torch.Tensor | None) -> torch.Tensor:
            if stage.is_last:
                return self._loss_of(objective, passes[number], received)
            hidden: torch.Tensor = role.run(passes[number].batch, received)
            return hidden

        stage.run(len(passes), forward, lambda i: role.hidden_buffer(passes[i].batch))

    def _split(
        self, objective: Objective, rows: Sequence[TrainRow]
    ) -> Iterator[list[tuple[TrainRow, float]]]:
        """Yield passes within the token limit: trained rows and the weight of each row's places.

        Adds the rows to the sums of the update.
        """
        role, loss, aggregation = objective
        role.check_groups(loss, rows)
        for row in rows:
            check_trained(row)
        weighted = [(row, self._count(role, row, aggregation)) for row in rows]
        trained = [(row, weight) for row, weight in weighted if role.num_trained(row)]
        for chosen in split_passes(
            [row for row, _ in trained],
            self._config.micro_batch_tokens,
            packed=role.packs,
            shares=role.shares,
            whole_groups=whole_groups(loss),
        ):
            yield [trained[index] for index in chosen]

    def _count(self, role: Role, row: TrainRow, aggregation: Aggregation) -> float:
        """Add a rollout to the sums and return the weight of each of its places."""
        num_places = role.num_trained(row)
        sizes = (row.group_size, role.num_in_group(row), num_places)
        weight, denominator = call_aggregation(aggregation, *sizes)
        versions = row.policy_versions[row.loss_mask]
        oldest = int(versions.min(initial=self._policy_version))
        self.statistics.add_rollout(
            denominator=denominator,
            num_places=num_places,
            num_tokens=len(versions),
            staleness=self._num_updates - self._config.updates_per_step * oldest,
        )
        return weight

    def _loss_of(
        self, objective: Objective, one: Pass, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the loss of a pass, summed and scaled: [], with gradient."""
        versions = one.batch.policy_versions
        staleness = self._num_updates - self._config.updates_per_step * versions
        losses, measured = objective.role.learn(objective.loss, one.batch, staleness, received)
        total = (one.weights * losses).sum()
        self.statistics.add_pass(total, measured)
        differences = measured.get(metrics.KL_SAMPLER_TRAINER)
        if isinstance(differences, torch.Tensor) and self._counts:
            self.gaps.add(one.rows, differences)
        return total * self._scale.value
