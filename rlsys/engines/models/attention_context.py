"""Limits on the number of tokens in a row, from a model's configuration.

config ─► row_limit       longest row that training and sampling compute in the same way
       ─► context_length  maximum tokens of prompt and completion together
"""

from __future__ import annotations

from typing import Any

CONTEXT_NAMES = (
    "max_position_embeddings",
    "max_seq_len",
    "max_sequence_length",
    "n_positions",
    "seq_length",
)
UNBOUNDED = 1 << 30  # for models whose configuration has no context length (relative positions)


def context_length(config: Any) -> int:
    """Return the maximum tokens of prompt and completion together, in [1, UNBOUNDED]."""
    text = config.get_text_config()
    lengths = (getattr(text, name, None) for name in CONTEXT_NAMES)
    context = next((length for length in lengths if isinstance(length, int) and length > 0), None)
    limit = row_limit(config)
    return min(context or UNBOUNDED, limit or UNBOUNDED)


def row_limit(config: Any) -> int | None:
    """Return the longest row that gives the same numbers at once and token by token.

    None means that a row's length does not matter. Dynamic NTK and longrope change the angles of
    *all* tokens of a row once it is longer than this limit. Keys that were computed while the row
    was short are then not those of the long row, so training would see other numbers than sampling.
    """
    text = config.get_text_config()
    limits = []
    for rotary in _rotaries(text):
        kind = str(rotary.get("rope_type"))
        if "dynamic" in kind:
            limits.append(text.max_position_embeddings)
        elif kind == "longrope":
            limits.append(rotary["original_max_position_embeddings"])
    return min(limits, default=None)


def _rotaries(config: Any) -> list[dict[str, Any]]:
    """Return parameters of each rotary embedding; some models have one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [one for one in parameters.values() if isinstance(one, dict)] or [parameters]
