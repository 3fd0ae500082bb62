"""An EAGLE-3 head as it runs in a generation engine: token by token, with a cache of keys.

An independent implementation for tests: one sequence, plain loops, no batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

Weights = Mapping[str, torch.Tensor]


class ReferenceHead:
    """Drafts after a sequence whose hidden states are known."""

    def __init__(self, weights: Weights, *, head_dim: int, eps: float = 1e-6) -> None:
        self._weights = weights
        self._head_dim = head_dim
        self._eps = eps

    def outputs(
        self,
        embeddings: Sequence[torch.Tensor],  # of tokens 1, 2, ..., [D] each
        hidden: Sequence[torch.Tensor],  # of the policy at tokens 0, 1, ..., [layers · D] each
        num_steps: int,
    ) -> list[torch.Tensor]:
        """Return the input [D] of the output layer in each step, after the last hidden state.

        Step k reads the embedding of the k-th token after the one that follows the hidden states.
        """
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        prenorm, output = hidden[0], hidden[0]
        for position, states in enumerate(hidden):
            read = self._weights["fc.weight"] @ states
            output, prenorm = self.step(position, embeddings[position], read, keys, values)
        outputs = [output]
        for position in range(len(hidden), len(hidden) + num_steps - 1):
            output, prenorm = self.step(position, embeddings[position], prenorm, keys, values)
            outputs.append(output)
        return outputs

    def step(
        self,
        position: int,
        embedding: torch.Tensor,
        read: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input of the output layer and the state of the next step.

        Appends to the cache. `read` are the hidden states after fc, or a state.
        """
        layer = "midlayer."
        inputs = torch.cat(
            [
                self._norm(layer + "input_layernorm", embedding),
                self._norm(layer + "hidden_norm", read),
            ]
        )
        query, key, value = (
            (self._weights[f"{layer}self_attn.{name}_proj.weight"] @ inputs).view(
                -1, self._head_dim
            )
            for name in "qkv"
        )
        keys.append(self._turned(key, position))
        values.append(value)
        query = self._turned(query, position)
        per_key = len(query) // len(key)
        past_keys, past_values = torch.stack(keys, 1), torch.stack(values, 1)
        seen = []
        for number, one in enumerate(query):
            scores = past_keys[number // per_key] @ one / math.sqrt(self._head_dim)
            seen.append(scores.softmax(0) @ past_values[number // per_key])
        state = read + self._weights[layer + "self_attn.o_proj.weight"] @ torch.cat(seen)
        normed = self._norm(layer + "post_attention_layernorm", state)
        gate, up, down = (
            self._weights[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        gated = gate @ normed
        state = state + down @ (gated * torch.sigmoid(gated) * (up @ normed))
        return self._norm("norm", state), state

    def _norm(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return values / (values.pow(2).mean() + self._eps).sqrt() * self._weights[f"{name}.weight"]

    def _turned(self, heads: torch.Tensor, position: int) -> torch.Tensor:
        half = self._head_dim // 2
        rates = torch.tensor([10000.0 ** (-2 * i / self._head_dim) for i in range(half)])
        turned = torch.complex(heads[:, :half], heads[:, half:]) * torch.exp(1j * position * rates)
        return torch.cat([turned.real, turned.imag], -1)
