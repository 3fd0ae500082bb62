"""Low-rank adapters in a model that is trained (LoRA, 2106.09685), by PEFT.

    x ─┬─► W, frozen ─────────────┬─► y           readers of the weights get
       └─► A ─► B ─► · alpha/rank ┘               W + B A · alpha/rank, under the name of W,
                                                  or A and B, if they have the base model

Adapters are float32 master weights. Frozen weights are read and kept in the precision of the
forward pass. The head of a critic or reward model starts as zeros, so it is trained as a whole.

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
from rlsys.errors import InvalidValue
from rlsys.reallocation.shards import Box, local_box, local_part, whole

NAME = "default"  # PEFT's name of the only adapter
BASE, PARTS = "base_layer", ("lora_A", "lora_B")  # PEFT's names of the layer and its factors
ADAPTER = "adapter"  # directory in an exported model


@dataclass(frozen=True, kw_only=True)
class AdaptedWeight:
    """The matrix of a linear layer and the low-rank product that is added to it."""

    base: torch.Tensor  # [O, I], or [I, O] in a Conv1D
    a: torch.Tensor  # [R, I]
    b: torch.Tensor  # [O, R]
    scaling: float
    is_transposed: bool

    @classmethod
    def of(cls, layer: Any) -> AdaptedWeight:
        """Return the weight of a layer that PEFT has adapted."""
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
        """Shape of the matrix."""
        return self.base.shape

    def whole(self) -> torch.Tensor:
        """Return the sum in float32, gathered on every rank: a collective if it is sharded."""
        gathered = replace(self.with_whole_factors(), base=whole(self.base))
        return gathered.part(Box.whole(self.shape))

    def with_whole_factors(self) -> AdaptedWeight:
        """Return a copy with `a` and `b` gathered on every rank: a collective if sharded."""
        return replace(self, a=whole(self.a), b=whole(self.b))

    def part(self, box: Box) -> torch.Tensor:
        """Return a box of the sum in float32, of this rank's part of `base`; factors are whole."""
        added = self.b @ self.a
        if self.is_transposed:
            added = added.t()
        base = local_part(self.base)[box.slices_in(local_box(self.base))]
        return torch.add(base.float(), added[box.slices], alpha=self.scaling)


class FrozenWeights:
    """Frozen weights of a base model that several engines of one process use.

    The first engine reads them. The others take the same tensors, so each of them needs memory for
    its adapters and their optimizer only.
    """

    def __init__(self) -> None:
        self.tensors: Mapping[str, torch.Tensor] = {}  # by Hugging Face name

    def put_into(self, model: Any) -> None:
        """Replace the frozen weights of a model, with or without adapters, by these."""
        places = [
            (held, name, _plain(f"{prefix}.{name}" if prefix else name))
            for prefix, module in model.named_modules(remove_duplicate=False)
            for held in (module._parameters, module._buffers)
            for name in held
        ]
        # By tensor, because tied tensors have several places and one name.
        shared = {
            id(held[name]): self.tensors[full_name]
            for held, name, full_name in places
            if full_name in self.tensors
        }
        for held, name, _ in places:
            held[name] = shared.get(id(held[name]), held[name])


