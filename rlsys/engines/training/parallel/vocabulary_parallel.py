"""Log-probabilities and entropy of logits that are split over ranks by tokens of the vocabulary.

No rank ever has all logits of a place.

Shape legend: N places, V tokens of this rank, J requested tokens at each place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rlsys.engines.training.parallel.collectives import Group

# As in token_policy.py: its exp is 0 in any precision, and its product with 0 is finite.
IMPOSSIBLE = -1e4


def cut_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p [N, J] of `tokens` [N, J] and the entropy [N].

    `logits` [N, V] are the r-th part on the r-th rank. Results are equal on all ranks, and so must
    their gradients be.
    """
    logprobs, entropy = _CutLogprobs.apply(logits, tokens, group)
    return logprobs, entropy


class _CutLogprobs(torch.autograd.Function):
    """Log-probabilities and entropy: ∂ log p_t / ∂z = 1_t − p, ∂H / ∂z = −p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, tokens: torch.Tensor, group: Group
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = logits.shape[1]
        highest = logits.amax(-1)  # [N]
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        shifted = logits - highest[:, None]
        normaliser = shifted.exp().sum(-1)
        dist.all_reduce(normaliser, group=group)
        logprobs = shifted - normaliser.log()[:, None]  # [N, V]
        local = tokens - size * dist.get_rank(group)
        outside = (local < 0) | (local >= size)
        local = local.masked_fill(outside, 0)
        chosen = logprobs.gather(-1, local).masked_fill(outside, 0.0)
        logprobs.clamp_(min=IMPOSSIBLE)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        both = torch.cat((chosen, entropy[:, None]), -1)
        dist.all_reduce(both, group=group)
        chosen, entropy = both[:, :-1].clone(), both[:, -1].clone()
        ctx.save_for_backward(logprobs, local, outside, entropy)
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_chosen: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None]:
        logprobs, local, outside, entropy = ctx.saved_tensors
        if grad_chosen is None:
            grad_chosen = torch.zeros_like(outside, dtype=logprobs.dtype)
        factor = -grad_chosen.sum(-1, keepdim=True)
        if grad_entropy is not None:
            factor = factor - grad_entropy[:, None] * (logprobs + entropy[:, None])
        grad = logprobs.exp().mul_(factor)
        return grad.scatter_add_(-1, local, grad_chosen.masked_fill(outside, 0.0)), None, None
