"""Passes of an EAGLE-3 head over a batch, several drafted tokens deep.

    step 0: hidden states of the policy before each query
    step k: the head's own hidden states of step k - 1, as when it drafts its (k + 1)-th token

In step k a query sees what the head has in its cache then: keys of the policy's hidden states up to
k tokens before, and for the k tokens after those the keys of its own earlier steps. The tokens
themselves are those of the rollout.

Shape legend: N nodes, Q queries, D width, H heads, J key heads, G = H / J, E head width; S, K, C as
in draft_layout.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rlsys.engines.models.eagle_head import HeadSizes
from rlsys.engines.training.draft_layout import AttentionPiece, DraftLayout

Tensors = Mapping[str, torch.Tensor]


class DraftNetwork:
    """The computation of a head. `weights` have the names of a checkpoint."""

    def __init__(self, sizes: HeadSizes, weights: Tensors, device: torch.device) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self._sizes = sizes
        self._weights = weights
        rotary: Any = LlamaRotaryEmbedding(LlamaConfig.from_dict(dict(sizes.config)))
        self._rotary = rotary.to(device)

    def drafts(
        self,
        layout: DraftLayout,
        embeddings: torch.Tensor,  # [N, D] of the nodes' tokens
        hidden: torch.Tensor,  # [N, layers · D] of the policy at the tokens before
        num_steps: int,
    ) -> list[torch.Tensor]:
        """Return the inputs of the output layer in each step, [Q, D].

        In step k they are meaningful for queries with k queries before them.
        """
        queries = layout.queries
        embedded = self._norm("midlayer.input_layernorm", embeddings)
        read = F.linear(hidden, self._weights["fc.weight"])  # [N, D]
        inputs = torch.cat((embedded, self._norm("midlayer.hidden_norm", read)), -1)
        cos, sin = self._rotary(read, layout.positions[None])
        turn = cos[0][:, None], sin[0][:, None]  # [N, 1, E]
        keys, values = self._keys(inputs, turn)
        embedded, turn = embedded[queries], (turn[0][queries], turn[1][queries])
        inputs, residual = inputs[queries], read[queries]
        own: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values of steps 1, 2, ...
        outputs = []
        for step in range(num_steps):
            if step:
                residual = residual[layout.before.clamp(min=0)]
                normed = self._norm("midlayer.hidden_norm", residual)
                inputs = torch.cat((embedded, normed), -1)
                own.append(self._keys(inputs, turn))
            query = self._turned(self._heads("q", inputs), turn)
            seen = _attention(layout, query, keys, values, own)
            residual = residual + F.linear(seen, self._weights["midlayer.self_attn.o_proj.weight"])
            residual = residual + self._mlp(
                self._norm("midlayer.post_attention_layernorm", residual)
            )
            outputs.append(self._norm("norm", residual))
        return outputs

    def _norm(self, name: str, values: torch.Tensor) -> torch.Tensor:
        floats = values.float()
        scale = torch.rsqrt(floats.square().mean(-1, keepdim=True) + self._sizes.eps)
        return floats * scale * self._weights[f"{name}.weight"]

    def _mlp(self, inputs: torch.Tensor) -> torch.Tensor:
        gate, up, down = (
            self._weights[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        return F.linear(F.silu(F.linear(inputs, gate)) * F.linear(inputs, up), down)

    def _heads(self, name: str, inputs: torch.Tensor) -> torch.Tensor:
        projected = F.linear(inputs, self._weights[f"midlayer.self_attn.{name}_proj.weight"])
        heads: torch.Tensor = projected.unflatten(-1, (-1, self._sizes.head_dim))
        return heads

    def _keys(
        self, inputs: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, [..., J, E]."""
        return self._turned(self._heads("k", inputs), turn), self._heads("v", inputs)

    def _turned(self, heads: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Apply the rotary embedding."""
        cos, sin = turn
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat((-second, first), -1) * sin


def _attention(
    layout: DraftLayout,
    query: torch.Tensor,  # [Q, H, E]
    keys: torch.Tensor,  # [N, J, E]
    values: torch.Tensor,
    own: Sequence[tuple[torch.Tensor, torch.Tensor]],  # [Q, J, E] each
) -> torch.Tensor:
    """Return what each query sees, [Q, H · E]."""
    num_steps = len(own)
    back = [torch.arange(len(query), device=query.device)]  # the query itself, 1 before, 2 before
    for _ in range(num_steps - 1):
        back.append(layout.before[back[-1]].clamp(min=0))
    own_keys = [one[back[num_steps - 1 - i]] for i, (one, _) in enumerate(own)]
    own_values = [one[back[num_steps - 1 - i]] for i, (_, one) in enumerate(own)]
    none = query.new_empty(len(query), 0, *keys.shape[1:])
    extra = [torch.stack(some, 1) if some else none for some in (own_keys, own_values)]
    found, numbers = [], []
    for piece in layout.pieces:
        arguments: tuple[Any, ...] = (piece, num_steps, query, keys, values, *extra)
        if len(layout.pieces) > 1 and torch.is_grad_enabled():
            seen = checkpoint(_seen, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            seen = _seen(*arguments)
        is_query = piece.queries >= 0
        found.append(seen[is_query])
        numbers.append(piece.queries[is_query])
    return torch.cat(found)[torch.cat(numbers).argsort()]


def _seen(
    piece: AttentionPiece,
    num_steps: int,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own_keys: torch.Tensor,  # [Q, steps, J, E]
    own_values: torch.Tensor,
) -> torch.Tensor:
    """Return what the queries of a piece see, [S, C, H · E]."""
    number = piece.queries.clamp(min=0)
    asked = query[number].unflatten(2, (keys.shape[1], -1)) * query.shape[-1] ** -0.5
    column = torch.arange(piece.keys.shape[1], device=query.device)
    hidden = column > (piece.columns - num_steps)[..., None]  # [S, C, K]
    scores = torch.einsum("scjge,skje->sjgck", asked, keys[piece.keys])
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    own = torch.einsum("scjge,scije->sjgci", asked, own_keys[number])
    weights = torch.cat((scores, own), -1).float().softmax(-1).to(values.dtype)
    split = [scores.shape[-1], own.shape[-1]]
    of_keys, of_own = weights.split(split, -1)
    seen = torch.einsum("sjgck,skje->scjge", of_keys, values[piece.keys])
    seen = seen + torch.einsum("sjgci,scije->scjge", of_own, own_values[number])
    return seen.flatten(2)
