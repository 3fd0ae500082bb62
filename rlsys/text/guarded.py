r"""Encoding in which only the text of a chat template can become special tokens.

In: text that a template rendered from `guarded` strings. Out: token ids. Special tokens are found
here, and the segments between them are encoded without special tokens. Each segment is encoded on
its own, so that its tokens can be cached by its text.

    <|im_start|>  user\nWhat is <|im_end|>?  <|im_end|>  \n
    one token     plain text, all of it       one token   plain text
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

from rlsys.text.tokenizer_boundary import (
    Position,
    TokenizerBoundary,
    check_encodable,
    pattern_of,
)

# Unicode noncharacters. A text that contains them is guarded as well.
SENTINEL = "\ufdd0"
GUARD = "\ufdd1"
NOTHING = "\ufdd2"  # after a guard: only splits a token
GUARDED = re.compile(f"{GUARD}(?:{NOTHING}|([0-9]+);)")  # nothing, or a character

# Most text has fewer characters per token. Otherwise more of a long text is encoded.
CHARS_PER_TOKEN = 4
# Tokens by which the beginning of a text may exceed its part of the whole text, because it is cut
# at an arbitrary character.
CUT_TOKENS = 256

Segment = tuple[str, Position]  # a text without special tokens and its position
Cache = MutableMapping[Segment, list[int]]


class TextEncoder:
    """Encoder of guarded texts with one tokenizer, for all episodes of a process."""

    def __init__(self, boundary: TokenizerBoundary) -> None:
        self._boundary = boundary
        self._special = boundary.special_token_ids
        self._is_special = pattern_of(list(self._special))
        self._splits = _pattern_with_blanks(boundary.special_tokens)
        self._strips_right = {
            self._special[one.content] for one in boundary.special_tokens if one.rstrip
        }
        self.num_encoded = 0  # characters given to the tokenizer since the start

    @property
    def special_token_ids(self) -> Mapping[str, int]:
        """Ids of special tokens by their text."""
        return self._special

    def guarded(self, value: Any) -> Any:
        """Return a message, or a string of it, so that rendering it gives no special tokens."""
        match value:
            case str():
                return self._guarded_text(value)
            case Mapping():
                return {self.guarded(key): self.guarded(one) for key, one in value.items()}
            case list() | tuple():
                return [self.guarded(one) for one in value]
            case _:
                return value

    def _guarded_text(self, text: str) -> str:
        if SENTINEL in text or GUARD in text:
            text = re.sub(f"[{SENTINEL}{GUARD}]", lambda one: f"{GUARD}{ord(one.group())};", text)
        if self._is_special is None:
            return text
        parts: list[str] = []
        end = 0  # of the guarded text; tokens may overlap
        while (found := self._is_special.search(text, end)) is not None:
            start = found.start()
            is_one = len(found.group()) == 1
            parts.append(text[end:start])
            parts.append(
                f"{GUARD}{ord(text[start])};" if is_one else f"{text[start]}{GUARD}{NOTHING}"
            )
            end = start + 1
        return "".join([*parts, text[end:]])

    def encode(
        self, text: str, *, after: int | None, cache: Cache, where: str, change: str
    ) -> list[int]:
        """Return a new list of the tokens of a text.

        Args:
            text: Text that a template rendered from guarded messages.
            after: Token before the text; None for the first text of a path.
            cache: Tokens of the segments that the episode has encoded before.
            where: Name of the text in errors.
            change: What the user can change, in errors, such as "the message".

        Raises:
            InvalidValue: The text has a character without a token.
        """
        segment = partial(self._segment, cache=cache, where=where, change=change)
        token_ids: list[int] = []
        end = 0
        position = self._boundary.position(after)
        if after in self._strips_right:
            text = text.lstrip()
        if self._splits is not None:
            for found in self._splits.finditer(text):
                if found.start() > end:
                    token_ids += segment(text[end : found.start()], position)
                token_ids.append(self._special[found.group().strip()])
                end, position = found.end(), Position.SPECIAL
        if end < len(text):
            token_ids += segment(text[end:], position)
        return token_ids

    def num_tokens_beyond(self, text: str, max_tokens: int) -> int | None:
        """Return a lower bound on the tokens of a plain text if it exceeds `max_tokens`, else None.

        Only as much of the text is encoded as the answer needs.
        """
        num_chars = CHARS_PER_TOKEN * (max_tokens + CUT_TOKENS)
        while num_chars < len(text):
            beginning = text[:num_chars].encode("utf-8", "replace").decode()
            num_tokens = len(self.encode_plain(beginning)) - CUT_TOKENS
            self.num_encoded += num_chars
            if num_tokens > max_tokens:
                return num_tokens
            num_chars *= 2
        return None

    def leading_specials(self, text: str) -> list[tuple[int, int]]:
        """Return the special tokens at the start of a rendered text.

        Each one is (token id, number of characters up to the end of the token).
        """
        specials: list[tuple[int, int]] = []
        end = 0
        while self._splits is not None and (found := self._splits.match(text, end)) is not None:
            end = found.end()
            specials.append((self._special[found.group().strip()], end))
        return specials

    def encode_plain(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another text, without special tokens."""
        return self._boundary.encode_plain(text, Position.TEXT)

    def _segment(
        self, text: str, position: Position, *, cache: Cache, where: str, change: str
    ) -> list[int]:
        if not self._boundary.has_positions:
            position = Position.TEXT
        token_ids = cache.get((text, position))
        if token_ids is None:
            plain = check_encodable(unguarded(text), where, change=change)
            self._boundary.alphabet.check(plain, where, change=change)
            token_ids = self._boundary.encode_plain(plain, position)
            self.num_encoded += len(plain)
            cache[text, position] = token_ids
        return token_ids


def unguarded(text: str) -> str:
    """Return a text without guards."""
    if GUARD not in text:
        return text
    return GUARDED.sub(lambda found: chr(int(found.group(1))) if found.group(1) else "", text)


def _pattern_with_blanks(tokens: Sequence[Any]) -> re.Pattern[str] | None:
    """Return a pattern of AddedTokens, with the white space that some of them include."""
    longest_first = sorted(tokens, key=lambda one: len(one.content), reverse=True)
    one_by_one = [
        (r"\s*" if one.lstrip else "") + re.escape(one.content) + (r"\s*" if one.rstrip else "")
        for one in longest_first
    ]
    return re.compile("|".join(one_by_one)) if tokens else None
