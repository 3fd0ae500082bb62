"""Characters without a token in a tokenizer.

In: a tokenizer, texts. Out: the first character of a text that encoding would lose. Byte-level
tokenizers lose nothing. The tokenizer of `OwnModel(characters=...)` drops other characters without
an error. Tokenizers with an unknown token replace them by it.
"""

from __future__ import annotations

from typing import Any

from rlsys.errors import require

# Private characters: a tokenizer that has tokens for these has tokens for all characters.
PROBES = ("\ue000", "\U0010fff0")


class Alphabet:
    """Characters that a tokenizer can encode.

    Characters are tested when they first occur, so that checking many texts is fast.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._known: set[str] = set()
        self._unknown: set[str] = set()
        # A tokenizer without a backend raises.
        self._loses_nothing = self._backend is None or not any(map(self._is_lost, PROBES))

    def check(self, text: str, where: str, *, change: str) -> None:
        """Check that encoding loses no character of a text.

        Raises:
            InvalidValue: It would. The field is `where`, and the fix is to change `change`, such as
                "the row".
        """
        lost = self.first_lost(text)
        require(
            lost is None,
            where,
            text,
            rule=f"contains the character {lost!r}, for which the model's tokenizer has no token",
            fix=f"Add it to OwnModel.characters, use another model, or change {change}.",
        )

    def first_lost(self, text: str) -> str | None:
        """Return the first character that encoding would lose; None if it loses none."""
        if self._loses_nothing or self._known.issuperset(text):
            return None
        for character in set(text) - self._known - self._unknown:
            (self._unknown if self._is_lost(character) else self._known).add(character)
        return None if self._unknown.isdisjoint(text) else self._first_unknown(text)

    def _is_lost(self, character: str) -> bool:
        """Return whether the vocabulary has no token for a character.

        Characters that the tokenizer removes deliberately, such as a second space, are not lost.
        """
        if token_ids := self._token_ids(character):
            return self._tokenizer.unk_token_id in token_ids
        text, backend = character, self._backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        if backend.pre_tokenizer is not None:
            text = "".join(piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text))
        return text != ""

    def _first_unknown(self, text: str) -> str | None:
        """Return the first unknown character outside added tokens such as `<eos>`."""
        for token in sorted(self._tokenizer.get_added_vocab(), key=len, reverse=True):
            text = text.replace(token, "")
        return next((character for character in text if character in self._unknown), None)

    def _token_ids(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids
