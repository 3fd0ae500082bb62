"""Kuhn poker against itself: the same small model plays both seats, from random weights.

In a game against itself, policy gradients cycle: each seat responds to the other's last policy.
They settle near an equilibrium if randomness is rewarded (an entropy bonus, which pulls inwards:
2206.05825) and steps are on-policy, without momentum, and with a learning rate that decays to
almost 0. recipes/kuhn_oracle.py computes the exact distance to the equilibrium.

    python recipes/kuhn.py --name kuhn
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rlsys
from recipes.kuhn_oracle import DEALS, FIRST, SECOND, VALUE, exploitability, gain, value
from rlsys import (
    AsyncConfig,
    HeldOut,
    OwnModel,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
)
from rlsys.algorithms import clipped_surrogate, entropy_bonus, token_mean, turn_batch_advantage

MOVES = {"p": "p", "b": "b"}  # pass or fold, bet or call


@rlsys.environment(
    seats=("first", "second"), turn_tokens=1, plain_text=True, format_reward=-3.0, timeout_s=30
)
async def kuhn(chat: Any, task: Any) -> None:
    """Play one game; each seat is rewarded with the chips that it wins."""
    first, second = chat.seat("first"), chat.seat("second")
    moves: str = await first("1" + task["first"], parse=MOVES.__getitem__)
    moves += await second("2" + task["second"] + moves, parse=MOVES.__getitem__)
    if moves == "pb":
        moves += await first("b", parse=MOVES.__getitem__)
    won = gain(task["first"], task["second"], moves)
    first.reward(won, "first")
    second.reward(-won, "second")


@dataclass(frozen=True, kw_only=True)
class KuhnConfig(RunConfig):
    """Settings for two CPU cores."""

    name: str = "kuhn"
    num_steps: int = 500
    prompts_per_step: int = len(DEALS)
    group_size: int = 48
    entropy_coefficient: float = 0.25
    """Coefficient of the entropy in the loss, whose advantages have a mean square of 1."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=12))
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(max_running=1024))
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(
            learning_rate=1e-3,
            schedule="linear",
            final_lr_frac=0.01,
            adam_betas=(0.0, 0.99),
            micro_batch_tokens=8192,
        )
    )
    asynchrony: AsyncConfig = field(default_factory=lambda: AsyncConfig(max_staleness=0))


def tasks() -> list[dict[str, Any]]:
    """Return a task for each deal."""
    return [{"first": first, "second": second} for first, second in DEALS]


def graph(cfg: KuhnConfig) -> rlsys.Dataflow:
    """Return the graph: play games, compute advantages per turn and seat, train."""
    flow = rlsys.Dataflow()
    policy = flow.model("policy")
    deals = rlsys.Prompts(config=cfg.data, rows=tasks())
    episodes = flow.play(policy, kuhn, deals, group_size=cfg.group_size)
    # The baseline of a turn is the mean of its seat over the group, which has the same cards.
    (advantages,) = flow.per_batch(
        turn_batch_advantage, episodes.turn_rewards, episodes.turns, episodes.seats, per="token"
    )
    loss = entropy_bonus(clipped_surrogate(0.2, 0.28), cfg.entropy_coefficient)
    flow.train(policy, episodes.rollouts, advantages, loss=loss, aggregation=token_mean)
    return flow


def strategy_of(model: Path) -> dict[str, float]:
    """Return the model's probability of a bet in each information set."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    moves = [tokenizer.convert_tokens_to_ids(move) for move in MOVES]
    seats = [*(("1", one) for one in FIRST), *(("2", one) for one in SECOND)]
    strategy = {}
    for seat, information in seats:
        ids = torch.tensor([tokenizer.encode(seat + information)])
        with torch.no_grad():
            logits = network(ids).logits[0, -1, moves]
        strategy[information] = float(logits.softmax(-1)[1])
    return strategy


@rlsys.main
def main() -> None:
    """Run the recipe."""
    parsed = rlsys.parse(KuhnConfig)
    cfg = parsed.config
    own_model = OwnModel(name="kuhn", characters="12JQKpb", width=64, num_layers=2)
    held_out = HeldOut(rows=tasks())  # there are no other deals
    result = rlsys.launch(
        cfg, graph(cfg), own_model=own_model, held_out=held_out, dry_run=parsed.dry_run
    )
    if parsed.dry_run:
        return
    strategy = strategy_of(result.model)
    print("bets:", ", ".join(f"{one} {bet:.2f}" for one, bet in strategy.items()))
    print(
        f"exploitability {exploitability(strategy):.3f} (coins: 0.458), "
        f"value {value(strategy):.3f} (equilibrium: {VALUE:.3f})"
    )


if __name__ == "__main__":
    main()
