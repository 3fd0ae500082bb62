"""Replay of expert routing: the trainer uses the experts that the sampler chose.

    sampler   router ─► top-k ─► experts        recorded ─► routed_experts [T, L·K]
    trainer   router ─► the recorded experts, with the router's own probabilities for them

Near a tie, rounding decides which experts are among the top k, and other experts are another
network. With replay, rounding is the only difference between sampler and trainer (Rollout Routing
Replay, 2510.11370). A router chooses by `torch.topk` of its scores over all experts. Under replay,
that call returns the recorded choice with the router's own scores. Everything that the router
computes from them, such as renormalised weights, and their gradient stay the model's own.

Shape legend: T tokens of a micro-batch, L layers with experts, K experts of each token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rlsys.common.hf_config import largest
from rlsys.engines.models.causal_lm import backbone, class_of
from rlsys.engines.models.expert_layout import LEAVE_OUT, REPLAY, Routing
from rlsys.engines.models.probe_model import build_miniature
from rlsys.errors import InvalidValue, require

# Attribute names of the router in transformers' models.
ROUTER_NAMES = ("gate", "router")
# Names of K in configurations.
NUM_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def routing_of(model: Any) -> Routing:
    """Return the routing of a model, which may be on the meta device.

    Raises InvalidValue for a model without experts, or with unknown routers.
    """
    found = routers(model)
    name = type(model).__name__
    require(
        len(found) > 0, REPLAY, rule=f"{name} has no experts whose routing is known", fix=LEAVE_OUT
    )
    num_experts = {router.num_experts for router in found}
    num_chosen = largest(model.config.get_text_config(), *NUM_CHOSEN, default=0)
    require(
        len(num_experts) == 1 and num_chosen > 0,
        REPLAY,
        rule=f"{name} has layers of {sorted(num_experts)} experts and chooses "
        f"{num_chosen or 'an unknown number'} of them, but all layers must have the same number",
        fix=LEAVE_OUT,
    )
    return Routing(num_layers=len(found), num_chosen=num_chosen, num_experts=max(num_experts))


def replayable_routing(config: Any) -> Routing:
    """Return the routing of a configuration's model, after a replay on its miniature.

    Raises InvalidValue if the miniature does not follow a recorded choice.
    """
    kind, own = class_of(config)
    with torch.device("meta"):
        routing = routing_of(kind(own))
    small = build_miniature(kind, own)
    try:
        is_followed = _follows(small)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise _unknown(kind, f"{type(error).__name__}: {error}") from error
    if not is_followed:
        raise _unknown(kind, "its layers do not follow a recorded choice")
    return routing


def _unknown(kind: type[Any], reason: str) -> InvalidValue:
    return InvalidValue(
        REPLAY,
        rule=f"{kind.__name__} chooses its experts in a way that rlsys does not know ({reason})",
        fix=LEAVE_OUT,
    )


@torch.no_grad()
def _follows(small: Any) -> bool:
    routing = routing_of(small)
    recorder = RoutingRecorder(small)
    replay_routing(small)
    token_ids = torch.arange(4, device=small.device)[None]
    run: Callable[..., Any] = backbone(small)
    run(input_ids=token_ids, use_cache=False)
    chosen = recorder.take()
    others = (chosen + 1) % routing.num_experts
    run(input_ids=token_ids, use_cache=False, routed_experts=others)
    return chosen.shape == (4, routing.width) and torch.equal(recorder.take(), others)


class MoERouter:
    """Router of one layer, which records or replays a choice of experts.

    It wraps the forward method of the model's module.
    """

    def __init__(self, module: nn.Module, num_experts: int) -> None:
        self.num_experts = num_experts
        self.records = False
        self.replayed: torch.Tensor | None = None  # [T, K] int64, for the next forward pass
        self.chosen: torch.Tensor | None = None  # [T, K] int64, of the last forward pass
        self._forward: Callable[..., Any] = module.forward
        module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, with the replayed choice if there is one."""
        if not self.records and self.replayed is None:
            return self._forward(*args, **kwargs)
        replayed, self.replayed = self.replayed, None
        with _Choice(self.num_experts, replayed) as choice:
            output = self._forward(*args, **kwargs)
        if choice.chosen is None:
            raise ValueError("a router does not choose by torch.topk over all experts")
        if self.records:
            self.chosen = choice.chosen
        return output


