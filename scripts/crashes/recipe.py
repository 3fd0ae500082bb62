"""The quickstart's task without its warm start, so small and slow that a blow finds work under way.

An untrained policy has hardly a sum right, so the reward counts the characters that are: groups
differ in it from the first step on, and every step moves the weights.
"""

from __future__ import annotations

import random
import time

import rlsys
from recipes.grpo import grpo
from recipes.quickstart import CHARACTERS, QuickstartConfig, problem
from rlsys import OwnModel

SCORE_S = 0.05
NUM_PROBLEMS = 64  # few, so that the audit sees epochs come round


@rlsys.reward(required_columns=("answer",))
def close(rollout: rlsys.Rollout) -> float:
    """Share of the answer's characters that stand in their place."""
    time.sleep(SCORE_S)
    answer: str = rollout.metadata["answer"]
    pairs = zip(rollout.completion_text, answer, strict=False)
    return sum(said == right for said, right in pairs) / len(answer)


def main() -> None:
    parsed = rlsys.parse(QuickstartConfig)
    rng = random.Random(parsed.config.seed)
    rlsys.launch(
        parsed.config,
        grpo(parsed.config, [close], rows=[problem(rng) for _ in range(NUM_PROBLEMS)]),
        own_model=OwnModel(name="crashes", characters=CHARACTERS),
    )


if __name__ == "__main__":
    main()
