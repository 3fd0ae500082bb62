"""Sums that one optimizer step needs from all ranks.

    add(...) per pass ──► reduce(ranks, squared gradient norm) ──► StepSums, equal on every rank

Counts, denominators and metrics are summed in float64 and sent together, once a step. A pass tells
whatever metrics it likes: each is a mean over those passes, of all ranks, that tell it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlsys.algorithms.loss_inputs import MeanOver
from rlsys.engines.training.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """Over the global batch of one optimizer update."""

    num_rows: int  # all that were accumulated
    num_places: int  # tokens (of a reward model: rows) that the loss is about
    num_rollouts: int  # with tokens that are trained on
    num_tokens: int  # completion tokens
    loss: float  # Σ weight · token loss / Σ denominator
    denominator: float
    grad_norm: float  # of the gradient of `loss`, before clipping
    staleness_mean: float  # over these rollouts
    staleness_max: int
    totals: Mapping[str, float]  # of metrics
    counts: Mapping[str, float]  # of what each of them is a mean of: tokens, rows, or others

    @property
    def means(self) -> dict[str, float]:
        """Without those of nothing, such as of a rank whose passes had no tokens."""
        return {
            name: total / self.counts[name]
            for name, total in self.totals.items()
            if self.counts[name]
        }


class StepStatistics:
    """`counts`: this rank's rows are its own, or it is the one that speaks for those that have the
    same.
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
        """The summed loss [] of one pass, and its metrics.

        Nothing is read from the device here, so that it need not be waited for.
        """
        self._loss.append(loss.detach().double())
        for name, metric in metrics.items():
            values = metric.values if isinstance(metric, MeanOver) else metric
            self._totals.setdefault(name, []).append(values.detach().double().sum())
            self._counts[name] = self._counts.get(name, 0) + len(values)

    def reduce(self, ranks: Ranks, squared_norm: torch.Tensor) -> StepSums:
        """A collective."""
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
        told = torch.tensor(host, dtype=torch.float64), device.cpu()
        if not self._counts_here:
            told = torch.zeros_like(told[0]), torch.zeros_like(told[1])
        vector = torch.cat((told[0], squared_norm.reshape(1), told[1]))
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
    """Of all updates of a batch: each mean weighs an update by what it is a mean of."""
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
