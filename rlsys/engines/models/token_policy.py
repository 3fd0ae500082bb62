"""Network of the policy: log-probability and entropy of chosen tokens.

    batch ──► backbone ──► hidden [U, D] at `positions` ──► head ──► logits [U, V] ──► [N], [N]

One module holds backbone and head, so that FSDP2 sees a single forward pass. Logits of a large
vocabulary are the largest tensor of training. They are computed for completion tokens only, in
chunks, and again in the backward pass instead of being kept.

Shape legend: N chosen tokens, U distinct ones (by token and prefix; called N in functions that do
not expand), D width, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rlsys.engines.models.architecture_probe import check_architecture
from rlsys.engines.models.attention_context import row_limit
from rlsys.engines.models.causal_lm import Head
from rlsys.engines.models.collate import CollatedBatch
from rlsys.engines.models.hidden_states import hidden_states, layer_outputs
from rlsys.engines.models.routing import replay_routing
from rlsys.engines.training.parallel.pipeline import PipelineStage
from rlsys.engines.training.parallel.process_groups import Mesh
from rlsys.engines.training.parallel.tensor_parallel import cuts_vocabulary
from rlsys.engines.training.parallel.vocabulary_parallel import cut_logprobs

MAX_LOGITS = 1 << 26  # logits per chunk: 256 MiB in float32
# 1 GiB in float32. Once per chunk, a GPU adds the gradient of the head's weight to memory, which
# costs more than the product if chunks are small.
GPU_MAX_LOGITS = 1 << 28
# Replaces a log-probability of −inf. exp of it is 0 in any precision, and its product with 0 is 0,
# where that of −inf is NaN. So such a token adds nothing to an entropy or a gradient.
IMPOSSIBLE = -1e4


class TokenPolicy(nn.Module):
    """A causal language model that scores chosen tokens.

    Raises InvalidValue for an unsupported architecture.
    """

    def __init__(self, model: Any, *, max_logits: int = MAX_LOGITS) -> None:
        super().__init__()
        self.model = model
        architecture = check_architecture(model)
        replay_routing(model)
        self.packs = architecture.packs
        self.shares = architecture.shares
        self._row_limit = row_limit(model.config)
        self.mesh: Mesh | None = None
        """Ranks of a layout with more than data parallelism."""
        self.stage: PipelineStage | None = None
        """Pipeline stage of this rank; None if the rank has all layers."""
        self.chunk_tokens = max(1, max_logits // model.config.get_text_config().vocab_size)

    def forward(
        self,
        batch: CollatedBatch,
        temperature: float,
        *,
        with_entropy: bool = True,
        candidates: torch.Tensor | None = None,
        received: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | torch.Tensor:
        """Return log-probabilities [N], entropies [N] and candidates' log-probabilities [N, K].

        The first are those of the batch's targets, under the distribution at `temperature`.
        Entropies are those of the same distribution, in nats. `candidates` are tokens [N, K] int64.
        All are float32 with gradients. Without entropy, zeros replace it. Without candidates, the
        third result is None.

        `received` holds the hidden states of the previous pipeline stage. A stage that is not the
        last returns only its own hidden states, [1, T, D].
        """
        if self.stage is not None and not self.stage.is_last:
            return layer_outputs(self.model, batch, self._row_limit, self.mesh, received)[0]
        if candidates is not None:
            # Places that share an output may have different candidates.
            batch = batch.each_read
        hidden, places = hidden_states(self.model, batch, self._row_limit, self.mesh, received)
        tokens = places.of(batch.targets)[:, None]  # [U', 1 + K]
        if candidates is not None:
            tokens = torch.cat((tokens, places.of(candidates)), -1)
        score = partial(self._score, with_entropy)
        logprobs, entropy = map(places.whole, self._scored(score, temperature, hidden, tokens))
        of_candidates = None if candidates is None else logprobs[:, 1:]
        own = logprobs[:, 0].clone()  # FSDP2 does not support outputs that are views of others
        return batch.spread(own), batch.spread(entropy), of_candidates

    def likeliest(
        self, batch: CollatedBatch, temperature: float, top_k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the targets' log-probabilities [N] and top-k distributions [N, 2 top_k + 1].

        A distribution has the ids of the likeliest tokens, their log-probabilities, and the
        log-probability of all other tokens together, -inf if there are none.
        """
        hidden, _ = hidden_states(self.model, batch, self._row_limit)
        score = partial(_likeliest, top_k)
        own, found = self._scored(score, temperature, hidden, batch.targets)
        return batch.spread(own), batch.spread(found)

    def _score(
        self,
        with_entropy: bool,
        head: Head,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log p [N, J] of tokens [N, J], and the entropy [N]."""
        logits = _logits(head, hidden, temperature)
        if cuts_vocabulary(self.model) and self.mesh is not None:
            return cut_logprobs(logits, tokens, self.mesh.group("tp"))
        if tokens.shape[1] > 1:
            logprobs = torch.log_softmax(logits, dim=-1)
            own, entropy = token_logprobs(logits, tokens[:, 0])
            return torch.cat((own[:, None], logprobs.gather(-1, tokens[:, 1:])), -1), entropy
        if with_entropy:
            own, entropy = token_logprobs(logits, tokens[:, 0])
            return own[:, None], entropy
        # The same log-probabilities, without the cost of the entropy.
        logprobs = torch.log_softmax(logits, dim=-1)
        own = -F.nll_loss(logprobs, tokens[:, 0], reduction="none")
        return own[:, None], torch.zeros_like(own)

    def _scored(self, score: Any, temperature: float, *places: torch.Tensor) -> Any:
        """Return `score(head, *places, temperature)`, computed in chunks of the places."""
        head = Head(self.model).for_chunks()
        if len(places[0]) <= self.chunk_tokens:
            return score(head, *places, temperature)
        chunks = [
            checkpoint(score, head, *chunk, temperature, use_reentrant=False)
            for chunk in zip(*(each.split(self.chunk_tokens) for each in places), strict=True)
        ]
        return tuple(torch.cat(parts) for parts in zip(*chunks, strict=True))


def _logits(head: Head, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = head(hidden)
    return logits / temperature if temperature != 1 else logits


def _likeliest(
    top_k: int, head: Head, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(_logits(head, hidden, temperature), dim=-1)
    own = -F.nll_loss(logprobs, targets, reduction="none")
    best = logprobs.topk(top_k, dim=-1)
    others = logprobs.scatter(-1, best.indices, -torch.inf).logsumexp(-1, keepdim=True)
    # Ids of a float32 column are exact below 2^24.
    return own, torch.cat((best.indices.float(), best.values, others), dim=-1)


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p [N] of `targets` [N] and entropy [N], for `logits` [N, V]."""
    logprobs, entropy = _TokenLogprobs.apply(logits, targets)
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies from the same log-softmax.

    The backward pass reads [N, V] once for both gradients.

    ∂ log p_t / ∂z = 1_t − p        ∂H / ∂z = −p (log p + H)
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.log_softmax(logits, dim=-1)  # [N, V]
        of_targets = -F.nll_loss(logprobs, targets, reduction="none")
        logprobs.clamp_(min=IMPOSSIBLE)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        ctx.save_for_backward(logprobs, targets, entropy)
        # A loss without an entropy term sends None, and its part of the gradient costs nothing.
        ctx.set_materialize_grads(False)
        return of_targets, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None]:
        logprobs, targets, entropy = ctx.saved_tensors
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(entropy)
        factor = -grad_logprob[:, None]
        if grad_entropy is not None:
            factor = factor - grad_entropy[:, None] * (logprobs + entropy[:, None])
        grad = logprobs.exp().mul_(factor)
        return grad.scatter_add_(-1, targets[:, None], grad_logprob[:, None]), None
