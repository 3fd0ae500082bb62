"""Whether a model knows its tokenizer's tokens, and models that read each other's mean the same.

In: the policy's tokenizer, its model's size, and the models beside it. Rollouts travel as token
ids, so that a reference, a teacher, a critic or a reward model of another vocabulary would read
another text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsys.config import require
from rlsys.data.hub import check_model_path
from rlsys.data.prompts import load_tokenizer


def check_vocabulary(tokenizer: Any, num_tokens: int, path: str) -> None:
    """Raise ValueError for a tokenizer with tokens beyond the `num_tokens` of its model, which
    model.path gives. Added tokens may be there: some text models come with those of their family
    for images.
    """
    added = tokenizer.get_added_vocab()
    needed = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
    beyond = {
        token: number
        for token, number in tokenizer.get_vocab().items()
        if number >= num_tokens and (token in needed or token not in added)
    }
    first = min(beyond, key=beyond.__getitem__, default="")
    require(
        not beyond,
        f"model.path={path!r}: the model has {num_tokens} tokens, and its tokenizer {len(beyond)} "
        f"more, such as {first!r} ({beyond.get(first)}); put the model's own tokenizer there, or "
        "add rows to its embedding (model.resize_token_embeddings).",
    )


def check_vocabularies(tokenizer: Any, paths: Mapping[str, str]) -> None:
    """Raise ValueError for a model whose tokens are not the policy's. `paths`: by role; an empty
    one takes the policy's weights.
    """
    own = tokenizer.get_vocab()
    for role, path in paths.items():
        if not path:
            continue
        setting = f"{role}.model.path"
        check_model_path(path, setting=setting)
        theirs = load_tokenizer(path, setting=setting).get_vocab()
        differing = sorted(
            (token for token in own.keys() & theirs.keys() if own[token] != theirs[token]),
            key=own.__getitem__,
        )
        lacking = sorted(own.keys() - theirs.keys(), key=own.__getitem__)
        wrong = [*lacking, *differing]
        require(
            not wrong,
            f"{setting}={path!r} has another vocabulary than the policy: {len(wrong)} of "
            f"the policy's {len(own)} tokens mean something else there, such as {wrong[:1]}; "
            "rollouts travel as token ids, so give a model with the policy's tokenizer.",
        )
