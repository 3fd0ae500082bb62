"""Encoding and decoding with one tokenizer, exact for text that is trained or scored.

    prompt text   ── encode_prompts ──►   tokens as the tokenizer makes them
    written text  ── encode_written ──►   tokens that decode to this text after any other tokens
    sampled tokens ── completion_text ──► the text that a reward reads

A prompt is encoded like the model's family does, with its blanks and <bos>. A written text (a
demonstration, a reply of a chat, a forced phrase) follows other tokens. It gets no blank, and no
normalizer changes it: decode(prompt + written) is decode(prompt) + the text, or encoding raises.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from enum import Enum
from functools import cached_property
from typing import Any

from rlsys.errors import InvalidValue, require
from rlsys.text import tokenizer_parts
from rlsys.text.alphabet import Alphabet
from rlsys.types import FinishReason

# Texts to encode before another text, for a tokenizer that cannot be copied.
MARKERS = ("\n", "=", "a")


class Position(Enum):
    """Position of a piece of text relative to the tokens before it."""

    START = "start"
    SPECIAL = "special token"
    TEXT = "text"


class TokenizerBoundary:
    """Encoder and decoder with one Hugging Face tokenizer.

    The tokenizer is copied when needed. Do not add tokens to it afterwards.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        named = set(tokenizer.all_special_tokens)  # not all of them are marked as special
        found = {
            int(i): token
            for i, token in tokenizer.added_tokens_decoder.items()
            if token.special or token.content in named
        }
        self.special_tokens = list(found.values())
        self.special_token_ids = {str(token.content): i for i, token in found.items()}
        self._special_ids = frozenset(self.special_token_ids.values())
        self._is_special = pattern_of(list(self.special_token_ids))
        ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
        self._end_ids = frozenset(int(one) for one in ends if one is not None)
        self._encoders: dict[Position, Any] = {}
        self._copies: list[tuple[tokenizer_parts.Parts, Any]] = []

    @cached_property
    def alphabet(self) -> Alphabet:
        """Characters that the tokenizer can encode."""
        return Alphabet(self.tokenizer)

    @cached_property
    def opening(self) -> list[int]:
        """The tokens, such as <bos>, that the tokenizer puts before a text."""
        plain: list[int] = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        full: list[int] = self.tokenizer("a", add_special_tokens=True)["input_ids"]
        at = next(
            (i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain), 0
        )
        return full[:at]

    @cached_property
    def encodes_all(self) -> bool:
        """True if each text has tokens that decode to exactly this text.

        The tokenizer then has a token for each byte, and its parts drop nothing.
        """
        return (
            self._backend is not None
            and type(self._backend.model).__name__ == "BPE"
            and tokenizer_parts.drops_nothing(self._parts)
            and all(
                self._backend.token_to_id(byte) is not None
                for byte in tokenizer_parts.bytes_of_text()
            )
        )

    # Encoding.

    def encode_prompts(self, texts: Sequence[str], *, with_opening: bool) -> list[list[int]]:
        """Return the tokens of whole texts, special tokens among them, as the tokenizer makes them.

        Args:
            texts: Prompts. A chat template writes <bos> itself.
            with_opening: Put tokens such as <bos> before each. Tokens that the tokenizer appends,
                such as <eos>, are always left out, because a completion follows.
        """
        if not texts:
            return []
        encoded: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False)[
            "input_ids"
        ]
        return [[*self.opening, *ids] if with_opening else list(ids) for ids in encoded]

    def encode_written(self, texts: Sequence[str], where: str, *, change: str) -> list[list[int]]:
        """Return the tokens of texts that follow other tokens, special tokens among them.

        Raises:
            InvalidValue: No tokens decode to exactly one of the texts. The field is `where`, and
                the fix is to change `change`, such as "the row".
        """
        return [self._encode_written(text, where, change) for text in texts]

    def _encode_written(self, text: str, where: str, change: str) -> list[int]:
        check_encodable(text, where, change=change)
        self.alphabet.check(text, where, change=change)
        token_ids: list[int] = []
        end = 0
        for found in self._is_special.finditer(text) if self._is_special is not None else ():
            token_ids += self._exact(text[end : found.start()])
            token_ids.append(self.special_token_ids[found.group()])
            end = found.end()
        token_ids += self._exact(text[end:])
        again = self.decode_written(token_ids)
        require(
            again == text,
            where,
            text,
            rule=f"no tokens of the model decode to exactly this text; the best ones decode to "
            f"{reprlib.repr(again)}, which differs from character "
            f"{_first_difference(text, again)} on",
            fix=f"Change {change}, or use another model.",
        )
        return token_ids

    def must_encode(self, text: str, max_tokens: int, where: str) -> bool:
        """Return whether a text of a row must be encoded to know that it fits into `max_tokens`.

        Raises:
            InvalidValue: The text has half a character. The field is `where`.
        """
        check_encodable(text, where, change="the row")
        return not self.encodes_all or len(text.encode()) > max_tokens

    def ended(self, token_ids: list[int]) -> list[int]:
        """Return the tokens with the tokenizer's end of sequence as the last one.

        Raises:
            InvalidValue: The tokenizer has no end of sequence.
        """
        end = self.tokenizer.eos_token_id
        require(
            end is not None,
            "eos_token",
            rule="the tokenizer has no end of sequence, which written completions end with",
            fix="Set one in the tokenizer.",
        )
        return token_ids if token_ids[-1:] == [end] else [*token_ids, int(end)]

    def encode_plain(self, text: str, position: Position) -> list[int]:
        """Return the tokens of a text, with special tokens as plain text."""
        if not text:
            return []
        if self._backend is None:
            is_within = position is Position.TEXT
            return self._encode_behind_marker(text) if is_within else self._slow(text)
        if position not in self._encoders:
            self._encoders[position] = self._copy(self._parts_at(position))
        ids: list[int] = self._encoders[position].encode(text, add_special_tokens=False).ids
        return ids

    def _parts_at(self, position: Position) -> tokenizer_parts.Parts:
        match position:
            case Position.START:
                return self._parts
            case Position.SPECIAL:
                return tokenizer_parts.behind_special_token(self._parts)
            case Position.TEXT:
                return tokenizer_parts.within_text(self._parts)

    def position(self, last: int | None) -> Position:
        """Return the position after a token; None means no token."""
        if last is None:
            return Position.START
        return Position.SPECIAL if last in self._special_ids else Position.TEXT

    @cached_property
    def has_positions(self) -> bool:
        """Return whether the tokens of a text depend on its position."""
        if self._backend is None:
            return True
        return tokenizer_parts.within_text(self._parts) != self._parts

    def shared_beginning(self, one: str, other: str) -> str:
        """Return the common beginning of two texts, without a part of a special token."""
        num = next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
            min(len(one), len(other)),
        )
        for found in self._is_special.finditer(one) if self._is_special is not None else ():
            if found.start() < num < found.end():
                return one[: found.start()]
        return one[:num]

    # Decoding. Special tokens become their text, halves of characters U+FFFD.

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens that start with the first one of a prompt."""
        if self._backend is not None:
            text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
            return text
        return str(
            self.tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def decode_written(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens that follow others, including a blank at its start."""
        if self._backend is None:
            before = self._slow(MARKERS[0])
            return text_behind(self.decode, before, token_ids)
        if self._decoder is None:
            return self.decode(token_ids)
        tokens = [self._backend.id_to_token(int(one)) for one in token_ids]
        text: str = self._decoder.decode([token for token in tokens if token is not None])
        return text

    def completion_text(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason,
        stop: Sequence[str] = (),
    ) -> str:
        """Return the text of a completion for rewards, without the tokens that end it.

        Removed at the end are the end of sequence and padding, and another special token that ended
        the completion, unless it belongs to one of the `stop` strings. Other special tokens, such
        as <think>, are kept.
        """
        ids = list(token_ids)
        num = len(ids)
        while num and ids[num - 1] in self._end_ids:
            num -= 1
        if num == len(ids) and num and finish_reason is FinishReason.STOP:
            num -= ids[-1] in self._special_ids and not self._ends_with(ids, stop)
        return self.decode_written(ids[:num])

    def _ends_with(self, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
        return bool(stop) and self.decode_written(token_ids).endswith(tuple(stop))

    # Copies of the tokenizer.

    @cached_property
    def _parts(self) -> tokenizer_parts.Parts:
        return tokenizer_parts.parts_of(self._backend)

    @cached_property
    def _decoder(self) -> Any:
        """Decoder of texts that follow others; None if it is the tokenizer's."""
        within = tokenizer_parts.within_text(self._parts)
        if within.decoder == self._parts.decoder:
            return None
        return tokenizer_parts.with_parts(within).decoder

    @cached_property
    def _exact_parts(self) -> tokenizer_parts.Parts:
        return tokenizer_parts.exact(self._parts)

    @cached_property
    def _encodes_exactly(self) -> bool:
        """True if the tokenizer itself encodes exactly, for texts that its normalizer keeps."""
        within = tokenizer_parts.within_text(self._parts)
        backend = self._backend
        return (
            within.pre_tokenizer == self._parts.pre_tokenizer
            and within.normalizer == self._parts.normalizer
            and self._exact_parts.normalizer is None
            and backend.truncation is None
            and backend.padding is None
        )

    def _exact(self, text: str) -> list[int]:
        """Return the tokens of a text without special tokens that follows others."""
        if not text:
            return []
        if self._backend is None:
            return self._encode_behind_marker(text)
        backend = self._backend
        if not self._encodes_exactly or (
            backend.normalizer is not None and backend.normalizer.normalize_str(text) != text
        ):
            backend = self._copy(self._exact_parts)
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    def _copy(self, parts: tokenizer_parts.Parts) -> Any:
        """Return a copy with these parts that encodes special tokens as text.

        Equal parts share a copy.
        """
        for known, made in self._copies:
            if known == parts:
                return made
        from tokenizers import Tokenizer

        made = Tokenizer.from_str(self._backend.to_str())
        changed = tokenizer_parts.with_parts(parts)
        for name in vars(parts):
            setattr(made, name, getattr(changed, name))
        made.no_truncation()
        made.no_padding()
        made.encode_special_tokens = True
        self._copies.append((parts, made))
        return made

    def _encode_behind_marker(self, text: str) -> list[int]:
        """Return the tokens of a text after the first marker that keeps its own tokens."""
        for marker in MARKERS:
            before, both = self._slow(marker), self._slow(marker + text)
            if both[: len(before)] == before:
                return both[len(before) :]
        return self._slow(text)

    def _slow(self, text: str) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return list(ids)


def text_behind(decode: Any, before: Sequence[int], token_ids: Sequence[int]) -> str:
    """Return the text of tokens after the tokens before them."""
    lead, whole = decode(list(before)), decode([*before, *token_ids])
    return str(whole.removeprefix(lead) if whole.startswith(lead) else decode(list(token_ids)))


def check_encodable(text: str, where: str, *, change: str) -> str:
    """Return the text.

    Raises:
        InvalidValue: The text has half a character (a lone surrogate). The field is `where`, and
            the fix is to change `change`, such as "the row".
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidValue(
            where,
            text,
            rule=f"character {error.start} is half of a surrogate pair",
            fix=f"Use whole characters in {change}.",
        ) from error
    return text


def pattern_of(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Return a pattern of all tokens, the longest first, or None if there are none."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if tokens else None


def _first_difference(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