class _Choice(TorchFunctionMode):
    """A mode in which top-k over all experts is recorded, or replaced by a recorded choice."""

    def __init__(self, num_experts: int, replayed: torch.Tensor | None) -> None:
        super().__init__()
        self.chosen: torch.Tensor | None = None
        self._num_experts = num_experts
        self._replayed = replayed

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in (torch.topk, torch.Tensor.topk) or not self._is_choice(args):
            return func(*args, **(kwargs or {}))
        if self._replayed is None:
            found = func(*args, **(kwargs or {}))
        else:
            found = torch.return_types.topk((args[0].gather(-1, self._replayed), self._replayed))
        self.chosen = found[1]
        return found

    def _is_choice(self, args: Sequence[Any]) -> bool:
        # A top-k over groups of experts (DeepSeek) has one more dimension.
        return bool(args) and args[0].ndim == 2 and args[0].shape[1] == self._num_experts


def routers(model: nn.Module) -> list[MoERouter]:
    """Return the routers of a model or a layer, in layer order; each module has one MoERouter."""
    found = []
    for block in model.modules():
        num_experts = getattr(getattr(block, "experts", None), "num_experts", None)
        if not isinstance(num_experts, int):
            continue
        for name in ROUTER_NAMES:
            module = getattr(block, name, None)
            if not isinstance(module, nn.Module):
                continue
            router = getattr(module.forward, "__self__", None)
            if not isinstance(router, MoERouter):
                router = MoERouter(module, num_experts)
            found.append(router)
    return found


class RoutingRecorder:
    """Recorder of the experts of every forward pass of a model."""

    def __init__(self, model: Any) -> None:
        self._routers = routers(model)
        for router in self._routers:
            router.records = True

    def take(self) -> torch.Tensor:
        """Return the choice [T, L·K] int64 of the last forward pass."""
        chosen = [router.chosen for router in self._routers]
        for router in self._routers:
            router.chosen = None
        return torch.cat([one for one in chosen if one is not None], -1)


def replay_routing(model: Any) -> None:
    """Let the layers of a model take `routed_experts` [T, L·K], and use these experts.

    It becomes an option of the backbone's forward pass. Without it the layers choose their experts.
    """
    layers = [(layer, routers(layer)) for layer in getattr(backbone(model), "layers", ())]
    num_layers = sum(len(found) for _, found in layers)
    first = 0
    for layer, found in layers:
        if found:
            _ReplayingLayer(layer, found, first, num_layers)
        first += len(found)


class _ReplayingLayer:
    """A layer that gives its routers their part of `routed_experts`.

    It does so in each run of the layer, and so also when activations are recomputed, while other
    forward passes may be in progress.
    """

    def __init__(
        self, layer: nn.Module, routers: Sequence[MoERouter], first: int, num_layers: int
    ) -> None:
        self._routers = list(enumerate(routers, first))
        self._num_layers = num_layers
        self._forward: Callable[..., Any] = layer.forward
        layer.forward = self.forward

    def forward(self, *args: Any, routed_experts: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if routed_experts is None:
            return self._forward(*args, **kwargs)
        of_layers = routed_experts.unflatten(-1, (self._num_layers, -1))  # [T, L, K]
        for number, router in self._routers:
            router.replayed = of_layers[:, number].long()
        output = self._forward(*args, **kwargs)
        assert all(router.replayed is None for _, router in self._routers), "a router did not run"
        return output
