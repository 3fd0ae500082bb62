"""Statistics of one optimizer step, summed over all ranks.

    add_*(...) per micro-batch ──► reduce(ranks, squared gradient norm) ──► StepSums, equal on
                                                                            every rank

Counts, denominators and metrics are summed in float64 and exchanged together, once per step. A
micro-batch may report any metrics. Each metric is the mean over the micro-batches of all ranks that
report it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlsys.algorithms.loss_inputs import MeanOver
from rlsys.engines.training.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """Sums over the global batch of one optimizer step."""

    num_rows: int
    num_places: int  # tokens (rows for a reward model) that the loss covers
    num_rollouts: int  # rollouts with trained tokens
    num_tokens: int  # trained completion tokens
    loss: float  # Σ weight · token loss / Σ denominator
    denominator: float
    grad_norm: float  # norm of the gradient of `loss`, before clipping
    staleness_mean: float  # over `num_rollouts`
    staleness_max: int
    totals: Mapping[str, float]  # sum of each metric
    counts: Mapping[str, float]  # number of values of each metric: tokens, rows, or others

    @property
    def means(self) -> dict[str, float]:
        """Means of the metrics, without those that have no value."""
        return {
            name: total / self.counts[name]
            for name, total in self.totals.items()
            if self.counts[name]
        }


class StepStatistics:
    """Statistics of this rank's rows during one step.

    `counts` is false on ranks whose rows another rank counts, because both have the same rows.
    """

    def __init__(self, *, counts: bool = True) -> None:
        self._counts_here = counts
        self._denominator = 0.0
        self._num_rows = 0
        self._num_places = 0
        self._num_rollouts = 0
        self._num_tokens = 0
        self._staleness_sum = 0
        self._staleness_max = 0
        self._loss: list[torch.Tensor] = []
        self._totals: dict[str, list[torch.Tensor]] = {}
        self._counts: dict[str, int] = {}

    @property
    def is_empty(self) -> bool:
        """No row and no micro-batch was added."""
        return not self._loss and not self._num_rows

    def add_rollout(
        self, *, denominator: float, num_places: int, num_tokens: int, staleness: int
    ) -> None:
        """Count a row. Its staleness is ignored if it has no tokens."""
        self._num_rows += 1
        self._num_places += num_places
        self._denominator += denominator
        if not num_tokens:
            return
        self._num_rollouts += 1
        self._num_tokens += num_tokens
        self._staleness_sum += staleness
        self._staleness_max = max(self._staleness_max, staleness)

    def add_pass(self, loss: torch.Tensor, metrics: Mapping[str, torch.Tensor | MeanOver]) -> None:
        """Add the summed loss [] of one micro-batch, and its metrics.

        Nothing is copied from the device here, so that the host does not wait for it.
        """
        self._loss.append(loss.detach().double())
        for name, metric in metrics.items():
            values = metric.values if isinstance(metric, MeanOver) else metric
            self._totals.setdefault(name, []).append(values.detach().double().sum())
            self._counts[name] = self._counts.get(name, 0) + len(values)

    def reduce(self, ranks: Ranks, squared_norm: torch.Tensor) -> StepSums:
        """Return the sums over all ranks. A collective."""
        names = ranks.union(self._totals)
        host = [
            float(self._num_rows),
            float(self._num_places),
            float(self._num_rollouts),
            float(self._num_tokens),
            self._denominator,
            float(self._staleness_sum),
            float(self._staleness_max),
            *(float(self._counts.get(name, 0)) for name in names),
        ]
        parts = [self._loss, *(self._totals.get(name, []) for name in names)]
        nothing = torch.zeros_like(self._loss[0]) if self._loss else torch.zeros(()).double()
        device = torch.stack([torch.stack(some).sum() if some else nothing for some in parts])
        own = torch.tensor(host, dtype=torch.float64), device.cpu()
        if not self._counts_here:
            own = torch.zeros_like(own[0]), torch.zeros_like(own[1])
        vector = torch.cat((own[0], squared_norm.reshape(1), own[1]))
        gathered = ranks.gather(vector)  # [R, K]
        rows, places, rollouts, tokens, denominator, staleness, _, *rest = gathered.sum(0).tolist()
        counts, (squares, loss, *totals) = rest[: len(names)], rest[len(names) :]
        divisor = denominator or 1.0
        return StepSums(
            num_rows=round(rows),
            num_places=round(places),
            num_rollouts=round(rollouts),
            num_tokens=round(tokens),
            loss=loss / divisor,
            denominator=denominator,
            grad_norm=squares**0.5 / divisor,
            staleness_mean=staleness / max(rollouts, 1.0),
            staleness_max=round(gathered[:, 6].max().item()),
            totals=dict(zip(names, totals, strict=True)),
            counts=dict(zip(names, counts, strict=True)),
        )


def over_updates(updates: Sequence[StepSums]) -> StepSums:
    """Return the sums over all optimizer updates of a batch; each mean is weighted by its count."""
    if len(updates) == 1:
        return updates[0]
    denominator = sum(update.denominator for update in updates)
    num_rollouts = sum(update.num_rollouts for update in updates)
    return StepSums(
        num_rows=sum(update.num_rows for update in updates),
        num_places=sum(update.num_places for update in updates),
        num_rollouts=num_rollouts,
        num_tokens=sum(update.num_tokens for update in updates),
        loss=sum(update.loss * update.denominator for update in updates) / (denominator or 1.0),
        denominator=denominator,
        grad_norm=sum(update.grad_norm for update in updates) / len(updates),
        staleness_mean=sum(update.staleness_mean * update.num_rollouts for update in updates)
        / max(num_rollouts, 1),
        staleness_max=max(update.staleness_max for update in updates),
        totals=_added_up([update.totals for update in updates]),
        counts=_added_up([update.counts for update in updates]),
    )


def _added_up(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for part in parts for name in part})
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}
