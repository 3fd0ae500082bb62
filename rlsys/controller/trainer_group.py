"""The learners of all trained models, in step: each takes the same steps on the same rows.

    main    ── accumulate ──► optimizer step ──► publish
    critic  ── accumulate ──► optimizer step
    ...

Each step makes a version of every model, so that one number says how old all of them are.

When one of them dies, all go back to the newest step of which every one has its state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from rlsys.controller.worker_protocols import TrainerProxy
from rlsys.types import StepResult, WeightManifest


class TrainerGroup(Mapping[str, TrainerProxy]):
    """By the name of the model; the graph's main model is the first."""

    def __init__(
        self,
        trainer_proxies: Mapping[str, TrainerProxy],
        *,
        main: str,
        others: Collection[str] = (),
        means: Collection[str] = (),
    ) -> None:
        """`others`: models that sample beside the main one. `means`: metrics that are told of
        columns, which no learner may tell.
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
        return self._trainer_proxies[self._main]

    @property
    def samplers(self) -> list[TrainerProxy]:
        """Of the models whose weights are published, the main one's first."""
        return [self.main, *(self._trainer_proxies[model] for model in self._others)]

    def join_manifests(self, manifests: Sequence[WeightManifest]) -> WeightManifest:
        """One version of all that sample, in the order of `samplers`, as one."""
        main, *others = manifests
        assert all(one.version == main.version for one in others), manifests
        return replace(main, others=tuple(zip(self._others, others, strict=True)))

    def merge_results(self, results: Sequence[StepResult]) -> StepResult:
        """Of one step of all models, in their order: the main one's, with the metrics of the others
        under their names. Raises ValueError where two of them, or a column, have the same name.
        """
        own = results[0].metrics
        others = {
            f"{model}/{name}": value
            for model, result in zip(self._trainer_proxies, results, strict=True)
            if model != self._main
            for name, value in result.metrics.items()
        }
        told_twice = {*(own.keys() & others.keys()), *({*own, *others} & {*self._means})}
        if told_twice:
            raise ValueError(
                f"metrics called {sorted(told_twice)} are told by a loss, and are those of a "
                "column or of another model too, so that one of the two would be lost; let the "
                "loss give its own another name."
            )
        return replace(results[0], metrics={**own, **others}) if others else results[0]

    async def hold(self) -> None:
        """All their states, side by side. Raises a group with a LearnerDied."""
        async with asyncio.TaskGroup() as tasks:
            for one in self._trainer_proxies.values():
                tasks.create_task(one.hold())

    async def restart(self, step: int) -> int:
        """All from the newest state, of `step` steps at most, that every one of them has; returns
        its steps. Raises LearnerDied, or a group with one.
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
