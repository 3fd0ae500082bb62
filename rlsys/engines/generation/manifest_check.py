"""Does a published version fit the model? Names and shapes, before anything is touched.

model directory ──► tensor_shapes ──► check_manifest(manifest, shapes)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlsys.engines.model_tensors import model_tensors
from rlsys.types import WeightManifest

Shapes = Mapping[str, tuple[int, ...]]  # of model_tensors, by Hugging Face name


def tensor_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters and buffers of the model at `path`, from its configuration alone.

    Raises ValueError where `path` holds no causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"model.path={path!r} holds no causal language model ({error}); give a Hugging Face "
            "model directory or hub name."
        ) from error
    return {name: tuple(tensor.shape) for name, tensor in model_tensors(model).items()}


def check_manifest(manifest: WeightManifest, shapes: Shapes) -> None:
    """Raise ValueError, with the first names, unless the names and shapes are those expected."""
    found = {name: tuple(entry.shape) for name, entry in manifest.entries.items()}
    problems = [
        *(f"{name} is missing" for name in shapes.keys() - found.keys()),
        *(f"{name} is not one of the model's" for name in found.keys() - shapes.keys()),
        *(
            f"{name} has shape {found[name]}, the model {shapes[name]}"
            for name in found.keys() & shapes.keys()
            if found[name] != shapes[name]
        ),
    ]
    if problems:
        raise ValueError(
            f"weights of version {manifest.version} do not fit the model in {len(problems)} of its "
            f"tensors: {'; '.join(sorted(problems)[:4])}. Trainer and generation engines must "
            "load the same model."
        )
