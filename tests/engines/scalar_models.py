"""Directories of small models with a head of one output, and their outputs in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlsys.types import Float32Array, TrainRow
from tests.engines.training_harness import VOCABULARY

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_labels": 1,
}


def scalar_model(directory: Path, kind: str, *, causal: bool = False, **settings: Any) -> Path:
    """Save a model with random weights that are large enough to distinguish texts.

    With `causal` it is a language model of the same configuration.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )

    from rlsys.launcher.tiny_models import build_tokenizer

    config = AutoConfig.for_model(kind, **(SMALL | settings))
    make: Any = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = make.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    build_tokenizer("0123456789+-*/=. #").save_pretrained(directory)
    return directory


def tokens_of(row: TrainRow) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([row.prompt_token_ids, row.token_ids])).long()


def plain_scores(directory: Path, rows: list[TrainRow]) -> list[float]:
    """Return the score of each row, computed separately."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        return [float(model(input_ids=tokens_of(row)[None]).logits[0, 0]) for row in rows]


def plain_values(directory: Path, rows: list[TrainRow]) -> list[Float32Array]:
    """Return the values before each completion token, each row computed separately."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    ).eval()
    found = []
    with torch.no_grad():
        for row in rows:
            hidden = model.base_model(input_ids=tokens_of(row)[None]).last_hidden_state
            first = len(row.prompt_token_ids) - 1
            found.append(model.score(hidden)[0, first:-1, 0].numpy())
    return found
