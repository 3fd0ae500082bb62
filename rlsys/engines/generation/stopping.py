"""What ends a completion besides its length, the same in every engine: tokens and strings.

    model directory ──► end_of_sequence_ids   tokens that end every completion
                    ──► TextDecoder           text in which stop strings are looked for

Special tokens are part of that text: "<|im_end|>" is a stop string like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DecodeText = Callable[[list[int]], str]

# Tokens before a completion that decide how its first ones read: a leading space, or the end of a
# character that began there.
CONTEXT_TOKENS = 8


def end_of_sequence_ids(model_path: str | Path) -> tuple[int, ...]:
    """Those of the generation configuration, else of the configuration, and the tokenizer's: a chat
    model's end of turn stands in the one or in the other."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        ids = None
    if ids is None:
        ids = AutoConfig.from_pretrained(model_path).get_text_config().eos_token_id
    found = {ids} if isinstance(ids, int) else set(ids or ())
    end_of_turn = AutoTokenizer.from_pretrained(model_path).eos_token_id
    return tuple(sorted(found if end_of_turn is None else found | {end_of_turn}))


def text_decoder(model_path: str | Path) -> DecodeText:
    """Text of tokens by the model's tokenizer, nothing left out and nothing tidied up."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_path)

    def decode(token_ids: list[int]) -> str:
        text: str = tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    return decode


def text_after(decode: DecodeText, before: Sequence[int], token_ids: Sequence[int]) -> str:
    """Text of tokens as it reads after those before them."""
    context = list(before)[-CONTEXT_TOKENS:]
    whole, lead = decode([*context, *token_ids]), decode(context)
    return whole.removeprefix(lead) if whole.startswith(lead) else decode(list(token_ids))
