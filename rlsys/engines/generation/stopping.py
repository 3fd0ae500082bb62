"""Tokens and strings that end a completion, the same in every engine.

    model directory ──► end_of_sequence_ids ──► stop_ids   tokens that end a completion
                    ──► text_decoder   text that is searched for stop strings

The text includes special tokens: "<|im_end|>" is a stop string like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rlsys.text.tokenizer_boundary import TokenizerBoundary, check_encodable, text_behind
from rlsys.types import GenerationRequest

DecodeText = Callable[[list[int]], str]

# Tokens before a completion that affect how its first tokens decode: a leading space, or the end of
# a character.
CONTEXT_TOKENS = 8


def check_stop(request: GenerationRequest) -> None:
    """Raise InvalidValue for stop strings that no text can contain."""
    for text in request.sampling.stop:
        where = f"request {request.request_id!r}: stop"
        check_encodable(text, where, change="the stop string")


def stop_ids(request: GenerationRequest, end_ids: Iterable[int]) -> list[int]:
    """Return the tokens that end a request, sorted. `end_ids` are the model's own."""
    sampling = request.sampling
    return sorted({*sampling.stop_token_ids, *(end_ids if sampling.stop_at_eos else ())})


def end_of_sequence_ids(model_path: str | Path) -> tuple[int, ...]:
    """Return the tokens that end a completion of a model, unless its request excludes them.

    They are those of the generation configuration, or else the configuration, and the tokenizer's:
    chat models have their end of turn in either.
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
    """Return a function that decodes tokens following others, special tokens included."""
    from transformers import AutoTokenizer

    return TokenizerBoundary(AutoTokenizer.from_pretrained(model_path)).decode_written


def text_after(decode: DecodeText, before: Sequence[int], token_ids: Sequence[int]) -> str:
    """Return the text of tokens as it reads after those before them."""
    return text_behind(decode, list(before)[-CONTEXT_TOKENS:], token_ids)
