"""The trainers of all trained models, which take the same steps on the same rows.

    main    ── accumulate ──► optimizer step ──► publish
    critic  ── accumulate ──► optimizer step
    ...

Each step makes a version of every model, so one number identifies the weights of all of them. When
a trainer dies, all go back to the newest step whose state every one has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from rlsys.controller.worker_protocols import TrainerProxy
from rlsys.errors import require
from rlsys.types import StepResult, WeightManifest


class TrainerGroup(Mapping[str, TrainerProxy]):
    """The trainers by the name of their model; the graph's main model is the first."""

    def __init__(
        self,
        trainer_proxies: Mapping[str, TrainerProxy],
        *,
        main: str,
        others: Collection[str] = (),
        means: Collection[str] = (),
    ) -> None:
        """Combine the trainers of a run.

        `others` are trained models that sample besides the main one; `means` are metrics that no
        loss may return, because they are means of columns.
        """
        self._main = main
        self._others = tuple(others)
        self._means = means
        self._trainer_proxies = {main: trainer_proxies[main], **trainer_proxies}

    def __getitem__(self, model: str) -> TrainerProxy:
        return self._trainer_proxies[model]

    def __iter__(self) -> Iterator[str]:
        return iter(self._trainer_proxies)

    def __len__(self) -> int:
        return len(self._trainer_proxies)

    @property
    def main(self) -> TrainerProxy:
        """The trainer of the graph's main model."""
        return self._trainer_proxies[self._main]

    @property
    def samplers(self) -> list[TrainerProxy]:
        """The trainers of all models whose weights are published, the main one first."""
        return [self.main, *(self._trainer_proxies[model] for model in self._others)]

    def join_manifests(self, manifests: Sequence[WeightManifest]) -> WeightManifest:
        """Combine the manifests of one version, in the order of `samplers`."""
        main, *others = manifests
        assert all(one.version == main.version for one in others), manifests
        return replace(main, others=tuple(zip(self._others, others, strict=True)))

    def merge_results(self, results: Sequence[StepResult]) -> StepResult:
        """Combine the results of one step of all models, in their order.

        The metrics of other models than the main one get the model's name as a prefix.

        Raises:
            InvalidValue: Two metrics, or a metric and a column's mean, have the same name.
        """
        own = results[0].metrics
        others = {
            f"{model}/{name}": value
            for model, result in zip(self._trainer_proxies, results, strict=True)
            if model != self._main
            for name, value in result.metrics.items()
        }
        duplicates = {*(own.keys() & others.keys()), *({*own, *others} & {*self._means})}
        require(
            not duplicates,
            "metrics of a loss",
            sorted(duplicates),
            rule="a column or another model has metrics of the same name",
            fix="Rename the metrics that the loss returns.",
        )
        return replace(results[0], metrics={**own, **others}) if others else results[0]

    async def hold(self) -> None:
        """Let all trainers copy their states. Raises an exception group with a TrainerDied."""
        async with asyncio.TaskGroup() as tasks:
            for one in self._trainer_proxies.values():
                tasks.create_task(one.hold())

    async def restart(self, step: int) -> int:
        """Restart all trainers from the newest common state of at most `step` steps.

        Return the number of optimizer steps behind that state. Raises an exception group with a
        TrainerDied.
        """
        while True:
            async with asyncio.TaskGroup() as tasks:
                starts = [
                    tasks.create_task(one.restart(step)) for one in self._trainer_proxies.values()
                ]
            reached = [start.result() for start in starts]
            if min(reached) == max(reached):
                return reached[0]
            step = min(reached)
