"""A decode step through a Llama-like backbone, with few kernel calls.

    one token per sequence [N], positions [N] ──► hidden states [N, D]

For small models, the overhead of calls dominates decoding: transformers makes some seventy per
layer, this decoder twenty-five. It uses the model's own parameters: query, key and value
projections become views of one matrix, gate and up projections of another (`buffers`).

Supports the parts of Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3: pre-norm or sandwich norm,
RMSNorm with weight w or 1 + w, norms on query and key, a rotary embedding per layer type, gated
MLPs. Callers compare its results with the model's before use.

Shape legend: N sequences, D hidden width, A query heads, H key/value heads, W head width, M MLP
width.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlsys.engines.devices.cpu import (
    LinearFunction,
    is_best_turned,
    linear_function,
    rounded_linear,
    wants_float32,
)
from rlsys.engines.generation.torch.adapter_bank import AdapterBank
from rlsys.engines.generation.torch.kv_cache import SlotCache
from rlsys.engines.generation.torch.weight_buffers import WeightBuffers
from rlsys.engines.models.attention import AttentionRule
from rlsys.engines.models.causal_lm import backbone as model_backbone

BACKBONE_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
PRE_NORM_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
SANDWICH_PARTS = PRE_NORM_PARTS | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and signed sin, [N, A + H, W]


def is_llama_like(model: Any) -> bool:
    """Return whether the backbone has exactly the parts that FusedDecoder supports."""
    backbone = model_backbone(model)
    return (
        _parts(backbone) == BACKBONE_PARTS
        and _is_rms_norm(backbone.norm)
        and _is_static(backbone.rotary_emb)
        and all(map(_is_known, backbone.layers))
    )


class FusedDecoder:
    """Decoder of a model that is_llama_like; `rules` are the attention rules by layer."""

    def __init__(self, model: Any, rules: Mapping[int, AttentionRule]) -> None:
        backbone = model_backbone(model)
        self._embed = backbone.embed_tokens
        rotary = backbone.rotary_emb
        typed = "layer_type" in inspect.signature(rotary.forward).parameters
        types = backbone.config.layer_types if typed else [None] * len(backbone.layers)
        self._layers = [
            _Layer(layer, rules[layer.self_attn.layer_idx], rotary_type)
            for layer, rotary_type in zip(backbone.layers, types, strict=True)
        ]
        self._rotations = {
            layer.rotation: _Rotary(rotary, *layer.rotation) for layer in self._layers
        }
        self._norm = _Norm(backbone.norm)

    @property
    def buffers(self) -> list[WeightBuffers]:
        """Parameters that share a tensor."""
        return [one for layer in self._layers for joined in layer.joined for one in joined.buffers]

    def use(self, bank: AdapterBank) -> None:
        """Add the adapters of a bank from now on."""
        for layer in self._layers:
            for joined in layer.joined:
                joined.use(bank)

    def refresh(self) -> None:
        """Update what was computed from the model's weights after they change."""
        self._norm.refresh()
        for layer in self._layers:
            layer.refresh()

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: SlotCache
    ) -> torch.Tensor:
        """Return hidden states [N, D] of one token of each sequence."""
        hidden = self._embed(token_ids)  # [N, D]
        rotations = {
            name: rotary(hidden, positions, cache.capacity)
            for name, rotary in self._rotations.items()
        }
        for layer in self._layers:
            hidden = layer(hidden, rotations[layer.rotation], cache)
        return self._norm(hidden)


