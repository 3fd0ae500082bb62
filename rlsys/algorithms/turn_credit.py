"""Advantages of turns: the return from a turn on, minus a baseline from the same prompt.

    turn_rewards, turns, seats ──► return of each turn ──► minus a baseline ──► its sampled tokens

Shape legend: B rollouts of a step, N completion tokens of all of them, one rollout after another;
E episodes: the rollouts, or each seat of each rollout.

Columns, next to the arguments that all functions over a step get (batch_functions.py):

    turn_rewards   [N]  reward between a turn's reply and the next one, at the turn's last sampled
                        token, 0 elsewhere; the sum over a rollout is its reward
    turns          [N]  number of the turn that sampled the token, in the order of the replies of
                        the rollout, over all seats; -1 for tokens of no turn
    seats          [N]  seat (player) of the turn, from 0; without it, all turns have the same seat

With seats, an episode is one seat of a rollout. Its return is the reward of its own turns, and it
is compared with the same seat of the group's other rollouts: in a game against itself, the winner
and the loser have two returns. Turns of other seats count as time.

The return of a turn is G_k = Σ_{j ≥ k} γ^(j − k) r_j over the turns of its episode. The discount γ
counts turns, not tokens. Rewards before a turn do not count for it.

A baseline must not depend on the turn's action. The mean over the group's other episodes does not.
A mean that includes the episode itself does, and biases the gradient. For the group's mean, as in
GRPO, the bias is a factor. A mean or deviation over only those episodes that reach a turn would be
biased towards stopping or continuing, because the policy decides whether an episode reaches it. So
these functions never normalise by a turn's number.

Episodes without a sampled token, such as a greedy baseline, have no turns and count nowhere. An
episode that is alone in its group has advantage 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlsys.algorithms.group_functions import needs_group
from rlsys.algorithms.token_advantages import rows_of
from rlsys.errors import require


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
    """Return G_k − mean return of the group's other episodes: RLOO, 2402.14740, over turns.

    [N], [N], [N] -> [N]. The gradient is unbiased. With one turn per rollout it is
    `rloo_advantage`. Aggregate with a sum over tokens (`sequence_sum`, `constant_length`): a mean
    weights a turn by the length of its rollout.
    """
    episodes = _Episodes.of(
        turn_rewards, turns, seats, row_offsets, group_index, loss_mask, discount
    )
    return episodes.masked(episodes.above(episodes.others_mean()))


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
    """Return G_k − mean return of the group's episodes: Dr. GRPO, 2503.20783, over turns.

    [N], [N], [N] -> [N]. The mean includes the episode itself. With one turn per rollout it is
    `dr_grpo_advantage`. In expectation the gradient is (G − 1)/G of that of `turn_advantage` for
    discount 1; for a smaller discount that of turn k is 1 − γ^k/G of it.
    """
    episodes = _Episodes.of(
        turn_rewards, turns, seats, row_offsets, group_index, loss_mask, discount
    )
    return episodes.masked(episodes.above(episodes.mean()))


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
    """Return normalised `turn_mean_advantage`: REINFORCE++ with baseline, 2501.03262, over turns.

    [N], [N], [N] -> [N]. The divisor is √(Σ A² / (turns − 1)) + ε over the turns of the batch: one
    number for the whole step, in which each turn counts once, whatever its length and position.
    With one turn per rollout it is `reinforce_plus_plus_baseline_advantage`.
    """
    episodes = _Episodes.of(
        turn_rewards, turns, seats, row_offsets, group_index, loss_mask, discount
    )
    advantages = episodes.masked(episodes.above(episodes.mean()))
    per_turn = advantages[episodes.first_tokens()]
    square = per_turn.square().sum() / max(len(per_turn) - 1, 1)
    return advantages / (square.sqrt() + epsilon)


@dataclass(frozen=True, kw_only=True)
class _Episodes:
    """Returns of a step's episodes, in float64 so that sums of equal returns are equal."""

    of_token: torch.Tensor  # [N] int64: episode of the token
    turn: torch.Tensor  # [N] int64: turn of the token, -1 for none
    is_trained: torch.Tensor  # [N] bool
    token_returns: torch.Tensor  # [N] return of the token's turn, 0 for no turn
    returns: torch.Tensor  # [E] return of the first turn
    has_turns: torch.Tensor  # [E] bool: the episode has tokens that the policy sampled
    groups: torch.Tensor  # [E] int64: episodes with the same number are compared
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
        require(
            0 <= discount <= 1,
            "discount",
            discount,
            rule="must be from 0 to 1",
            fix="Use 1 for no discount.",
        )
        turn, in_turn = turns.long(), turns >= 0
        row = rows_of(row_offsets)
        num_seats = 1
        if seats is not None and bool(in_turn.any()):
            num_seats = int(seats[in_turn].max()) + 1
        seat = torch.zeros_like(row) if seats is None else seats.long().clamp(0, num_seats - 1)
        episode = row * num_seats + seat
        num_episodes = (len(row_offsets) - 1) * num_seats
        num_turns = int(turn.max()) + 1 if len(turn) else 0
        require(
            not bool((turn_rewards[~in_turn] != 0).any()),
            "turn_rewards",
            rule="has rewards at tokens of no turn (turns -1), where they would be lost",
            fix="Put each reward at the last sampled token of its turn.",
        )

        # [E, K + 1] rewards of turns, then the return of each turn.
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
        """Return the return of each token's turn [N] minus the baseline [E] of its episode."""
        return self.token_returns - baseline[self.of_token]

    def first_tokens(self) -> torch.Tensor:
        """Return the index of the first trained token of each turn."""
        tokens = self.is_trained.nonzero()[:, 0]
        number = self.of_token * (int(self.turn.max()) + 1 if len(self.turn) else 1) + self.turn
        found, index = number[tokens].unique(return_inverse=True)
        first = torch.full((len(found),), len(self.turn), device=tokens.device)
        return first.scatter_reduce_(0, index, tokens, "amin")

    def masked(self, advantages: torch.Tensor) -> torch.Tensor:
        """Return advantages [N], 0 at untrained tokens and for episodes alone in their group."""
        compared = self._counts()[self.of_token] > 1
        return advantages.where(self.is_trained & compared, 0.0).to(self.dtype)

    def mean(self) -> torch.Tensor:
        """Return the group's mean return [E], exactly the return if all are equal."""
        return torch.where(self._are_equal(), self.returns, self._sums() / self._counts())

    def others_mean(self) -> torch.Tensor:
        """Return the mean return of the group's other episodes [E]."""
        others = (self._sums() - self.returns) / (self._counts() - 1)
        return torch.where(self._are_equal(), self.returns, others)

    def _sums(self) -> torch.Tensor:
        return self._over_group(self.returns)

    def _counts(self) -> torch.Tensor:
        return self._over_group(torch.ones_like(self.returns))

    def _are_equal(self) -> torch.Tensor:
        """Return whether all returns of the group are equal [E]."""
        low, high = (self._extreme(kind) for kind in ("amin", "amax"))
        return low == high

    def _extreme(self, kind: str) -> torch.Tensor:
        own = self.groups[self.has_turns]
        found = self.returns.new_zeros(self._num_groups)
        found.scatter_reduce_(0, own, self.returns[self.has_turns], kind, include_self=False)
        return found[self.groups]

    def _over_group(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the group's episodes with turns [E]."""
        own = self.groups[self.has_turns]
        sums = values.new_zeros(self._num_groups).index_add(0, own, values[self.has_turns])
        return sums[self.groups]

    @property
    def _num_groups(self) -> int:
        return int(self.groups.max()) + 1 if len(self.groups) else 0
