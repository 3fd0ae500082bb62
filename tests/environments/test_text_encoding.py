"""Text of others, in which no special token is found, whatever it says."""

from __future__ import annotations

import time

import pytest

from rlsys.environments.text_encoding import TextEncoder, unguarded
from rlsys.tiny_models import build_tokenizer

CHARACTERS = "abcdefghijklmnopqrstuvwxyz<>|_; "


def encoder(*special: str) -> TextEncoder:
    tokenizer = build_tokenizer(CHARACTERS)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return TextEncoder(tokenizer)


@pytest.mark.parametrize("special", ["<|im_end|>", "__en__", "_", "<<<", "aa"])
@pytest.mark.parametrize(
    "text", ["{0}", "a_{0}", "{0}{0}", "<{0}<_{0}_", "aaaa", "\ufdd1_{0}\ufdd2"]
)
def test_what_is_guarded_holds_no_special_token_and_says_the_same(special: str, text: str) -> None:
    told = text.format(special)
    guarded = encoder(special).guarded(told)
    assert special not in guarded
    assert unguarded(guarded) == told


def test_a_text_of_nothing_but_special_tokens_is_guarded_in_linear_time() -> None:
    one = encoder("<|im_end|>")
    start = time.perf_counter()
    guarded = one.guarded("<|im_end|>" * 50_000)
    assert time.perf_counter() - start < 2.0  # half a minute, where each begins anew
    assert "<|im_end|>" not in guarded
