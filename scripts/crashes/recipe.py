"""The quickstart's task without its warm start, small and slow enough for faults to matter.

An untrained policy hardly ever gets a sum right, so the reward counts the right characters: rewards
differ within groups from the first step on, and every step changes the weights.
"""

from __future__ import annotations

import random
import time

import rlsys
from recipes.grpo import grpo
from recipes.quickstart import CHARACTERS, QuickstartConfig, problem
from rlsys import OwnModel

SCORE_S = 0.05
NUM_PROBLEMS = 64  # few, so that a run has several epochs


@rlsys.reward(required_columns=("answer",))
def close(rollout: rlsys.Rollout) -> float:
    """Return the fraction of the answer's characters that the completion has in their place."""
    time.sleep(SCORE_S)
    answer: str = rollout.metadata["answer"]
    pairs = zip(rollout.completion_text, answer, strict=False)
    return sum(found == right for found, right in pairs) / len(answer)


def main() -> None:
    """Run the recipe."""
    parsed = rlsys.parse(QuickstartConfig)
    rng = random.Random(parsed.config.seed)
    rlsys.launch(
        parsed.config,
        grpo(parsed.config, [close], rows=[problem(rng) for _ in range(NUM_PROBLEMS)]),
        own_model=OwnModel(name="crashes", characters=CHARACTERS),
    )


if __name__ == "__main__":
    main()
