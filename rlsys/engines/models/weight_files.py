"""The weights of a Hugging Face checkpoint as promises: files are opened, and nothing is read.

    directory ─► load_promised ─► model of promises ─► take_promises ─► model on the meta device,
                                                                        promises by name

transformers renames and converts them as it does with tensors that are there, so whatever it loads
can be promised. A part of a safetensors file, or of a torch file that can be mapped into memory, is
read by itself. What is quantised, or an adapter beside another model, is not promised.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlsys.engines.models.lazy_tensors import Index, LazyTensor

SAFE, TORCH = "model.safetensors", "pytorch_model.bin"
ADAPTER = "adapter_config.json"
UNPROMISED = ("quantization_config", "transformers_weights")  # configurations that set them


def load_promised(
    config: Any, path: str | Path, choose: Callable[[], tuple[Any, Any]], **options: Any
) -> Any:
    """What `from_pretrained(path, **options)` gives, of promises: by the class of models, and with
    the configuration, that `choose` says. None where transformers has to read the weights by
    itself. Raises what the libraries do for damaged files and models that do not fit them.
    """
    if any(getattr(config, name, None) is not None for name in UNPROMISED):
        return None
    if _found(path, ADAPTER) or not (promises := _promises(path)):
        return None
    kind, config = choose()
    try:
        loaded = kind.from_pretrained(
            None,
            config=config,
            state_dict=promises,
            generation_config=_generation_config(path),
            **options,
        )
    except NotImplementedError:  # its class looks at numbers, or changes them
        return None
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.config.name_or_path = str(path)
    return loaded


def take_promises(model: nn.Module) -> dict[str, LazyTensor]:
    """Those of a model by the names of parameters and buffers, all names of tied ones. In their
    place it gets tensors on the meta device, which hold nothing.
    """
    found: dict[str, LazyTensor] = {}
    empty: dict[int, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                full_name = f"{prefix}.{name}" if prefix else name
                if isinstance(tensor, LazyTensor):
                    found[full_name] = tensor
                    held[name] = empty.setdefault(id(tensor), _empty_like(tensor))
    return found


def _promises(path: str | Path) -> dict[str, LazyTensor]:
    """By their names in the files."""
    found: dict[str, LazyTensor] = {}
    for file in _files(path):
        found |= _of_safetensors(file) if file.endswith(".safetensors") else _of_torch(file)
    return found


def _generation_config(path: str | Path) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None  # the model makes one of its configuration


def _empty_like(promise: LazyTensor) -> torch.Tensor:
    made = torch.empty(promise.shape, dtype=promise.dtype, device="meta")
    if not isinstance(promise, nn.Parameter):
        return made
    return nn.Parameter(made, requires_grad=promise.requires_grad)


def _files(path: str | Path) -> list[str]:
    """Those that transformers would load: the first that are there, in its order."""
    from transformers.utils.hub import get_checkpoint_shard_files

    for name in (SAFE, f"{SAFE}.index.json", TORCH, f"{TORCH}.index.json"):
        if (file := _found(path, name)) is not None:
            return get_checkpoint_shard_files(str(path), file)[0] if "index" in name else [file]
    return []


def _found(path: str | Path, name: str) -> str | None:
    """A file of a directory, or of a model on the hub, which is downloaded."""
    from transformers.utils import cached_file

    try:
        found: str | None = cached_file(str(path), name)
    except OSError:
        return None
    return found


def _of_safetensors(file: str) -> dict[str, LazyTensor]:
    from safetensors import safe_open

    opened = safe_open(file, framework="pt")
    return {name: _of_slice(opened, name) for name in opened.keys()}  # noqa: SIM118 - no mapping


def _of_slice(opened: Any, name: str) -> LazyTensor:
    part = opened.get_slice(name)
    shape = part.get_shape()
    if not shape:
        return _of_tensor(opened.get_tensor(name))
    return LazyTensor(shape, part[:0].dtype, part.__getitem__)


def _of_torch(file: str) -> dict[str, LazyTensor]:
    tensors = torch.load(file, map_location="cpu", mmap=_is_zip(file), weights_only=True)
    return {name: _of_tensor(tensor) for name, tensor in tensors.items()}


def _of_tensor(tensor: torch.Tensor) -> LazyTensor:
    return LazyTensor(tensor.shape, tensor.dtype, partial(_indexed, tensor))


def _indexed(tensor: torch.Tensor, index: Index) -> torch.Tensor:
    return tensor[index]


def _is_zip(file: str) -> bool:
    from zipfile import is_zipfile

    return is_zipfile(file)
