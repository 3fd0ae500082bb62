"""A Hugging Face checkpoint of the trained policy, with the tokenizer that it began with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlsys.checkpoint import new_directory


def export_model(
    model: Any, tensors: Mapping[str, torch.Tensor], tokenizer_path: str | Path, directory: Path
) -> None:
    """Write `tensors`, all of one dtype and keyed by parameter name, with the configuration of
    `model`. Replaces `directory` as a whole, or not at all.

    Raises OSError for an unwritable directory or a full disk.
    """
    from transformers import AutoTokenizer

    dtype = next(iter(tensors.values())).dtype
    with new_directory(directory) as unfinished:
        before = model.config.dtype
        model.config.dtype = dtype
        try:
            model.save_pretrained(unfinished, state_dict=dict(tensors))
        finally:
            model.config.dtype = before
        AutoTokenizer.from_pretrained(tokenizer_path).save_pretrained(unfinished)
