"""Replacing the weights of a model that vLLM has converted for its kernels.

    Hugging Face names and shapes ──► WeightUpdater(model, shapes, …)      once: trace the loaders
    Weights                       ──► WeightUpdater.prepare(weights) ──► switch()   each update

vLLM's own weight loaders define the mapping: they fuse q, k and v, stack experts, pad the
vocabulary, take the slice of a tensor-parallel rank. They run once, over meta tensors in the form
of a checkpoint. Each copy that they make is recorded as a box of a tensor of the Hugging Face model
and one of a parameter of vLLM. Updates copy these boxes.

If kernels read the weights as loaded, as most do on GPUs, boxes are copied into the parameters. If
vLLM has packed them (all linear layers and experts on the CPU, experts of some kernels on GPUs), a
shadow of the layer gets the unpacked parameters, vLLM packs it as at the start, and the layer takes
over the result. On the CPU all shadows are created during generation, and the model changes only
when they are ready. On GPUs, where CUDA graphs hold the addresses, they are created during the
pause one after the other, and copied over the layer's own parameters.

Imports vllm: only vLLM's own processes import this module.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol, cast

import torch
from torch import nn
from vllm.model_executor.layers.attention import MLAAttention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.online.int8 import Int8OnlineMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from rlsys.engines.models.model_tensors import model_tensors
from rlsys.errors import InvalidValue
from rlsys.reallocation.loader_trace import Copy, CopyRecorder, joined, wanted
from rlsys.reallocation.shards import Box, TensorShard
from rlsys.reallocation.traffic import without
from rlsys.reallocation.transport.tensor_copies import copy_all
from rlsys.reallocation.transport.weight_views import Weights

TABLES = ("_parameters", "_buffers", "_modules")  # attributes of a module

PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)

# vLLM quantizes weights loaded in full precision, into parameters that checkpoints do not have.
QUANTIZED = (OnlineLinearBase, Int8OnlineMoEMethod)

# Quantisation methods that keep the kernel with the scales, besides the layer's parameters.
WITH_KERNEL = (Int8OnlineMoEMethod,)

# A layer with this attribute counts as packed in vLLM.
IS_PACKED = "_already_called_process_weights_after_loading"

# Kernels of experts that read weights as loaded, and those whose packing cannot be repeated.
AS_LOADED = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
NOT_AGAIN = (
    UnquantizedMoeBackend.MOONEP,
    UnquantizedMoeBackend.TPU,
    UnquantizedMoeBackend.OOT,
)

# Attributes of layers that vLLM computes once from weights that it also keeps.
DERIVED = ("_bf16x3_weight", "_combined_gate_weight")

# Attributes that hold packed weights on the CPU.
PACKED_INTO = ("cpu_linear", "_cpu_unpacked_conv_weight")

Switch = Callable[[], list[Any]]
"""Replaces weights; returns the old ones, which take as long to free as to copy."""

AsSaved = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class Updater(Protocol):
    """Replaces the weights of a running engine; see WeightUpdater."""

    holdings: list[TensorShard]

    def prepare(self, weights: Weights) -> Switch:
        """Prepare an update while the model runs."""

    def release(self) -> None:
        """Free the memory of all weights on the CPU until the next update."""


class WeightUpdater:
    """Replaces all weights of `model`, a vLLM model of one tensor-parallel rank in `dtype`.

    `shapes` are those of `model_tensors` of the same Hugging Face model. `as_saved` converts them
    to the names and forms of a checkpoint, which vLLM's loaders read. `other` is a model with an
    updater of its own, whose modules this model may share.

    Raises InvalidValue if a layer's packed form is unknown (quantized layers), if vLLM computes a
    weight instead of copying it, or if an element of a vLLM parameter gets no value.
    """

    def __init__(
        self,
        model: Any,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        as_saved: AsSaved,
        other: Any = None,
    ) -> None:
        self._model = model
        self._shared = set() if other is None else set(other.modules())
        self._dtype = dtype
        self._on_cpu = next(model.parameters()).device.type == "cpu"
        self._packed: dict[str, Any] = {
            name: layer for name, layer in self._modules() if _is_packed(name, layer)
        }
        self._attention = [
            layer for _, layer in self._modules() if is_deferred_attention_layer(layer)
        ]
        if self._on_cpu and any(isinstance(layer, MLAAttention) for layer in self._attention):
            # Its rotary kernel gives wrong results for a part of each query that has a stride.
            raise self._unsupported("vLLM's CPU kernels rotate latent attention wrongly")
        # Targets of the loaders: the model's own tensors, and meta tensors in the original form.
        self._own: dict[str, torch.Tensor] = {}
        self._meta: dict[str, torch.Tensor] = {}
        self._names: dict[str, str] = {}  # of tied tensors the first
        recorder = self._record(shapes, as_saved)
        self._copies: dict[str, list[Copy]] = defaultdict(list)  # by target
        for one in joined(recorder.copies):
            self._copies[one.target].append(one)
        self._padded = {name for name, _ in recorder.fills}
        for name in self._padded:  # a rank may have only the padding of a small vocabulary
            self._copies.setdefault(name, [])
        copies = (one for of_target in self._copies.values() for one in of_target)
        dtypes = {name: meta.dtype for name, meta in self._meta.items()}
        self.holdings: list[TensorShard] = wanted(copies, shapes, dtypes)
        """This rank's shards of the Hugging Face model."""
        self._check_coverage(recorder)

    def _modules(self) -> list[tuple[str, Any]]:
        """Return the names and modules of this updater."""
        return [one for one in self._model.named_modules() if one[1] not in self._shared]

    @torch.no_grad()
    def prepare(self, weights: Weights) -> Switch:
        """Prepare an update while the model runs, on any thread.

        The result replaces every weight, and must be called only while the model is paused.
        `weights` fit the shapes of the constructor and stay open until then. On GPUs weights are
        overwritten in place, because CUDA graphs hold the addresses.
        """
        if not self._on_cpu:
            return lambda: self._overwrite(weights)
        new = self._read(weights, self._copies)
        shadows = [(layer, self._shadow(name, new)) for name, layer in self._packed.items()]

        def switch() -> list[Any]:
            replaced: list[Any] = []
            for name, tensor in new.items():
                replaced.append(self._own[name].data)
                self._own[name].data = tensor
            for layer, shadow in shadows:
                for name, parameter in layer.named_parameters(recurse=False):
                    replaced.append(parameter.data)
                    parameter.data = getattr(shadow, name).data
                replaced.append(dict(layer.__dict__))
                if isinstance(layer.quant_method, WITH_KERNEL):  # others refer to the method
                    layer.quant_method.__dict__.update(shadow.quant_method.__dict__)
                    shadow.quant_method = layer.quant_method
                layer.__dict__.update((k, v) for k, v in shadow.__dict__.items() if k not in TABLES)
            self._finish()
            return replaced

        return switch

    @torch.no_grad()
    def release(self) -> None:
        """Free the memory of all weights on the CPU until the next update."""
        for layer in self._packed.values():
            for name in PACKED_INTO:
                layer.__dict__.pop(name, None)
        for tensor in self._own.values():
            tensor.data = tensor.new_empty(0)

    @torch.no_grad()
    def _overwrite(self, weights: Weights) -> list[Any]:
        """Overwrite weights with one layer's shadow at a time: GPUs have no memory for more."""
        packed = {name for layer in self._packed for name in self._names_in(layer).values()}
        for name in self._copies.keys() - packed:
            self._put(weights, name, self._own[name])
        for layer in self._packed:
            self._overwrite_packed(layer, weights)
        self._finish()
        return []

    def _overwrite_packed(self, layer: str, weights: Weights) -> None:
        shadow = self._shadow(layer, self._read(weights, self._names_in(layer).values()))
        for name, own in self._packed[layer].named_parameters(recurse=False):
            own.copy_(getattr(shadow, name))

    @torch.no_grad()
    def _finish(self) -> None:
        """Recompute what vLLM derives from several weights: latent attention, copies of sinks."""
        for layer in self._attention:
            layer.process_weights_after_loading(self._dtype)

    def _read(self, weights: Weights, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return new tensors in the form that the loaders write."""
        new = {}
        for name in names:
            make = torch.zeros if name in self._padded else torch.empty
            meta, own = self._meta[name], self._own[name]
            new[name] = make(meta.shape, dtype=meta.dtype, device=own.device)
            self._put(weights, name, new[name])
        return new

    def _put(self, weights: Weights, name: str, target: torch.Tensor) -> None:
        copies = self._copies[name]
        copy_all(
            [target[one.target_box.slices] for one in copies],
            [one.arranged(weights.read(one.source, one.source_box)) for one in copies],
        )

    def _names_in(self, prefix: str) -> dict[str, str]:
        """Return the parameters of a packed layer, by their names in the layer."""
        full = {name: _joined(prefix, name) for name in self._packed[prefix]._parameters}
        return {name: self._names[one] for name, one in full.items() if one in self._names}

    def _shadow(self, prefix: str, new: Mapping[str, torch.Tensor]) -> Any:
        """Return a copy of a layer with new weights, packed."""
        layer = self._packed[prefix]
        shadow = copy.copy(layer)
        shadow.__dict__.update({table: dict(getattr(layer, table)) for table in TABLES})
        shadow.__dict__.pop(IS_PACKED, None)
        names = self._names_in(prefix)
        shadow._parameters = {name: None for name in layer._parameters if name not in names}
        for own_name, name in names.items():
            parameter = layer._parameters[own_name]
            made = nn.Parameter(new[name], requires_grad=False)
            made.__class__, made.__dict__ = parameter.__class__, dict(parameter.__dict__)
            shadow._parameters[own_name] = made
        if isinstance(layer.quant_method, WITH_KERNEL):
            shadow.quant_method = copy.copy(layer.quant_method)
        shadow.quant_method.process_weights_after_loading(shadow)
        if isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
            # vLLM does not run the kernel's own processing of new weights if a kernel exists.
            experts = layer.quant_method.moe_kernel.fused_experts
            experts.process_weights_after_loading(shadow)
        return shadow

    @torch.no_grad()
    def _record(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        as_saved: AsSaved,
    ) -> CopyRecorder:
        """Trace the loaders over a model of meta tensors; fills in their targets."""
        sources = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        first: dict[int, str] = {}  # keeps tied tensors tied
        with ExitStack() as undo:
            for name, module, table, own_name in _places(self._model, self._modules()):
                tensor = table[own_name]
                if id(tensor) not in first:
                    first[id(tensor)] = name
                    self._meta[name] = _meta(module, own_name, tensor)
                    self._own[name] = tensor
                self._names[name] = first[id(tensor)]
                undo.callback(table.__setitem__, own_name, tensor)
                table[own_name] = self._meta[self._names[name]]
            recorder = CopyRecorder(sources, self._meta)
            try:
                with recorder:
                    self._model.load_weights(iter(as_saved(sources).items()))
            except (AttributeError, KeyError, ValueError) as error:
                raise self._unsupported(f"its weight loader cannot be traced ({error})") from error
        return recorder

    def _check_coverage(self, recorder: CopyRecorder) -> None:
        boxes: dict[str, list[Box]] = defaultdict(list)
        for name, box in (*((c.target, c.target_box) for c in recorder.copies), *recorder.fills):
            boxes[name].append(box)
        unfilled = [
            name
            for name, tensor in self._own.items()
            if isinstance(tensor, nn.Parameter)
            and without([Box.whole(self._meta[name].shape)], boxes[name])
        ]
        if unfilled:
            names = ", ".join(unfilled[:4])
            raise self._unsupported(f"{len(unfilled)} parameters get no value ({names})")

    def _unsupported(self, reason: str) -> InvalidValue:
        return InvalidValue(
            "model.path",
            rule=f"weights of {type(self._model).__name__} cannot be replaced in a running vLLM: "
            f"{reason}",
            fix="Use the torch engine for this architecture.",
        )


def _places(
    model: Any, modules: Iterable[tuple[str, Any]]
) -> list[tuple[str, Any, dict[str, Any], str]]:
    """Return parameters and persistent buffers: full name, module, its table and the name there.

    Tied tensors occur several times; tensors that vLLM has computed from others are left out.
    """
    of_model = {id(tensor) for tensor in model_tensors(model).values()}
    return [
        (_joined(prefix, name), module, table, name)
        for prefix, module in modules
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if id(tensor) in of_model and not _is_computed(module, name, tensor)
    ]


def _is_computed(module: Any, name: str, tensor: Any) -> bool:
    """Return whether vLLM computes a tensor from those that were loaded.

    Kernels may replace a loaded weight by one without its loader. vLLM lists no biases as loaded,
    but these keep their loaders.
    """
    if name in _loaded(module):
        return False
    if is_deferred_attention_layer(module):
        return True
    return _is_quantized(module) and getattr(tensor, "weight_loader", None) is None


def _is_quantized(module: Any) -> bool:
    return isinstance(getattr(module, "quant_method", None), QUANTIZED)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _loaded(module: Any) -> dict[str, torch.Tensor]:
    """Return parameters as they were before vLLM packed them; most are meta tensors."""
    found: dict[str, torch.Tensor] = get_layerwise_info(module).restore_metadata[0]
    return found


def _meta(module: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a loader expects it, on the meta device."""
    meta = to_meta_tensor(_loaded(module).get(name, tensor))
    restored: Any = restore_layer_refs(meta, module)
    if _is_quantized(module):  # its loaders would buffer all weights
        restored.weight_loader = _get_original_loader(restored)
    return cast("torch.Tensor", restored)


def _is_packed(name: str, layer: Any) -> bool:
    """Return whether vLLM repacks this layer's weights.

    Raises InvalidValue if the packing cannot be repeated.
    """
    method = getattr(layer, "quant_method", None)
    if (form := _unknown_form(layer, method)) is not None:
        raise InvalidValue(
            "model.path",
            rule=f"layer {name} keeps its weights as {form}, which cannot be replaced in a running "
            "vLLM",
            fix="Use an unquantized model without rollout.quantization, or the torch engine.",
        )
    if isinstance(method, UnquantizedFusedMoEMethod):
        return method.unquantized_backend not in AS_LOADED
    if isinstance(method, QUANTIZED):
        return True
    if isinstance(method, PLAIN):
        return any(parameter.device.type == "cpu" for parameter in layer.parameters())
    return False


def _unknown_form(layer: Any, method: Any) -> str | None:
    """Return the name of an unknown packed form, None for a known one."""
    if isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend in NOT_AGAIN:
        return f"the {method.unquantized_backend.value} kernel for experts"
    is_known = isinstance(method, (*PLAIN, *QUANTIZED, UnquantizedFusedMoEMethod))
    has_weights = next(layer.parameters(), None) is not None
    if isinstance(method, QuantizeMethodBase) and has_weights and not is_known:
        return type(method).__name__
    sinks = getattr(getattr(layer, "impl", None), "sinks", None)
    if sinks is not None and sinks.device.type == "cpu" and sinks.dtype == torch.float16:
        return "attention sinks in float32"  # converted from float16 by the first request
    return next((one for one in DERIVED if getattr(layer, one, None) is not None), None)
