"""Replacing the adapters of a running vLLM, which keeps the weights of the base model.

    shapes of the factors ──► AdapterUpdater(runner, number, shapes, …)    once: zeros
    Weights               ──► AdapterUpdater.prepare(weights) ──► switch()   each update

All requests of a policy use one adapter. vLLM's LoRA layers have as many slots as there are
policies, each with the factors of one of them. A switch overwrites the slot of its policy, so that
running requests go on with the new factors and the old ones are freed. Other slots and the
addresses, which CUDA graphs hold, do not change. The engine starts with zeros: the base model. A
layer that the adapter of a policy does not have gets zeros too.

There are no requests without an adapter: on the CPU, vLLM 0.32 gives those the adapter of its last
slot.

Imports vllm: only vLLM's own processes import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from rlsys.errors import InvalidValue
from rlsys.reallocation.shards import Box, TensorShard
from rlsys.reallocation.transport.weight_views import Weights


class AdapterUpdater:
    """Replaces an adapter of `runner`, vLLM's model runner of one tensor-parallel rank.

    `number` is that of the adapter, from 1. `shapes` are those of all its factors by published
    name (`factor_tensors`). B A is multiplied by `lora_alpha` / `r`.

    Raises InvalidValue if vLLM has no LoRA kernel for one of the layers.
    """

    def __init__(
        self,
        runner: Any,
        number: int,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        r: int,
        lora_alpha: int,
    ) -> None:
        self._number = number
        self._manager = runner.lora_manager._adapter_manager
        self._shapes = shapes
        self._dtype: torch.dtype = self._manager.lora_config.lora_dtype
        self._config = PEFTHelper(r=r, lora_alpha=lora_alpha, target_modules=[])
        mapper = getattr(runner.get_model(), "hf_to_vllm_mapper", None)
        self._mapper = None if mapper is None else mapper.get_rename_mapper()
        self.holdings = [
            TensorShard(name=name, shape=shape, dtype=self._dtype, box=Box.whole(shape))
            for name, shape in shapes.items()
        ]
        """The factors; vLLM takes its parts of them."""
        zeros = self._adapter({name: torch.zeros(shape) for name, shape in shapes.items()})
        self._check(zeros.loras)
        self._load(zeros)

    def prepare(self, weights: Weights) -> Callable[[], list[Any]]:
        """Read an adapter while the model runs, on any thread.

        The result loads it, and must be called only while the model is paused.
        """
        adapter = self._adapter(
            {
                # vLLM scales B in place, and the memory is the trainer's.
                name: weights.read(name, Box.whole(shape)).clone()
                for name, shape in self._shapes.items()
            }
        )

        def switch() -> list[Any]:
            self._load(adapter)
            return []

        return switch

    def release(self) -> None:
        """Keep all weights: an update would not bring those of the base model."""

    def _adapter(self, factors: Mapping[str, torch.Tensor]) -> Any:
        return LoRAModel.from_lora_tensors(
            self._number,
            dict(factors),
            self._config,
            device="cpu",
            dtype=self._dtype,
            weights_mapper=self._mapper,
        )

    def _load(self, adapter: Any) -> None:
        self._manager.remove_adapter(self._number)
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(self._number)  # takes the first free slot: its own

    def _check(self, layers: Iterable[str]) -> None:
        """Check that vLLM reads the factors of each layer, which it would ignore otherwise."""
        known = set(self._manager.modules)
        for fused, parts in self._manager.packed_modules.items():
            known |= set(parts) if fused in known else set()
        if unknown := sorted(set(layers) - known):
            names = ", ".join(unknown[:4])
            raise InvalidValue(
                "model.lora",
                rule=f"vLLM has no adapters for {len(unknown)} layers of this model ({names})",
                fix="Name other layers, such as r16:q_proj,v_proj, or leave out "
                "rollout.vllm.enable_lora, which merges the adapters.",
            )
