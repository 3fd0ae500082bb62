"""Whether models that read each other's tokens mean the same by them.

In: the policy's tokenizer, and the models beside it. Rollouts travel as token ids, so that a
reference, a teacher, a critic or a reward model of another vocabulary would read another text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsys.config import require
from rlsys.data.hub import check_model_path
from rlsys.data.prompts import load_tokenizer


def check_vocabularies(tokenizer: Any, paths: Mapping[str, str]) -> None:
    """Raise ValueError for a model whose tokens are not the policy's. `paths`: by role; an empty
    one takes the policy's weights."""
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
