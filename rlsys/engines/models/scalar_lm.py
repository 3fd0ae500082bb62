"""A Hugging Face model with a head of one output: a critic or a reward model.

    directory of a reward model ──► its head ─┐
    directory of a causal LM ─────► zeros ────┴─► AutoModelForSequenceClassification, num_labels=1
                                                    backbone ─► score ─► values of every token
                                                                         score of the last one

Critics and reward models have the same class, so each can be loaded from the other's files. A
missing head starts as zeros, so that no value depends on a random draw: a critic's first values are
0, where random ones would be noise of the size of the rewards, and a reward model starts with even
odds for all pairs. The head learns from the first step, the backbone from the second.

Shape legend: T tokens of a row, D width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlsys.data.hub import in_short, unreadable
from rlsys.engines.models.architecture_probe import (
    MODEL_CLASS,
    Architecture,
    Outputs,
    check_architecture,
    difference,
)
from rlsys.engines.models.causal_lm import backbone, check_finite, hide_progress_bars
from rlsys.engines.models.loading_report import (
    REPORTED,
    check_kinds,
    check_report,
    no_printed_report,
)
from rlsys.engines.models.weight_files import load_lazily
from rlsys.errors import InvalidValue, require

HAS_HEAD = "ForSequenceClassification"
SCALAR_HEAD = "score"  # attribute name of the head in these classes


def load_scalar_lm(path: str | Path, *, dtype: str, fresh_head: bool, lazy: bool = False) -> Any:
    """Load the model of a directory, with transformers' own attention.

    With `fresh_head`, a directory without a head, such as that of a causal LM, gets a head of
    zeros. With `lazy`, weights are lazy tensors if the files allow it (weight_files.py).

    Raises InvalidValue for a directory without a model, a head with another number of outputs, or a
    missing head without `fresh_head`.
    """
    from transformers import AutoConfig

    hide_progress_bars()
    config, kind, has_head = check_scalar_head(path, fresh_head=fresh_head)
    try:
        options = {"dtype": getattr(torch, dtype), "attn_implementation": "eager", **REPORTED}
        with no_printed_report():
            loaded = None
            if lazy:
                config = AutoConfig.from_pretrained(path, num_labels=1)
                loaded = load_lazily(config, path, lambda: (kind, config), **options)
            model, report = loaded or kind.from_pretrained(path, num_labels=1, **options)
    except unreadable() as error:
        raise _unreadable(path, error) from error
    head = scalar_head(model)
    fresh = None if has_head else head
    check_report(model, report, path, may_lack=[] if fresh is None else ["score.weight"])
    if fresh is not None:
        nn.init.zeros_(fresh)
    check_kinds(model, path)
    check_finite(model, path)
    return model


def check_scalar_head(
    path: str | Path, *, fresh_head: bool, setting: str = "model.path"
) -> tuple[Any, Any, bool]:
    """Return a directory's configuration, its class in transformers, and whether it has a head.

    No weights are read. `setting` is the option that gives the path. Raises InvalidValue as
    `load_scalar_lm` does.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path)
        kind = scalar_class(config)
    except unreadable() as error:
        raise _unreadable(path, error, setting) from error
    name = (config.architectures or [type(config).__name__])[0]
    has_head = name.endswith(HAS_HEAD)
    require(
        not has_head or config.num_labels == 1,
        setting,
        str(path),
        rule=f"has a head of {config.num_labels} outputs ({name}), but needs one output",
        fix="Give a model with num_labels=1"
        + (", or a causal language model, whose head starts as zeros." if fresh_head else "."),
    )
    require(
        has_head or not name.endswith("Classification"),
        setting,
        str(path),
        rule=f"has a head of another kind ({name}), which would be lost",
        fix=f"Save it as AutoModel{HAS_HEAD} with num_labels=1, whose head has no bias, or give a "
        "causal language model.",
    )
    require(
        has_head or fresh_head,
        setting,
        str(path),
        rule=f"has no scalar head ({name}), so its scores would come from random weights",
        fix="Give a reward model that AutoModelForSequenceClassification loads, with "
        "num_labels=1, or train one.",
    )
    return config, kind, has_head


def scalar_head(model: Any) -> nn.Parameter | None:
    """Return the weight [1, D] of a head that is a single linear layer without bias, else None."""
    head: Any = getattr(model, SCALAR_HEAD, None)
    is_plain = isinstance(head, nn.Linear) and len(list(head.parameters())) == 1
    return head.weight if is_plain and head.out_features == 1 else None


def scalar_outputs(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return outputs [...] float32 of hidden states [..., D] of any precision."""
    outputs: torch.Tensor = hidden.float() @ model.score.weight[0].float()
    return outputs


def last_token(token_ids: torch.Tensor, pad_token_id: int | None) -> int:
    """Return the index of the last token of [T] that is not padding, as transformers does."""
    if pad_token_id is None:
        return len(token_ids) - 1
    places = (token_ids != pad_token_id).nonzero()
    return int(places[-1]) if len(places) else 0


def pad_token_id(model: Any) -> int | None:
    """Return the padding token of a model's configuration."""
    found: int | None = getattr(model.config.get_text_config(), "pad_token_id", None)
    return found


def check_scalar_architecture(model: Any) -> Architecture:
    """Check values of every token and scores of rows, as `check_architecture` does.

    Raises InvalidValue for an architecture that the engines would compute incorrectly.
    """
    found = check_architecture(model, VALUES)
    small = found.miniature
    with torch.no_grad():
        for row, values in zip(found.rows, found.expected, strict=True):
            score = small(input_ids=row[None], use_cache=False).logits[0]
            if difference(score, values[last_token(row, pad_token_id(small))]) > 1e-3:
                raise InvalidValue(
                    MODEL_CLASS,
                    type(model).__name__,
                    rule="does not score a row at its last token",
                    fix="Use an architecture of docs/models.md.",
                )
    return found


def _values_by_transformers(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    hidden = model.base_model(input_ids=token_ids[None], use_cache=False).last_hidden_state
    values: torch.Tensor = model.score(hidden)[0]  # [T, 1]
    return values


def _values_by_engines(model: Any, token_ids: torch.Tensor, **options: Any) -> torch.Tensor:
    hidden = backbone(model)(input_ids=token_ids, use_cache=False, **options).last_hidden_state
    return scalar_outputs(model, hidden)[..., None]


VALUES = Outputs(
    by_transformers=_values_by_transformers, by_engines=_values_by_engines, name="values"
)


def scalar_class(config: Any) -> Any:
    """Return transformers' sequence classification class for a configuration.

    For a causal language model without one, the class is built as transformers builds its own.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    from transformers.modeling_layers import GenericForSequenceClassification

    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    causal = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    family = next(base for base in causal.__mro__ if base.__name__.endswith("PreTrainedModel"))
    return type(
        f"{causal.__name__.partition('For')[0]}{HAS_HEAD}",
        (GenericForSequenceClassification, family),
        {"base_model_prefix": causal.base_model_prefix},
    )


def _unreadable(path: str | Path, error: Exception, setting: str = "model.path") -> InvalidValue:
    return InvalidValue(
        setting,
        str(path),
        rule=f"holds no model that a scalar head fits on ({in_short(error)})",
        fix="Give the directory or hub name of a reward model or a causal language model.",
    )
