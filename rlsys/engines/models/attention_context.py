"""How many tokens a row may have, as its model's configuration says.

config ─► row_limit       beyond which a row cannot be computed, or not token by token
       ─► context_length  what prompt and completion may have together
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
UNBOUNDED = 1 << 30  # for models whose configuration names no context: attention by distance


def context_length(config: Any) -> int:
    """Tokens of prompt and completion together that the model can take, in [1, UNBOUNDED]."""
    text = config.get_text_config()
    lengths = (getattr(text, name, None) for name in CONTEXT_NAMES)
    context = next((length for length in lengths if isinstance(length, int) and length > 0), None)
    limit = row_limit(config)
    return min(context or UNBOUNDED, limit or UNBOUNDED)


def row_limit(config: Any) -> int | None:
    """The longest row that gives the same numbers at once and token by token; None where its length
    does not enter into them.

    Dynamic NTK and longrope turn *all* tokens of a row by other angles once it is longer than this.
    Keys computed while a row was short are then not those of the long row, and what was sampled
    token by token would not be what is trained on.
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
    """Parameters of each rotary embedding; some models have one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [one for one in parameters.values() if isinstance(one, dict)] or [parameters]
