"""New weights for a model that vLLM has already laid out for its kernels.

    Hugging Face names and shapes ──► WeightUpdater(model, shapes)   once: what goes where?
    Hugging Face tensors          ──► WeightUpdater.write(tensors)   each update

vLLM's own weight loaders say what goes where: they fuse q, k and v, pad the vocabulary, cut the
slice of a tensor-parallel rank. They run once, over tensors that hold nothing, and each copy that
they make is recorded as a box of a Hugging Face tensor and one of a parameter of vLLM. Updates copy
these boxes.

On GPUs they go into the parameters that the kernels read. On the CPU vLLM has packed the linear
weights and left empty parameters behind, so each such layer gets a shadow with full parameters,
vLLM packs that as it did at the start, and the layer takes over what the shadow has. Nothing of the
model changes before all shadows are ready.

Imports vllm: only vLLM's own processes import this module.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from rlsys.engines.model_tensors import model_tensors
from rlsys.layout.holdings import Box
from rlsys.layout.link_bytes import without
from rlsys.layout.recording import CopyRecorder

TABLES = ("_parameters", "_buffers", "_modules")  # of a module


class WeightUpdater:
    """Replaces all weights of `model`, a vLLM model of one tensor-parallel rank.

    `shapes` are the `model_tensors` of the same Hugging Face model. Raises ValueError for a model
    with layers whose packed form is unknown here (quantized ones, experts), where vLLM computes a
    weight instead of copying it, and if any element of a vLLM parameter gets no value.
    """

    def __init__(self, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._model = model
        self._layers: list[Any] = [
            layer for name, layer in model.named_modules() if _is_plain(name, layer)
        ]
        self._on_cpu = next(model.parameters()).device.type == "cpu"
        # What the loaders write: the model's own, and as large as they know it, without numbers.
        self._own: dict[str, torch.Tensor] = {}
        self._hollow: dict[str, torch.Tensor] = {}
        recorder = self._record(shapes)
        self._copies = recorder.copies
        self._padded = {name for name, _ in recorder.fills}
        self._check_coverage(recorder)

    @torch.no_grad()
    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace every weight; the names and shapes must be those given to the constructor. On
        GPUs, where CUDA graphs hold the addresses, weights are overwritten in place."""
        if not self._on_cpu:
            self._put(tensors, self._own)
            return
        written = {one.target for one in self._copies}
        new = {name: self._room(name) for name in self._own if name in written}
        self._put(tensors, new)
        shadows = [(layer, self._shadow(layer, new)) for layer in self._layers]
        for name, tensor in new.items():
            self._own[name].data = tensor
        for layer, shadow in shadows:
            for name, parameter in layer.named_parameters(recurse=False):
                parameter.data = getattr(shadow, name).data
            layer.__dict__.update((k, v) for k, v in shadow.__dict__.items() if k not in TABLES)

    def _put(
        self, tensors: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]
    ) -> None:
        for one in self._copies:
            part = one.arranged(tensors[one.source][one.source_box.slices])
            targets[one.target][one.target_box.slices].copy_(part)

    def _room(self, name: str) -> torch.Tensor:
        make = torch.zeros if name in self._padded else torch.empty
        return make(self._hollow[name].shape, dtype=self._own[name].dtype)

    def _shadow(self, layer: Any, new: Mapping[str, torch.Tensor]) -> Any:
        """A layer with new weights, packed."""
        shadow = copy.copy(layer)
        shadow.__dict__.update({table: dict(getattr(layer, table)) for table in TABLES})
        names = {id(tensor): name for name, tensor in self._own.items()}
        for name, parameter in layer.named_parameters(recurse=False):
            made = nn.Parameter(new[names[id(parameter)]], requires_grad=False)
            made.__class__, made.__dict__ = parameter.__class__, dict(parameter.__dict__)
            shadow._parameters[name] = made
        layer.quant_method.process_weights_after_loading(shadow)
        return shadow

    @torch.no_grad()
    def _record(self, shapes: Mapping[str, tuple[int, ...]]) -> CopyRecorder:
        """Run the loaders over a hollow model; fills in what they write."""
        sources = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        by_id: dict[int, torch.Tensor] = {}  # tied ones stay tied
        with ExitStack() as undo:
            for name, module, table, own_name in _places(self._model):
                tensor = table[own_name]
                if id(tensor) not in by_id:
                    by_id[id(tensor)] = self._hollow[name] = _hollow(module, own_name, tensor)
                    self._own[name] = tensor
                undo.callback(table.__setitem__, own_name, tensor)
                table[own_name] = by_id[id(tensor)]
            recorder = CopyRecorder(sources, self._hollow)
            try:
                with recorder:
                    self._model.load_weights(iter(sources.items()))
            except ValueError as error:
                raise ValueError(
                    self._refusal(f"vLLM's loader is not understood: {error}")
                ) from error
        return recorder

    def _check_coverage(self, recorder: CopyRecorder) -> None:
        boxes: dict[str, list[Box]] = defaultdict(list)
        for name, box in (*((c.target, c.target_box) for c in recorder.copies), *recorder.fills):
            boxes[name].append(box)
        unfilled = [
            name
            for name, tensor in self._own.items()
            if isinstance(tensor, nn.Parameter)
            and without([Box.whole(self._hollow[name].shape)], boxes[name])
        ]
        if unfilled:
            why = f"{len(unfilled)} parameters get no value ({', '.join(unfilled[:4])})"
            raise ValueError(self._refusal(why))

    def _refusal(self, why: str) -> str:
        return (
            f"weights of the Hugging Face model cannot be handed over to vLLM's "
            f"{type(self._model).__name__}: {why}. Use the torch engine for this architecture."
        )


def _places(model: Any) -> list[tuple[str, Any, dict[str, Any], str]]:
    """Of parameters and persistent buffers: full name, module, the table there, and its own name
    in it. Tied ones stand several times."""
    of_model = {id(tensor) for tensor in model_tensors(model).values()}
    return [
        (f"{prefix}.{name}" if prefix else name, module, table, name)
        for prefix, module in model.named_modules()
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if id(tensor) in of_model
    ]


def _hollow(module: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """As a loader takes it, on the meta device. What vLLM has packed and emptied is as it was."""
    if tensor.numel() == 0:
        tensor = get_layerwise_info(module).restore_metadata[0][name]
    hollow: torch.Tensor = restore_layer_refs(to_meta_tensor(tensor), module)
    return hollow


def _is_plain(name: str, layer: nn.Module) -> bool:
    """Whether vLLM packs this layer's weight; ValueError where that is not known to be redoable."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        return True
    if isinstance(method, QuantizeMethodBase) and next(layer.parameters(), None) is not None:
        raise ValueError(
            f"layer {name} keeps its weights in the form of {type(method).__name__}, which cannot "
            "be replaced in a running vLLM; use an unquantized dense model."
        )
    return False
