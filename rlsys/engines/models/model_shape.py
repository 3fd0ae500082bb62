"""Sizes of a model, read from its config.json without loading weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlsys.common.hf_config import largest, numbers
from rlsys.data.hub import check_model_path, in_short, unreadable
from rlsys.dataflow.graph.stages import Head
from rlsys.engines.models.attention_context import context_length
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.errors import InvalidValue, require

# Larger models do not exist, and torch cannot represent tensors of such sizes on every machine.
MAX_PARAMETERS = 10**14


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model."""

    num_parameters: int
    buffer_bytes: int  # of buffers that are saved with the model
    linear_layers: Mapping[str, int]  # adaptable layers: inputs plus outputs, by name
    scalar_head: int = 0  # parameters of a head with one output, trained in addition to adapters
    kv_values_per_token: int  # elements of keys and values over all layers
    max_context: int
    config: Any  # the Hugging Face configuration


def model_shape(path: str, head: Head = "logits", *, setting: str = "model.path") -> ModelShape:
    """Return the sizes of a model with this head.

    `setting` is the option that gives `path`. Raises InvalidValue if `path` holds no such model.
    """
    check_model_path(path, setting=setting)

    from transformers import AutoConfig, AutoModelForCausalLM

    from rlsys.engines.models.scalar_lm import scalar_class, scalar_head
    from rlsys.engines.training.adapters import adaptable_layers

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        _check_sizes(config)
        with torch.device("meta"):
            if head == "logits":
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            else:
                config.num_labels = 1  # as load_scalar_lm reads it
                model = scalar_class(config)(config)
        text = config.get_text_config()
        num_heads = largest(text, "num_attention_heads", default=1)
        head_dim = largest(text, "head_dim", default=text.hidden_size // num_heads)
        num_kv_heads = largest(text, "num_key_value_heads", default=num_heads)
        kv_values_per_token = 2 * text.num_hidden_layers * num_kv_heads * head_dim
    except unreadable() as error:
        raise InvalidValue(
            setting,
            path,
            rule=f"holds no {'causal ' if head == 'logits' else ''}language model "
            f"({in_short(error)})",
            fix="Give a Hugging Face model directory or hub name.",
        ) from error
    num = num_parameters(model)
    score = scalar_head(model)
    require(
        num <= MAX_PARAMETERS,
        setting,
        path,
        rule=f"config.json describes a model of {num:.1e} parameters, more than "
        f"{MAX_PARAMETERS:.0e}",
        fix="Correct its sizes.",
    )
    return ModelShape(
        num_parameters=num,
        buffer_bytes=sum(
            tensor.nbytes
            for tensor in model_tensors(model).values()
            if not isinstance(tensor, torch.nn.Parameter)
        ),
        linear_layers={
            name: sum(module.weight.shape) for name, module in adaptable_layers(model).items()
        },
        scalar_head=0 if score is None else score.numel(),
        kv_values_per_token=kv_values_per_token,
        max_context=context_length(config),
        config=config,
    )


# Sizes in config.json that every model has. A layer may have its own value.
SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def _check_sizes(config: Any) -> None:
    """Raise InvalidValue for a size in config.json that is not positive."""
    text = config.get_text_config()
    for name in (*SIZES, "num_key_value_heads", "head_dim", "intermediate_size"):
        for number in numbers(text, name):
            require(
                number > 0 or (number == 0 and name not in (*SIZES, "head_dim")),
                f"config.json: {name}",
                number,
                rule="must be positive",
                fix="Restore the original value.",
            )


def num_parameters(module: torch.nn.Module) -> int:
    """Return the number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())