class Adapters:
    """Adapters of one model. Creating them changes the model in place and freezes all else.

    `path` is that of the model. Raises ValueError if `lora` names layers that are not linear, or
    the head.
    """

    def __init__(self, model: Any, lora: Lora, path: str | Path) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        self._model = model
        head = scalar_head(model)
        has_logits = model.get_output_embeddings() is not None
        if head is None and not has_logits:
            raise InvalidValue(
                "model.lora",
                rule=f"{type(model).__name__} has a head that is not one linear layer with one "
                "output, which adapters do not support",
                fix="Leave model.lora out to train all weights.",
            )
        linear = adaptable_layers(model)
        if wrong := lora.misnamed(linear):
            raise self._unsupported(lora, f"{wrong[0]!r} is not a linear layer, or is the head")
        self._config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            # PEFT's "all-linear" would also wrap the experts of a mixture, which are not layers.
            target_modules=sorted(name for name in linear if lora.adapts(name)),
            task_type="CAUSAL_LM" if has_logits else "SEQ_CLS",
            base_model_name_or_path=str(path),
        )
        try:
            inject_adapter_in_model(self._config, model, low_cpu_mem_usage=True)
        except ValueError as error:
            raise self._unsupported(lora, in_short(error)) from error
        if others := sorted(set(self._layers) - linear.keys()):
            raise self._unsupported(lora, f"{others[0]!r} is not a linear layer, or is the head")
        for layer in self._layers.values():
            for part in PARTS:
                # PEFT creates them on the meta device, in the precision of the layer.
                getattr(layer, part).float().to_empty(device="cpu")
            layer.reset_lora_parameters(NAME, init_lora_weights=True)
        tune_for_cpu(model)
        if head is not None:
            getattr(model, SCALAR_HEAD).float().requires_grad_(True)
            self._config.modules_to_save = [SCALAR_HEAD]

    def _unsupported(self, lora: Lora, reason: str) -> InvalidValue:
        layers = ", ".join(lora.targets or ["all layers"])
        return InvalidValue(
            "model.lora",
            rule=f"PEFT cannot adapt {layers} of {type(self._model).__name__} ({reason})",
            fix="Name linear layers of the model.",
        )

    @property
    def _layers(self) -> dict[str, Any]:
        """Adapted layers by Hugging Face name."""
        return {name: one for name, one in self._model.named_modules() if hasattr(one, BASE)}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Adapters, and the head if it is trained as a whole, by the names of PEFT's model."""
        return {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }

    @property
    def base(self) -> dict[str, torch.Tensor]:
        """All tensors of the model by Hugging Face name, without adapters."""
        return {
            _plain(name): tensor
            for name, tensor in model_tensors(self._model).items()
            if not set(PARTS) & set(name.split("."))
        }

    @property
    def merged(self) -> dict[str, torch.Tensor | AdaptedWeight]:
        """All tensors of the model by Hugging Face name, with adapters added to them."""
        adapted = {
            f"{name}.weight": AdaptedWeight.of(layer) for name, layer in self._layers.items()
        }
        return {name: adapted.get(name, tensor) for name, tensor in self.base.items()}

    @property
    def factors(self) -> dict[str, torch.Tensor]:
        """The factors A and B of all adapted layers, for readers that have the base model."""
        return {
            factor_name(name, part): getattr(layer, part)[NAME].weight
            for name, layer in self._layers.items()
            for part in PARTS
        }

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Let the model compute without its adapters within the block."""
        # PEFT's own switch turns off requires_grad, which FSDP2 reads in its first pass.
        scalings = [(layer, layer.scaling[NAME]) for layer in self._layers.values()]
        for layer, _ in scalings:
            layer.scaling[NAME] = 0.0
        try:
            yield
        finally:
            for layer, scaling in scalings:
                layer.scaling[NAME] = scaling

    def save(self, tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Write the adapters into a checkpoint, as PEFT loads them for the original model.

        `tensors` are those that are trained, whole. Raises OSError as save_model does.
        """
        from safetensors.torch import save_file

        target = directory / ADAPTER
        target.mkdir()
        self._config.inference_mode = True
        # PEFT keeps a set, whose order differs between processes.
        self._config.target_modules = sorted(self._config.target_modules)
        self._config.save_pretrained(str(target))
        named = {
            f"base_model.model.{name.replace(f'.{NAME}.', '.')}": tensor.contiguous()
            for name, tensor in tensors.items()
        }
        with disk_errors_as_oserror():
            save_file(named, target / "adapter_model.safetensors")


def _plain(name: str) -> str:
    """Return the name of a tensor of an adapted layer in the model without adapters."""
    return name.replace(f".{BASE}.", ".")


def factor_name(layer: str, part: str) -> str:
    """Return the name of a factor in published weights; `part` is one of PARTS."""
    return f"{layer}.{part}.weight"


def layer_of(factor: str) -> str:
    """Return the layer of a factor, by its published name."""
    return factor.removesuffix(".weight").rpartition(".")[0]


def factor_tensors(model: Any, lora: Lora) -> dict[str, torch.Tensor]:
    """Return the factors of the adapters of a model, on the meta device, by published name."""
    from transformers.pytorch_utils import Conv1D

    found: dict[str, torch.Tensor] = {}
    for name, layer in adaptable_layers(model).items():
        if lora.adapts(name):
            rows, columns = layer.weight.shape
            outputs, inputs = (columns, rows) if isinstance(layer, Conv1D) else (rows, columns)
            shapes = ((lora.rank, inputs), (outputs, lora.rank))
            for part, shape in zip(PARTS, shapes, strict=True):
                found[factor_name(name, part)] = torch.empty(shape, device="meta")
    return found


def adaptable_layers(model: Any) -> dict[str, Any]:
    """Return the linear layers that can have adapters, by Hugging Face name.

    These are all but the head and the layers that PEFT treats as experts. PEFT converts adapters of
    mixtures from a format in which each expert was a layer: in such a model it replaces names like
    `gate_proj` by the tensor of all experts, also those of dense and shared layers. PEFT could not
    load an adapter of one of these.
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
    """Return the names that PEFT does not replace; all of them if PEFT is not installed."""
    try:
        from peft import LoraConfig
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:
        return set(names)
    config = LoraConfig(target_modules=list(names))
    convert_peft_config_for_transformers(config, model=model, conversions=None)
    return set(config.target_modules or ())
