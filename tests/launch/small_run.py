"""A minimal run, for tests in this process and in others: its rows, reward and graph."""

from __future__ import annotations

from typing import Any

import rlsys

ROWS = [{"prompt": f"{n}=", "answer": str(n)} for n in range(8)]


@rlsys.reward(required_columns=("answer",))
def right(rollout: rlsys.Rollout) -> float:
    return 1.0


def small_flow(config: rlsys.RunConfig, rows: Any) -> rlsys.Dataflow:
    flow = rlsys.Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, rlsys.Prompts(config=config.data, rows=rows), group_size=2)
    advantage = flow.per_group(rlsys.algorithms.grpo_advantage, flow.score(rollouts, [right]))
    flow.train(
        policy,
        rollouts,
        advantage,
        loss=rlsys.algorithms.clipped_surrogate(0.2, 0.2),
        aggregation=rlsys.algorithms.token_mean,
    )
    return flow
