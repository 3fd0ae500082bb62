"""Which experts a mixture sends each token to: told by the sampler, followed by the trainer.

    sampler   router ─► top-k ─► experts        recorded ─► routed_experts [T, L·K]
    trainer   router ─► the recorded experts, with the probabilities that the router has for them

Near a tie, rounding alone decides which experts are among the top k, and other experts are another
network. Following the sampler's choice leaves rounding as the only difference between the two
(Rollout Routing Replay, 2510.11370). A router chooses by `torch.topk` of its scores over all
experts; where a choice is given, that call returns it with the router's own scores. Whatever the
router makes of them, such as renormalised weights, and their gradient stay the model's own.

Shape legend: T tokens of a pass, L layers with experts, K experts of each token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rlsys.common.hf_config import largest
from rlsys.engines.models.causal_lm import backbone, class_of
from rlsys.engines.models.probe_model import build_miniature

# What models of transformers call the router beside their experts.
ROUTER_NAMES = ("gate", "router")
# What configurations call K.
NUM_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What is recorded of a token: L·K numbers of experts, layer by layer."""

    num_layers: int
    num_chosen: int
    num_experts: int

    @property
    def width(self) -> int:
        return self.num_layers * self.num_chosen

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest integer that numbers all experts."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.int16)


def routing_of(model: Any) -> Routing:
    """Of a model, which may have no weights. Raises ValueError for one without experts, or whose
    routers rlsys does not know.
    """
    found = routers(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts that rlsys can tell the routing of; leave "
            "rollout.replay_routing out."
        )
    num_experts = {router.num_experts for router in found}
    num_chosen = largest(model.config.get_text_config(), *NUM_CHOSEN, default=0)
    if len(num_experts) > 1 or not num_chosen:
        raise ValueError(
            f"{type(model).__name__} has layers of {sorted(num_experts)} experts and chooses "
            f"{num_chosen or 'an unknown number'} of them; rollout.replay_routing takes one number "
            "of each. Leave it out."
        )
    return Routing(num_layers=len(found), num_chosen=num_chosen, num_experts=max(num_experts))


def replayable_routing(config: Any) -> Routing:
    """Of the model of a Hugging Face configuration, after a trial on its miniature: what is
    recorded there is what another choice, given, replaces. Raises ValueError where it is not.
    """
    kind, own = class_of(config)
    with torch.device("meta"):
        routing = routing_of(kind(own))
    small = build_miniature(kind, own)
    try:
        is_followed = _follows(small)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ValueError(_unknown(kind, f"{type(error).__name__}: {error}")) from error
    if not is_followed:
        raise ValueError(_unknown(kind, "its layers do not follow a choice that is given"))
    return routing


def _unknown(kind: type[Any], reason: str) -> str:
    return (
        f"{kind.__name__} chooses its experts in a way that rlsys does not know ({reason}); leave "
        "rollout.replay_routing out."
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
    """One layer's, which tells or follows a choice of experts; the model's module calls it."""

    def __init__(self, module: nn.Module, num_experts: int) -> None:
        self.num_experts = num_experts
        self.records = False
        self.given: torch.Tensor | None = None  # [T, K] int64, for the next pass
        self.chosen: torch.Tensor | None = None  # [T, K] int64, of the pass before
        self._forward: Callable[..., Any] = module.forward
        module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.records and self.given is None:
            return self._forward(*args, **kwargs)
        given, self.given = self.given, None
        with _Choice(self.num_experts, given) as choice:
            output = self._forward(*args, **kwargs)
        if choice.chosen is None:
            raise ValueError("a router that does not choose by torch.topk over all experts")
        if self.records:
            self.chosen = choice.chosen
        return output


class _Choice(TorchFunctionMode):
    """Within it, top-k over all experts is told, or replaced by what is given."""

    def __init__(self, num_experts: int, given: torch.Tensor | None) -> None:
        super().__init__()
        self.chosen: torch.Tensor | None = None
        self._num_experts = num_experts
        self._given = given

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in (torch.topk, torch.Tensor.topk) or not self._is_choice(args):
            return func(*args, **(kwargs or {}))
        if self._given is None:
            found = func(*args, **(kwargs or {}))
        else:
            found = torch.return_types.topk((args[0].gather(-1, self._given), self._given))
        self.chosen = found[1]
        return found

    def _is_choice(self, args: Sequence[Any]) -> bool:
        """Not one among groups of experts (DeepSeek), which has a dimension for the groups."""
        return bool(args) and args[0].ndim == 2 and args[0].shape[1] == self._num_experts


def routers(model: nn.Module) -> list[MoERouter]:
    """Those of a model or a layer, in the order of the layers; each module has one Router."""
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
    """Records the experts of every pass of a model."""

    def __init__(self, model: Any) -> None:
        self._routers = routers(model)
        for router in self._routers:
            router.records = True

    def take(self) -> torch.Tensor:
        """[T, L·K] int64 of the last pass, whose tokens lie one after another."""
        chosen = [router.chosen for router in self._routers]
        for router in self._routers:
            router.chosen = None
        return torch.cat([one for one in chosen if one is not None], -1)


def replay_routing(model: Any) -> None:
    """Let the layers of a model take `routed_experts` [T, L·K], an option of its backbone's forward
    pass, and send each token to these experts. Without it they choose themselves.
    """
    layers = [(layer, routers(layer)) for layer in getattr(backbone(model), "layers", ())]
    num_layers = sum(len(found) for _, found in layers)
    first = 0
    for layer, found in layers:
        if found:
            _ReplayingLayer(layer, found, first, num_layers)
        first += len(found)


class _ReplayingLayer:
    """Its routers are given their part for as long as the layer runs: again where activations are
    recomputed, when other passes may be under way.
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
            router.given = of_layers[:, number].long()
        output = self._forward(*args, **kwargs)
        assert all(router.given is None for _, router in self._routers), "the layer runs otherwise"
        return output
