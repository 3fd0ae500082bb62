"""Guarded text never contains special tokens."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlsys.launcher.tiny_models import build_tokenizer
from rlsys.text.guarded import (
    CHARS_PER_TOKEN,
    CUT_TOKENS,
    TextEncoder,
    unguarded,
)
from rlsys.text.tokenizer_boundary import TokenizerBoundary

CHARACTERS = "abcdefghijklmnopqrstuvwxyz<>|_; "


def encoder(*special: str) -> TextEncoder:
    tokenizer = build_tokenizer(CHARACTERS)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return TextEncoder(TokenizerBoundary(tokenizer))


@pytest.mark.parametrize("special", ["<|im_end|>", "__en__", "_", "<<<", "aa"])
@pytest.mark.parametrize(
    "text", ["{0}", "a_{0}", "{0}{0}", "<{0}<_{0}_", "aaaa", "\ufdd1_{0}\ufdd2"]
)
def test_guarded_text_has_no_special_token_and_is_restored(special: str, text: str) -> None:
    original = text.format(special)
    guarded = encoder(special).guarded(original)
    assert special not in guarded
    assert unguarded(guarded) == original


def test_a_text_of_special_tokens_is_guarded_in_linear_time() -> None:
    one = encoder("<|im_end|>")
    start = time.perf_counter()
    guarded = one.guarded("<|im_end|>" * 50_000)
    assert time.perf_counter() - start < 2.0  # a quadratic algorithm takes half a minute
    assert "<|im_end|>" not in guarded


def trained(model: Any, trainer: Any, pre_tokenizer: Any, normalizer: Any = None) -> TextEncoder:
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    corpus = ["the quick brown fox = 1234 + 5678;", "----------------", "aaaaaaaaaaaaaaaa", "éèê"]
    backend.train_from_iterator(corpus * 50, trainer)
    return TextEncoder(TokenizerBoundary(PreTrainedTokenizerFast(tokenizer_object=backend)))


ALPHABET = pre_tokenizers.ByteLevel.alphabet()
ENCODERS = {
    "bytes": lambda: trained(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=ALPHABET, show_progress=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        normalizers.NFC(),
    ),
    "one word": lambda: trained(  # a merge may reach anywhere
        models.BPE(unk_token="?", fuse_unk=True),
        trainers.BpeTrainer(vocab_size=300, special_tokens=["?"], show_progress=False),
        pre_tokenizers.Split(Regex("$^"), "isolated"),
    ),
    "unigram": lambda: trained(
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=60, special_tokens=["?"], unk_token="?", show_progress=False
        ),
        pre_tokenizers.Metaspace(),
    ),
    "words": lambda: trained(
        models.WordPiece(unk_token="?"),
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=["?"], show_progress=False),
        pre_tokenizers.Whitespace(),
        normalizers.BertNormalizer(),
    ),
    "characters": lambda: encoder(),
}
ENCODER_OF = {name: make() for name, make in ENCODERS.items()}


@pytest.mark.parametrize("name", ENCODERS)
@given(
    st.lists(st.sampled_from(["the ", "quick", "a", "-", " ", "\n", "é", "e\u0301", "1234", "漢"])),
    st.sampled_from([300, 3000]),
    st.integers(0, 3000),
)
def test_the_lower_bound_of_a_long_text_holds(
    name: str, words: list[str], num_repeats: int, max_tokens: int
) -> None:
    one, text = ENCODER_OF[name], "".join(words) * num_repeats
    beyond = one.num_tokens_beyond(text, max_tokens)
    num_tokens = len(one.encode_plain(text))
    if beyond is not None:
        assert max_tokens < beyond <= num_tokens
    else:  # three bytes a character, at most
        assert num_tokens <= 3 * CHARS_PER_TOKEN * (max_tokens + 2 * CUT_TOKENS)


def test_only_the_needed_part_of_a_long_text_is_encoded() -> None:
    one = encoder()
    assert one.num_tokens_beyond("ab c" * 2_500_000, 1000) is not None
    assert one.num_encoded < 10_000
    assert one.num_tokens_beyond("ab c" * 200, 1000) is None
