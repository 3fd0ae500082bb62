"""Tasks of Reasoning Gym (https://github.com/open-thought/reasoning-gym): made without end, scored
by their own rules.

In: names of its datasets. A task is a dataset and a place in it, whose question and rules of
scoring are made again where it is played. One turn an episode.
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

# The answer stands between these in a reply, the last such pair counts.
PROMPT = (
    "Think step by step, then give your final answer between <answer> and </answer> tags, "
    "and nothing but the answer there."
)


@dataclass(frozen=True, kw_only=True)
class ReasoningGym(Foreign):
    """datasets: the settings of each, by its name: {"chain_sum": {"max_terms": 3}}.
    prompt: the system message that asks for <answer> tags; None: no message, and the whole reply is
        the answer.
    """

    datasets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prompt: str | None = PROMPT

    def __post_init__(self) -> None:
        if not self.datasets:
            raise ValueError(
                'ReasoningGym(datasets={}) has no tasks; name some, such as {"chain_sum": {}}.'
            )

    @property
    def name(self) -> str:
        return "reasoning_gym"

    def tasks(self, num: int, *, seed: int = 0) -> list[dict[str, Any]]:
        """`num` in all, of the datasets in turn. Raises ValueError for a dataset or a setting that
        Reasoning Gym does not know.
        """
        names = list(self.datasets)
        for name in names:
            size, wanted = len(self._dataset(name, seed)), math.ceil(num / len(names))
            if wanted > size:
                raise ValueError(
                    f"{num} tasks of {len(names)} datasets need {wanted} of {name!r}, which is to "
                    f'have {size}; raise its size: {{"{name}": {{"size": {wanted}}}}}.'
                )
        return [
            {"dataset": names[n % len(names)], "place": n // len(names), "seed": seed}
            for n in range(num)
        ]

    def __call__(self, chat: SyncChat, task: Mapping[str, Any]) -> float:
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
    except (TypeError, AssertionError) as error:
        raise ValueError(
            f"the dataset {name!r} of Reasoning Gym refuses the settings {settings}: {error}"
        ) from error
