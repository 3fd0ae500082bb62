"""Expert parallelism: each rank holds some experts of a mixture, and tokens are sent to them.

    tokens of this rank ─router─► (token, expert) pairs, by expert ─exchange─► the expert's rank
                                                 weighted sum ◄─exchange─ outputs of the experts

Experts are split over the expert and tensor ranks together, which all have tokens of their own. The
auxiliary loss that balances a router during pre-training is left out: it would pull the policy away
from its rewards, and no engine samples with it.

Shape legend: T tokens, K experts of each, P = T·K pairs, E experts, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from rlsys.engines.training.parallel.collectives import exchange
from rlsys.engines.training.parallel.process_groups import Mesh
from rlsys.engines.training.parallel.tensor_parallel import expert_modules, local_weights
from rlsys.errors import InvalidValue

EXPERTS = ("ep", "tp")


def cut_experts(model: Any, mesh: Mesh) -> None:
    """Split the experts of a model in place. Raises ValueError if it has none that can be split."""
    found = expert_modules(model)
    if mesh.layout.ep > 1 and not found:
        raise InvalidValue(
            "trainer.layout",
            str(mesh.layout),
            rule=f"transformers cannot run experts of {type(model).__name__} on separate ranks",
            fix="Use a layout without ep.",
        )
    for module in found:
        _Cut(module, mesh)


class _Cut:
    """The experts of one layer."""

    def __init__(self, module: Any, mesh: Mesh) -> None:
        self._module = module
        self._group = mesh.group(*EXPERTS)
        self._num_ranks = mesh.layout.size(*EXPERTS)
        self._forward: Callable[..., torch.Tensor] = module.forward
        self._num_local = module.num_experts // self._num_ranks
        device_mesh, rank = mesh.along(*EXPERTS), mesh.index(*EXPERTS)
        for name, whole in list(module.named_parameters(recurse=False)):
            part = whole.detach().chunk(self._num_ranks)[rank].clone()
            cut = DTensor.from_local(part, device_mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(cut, requires_grad=whole.requires_grad))
        module.num_experts = self._num_local
        module.forward = self.forward

    def forward(
        self, hidden_states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return [T, D] for hidden states [T, D], each token's experts and their weights [T, K]."""
        num_chosen = indices.shape[1]
        order = indices.flatten().argsort(stable=True)  # [P]
        sent = torch.bincount(indices.flatten() // self._num_local, minlength=self._num_ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        to, back = sent.tolist(), received.tolist()
        pairs = hidden_states.index_select(0, order // num_chosen)  # [P, D]
        arrived = exchange(pairs, self._group, to, back)
        experts = torch.empty(sum(back), dtype=indices.dtype, device=indices.device)
        local = indices.flatten()[order] % self._num_local
        dist.all_to_all_single(experts, local, back, to, group=self._group)
        outputs = exchange(self._local(arrived, experts), self._group, back, to)  # [P, D]
        weighted = outputs * weights.flatten()[order, None].to(outputs.dtype)
        summed = torch.zeros_like(hidden_states)
        return summed.index_add(0, order // num_chosen, weighted)

    def _local(self, tokens: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return outputs of this rank's experts for tokens of one expert each, with weight 1."""
        with local_weights(self._module) as local:
            if not len(tokens):
                # Every rank needs gradients of its experts in every pass, even if they are zeros.
                return tokens + torch.stack([w[:1].sum() * 0 for w in local.values()]).sum()
            ones = tokens.new_ones(len(tokens), 1)
            outputs: torch.Tensor = self._forward(tokens, experts[:, None], ones)
            return outputs
