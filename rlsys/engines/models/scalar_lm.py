"""A Hugging Face model with a head of one output: a critic, a reward model.

    directory of a reward model ──► its head ─┐
    directory of a causal LM ─────► zeros ────┴─► AutoModelForSequenceClassification, num_labels=1
                                                    backbone ─► score ─► values of every token
                                                                         score of the last one

One class of model serves both: what a critic is saved as is a reward model, and loads as one, and
the other way round. A head that was not there begins as zeros, so that no value depends on a draw:
a critic's first values are then 0, where random ones would be noise of the size of the rewards,
and all of a reward model's pairs begin at even odds. The head learns from the first step, the
backbone from the second.

Shape legend: T tokens of a row, D width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlsys.data.hub import in_short, unreadable
from rlsys.engines.models.architecture_probe import (
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
from rlsys.engines.models.weight_files import load_promised

HAS_HEAD = "ForSequenceClassification"
SCALAR_HEAD = "score"  # as these classes call it


def load_scalar_lm(
    path: str | Path, *, dtype: str, fresh_head: bool, promised: bool = False
) -> Any:
    """The model of a directory, with transformers' own attention. `fresh_head`: where the directory
    has no head, as that of a causal LM, begin with zeros. `promised`: its weights are promises
    where they can be (weight_files.py).

    Raises ValueError for a directory that holds no model, a head of another number of outputs, or
    none where one must be.
    """
    from transformers import AutoConfig

    hide_progress_bars()
    config, kind, has_head = check_scalar_head(path, fresh_head=fresh_head)
    try:
        options = {"dtype": getattr(torch, dtype), "attn_implementation": "eager", **REPORTED}
        with no_printed_report():
            loaded = None
            if promised:
                config = AutoConfig.from_pretrained(path, num_labels=1)
                loaded = load_promised(config, path, lambda: (kind, config), **options)
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
    """The configuration of a directory, transformers' class for it, and whether it has a head; no
    weights are read. Raises ValueError as `load_scalar_lm` does; `setting` gives the path.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path)
        kind = scalar_class(config)
    except unreadable() as error:
        raise _unreadable(path, error, setting) from error
    name = (config.architectures or [type(config).__name__])[0]
    has_head = name.endswith(HAS_HEAD)
    if has_head and config.num_labels != 1:
        raise ValueError(
            f"{setting}={str(path)!r} has a head of {config.num_labels} outputs ({name}), where "
            "one is wanted; give a model with num_labels=1"
            + (", or a causal language model, whose head begins with zeros." if fresh_head else ".")
        )
    if name.endswith("Classification") and not has_head:
        raise ValueError(
            f"{setting}={str(path)!r} has a head of another kind ({name}), which would be lost; "
            f"save it as AutoModel{HAS_HEAD} with num_labels=1, whose head has no bias, or give a "
            "causal language model."
        )
    if not has_head and not fresh_head:
        raise ValueError(
            f"{setting}={str(path)!r} has no scalar head ({name}): its scores would be those of "
            "random weights; give a reward model that AutoModelForSequenceClassification loads, "
            "with num_labels=1, or train one."
        )
    return config, kind, has_head


def scalar_head(model: Any) -> nn.Parameter | None:
    """[1, D], where that is all there is to a model's head; None where it is more, or elsewhere."""
    head: Any = getattr(model, SCALAR_HEAD, None)
    is_plain = isinstance(head, nn.Linear) and len(list(head.parameters())) == 1
    return head.weight if is_plain and head.out_features == 1 else None


def scalar_outputs(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[...] float32 of hidden states [..., D], whatever their precision."""
    outputs: torch.Tensor = hidden.float() @ model.score.weight[0].float()
    return outputs


def last_token(token_ids: torch.Tensor, pad_token_id: int | None) -> int:
    """Where transformers takes a row's score from: the last token of [T] that is no padding."""
    if pad_token_id is None:
        return len(token_ids) - 1
    places = (token_ids != pad_token_id).nonzero()
    return int(places[-1]) if len(places) else 0


def pad_token_id(model: Any) -> int | None:
    found: int | None = getattr(model.config.get_text_config(), "pad_token_id", None)
    return found


def check_scalar_architecture(model: Any) -> Architecture:
    """As `check_architecture`, of the values of every token and of a row's score. Raises ValueError
    for a model that the engines would get wrong.
    """
    found = check_architecture(model, VALUES)
    small = found.miniature
    with torch.no_grad():
        for row, values in zip(found.rows, found.expected, strict=True):
            score = small(input_ids=row[None], use_cache=False).logits[0]
            if difference(score, values[last_token(row, pad_token_id(small))]) > 1e-3:
                raise ValueError(
                    f"{type(model).__name__} takes the score of a row elsewhere than from its last "
                    "token; use an architecture whose class does."
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
    """Transformers' class for a configuration. For a causal language model without one, it is made
    as transformers makes its own.
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


def _unreadable(path: str | Path, error: Exception, setting: str = "model.path") -> ValueError:
    return ValueError(
        f"{setting}={str(path)!r} holds no model that a scalar head fits on ({in_short(error)}); "
        "give the directory or hub name of a reward model or a causal language model."
    )
