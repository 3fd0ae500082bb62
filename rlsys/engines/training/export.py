"""A Hugging Face checkpoint of the trained policy, with the tokenizer that it began with."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlsys.checkpoint import new_directory
from rlsys.engines.causal_lm import save_model


def export_model(
    model: Any,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    tokenizer_path: str | Path,
    directory: Path,
) -> None:
    """Write `tensors`, all that `model_tensors` names, with the configuration of `model` and
    `dtype` as the precision that it is loaded in by default. Replaces `directory` as a whole, or
    not at all.

    Raises OSError for an unwritable directory or a full disk.
    """
    from transformers import AutoTokenizer

    with new_directory(directory) as unfinished:
        save_model(model, unfinished, state_dict=dict(tensors))
        # What was written there is the dtype of `model`, whose parameters are float32 masters.
        config = copy.deepcopy(model.config)
        config.dtype = dtype
        config.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(tokenizer_path).save_pretrained(unfinished)
