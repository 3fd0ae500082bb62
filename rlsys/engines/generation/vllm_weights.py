"""New weights for a model that vLLM has already laid out for its kernels.

    Hugging Face names and shapes ──► WeightUpdater(model, shapes)   once: do they fill all of it?
    Hugging Face tensors          ──► WeightUpdater.write(tensors)   each update

vLLM's own weight loaders do the mapping: they fuse q, k and v, pad the vocabulary, cut the slice of
a tensor-parallel rank. What they need is parameters to write to. On GPUs these are the ones that
the kernels read. On the CPU vLLM has packed the linear weights and left empty parameters behind, so
each such layer gets a full parameter back, and once that is written vLLM packs it as it did at
start. Persistent buffers are written as parameters are.

Imports vllm: only vLLM's own processes import this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from rlsys.engines.model_tensors import model_tensors


class WeightUpdater:
    """Replaces all weights of `model`, a vLLM model of one tensor-parallel rank.

    `shapes` are the `model_tensors` of the same Hugging Face model. Raises ValueError for a model
    with layers whose packed form is unknown here (quantized ones, experts), and if any element of a
    vLLM parameter gets no value from `shapes`.
    """

    def __init__(self, model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._model = model
        self._layers: list[Any] = [
            layer for name, layer in model.named_modules() if _is_plain(name, layer)
        ]
        self._on_cpu = next(model.parameters()).device.type == "cpu"
        self._check_coverage(shapes)

    @torch.no_grad()
    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace every weight; the names and shapes must be those given to the constructor.

        If a loader of vLLM raises, the old weights stay on the CPU; on GPUs, where CUDA graphs hold
        the addresses, weights are overwritten in place and the model is then unusable.
        """
        if not self._on_cpu:
            self._model.load_weights(iter(tensors.items()))
            return
        with ExitStack() as undo:
            self._unpack(undo)
            self._model.load_weights(iter(tensors.items()))
            undo.pop_all()
        for layer in self._layers:
            layer.quant_method.process_weights_after_loading(layer)

    @torch.no_grad()
    def _check_coverage(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Write zeros over NaN: what is NaN afterwards gets no value from `shapes`."""
        zeros = {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}
        with ExitStack() as undo:
            self._unpack(undo)
            for parameter in self._model.parameters():
                parameter.data.fill_(float("nan"))
            self._model.load_weights(iter(zeros.items()))
            named = self._model.named_parameters()
            unfilled = [name for name, parameter in named if parameter.isnan().any()]
        if unfilled:
            raise ValueError(
                f"{len(unfilled)} parameters of vLLM's {type(self._model).__name__} get no value "
                "from the Hugging Face model's tensors, so weights cannot be handed over: "
                f"{', '.join(unfilled[:4])}. Use the torch engine for this architecture."
            )

    def _unpack(self, undo: ExitStack) -> None:
        """Give every parameter fresh CPU memory in the shape that the loaders write, and every
        buffer a copy; `undo` puts the old memory back."""
        for layer in self._layers:
            if layer.weight.numel() == 0:
                undo.callback(setattr, layer, "weight", layer.weight)
                recorded = get_layerwise_info(layer).restore_metadata[0]["weight"]
                layer.weight = restore_layer_refs(materialize_meta_tensor(recorded), layer)
        for tensor in model_tensors(self._model).values():
            undo.callback(setattr, tensor, "data", tensor.data)
            is_parameter = isinstance(tensor, nn.Parameter)
            # vLLM has buffers of its own, which no loader writes.
            tensor.data = torch.empty_like(tensor, device="cpu") if is_parameter else tensor.clone()


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
