"""Models that read the same token ids must mean the same by them.

In: the tokenizer that makes the ids, and another model's directory. Out: nothing, or a ValueError
that names the first token that is another there.
"""

from __future__ import annotations

from typing import Any

from rlsys.config import require
from rlsys.data.prompts import load_tokenizer


def check_vocabulary(name: str, path: str, tokenizer: Any) -> None:
    """Every token of `tokenizer` is the same for the model `name` at `path`, which may have more.
    Raises ValueError else, and for a model without a tokenizer."""
    theirs: dict[str, int] = load_tokenizer(path).get_vocab()
    ours: dict[str, int] = tokenizer.get_vocab()
    differs = sorted(
        (token_id, token) for token, token_id in ours.items() if theirs.get(token) != token_id
    )
    example = differs[0] if differs else (0, "")
    require(
        not differs,
        f"model {name!r} at {path!r} has another vocabulary: {len(differs)} of {len(ours)} tokens "
        f"differ, first {example[1]!r}, which is {example[0]} for the policy and "
        f"{theirs.get(example[1], 'none')} there; give a model with the policy's tokenizer.",
    )
