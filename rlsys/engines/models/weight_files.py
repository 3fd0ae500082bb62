"""Lazy loading of a Hugging Face checkpoint: files are opened, but no weights are read.

    directory ─► load_lazily ─► model of lazy tensors ─► take_lazy_tensors ─► model on the meta
                                                                              device, lazy tensors
                                                                              by name

transformers renames and converts lazy tensors like any others, so every architecture that it loads
can be loaded lazily. Parts of a safetensors file, or of a torch file that supports mmap, are read
separately. Quantized models and adapters are not loaded lazily.
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
NOT_LAZY = ("quantization_config", "transformers_weights")  # settings that prevent lazy loading


def load_lazily(
    config: Any, path: str | Path, choose: Callable[[], tuple[Any, Any]], **options: Any
) -> Any:
    """Return the result of `from_pretrained(path, **options)` with lazy tensors.

    `choose` returns the model class and its configuration. The result is None if transformers has
    to read the weights itself. Raises the libraries' errors for damaged files and models that do
    not match them.
    """
    if any(getattr(config, name, None) is not None for name in NOT_LAZY):
        return None
    if _cached_path(path, ADAPTER) or not (tensors := lazy_tensors(path)):
        return None
    kind, config = choose()
    try:
        loaded = kind.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            generation_config=_generation_config(path),
            **options,
        )
    except NotImplementedError:  # the model's class reads or changes weights while loading
        return None
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.config.name_or_path = str(path)
    return loaded


def take_lazy_tensors(model: nn.Module) -> dict[str, LazyTensor]:
    """Replace a model's lazy tensors by tensors on the meta device, and return them by name.

    Tied tensors have an entry for each name.
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


def lazy_tensors(path: str | Path) -> dict[str, LazyTensor]:
    """Return lazy tensors by their names in the files."""
    found: dict[str, LazyTensor] = {}
    for file in _files(path):
        found |= _of_safetensors(file) if file.endswith(".safetensors") else _of_torch(file)
    return found


def _generation_config(path: str | Path) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None  # the model derives one from its configuration


def _empty_like(tensor: LazyTensor) -> torch.Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return made
    return nn.Parameter(made, requires_grad=tensor.requires_grad)


def _files(path: str | Path) -> list[str]:
    """Return the files that transformers would load: the first existing kind, in its order."""
    from transformers.utils.hub import get_checkpoint_shard_files

    for name in (SAFE, f"{SAFE}.index.json", TORCH, f"{TORCH}.index.json"):
        if (file := _cached_path(path, name)) is not None:
            return get_checkpoint_shard_files(str(path), file)[0] if "index" in name else [file]
    return []


def _cached_path(path: str | Path, name: str) -> str | None:
    """Return the path of a model's file; files of the hub are downloaded."""
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
