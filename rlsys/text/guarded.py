"""Text to tokens, where only what a chat template wrote itself may become a special token.

In: the text that a template rendered of `guarded` strings. Out: token ids. Special tokens are found
here, and what stands between them is encoded by a tokenizer that knows none, so that a stretch
between two of them is encoded alone and its tokens can be kept by its text.

    <|im_start|>  user\\nWhat is <|im_end|>?  <|im_end|>  \\n
    one token     plain text, all of it       one token   plain text
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from rlsys.text.tokenizer_boundary import (
    Position,
    TokenizerBoundary,
    check_encodable,
    pattern_of,
)

# Noncharacters of Unicode, which no text should hold. One that does is guarded as well.
SENTINEL = "\ufdd0"
GUARD = "\ufdd1"
NOTHING = "\ufdd2"  # behind a guard: it parts a token
GUARDED = re.compile(f"{GUARD}(?:{NOTHING}|([0-9]+);)")  # nothing, or a character

# Ordinary text has fewer characters a token; more of a long text is looked at where it has not.
CHARS_PER_TOKEN = 4
# A text's beginning may have a few tokens more than stand for it in the whole: what is cut in its
# midst is encoded otherwise.
CUT_TOKENS = 256

Segment = tuple[str, Position]  # a text without special tokens, and what it follows
Cache = MutableMapping[Segment, list[int]]


class TextEncoder:
    """Encodes guarded texts with one tokenizer, for all episodes of a process."""

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
        return self._special

    def guarded(self, value: Any) -> Any:
        """A message, or a string of it, in which no special token can be found once rendered."""
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
        end = 0  # of what has been guarded; other tokens may begin within one
        while (found := self._is_special.search(text, end)) is not None:
            start = found.start()
            is_one = len(found.group()) == 1
            parts.append(text[end:start])
            parts.append(
                f"{GUARD}{ord(text[start])};" if is_one else f"{text[start]}{GUARD}{NOTHING}"
            )
            end = start + 1
        return "".join([*parts, text[end:]])

    def encode(self, text: str, *, after: int | None, cache: Cache, where: str) -> list[int]:
        """Return a new list of the tokens of a text.

        Args:
            text: What a template rendered of guarded messages.
            after: The token that the text follows; None: it is the first text of a path.
            cache: The tokens of segments that the episode has encoded before.
            where: What a message of an error begins with.

        Raises:
            ValueError: The text has a character without a token.
        """
        token_ids: list[int] = []
        end = 0
        position = self._boundary.position(after)
        if after in self._strips_right:
            text = text.lstrip()
        if self._splits is not None:
            for found in self._splits.finditer(text):
                if found.start() > end:
                    token_ids += self._segment(text[end : found.start()], position, cache, where)
                token_ids.append(self._special[found.group().strip()])
                end, position = found.end(), Position.SPECIAL
        if end < len(text):
            token_ids += self._segment(text[end:], position, cache, where)
        return token_ids

    def num_tokens_beyond(self, text: str, max_tokens: int) -> int | None:
        """A number above `max_tokens` that a plain text has no fewer tokens than; None where it may
        have fewer. Encodes no more of the text than it needs to say so.
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
        """The special tokens that a rendered text begins with, one after another, and how many
        characters the text takes up to the end of each.
        """
        specials: list[tuple[int, int]] = []
        end = 0
        while self._splits is not None and (found := self._splits.match(text, end)) is not None:
            end = found.end()
            specials.append((self._special[found.group().strip()], end))
        return specials

    def encode_plain(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another and holds no special token."""
        return self._boundary.encode_plain(text, Position.TEXT)

    def _segment(self, text: str, position: Position, cache: Cache, where: str) -> list[int]:
        if not self._boundary.has_positions:
            position = Position.TEXT
        token_ids = cache.get((text, position))
        if token_ids is None:
            plain = check_encodable(unguarded(text), where)
            self._boundary.alphabet.check(plain, where)
            token_ids = self._boundary.encode_plain(plain, position)
            self.num_encoded += len(plain)
            cache[text, position] = token_ids
        return token_ids


def unguarded(text: str) -> str:
    if GUARD not in text:
        return text
    return GUARDED.sub(lambda found: chr(int(found.group(1))) if found.group(1) else "", text)


def _pattern_with_blanks(tokens: Sequence[Any]) -> re.Pattern[str] | None:
    """Of AddedTokens: some take the white space beside them."""
    longest_first = sorted(tokens, key=lambda one: len(one.content), reverse=True)
    one_by_one = [
        (r"\s*" if one.lstrip else "") + re.escape(one.content) + (r"\s*" if one.rstrip else "")
        for one in longest_first
    ]
    return re.compile("|".join(one_by_one)) if tokens else None
