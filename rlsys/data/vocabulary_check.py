"""Checks that a model knows its tokenizer's tokens, and that models share one vocabulary.

In: the policy's tokenizer, the size of its model, and the other models of the run. Rollouts travel
as token ids, so a reference, teacher, critic or reward model with another vocabulary would read
another text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsys.data.hub import check_model_path
from rlsys.data.prompts import load_tokenizer
from rlsys.errors import require


def check_vocabulary(tokenizer: Any, num_tokens: int, path: str) -> None:
    """Raise InvalidValue for a tokenizer with tokens that its model at `path` does not have.

    Added tokens are allowed beyond the model's `num_tokens`: some text models come with the image
    tokens of their family.
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
        "model.path",
        path,
        rule=f"the model has {num_tokens} tokens, and its tokenizer {len(beyond)} more, such as "
        f"{first!r} ({beyond.get(first)})",
        fix="Put the model's own tokenizer there, or add rows to its embedding "
        "(model.resize_token_embeddings).",
    )


def check_vocabularies(tokenizer: Any, paths: Mapping[str, str]) -> None:
    """Raise InvalidValue for a model whose tokens differ from the policy's.

    Args:
        tokenizer: The policy's tokenizer.
        paths: Model paths by role. An empty path means the policy's weights.
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
            setting,
            path,
            rule=f"has another vocabulary than the policy: {len(wrong)} of the policy's {len(own)} "
            f"tokens mean something else there, such as {wrong[:1]}",
            fix="Give a model with the policy's tokenizer, because rollouts travel as token ids.",
        )
