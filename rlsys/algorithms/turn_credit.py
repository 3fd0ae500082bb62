"""Credit of turns: what followed a turn, less what episodes of the same prompt earn.

    turn_rewards, turns, whose ──► return of each turn ──► less a baseline ──► its sampled tokens

Shape legend: B rollouts of a step, N completion tokens of all of them, one rollout after another;
E episodes: the rollouts, or each of a rollout's seats by itself.

What the functions read of each token, beside what all functions over a step are given:

    turn_rewards   [N]  what was earned from a turn's reply up to the next one, at the turn's last
                        sampled token, 0 elsewhere: over a rollout they add up to its reward
    turns          [N]  number of the turn that sampled the token, counted over the rollout in the
                        order in which replies came, whoever gave them; -1: no turn did
    seats          [N]  whose turn it was, from 0; where it is left out, all turns are one's

With seats an episode is one seat of a rollout: its return is what its own turns earned, and it is
compared with the same seat of the group's other rollouts. So what one wins and another loses, in a
game against itself, are two returns. Turns of others count as time.

A turn's return is G_k = Σ_{j ≥ k} γ^(j − k) r_j over its episode's turns: γ, `discount`, is one of
turns, whatever they have of tokens, and what had been earned before a turn is no merit of it. A
baseline must not know what the turn did. The mean over the other episodes of the group does not.
What the episode itself is part of does, so that the gradient is biased: by a factor where that is
the group's mean, as in GRPO; but towards stopping or going on where means or deviations are taken
over those episodes that reach a turn, because whether one does is the policy's choice. So nothing
here is normalised by the turn's number.

Episodes without a sampled token, such as a greedy baseline, have no turn to be compared: they count
nowhere. An episode that is alone in its group gets advantage 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlsys.algorithms.group_functions import needs_group
from rlsys.algorithms.token_advantages import rows_of


@needs_group(2)
def turn_advantage(
    turn_rewards: torch.Tensor,
    turns: torch.Tensor,
    seats: torch.Tensor | None = None,
    *,
    row_offsets: torch.Tensor,
    group_index: torch.Tensor,
    loss_mask: torch.Tensor,
    discount: float = 1.0,
) -> torch.Tensor:
    """Return of the turn − mean return of the group's other episodes: RLOO, 2402.14740, over turns;
    unbiased. [N], [N], [N] -> [N].

    With one turn a rollout it is `rloo_advantage`. Aggregate with a sum over tokens
    (`sequence_sum`, `constant_length`): means weigh a turn by the length of its rollout.
    """
    episodes = _Episodes.of(
        turn_rewards, turns, seats, row_offsets, group_index, loss_mask, discount
    )
    return episodes.spread(episodes.above(episodes.others_mean()))


@needs_group(2)
def turn_mean_advantage(
    turn_rewards: torch.Tensor,
    turns: torch.Tensor,
    seats: torch.Tensor | None = None,
    *,
    row_offsets: torch.Tensor,
    group_index: torch.Tensor,
    loss_mask: torch.Tensor,
    discount: float = 1.0,
) -> torch.Tensor:
    """Return of the turn − mean return of the group's episodes, its own among them: Dr. GRPO,
    2503.20783, over turns. [N], [N], [N] -> [N].

    With one turn a rollout it is `dr_grpo_advantage`. With discount 1 its gradient is
    (G − 1)/G of that of `turn_advantage`, in the mean; below 1 turn k's is 1 − γ^k/G of it.
    """
    episodes = _Episodes.of(
        turn_rewards, turns, seats, row_offsets, group_index, loss_mask, discount
    )
    return episodes.spread(episodes.above(episodes.mean()))


@needs_group(2)
def turn_batch_advantage(
    turn_rewards: torch.Tensor,
    turns: torch.Tensor,
    seats: torch.Tensor | None = None,
    *,
    row_offsets: torch.Tensor,
    group_index: torch.Tensor,
    loss_mask: torch.Tensor,
    discount: float = 1.0,
    epsilon: float = 1e-4,
) -> torch.Tensor:
    """`turn_mean_advantage` / (its standard deviation, about 0, over the turns of the batch + ε):
    REINFORCE++ with baseline, 2501.03262, over turns. [N], [N], [N] -> [N].

    One number for the whole step, in which each turn counts once, whatever its length and its
    place. With one turn a rollout it is `reinforce_plus_plus_baseline_advantage`: what is divided
    by one less than there are turns is the sum of squares.
    """
    episodes = _Episodes.of(
        turn_rewards, turns, seats, row_offsets, group_index, loss_mask, discount
    )
    advantages = episodes.spread(episodes.above(episodes.mean()))
    of_turns = advantages[episodes.first_of_turns()]
    square = of_turns.square().sum() / max(len(of_turns) - 1, 1)
    return advantages / (square.sqrt() + epsilon)


@dataclass(frozen=True, kw_only=True)
class _Episodes:
    """Returns of a step's episodes. In float64, so that sums of equal returns are equal."""

    of_token: torch.Tensor  # [N] int64
    turn: torch.Tensor  # [N] int64; -1: of none
    is_trained: torch.Tensor  # [N] bool
    token_returns: torch.Tensor  # [N] of the token's turn; of no turn 0
    returns: torch.Tensor  # [E] from the first turn on
    has_turns: torch.Tensor  # [E] bool: with tokens that the policy sampled
    groups: torch.Tensor  # [E] int64: which episodes are compared
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        turn_rewards: torch.Tensor,
        turns: torch.Tensor,
        seats: torch.Tensor | None,
        row_offsets: torch.Tensor,
        group_index: torch.Tensor,
        loss_mask: torch.Tensor,
        discount: float,
    ) -> _Episodes:
        if not 0 <= discount <= 1:
            raise ValueError(f"discount={discount} lies outside 0 to 1; use 1 for none.")
        turn, in_turn = turns.long(), turns >= 0
        row = rows_of(row_offsets)
        num_seats = 1
        if seats is not None and bool(in_turn.any()):
            num_seats = int(seats[in_turn].max()) + 1
        seat = torch.zeros_like(row) if seats is None else seats.long().clamp(0, num_seats - 1)
        episode = row * num_seats + seat
        num_episodes = (len(row_offsets) - 1) * num_seats
        num_turns = int(turn.max()) + 1 if len(turn) else 0
        if bool((turn_rewards[~in_turn] != 0).any()):
            raise ValueError(
                "turn_rewards has rewards at tokens that no turn sampled (turns -1), where they "
                "would be lost; let each stand at its turn's last sampled token."
            )

        # [E, K + 1] rewards of turns, then returns from each of them on.
        found = turn_rewards.new_zeros(num_episodes, num_turns + 1, dtype=torch.float64)
        places = episode[in_turn], turn[in_turn]
        found.index_put_(places, turn_rewards[in_turn].double(), accumulate=True)
        for k in reversed(range(num_turns)):
            found[:, k] += discount * found[:, k + 1]

        first = torch.full((num_episodes,), num_turns, device=turn.device)
        first.scatter_reduce_(0, places[0], places[1], "amin")
        is_trained = in_turn & loss_mask
        has_turns = torch.zeros(num_episodes, dtype=torch.bool, device=turn.device)
        has_turns[episode[is_trained]] = True
        each = torch.arange(num_episodes, device=turn.device)
        return cls(
            of_token=episode,
            turn=turn,
            is_trained=is_trained,
            token_returns=found[episode, turn.clamp(min=0)].where(in_turn, 0.0),
            returns=found[each, first],
            has_turns=has_turns,
            groups=group_index.repeat_interleave(num_seats) * num_seats + each % num_seats,
            dtype=turn_rewards.dtype,
        )

    def above(self, baseline: torch.Tensor) -> torch.Tensor:
        """[N]: the return of the token's turn less the number of its episode in `baseline` [E]."""
        return self.token_returns - baseline[self.of_token]

    def first_of_turns(self) -> torch.Tensor:
        """Of each turn that is trained on, one of its tokens."""
        tokens = self.is_trained.nonzero()[:, 0]
        number = self.of_token * (int(self.turn.max()) + 1 if len(self.turn) else 1) + self.turn
        found, index = number[tokens].unique(return_inverse=True)
        first = torch.full((len(found),), len(self.turn), device=tokens.device)
        return first.scatter_reduce_(0, index, tokens, "amin")

    def spread(self, advantages: torch.Tensor) -> torch.Tensor:
        """[N] at the tokens that are trained on, 0 elsewhere and where there is no other episode to
        compare with.
        """
        compared = self._counts()[self.of_token] > 1
        return advantages.where(self.is_trained & compared, 0.0).to(self.dtype)

    def mean(self) -> torch.Tensor:
        """[E] of the returns of its group; where they are equal exactly these."""
        return torch.where(self._are_equal(), self.returns, self._sums() / self._counts())

    def others_mean(self) -> torch.Tensor:
        """[E] of those without its own."""
        others = (self._sums() - self.returns) / (self._counts() - 1)
        return torch.where(self._are_equal(), self.returns, others)

    def _sums(self) -> torch.Tensor:
        return self._over_group(self.returns)

    def _counts(self) -> torch.Tensor:
        return self._over_group(torch.ones_like(self.returns))

    def _are_equal(self) -> torch.Tensor:
        """[E]: all returns of its group, and there is more than none."""
        low, high = (self._extreme(kind) for kind in ("amin", "amax"))
        return low == high

    def _extreme(self, kind: str) -> torch.Tensor:
        own = self.groups[self.has_turns]
        found = self.returns.new_zeros(self._num_groups)
        found.scatter_reduce_(0, own, self.returns[self.has_turns], kind, include_self=False)
        return found[self.groups]

    def _over_group(self, values: torch.Tensor) -> torch.Tensor:
        """[E] sum over the episodes of its group that have turns."""
        own = self.groups[self.has_turns]
        sums = values.new_zeros(self._num_groups).index_add(0, own, values[self.has_turns])
        return sums[self.groups]

    @property
    def _num_groups(self) -> int:
        return int(self.groups.max()) + 1 if len(self.groups) else 0
