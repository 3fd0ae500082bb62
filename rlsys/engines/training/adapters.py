"""Low-rank adapters in a model that is trained (LoRA, 2106.09685), by PEFT.

    x ─┬─► W, frozen ─────────────┬─► y           whoever takes the weights gets
       └─► A ─► B ─► · alpha/rank ┘               W + B A · alpha/rank, by the name of W

Adapters are float32 masters, as the weights of a whole model are; what is frozen is read and kept
in the precision of the forward pass. The head of a critic or reward model begins as zeros, so it is
trained as a whole.

Shape legend: I inputs and O outputs of a linear layer, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlsys.config.lora import Lora
from rlsys.data.hub import in_short
from rlsys.engines.devices.cpu import tune_for_cpu
from rlsys.engines.models.causal_lm import disk_errors_as_oserror
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.engines.models.scalar_lm import SCALAR_HEAD, scalar_head
from rlsys.reallocation.shards import Box, local_box, local_part, whole

NAME = "default"  # PEFT's, of the only adapter
BASE, PARTS = "base_layer", ("lora_A", "lora_B")  # what it calls the layer and what it adds
ADAPTER = "adapter"  # of an exported model


@dataclass(frozen=True, kw_only=True)
class AdaptedWeight:
    """The matrix of a linear layer, and what is added to it."""

    base: torch.Tensor  # [O, I], or [I, O] of a class that keeps its matrix so
    a: torch.Tensor  # [R, I]
    b: torch.Tensor  # [O, R]
    scaling: float
    is_transposed: bool

    @classmethod
    def of(cls, layer: Any) -> AdaptedWeight:
        """Of a layer of PEFT."""
        a, b = (getattr(layer, part)[NAME].weight for part in PARTS)
        return cls(
            base=layer.get_base_layer().weight,
            a=a,
            b=b,
            scaling=layer.scaling[NAME],
            is_transposed=layer.fan_in_fan_out,
        )

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    def whole(self) -> torch.Tensor:
        """Their sum in float32, gathered on every rank: a collective if it is sharded."""
        gathered = replace(self.with_whole_factors(), base=whole(self.base))
        return gathered.part(Box.whole(self.shape))

    def with_whole_factors(self) -> AdaptedWeight:
        """The same with `a` and `b` gathered on every rank: a collective if they are sharded."""
        return replace(self, a=whole(self.a), b=whole(self.b))

    def part(self, box: Box) -> torch.Tensor:
        """A box of the sum, in float32, where `base` lies on this rank; the factors are whole."""
        added = self.b @ self.a
        if self.is_transposed:
            added = added.t()
        base = local_part(self.base)[box.slices_in(local_box(self.base))]
        return torch.add(base.float(), added[box.slices], alpha=self.scaling)


class Adapters:
    """Those of one model, which this puts into it, in place; all else is frozen. `path`: that of
    the model. Raises ValueError for layers that are no linear ones of the model, or its head.
    """

    def __init__(self, model: Any, lora: Lora, path: str | Path) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        self._model = model
        head = scalar_head(model)
        has_logits = model.get_output_embeddings() is not None
        if head is None and not has_logits:
            raise ValueError(
                f"model.lora: the head of {type(model).__name__} is more than a linear one of one "
                "output, which adapters leave out; train all weights."
            )
        linear = adaptable_layers(model)
        if wrong := lora.misnamed(linear):
            raise self._misnamed(lora, f"{wrong[0]!r} is none, or the head")
        self._config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            # By name: PEFT's "all-linear" also wraps the experts of a mixture, which are no layers.
            target_modules=sorted(name for name in linear if lora.adapts(name)),
            task_type="CAUSAL_LM" if has_logits else "SEQ_CLS",
            base_model_name_or_path=str(path),
        )
        try:
            inject_adapter_in_model(self._config, model, low_cpu_mem_usage=True)
        except ValueError as error:
            raise self._misnamed(lora, in_short(error)) from error
        if others := sorted(set(self._layers) - linear.keys()):
            raise self._misnamed(lora, f"{others[0]} is none, or the head")
        for layer in self._layers.values():
            for part in PARTS:
                # PEFT has laid them on the meta device, in the precision of the layer.
                getattr(layer, part).float().to_empty(device="cpu")
            layer.reset_lora_parameters(NAME, init_lora_weights=True)
        tune_for_cpu(model)
        if head is not None:
            getattr(model, SCALAR_HEAD).float().requires_grad_(True)
            self._config.modules_to_save = [SCALAR_HEAD]

    def _misnamed(self, lora: Lora, why: str) -> ValueError:
        return ValueError(
            f"model.lora: PEFT puts no adapters beside {', '.join(lora.targets or ['all layers'])} "
            f"of {type(self._model).__name__} ({why}); name linear layers of the model."
        )

    @property
    def _layers(self) -> dict[str, Any]:
        """Those that are adapted, by Hugging Face name."""
        return {name: one for name, one in self._model.named_modules() if hasattr(one, BASE)}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Adapters, and the head where it is trained as a whole, by the names of PEFT's model."""
        return {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }

    @property
    def base(self) -> dict[str, torch.Tensor]:
        """All tensors of the model by Hugging Face name, as they are without adapters."""
        return {
            name.replace(f".{BASE}.", "."): tensor
            for name, tensor in model_tensors(self._model).items()
            if not set(PARTS) & set(name.split("."))
        }

    @property
    def merged(self) -> dict[str, torch.Tensor | AdaptedWeight]:
        """The same with adapters."""
        adapted = {
            f"{name}.weight": AdaptedWeight.of(layer) for name, layer in self._layers.items()
        }
        return {name: adapted.get(name, tensor) for name, tensor in self.base.items()}

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """The model computes as it would without them meanwhile."""
        # PEFT's own switch takes adapters their gradient, at which FSDP2 looks in its first pass.
        scalings = [(layer, layer.scaling[NAME]) for layer in self._layers.values()]
        for layer, _ in scalings:
            layer.scaling[NAME] = 0.0
        try:
            yield
        finally:
            for layer, scaling in scalings:
                layer.scaling[NAME] = scaling

    def save(self, tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Write them alone beside a model, as PEFT loads them into the one that it began as.
        `tensors`: those that are trained, whole. Raises OSError as save_model does.
        """
        from safetensors.torch import save_file

        beside = directory / ADAPTER
        beside.mkdir()
        self._config.inference_mode = True
        # PEFT keeps a set, whose order is another in every process.
        self._config.target_modules = sorted(self._config.target_modules)
        self._config.save_pretrained(str(beside))
        named = {
            f"base_model.model.{name.replace(f'.{NAME}.', '.')}": tensor.contiguous()
            for name, tensor in tensors.items()
        }
        with disk_errors_as_oserror():
            save_file(named, beside / "adapter_model.safetensors")


def adaptable_layers(model: Any) -> dict[str, Any]:
    """Return the linear layers that adapters may stand beside, by Hugging Face name.

    These are all but the head and but those that PEFT takes for experts. PEFT reads adapters of
    mixtures from times when each expert was a layer of its own: in such a model it replaces names
    like `gate_proj` by the tensor of all experts, also those of dense and shared layers. An adapter
    beside one of these could not be loaded by PEFT.
    """
    from transformers.pytorch_utils import Conv1D

    heads = (model.get_output_embeddings(), getattr(model, SCALAR_HEAD, None))
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not any(module is head for head in heads)
    }
    if all(one.dim() < 3 for one in model.parameters()):  # no tensor of several experts
        return linear
    kept = _kept_by_peft(model, linear)
    return {name: module for name, module in linear.items() if name in kept}


def _kept_by_peft(model: Any, names: Iterable[str]) -> set[str]:
    """Return the names that PEFT leaves as they are, all of them where it is not installed."""
    try:
        from peft import LoraConfig
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:
        return set(names)
    config = LoraConfig(target_modules=list(names))
    convert_peft_config_for_transformers(config, model=model, conversions=None)
    return set(config.target_modules or ())
