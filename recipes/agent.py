"""Train an agent that only knows an OpenAI-compatible endpoint.

The agent finds a number from 1 to 9 in two questions. Like any program with a base URL and a key,
it does not know that the policy that answers is being trained. The model, with 0.8 million
parameters, starts from random weights.

    python recipes/agent.py --name agent
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import openai

import rlsys
from rlsys import OwnModel, RolloutConfig, RunConfig, SamplingConfig, TrainerConfig
from rlsys.algorithms import clipped_surrogate, grpo_advantage, token_mean


@rlsys.agent(max_turns=2, turn_tokens=2, timeout_s=30)
async def asks_twice(endpoint: rlsys.Endpoint, task: Any) -> float:
    """Return 1 if one of two guesses is the number, else 0."""
    messages: list[Any] = [{"role": "user", "content": "?"}]
    # Skip loading certificates (26 ms), which a local connection does not use.
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(
        base_url=endpoint.url, api_key=endpoint.key, http_client=http
    ) as policy:
        for _ in range(2):
            answer = await policy.chat.completions.create(model=endpoint.model, messages=messages)
            reply = answer.choices[0].message.content or ""
            if reply == str(task["number"]):
                return 1.0
            hint = ">" if reply < str(task["number"]) else "<"
            messages += [answer.choices[0].message, {"role": "user", "content": hint}]
    return 0.0


@dataclass(frozen=True, kw_only=True)
class AgentConfig(RunConfig):
    """Settings for two CPU cores."""

    name: str = "agent"
    num_steps: int = 100
    prompts_per_step: int = 9
    group_size: int = 16
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=8))
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(max_running=256))
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(learning_rate=1e-3, micro_batch_tokens=4096)
    )


def graph(cfg: AgentConfig) -> rlsys.Dataflow:
    """Return the graph: play episodes, compare rewards within groups, train."""
    flow = rlsys.Dataflow()
    policy = flow.model("policy")
    tasks = rlsys.Prompts(config=cfg.data, rows=[{"number": number} for number in range(1, 10)])
    episodes = flow.play(policy, asks_twice, tasks, group_size=cfg.group_size)
    advantages = flow.per_group(grpo_advantage, episodes.reward)
    flow.train(
        policy,
        episodes.rollouts,
        advantages,
        loss=clipped_surrogate(0.2, 0.28),
        aggregation=token_mean,
    )
    return flow


@rlsys.main
def main() -> None:
    """Run the recipe."""
    parsed = rlsys.parse(AgentConfig)
    rlsys.launch(
        parsed.config,
        graph(parsed.config),
        own_model=OwnModel(name="agent", characters="0123456789?<>"),
        dry_run=parsed.dry_run,
    )


if __name__ == "__main__":
    main()
