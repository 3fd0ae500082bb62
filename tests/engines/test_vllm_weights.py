"""Updates of layers that vLLM packs differently on other machines, and unsupported layers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlsys.reallocation.transport.weight_views import Weights
from tests.engines import published
from tests.errors import invalid

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed"
)

EXPERTS = torch.arange(2 * 4 * 3, dtype=torch.float32).view(2, 4, 3)
NORM = torch.tensor([3.0, 4.0])


def build(backend: str) -> Any:
    """Build a vLLM model with experts that `backend` reads in reverse, as after loading."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.utils import replace_parameter

    class Method(UnquantizedFusedMoEMethod):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.unquantized_backend = UnquantizedMoeBackend[backend]
            nothing_more = SimpleNamespace(process_weights_after_loading=lambda layer: None)
            self.moe_kernel = SimpleNamespace(fused_experts=nothing_more)

        def process_weights_after_loading(self, layer: Any) -> None:
            replace_parameter(layer, "w13_weight", layer.w13_weight.data.flip(1))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Parameter(torch.zeros(2))
            self.experts: Any = nn.Module()
            self.experts.w13_weight = nn.Parameter(torch.zeros(2, 4, 3))
            self.experts.quant_method = Method()

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            own = dict(self.named_parameters())
            for name, tensor in weights:
                for expert, part in enumerate(tensor):
                    own[name].data[expert].copy_(part)

    model: Any = Model()
    record_metadata_for_reloading(model)
    with torch.no_grad():
        model.experts.quant_method.process_weights_after_loading(model.experts)
    return model


def test_packed_weights_are_copied_over_the_old_ones_if_addresses_stay() -> None:
    from rlsys.engines.generation.vllm.vllm_weights import WeightUpdater

    model = build("FLASHINFER_TRTLLM")
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    updater = WeightUpdater(model, shapes, torch.float32, dict)
    assert list(map(str, updater.holdings)) == [
        "norm [2] float32 [0:2]",
        "experts.w13_weight [2, 4, 3] float32 [0:2, 0:4, 0:3]",
    ]
    updater._on_cpu = False
    manifest = published.publish(1, [("norm", NORM), ("experts.w13_weight", EXPERTS)])
    with Weights(manifest) as weights:
        switch = updater.prepare(weights)
        assert not model.norm.any()
        switch()
    assert torch.equal(model.norm, NORM)
    assert torch.equal(model.experts.w13_weight, EXPERTS.flip(1))
    assert {name: one.data_ptr() for name, one in model.named_parameters()} == addresses


@pytest.mark.parametrize("backend", ["MOONEP", "OOT"])
def test_experts_that_cannot_be_repacked_are_rejected(backend: str) -> None:
    from rlsys.engines.generation.vllm.vllm_weights import WeightUpdater

    with invalid("model.path") as refusal:
        WeightUpdater(build(backend), {}, torch.float32, dict)
    assert "layer experts" in refusal.value.rule
    assert backend in refusal.value.rule


class Slots:
    """LoRA layers of vLLM that record what they get."""

    def __init__(self) -> None:
        self.lora_config = SimpleNamespace(lora_dtype=torch.float32)
        self.modules = dict.fromkeys(["block.qkv_proj", "block.o_proj"])
        self.packed_modules = {"block.qkv_proj": ["block.q_proj", "block.k_proj", "block.v_proj"]}
        self.added: list[Any] = []
        self.active: list[int] = []

    def remove_adapter(self, number: int) -> None:
        self.active = [one for one in self.active if one != number]

    def add_adapter(self, adapter: Any) -> None:
        assert adapter.id not in self.active
        self.added.append(adapter)

    def activate_adapter(self, number: int) -> None:
        self.active.append(number)


def updater_of(slots: Slots, *layers: str, number: int = 1) -> Any:
    from rlsys.engines.generation.vllm.vllm_adapters import AdapterUpdater

    runner = SimpleNamespace(
        lora_manager=SimpleNamespace(_adapter_manager=slots), get_model=lambda: nn.Module()
    )
    shapes = {
        name: shape
        for layer in layers
        for name, shape in {
            f"{layer}.lora_A.weight": (2, 3),
            f"{layer}.lora_B.weight": (4, 2),
        }.items()
    }
    return AdapterUpdater(runner, number, shapes, r=2, lora_alpha=6)


def test_an_adapter_is_replaced_in_the_pause_only() -> None:
    slots = Slots()
    updater = updater_of(slots, "block.q_proj", "block.o_proj")
    a, b = torch.arange(6.0).view(2, 3), torch.arange(8.0).view(4, 2)
    (zeros,) = slots.added
    assert not any(one.lora_b.any() for one in zeros.loras.values())
    manifest = published.publish(
        1,
        [
            (f"block.{layer}.lora_{part}.weight", factor)
            for layer in ("q_proj", "o_proj")
            for part, factor in (("A", a), ("B", b))
        ],
    )
    with Weights(manifest) as weights:
        switch = updater.prepare(weights)
        assert slots.added == [zeros]
        switch()
        _, adapter = slots.added
        adapter.loras["block.q_proj"].optimize()
        assert torch.equal(adapter.loras["block.q_proj"].lora_a, a)
        assert torch.equal(adapter.loras["block.q_proj"].lora_b, 3 * b)
        weights.verify()  # the scaling is not in the trainer's memory
    assert len(slots.active) == 1


def test_an_update_of_one_policy_replaces_its_adapter_only() -> None:
    slots = Slots()
    updater_of(slots, "block.q_proj", "block.o_proj", number=1)
    rival = updater_of(slots, "block.q_proj", number=2)
    assert slots.active == [1, 2]
    manifest = published.publish(
        1,
        [
            ("block.q_proj.lora_A.weight", torch.ones(2, 3)),
            ("block.q_proj.lora_B.weight", torch.ones(4, 2)),
        ],
    )
    with Weights(manifest) as weights:
        rival.prepare(weights)()
    assert [one.id for one in slots.added] == [1, 2, 2]
    assert slots.active == [1, 2]
    assert set(slots.added[-1].loras) == {"block.q_proj"}


def test_a_layer_that_vllm_cannot_adapt_is_rejected() -> None:
    with invalid("model.lora") as refusal:
        updater_of(Slots(), "block.q_proj", "block.gate")
    assert "block.gate" in refusal.value.rule


def test_unknown_packed_forms_are_rejected() -> None:
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

    from rlsys.engines.generation.vllm.vllm_weights import WeightUpdater

    def refused(form: str, **attributes: Any) -> None:
        layer = nn.Linear(2, 2)
        for name, value in attributes.items():
            setattr(layer, name, value)
        with invalid("model.path") as refusal:
            WeightUpdater(nn.Sequential(layer), {}, torch.float32, dict)
        assert "layer 0" in refusal.value.rule
        assert form in refusal.value.rule

    refused("Fp8LinearMethod", quant_method=object.__new__(Fp8LinearMethod))
    refused("_combined_gate_weight", _combined_gate_weight=torch.ones(2))
    refused("attention sinks in float32", impl=SimpleNamespace(sinks=torch.ones(2).half()))