class _Layer:
    def __init__(self, layer: Any, rule: AttentionRule, rotary_type: str | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._rule = rule
        self._index: int = attention.layer_idx
        self._width: int = attention.head_dim
        self._num_heads = attention.q_proj.out_features // self._width  # A
        self._num_rotated = self._num_heads + attention.k_proj.out_features // self._width  # A + H
        self.rotation = (rotary_type, self._num_rotated)
        self._qkv = _Joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._gate_up = _Joined(mlp.gate_proj, mlp.up_proj)
        self._out, self._down = _Joined(attention.o_proj), _Joined(mlp.down_proj)
        self.joined = (self._qkv, self._out, self._gate_up, self._down)
        self._act = mlp.act_fn
        self._mlp_width: int = mlp.gate_proj.out_features  # M
        self._before_attention = _Norm(layer.input_layernorm)
        self._head_norm = self._after_attention = self._after_mlp = None
        if hasattr(attention, "q_norm"):
            num_key_heads = self._num_rotated - self._num_heads
            self._head_norm = _Norm(
                *[attention.q_norm] * self._num_heads, *[attention.k_norm] * num_key_heads
            )
        if hasattr(layer, "pre_feedforward_layernorm"):
            self._after_attention = _Norm(layer.post_attention_layernorm)
            self._before_mlp = _Norm(layer.pre_feedforward_layernorm)
            self._after_mlp = _Norm(layer.post_feedforward_layernorm)
        else:
            self._before_mlp = _Norm(layer.post_attention_layernorm)

    def refresh(self) -> None:
        for one in self.joined:
            one.refresh()
        for norm in (
            self._before_attention,
            self._head_norm,
            self._after_attention,
            self._before_mlp,
            self._after_mlp,
        ):
            if norm is not None:
                norm.refresh()

    def __call__(self, hidden: torch.Tensor, rotation: Rotation, cache: SlotCache) -> torch.Tensor:
        attended = self._attend(self._before_attention(hidden), rotation, cache)
        if self._after_attention is not None:
            attended = self._after_attention(attended)
        hidden = hidden + attended
        update = self._transform(self._before_mlp(hidden))
        if self._after_mlp is not None:
            update = self._after_mlp(update)
        return hidden + update

    def _attend(self, x: torch.Tensor, rotation: Rotation, cache: SlotCache) -> torch.Tensor:
        heads = self._qkv(x).unflatten(-1, (-1, self._width))  # [N, A + 2H, W]
        x, value = heads[:, : self._num_rotated], heads[:, self._num_rotated :]
        if self._head_norm is not None:
            x = self._head_norm(x)
        cos, sin = rotation
        x = torch.addcmul(x * cos, x.roll(self._width // 2, -1), sin)
        query, key = x[:, : self._num_heads], x[:, self._num_heads :]
        attended = cache.attend_one(self._index, query, key, value, self._rule)  # [N, A, W]
        return self._out(attended.flatten(1))

    def _transform(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self._gate_up(x)  # [N, 2M]
        gated = self._act(gate_up[:, : self._mlp_width]).mul_(gate_up[:, self._mlp_width :])
        return self._down(gated)


class _Rotary:
    """Table of the model's rotary embedding, as long as the cache's slots."""

    def __init__(self, module: Any, rotary_type: str | None, num_heads: int) -> None:
        self._module = module
        self._type = () if rotary_type is None else (rotary_type,)
        self._num_heads = num_heads
        self._cos = self._sin = torch.empty(0)  # [C, W]

    def __call__(self, like: torch.Tensor, positions: torch.Tensor, capacity: int) -> Rotation:
        if len(self._cos) < capacity:
            positions_of_slot = torch.arange(capacity, device=like.device)[None]
            cos, sin = self._module(like, positions_of_slot, *self._type)
            half = sin.shape[-1] // 2
            self._cos = cos[0]
            # sin has the signs of rotate_half, so that a rotation only needs a roll.
            self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
        return self._of_heads(self._cos[positions]), self._of_heads(self._sin[positions])

    def _of_heads(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, None].expand(-1, self._num_heads, -1).contiguous()


class _Joined:
    """Linear layers with the same input, computed as one."""

    def __init__(self, *layers: nn.Linear) -> None:
        weights = [layer.get_parameter("weight") for layer in layers]
        whole = torch.cat([weight.detach() for weight in weights])
        self.buffers = [WeightBuffers(weights, is_transposed=is_best_turned(whole))]
        if layers[0].bias is not None:
            self.buffers.append(WeightBuffers([layer.get_parameter("bias") for layer in layers]))
        self._layers = layers
        self._bank: AdapterBank | None = None
        self._group: tuple[str, ...] = ()
        for one in self.buffers:
            one.put(one.copy())
        self.refresh()

    def use(self, bank: AdapterBank) -> None:
        self._bank, self._group = bank, bank.group(self._layers)

    def refresh(self) -> None:
        weight = self.buffers[0].whole
        bias = self.buffers[1].whole if len(self.buffers) > 1 else None
        if wants_float32(weight, weight):
            self._run: LinearFunction = lambda x: rounded_linear(x, weight, bias)
        else:
            self._run = linear_function(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._run(x)
        return y if self._bank is None else self._bank.add_to(self._group, x, y)


class _Norm:
    """RMSNorm with weight w, or Gemma's 1 + w; with several modules, one per head."""

    def __init__(self, *modules: Any) -> None:
        self._modules = modules
        first = modules[0]
        eps: float = getattr(first, "eps", None) or first.variance_epsilon
        weight = first.weight.detach()
        scale = first(torch.ones_like(weight))  # the norm of a row with mean square 1
        self._offset = bool((scale - weight).mean() > 0.5)
        self._eps = torch.tensor(eps, device=weight.device)
        self.refresh()

    def refresh(self) -> None:
        weights = [module.weight.detach() for module in self._modules]
        weight = weights[0] if len(weights) == 1 else torch.stack(weights)  # [..., width]
        self._weight = 1 + weight if self._offset else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(self._weight).to(x.dtype)


def _is_static(rotary: Any) -> bool:
    """Return whether a position's rotation is independent of the sequence length."""
    types = rotary.rope_type.values() if isinstance(rotary.rope_type, dict) else [rotary.rope_type]
    return not any("dynamic" in kind or kind == "longrope" for kind in types)


def _is_known(layer: Any) -> bool:
    if _parts(layer) not in (PRE_NORM_PARTS, SANDWICH_PARTS) or _parts(layer.mlp) != MLP_PARTS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if not all(_is_rms_norm(part) for name, part in layer.named_children() if "norm" in name):
        return False
    if _parts(attention) == ATTENTION_PARTS | HEAD_NORMS:
        if attention.q_norm.weight.shape != (attention.head_dim,):
            return False
    elif _parts(attention) != ATTENTION_PARTS:
        return False
    joined = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
    return all(len({part.bias is None for part in parts}) == 1 for parts in joined)


def _is_rms_norm(module: Any) -> bool:
    """Return whether a module has the parts of an RMSNorm; its results are compared later."""
    eps = getattr(module, "eps", None) or getattr(module, "variance_epsilon", None)
    return eps is not None and [name for name, _ in module.named_parameters()] == ["weight"]


def _parts(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
