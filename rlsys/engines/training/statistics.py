"""Sums that one optimizer step needs from all ranks.

    add(...) per pass ──► reduce(ranks, squared gradient norm) ──► StepSums, equal on every rank

Counts, denominators and metrics are summed in float64 and sent together, once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlsys.engines.training.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """Over the global batch of one optimizer update."""

    num_rollouts: int
    num_tokens: int  # completion tokens
    num_places: int  # of which the loss has a value each: those tokens, or rows
    loss: float  # Σ weight · token loss / Σ denominator
    denominator: float
    grad_norm: float  # of the gradient of `loss`, before clipping
    staleness_mean: float  # over rollouts
    staleness_max: int
    means: Mapping[str, float]  # of metrics, over the places


class StepStatistics:
    def __init__(self) -> None:
        self._denominator = 0.0
        self._num_rollouts = 0
        self._num_tokens = 0
        self._num_places = 0
        self._staleness_sum = 0
        self._staleness_max = 0
        self._loss: list[torch.Tensor] = []
        self._metrics: dict[str, list[torch.Tensor]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._loss and not self._num_rollouts

    def add_rollout(
        self, *, denominator: float, num_tokens: int, num_places: int, staleness: int
    ) -> None:
        self._denominator += denominator
        self._num_rollouts += 1
        self._num_tokens += num_tokens
        self._num_places += num_places
        self._staleness_sum += staleness
        self._staleness_max = max(self._staleness_max, staleness)

    def add_pass(self, loss: torch.Tensor, metrics: Mapping[str, torch.Tensor]) -> None:
        """The summed loss [] of one pass, and metrics [N] of its places.

        Nothing is read from the device here, so that it need not be waited for.
        """
        self._loss.append(loss.detach().double())
        for name, values in metrics.items():
            self._metrics.setdefault(name, []).append(values.detach().double().sum())

    def reduce(self, ranks: Ranks, squared_norm: torch.Tensor) -> StepSums:
        """A collective. Every rank has seen the same metric names: a pass without tokens, which a
        rank without rows runs, has them too."""
        names = sorted(self._metrics)
        host = [
            float(self._num_rollouts),
            float(self._num_tokens),
            float(self._num_places),
            self._denominator,
            float(self._staleness_sum),
            float(self._staleness_max),
        ]
        device = [_total(self._loss), *(_total(self._metrics[name]) for name in names)]
        vector = torch.cat(
            [
                torch.tensor(host, dtype=torch.float64),
                squared_norm.reshape(1),
                torch.stack(device).cpu(),
            ]
        )
        gathered = ranks.gather(vector)  # [R, K]
        rollouts, tokens, places, denominator, staleness, _, squares, loss, *metrics = gathered.sum(
            0
        ).tolist()
        divisor = denominator or 1.0
        return StepSums(
            num_rollouts=round(rollouts),
            num_tokens=round(tokens),
            num_places=round(places),
            loss=loss / divisor,
            denominator=denominator,
            grad_norm=squares**0.5 / divisor,
            staleness_mean=staleness / max(rollouts, 1.0),
            staleness_max=round(gathered[:, 5].max().item()),
            means={
                name: total / max(places, 1.0) for name, total in zip(names, metrics, strict=True)
            },
        )


def over_updates(updates: Sequence[StepSums]) -> StepSums:
    """Of all updates of a batch: each mean weighs an update by what it is a mean of."""
    if len(updates) == 1:
        return updates[0]
    denominator = sum(update.denominator for update in updates)
    num_rollouts = sum(update.num_rollouts for update in updates)
    num_places = sum(update.num_places for update in updates)
    return StepSums(
        num_rollouts=num_rollouts,
        num_tokens=sum(update.num_tokens for update in updates),
        num_places=num_places,
        loss=sum(update.loss * update.denominator for update in updates) / denominator,
        denominator=denominator,
        grad_norm=sum(update.grad_norm for update in updates) / len(updates),
        staleness_mean=sum(update.staleness_mean * update.num_rollouts for update in updates)
        / num_rollouts,
        staleness_max=max(update.staleness_max for update in updates),
        means={
            name: sum(update.means[name] * update.num_places for update in updates)
            / max(num_places, 1)
            for name in updates[0].means
        },
    )


def _total(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
