"""What ends a completion besides its length, the same in every engine: tokens and strings.

    model directory ──► end_of_sequence_ids   tokens that end every completion
                    ──► TextDecoder           text in which stop strings are looked for

Special tokens are part of that text: "<|im_end|>" is a stop string like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rlsys.text.tokenizer_boundary import TokenizerBoundary, text_behind

DecodeText = Callable[[list[int]], str]

# Tokens before a completion that decide how its first ones read: a leading space, or the end of a
# character that began there.
CONTEXT_TOKENS = 8


def end_of_sequence_ids(model_path: str | Path) -> tuple[int, ...]:
    """Those of the generation configuration, else of the configuration, and the tokenizer's: a chat
    model's end of turn stands in the one or in the other.
    """
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
    """Return a function that decodes tokens which follow others, special tokens included."""
    from transformers import AutoTokenizer

    return TokenizerBoundary(AutoTokenizer.from_pretrained(model_path)).decode_written


def text_after(decode: DecodeText, before: Sequence[int], token_ids: Sequence[int]) -> str:
    """Text of tokens as it reads after those before them."""
    return text_behind(decode, list(before)[-CONTEXT_TOKENS:], token_ids)
