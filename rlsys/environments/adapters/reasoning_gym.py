"""Adapter for Reasoning Gym (https://github.com/open-thought/reasoning-gym): procedural tasks.

In: names of its datasets. A task is a dataset and an index; the question and the scoring rule are
generated again in the worker that plays it. An episode has one turn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.environments.adapters import Foreign, required
from rlsys.environments.workers.sync_worker_chat import SyncChat
from rlsys.errors import InvalidValue, require

# If a reply has several pairs of tags, the last one counts.
PROMPT = (
    "Think step by step, then give your final answer between <answer> and </answer> tags, "
    "and nothing but the answer there."
)


@dataclass(frozen=True, kw_only=True)
class ReasoningGym(Foreign):
    """Datasets of Reasoning Gym.

    Attributes:
        datasets: Settings of each dataset by name: {"chain_sum": {"max_terms": 3}}.
        prompt: System message that asks for <answer> tags. None: no message, and the whole reply
            is the answer.
    """

    datasets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prompt: str | None = PROMPT

    def __post_init__(self) -> None:
        require(
            bool(self.datasets),
            "ReasoningGym: datasets",
            self.datasets,
            rule="must not be empty",
            fix='For example: {"chain_sum": {}}.',
        )

    @property
    def name(self) -> str:
        """Name of the environment in metrics and failures."""
        return "reasoning_gym"

    def tasks(self, num: int, *, seed: int = 0) -> list[dict[str, Any]]:
        """Return `num` tasks in all, of the datasets in turn.

        Raises InvalidValue for an unknown dataset or setting.
        """
        names = list(self.datasets)
        for name in names:
            size, needed = len(self._dataset(name, seed)), math.ceil(num / len(names))
            require(
                needed <= size,
                f"ReasoningGym: datasets: {name}",
                rule=f"has {size} tasks, but {num} tasks of {len(names)} datasets need {needed}",
                fix=f'Raise its size: {{"{name}": {{"size": {needed}}}}}.',
            )
        return [
            {"dataset": names[n % len(names)], "place": n // len(names), "seed": seed}
            for n in range(num)
        ]

    def __call__(self, chat: SyncChat, task: Mapping[str, Any]) -> float:
        """Play one rollout of a task."""
        dataset = self._dataset(str(task["dataset"]), int(task["seed"]))
        entry = dataset[int(task["place"])]
        if self.prompt is not None:
            chat.system(self.prompt)
        reply = chat(entry["question"])
        return float(dataset.score_answer(self._answer(reply), entry=entry))

    def _answer(self, reply: str) -> str | None:
        if self.prompt is None:
            return reply.strip()
        answer: str | None = required("reasoning_gym.utils", "reasoning-gym").extract_answer(reply)
        return answer

    def _dataset(self, name: str, seed: int) -> Any:
        return _made(name, dump_json({**self.datasets[name], "seed": seed}))


@functools.lru_cache(maxsize=256)
def _made(name: str, settings: str) -> Any:
    gym = required("reasoning_gym", "reasoning-gym")
    try:
        return gym.create_dataset(name, **parse_json(settings))
    except (TypeError, ValueError, AssertionError) as error:
        raise InvalidValue(
            f"ReasoningGym: datasets: {name}",
            parse_json(settings),
            rule=f"Reasoning Gym rejects this: {error}",
            fix="Correct the name or the settings.",
        ) from error
