"""Characters that a tokenizer has no token for.

In: a tokenizer, texts. Out: the first character of a text that would vanish. Tokenizers of bytes
lose nothing. One of a few characters, such as `OwnModel(characters=...)` has, leaves out the others
without an error; one with a token for the unknown writes that token in their place.
"""

from __future__ import annotations

import reprlib
from typing import Any

from rlsys.config import require

# Of no alphabet: a tokenizer that has tokens for these has some for everything.
PROBES = ("\ue000", "\U0010fff0")


class Alphabet:
    """What a tokenizer knows; it learns as it is asked, so that many texts cost little more than a
    look at their characters.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._known: set[str] = set()
        self._unknown: set[str] = set()
        # A tokenizer without a backend raises.
        self._loses_nothing = self._backend is None or not any(map(self._is_lost, PROBES))

    def check(self, text: str, where: str) -> None:
        """Raise ValueError, beginning with `where`, for a text with a character that would be left
        out.
        """
        if self._loses_nothing or self._known.issuperset(text):
            return
        for character in set(text) - self._known - self._unknown:
            (self._unknown if self._is_lost(character) else self._known).add(character)
        if self._unknown.isdisjoint(text):
            return
        lost = self._first_lost(text)
        require(
            lost is None,
            f"{where}: {reprlib.repr(text)} holds the character {lost!r}, which the model's "
            "tokenizer has no token for and would leave out; add it to OwnModel.characters, take a "
            "model that knows it, or change the row.",
        )

    def _is_lost(self, character: str) -> bool:
        """Whether the vocabulary is why there is no token for it; what a tokenizer cleans away on
        purpose, such as a second blank, is not lost.
        """
        if token_ids := self._token_ids(character):
            return self._tokenizer.unk_token_id in token_ids
        text, backend = character, self._backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        if backend.pre_tokenizer is not None:
            text = "".join(piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text))
        return text != ""

    def _first_lost(self, text: str) -> str | None:
        """Of the text without tokens such as `<eos>`, whose characters need none of their own."""
        for token in sorted(self._tokenizer.get_added_vocab(), key=len, reverse=True):
            text = text.replace(token, "")
        return next((character for character in text if character in self._unknown), None)

    def _token_ids(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids
