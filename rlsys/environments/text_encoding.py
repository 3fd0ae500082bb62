"""Text to tokens, where only what a chat template wrote itself may become a special token.

In: the text that a template rendered of `guarded` strings. Out: token ids. Special tokens are found
here, and what stands between them is encoded by a tokenizer that knows none, so that a stretch
between two of them is encoded alone and its tokens can be kept by its text.

    <|im_start|>  user\\nWhat is <|im_end|>?  <|im_end|>  \\n
    one token     plain text, all of it       one token   plain text
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from rlsys.data.alphabet import Alphabet

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

Segment = tuple[str, bool]  # a text without special tokens, whether a path begins with it
Cache = MutableMapping[Segment, list[int]]


class TextEncoder:
    """Of one tokenizer, for all episodes of a process."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._alphabet = Alphabet(tokenizer)
        added = tokenizer.added_tokens_decoder
        self._special = {str(token.content): int(i) for i, token in added.items() if token.special}
        self._is_special = _pattern(list(self._special))
        self._splits = _pattern_with_blanks([one for one in added.values() if one.special])
        self._first, self._later = _plain_backends(tokenizer)
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

    def encode(self, text: str, *, at_start: bool, cache: Cache, where: str) -> list[int]:
        """A new list. `cache`: of the episode; what it has is not encoded again.

        Raises ValueError, beginning with `where`, for a text that has no tokens.
        """
        token_ids: list[int] = []
        end = 0
        if self._splits is not None:
            for found in self._splits.finditer(text):
                if found.start() > end:
                    token_ids += self._segment(text[end : found.start()], at_start, cache, where)
                token_ids.append(self._special[found.group().strip()])
                end, at_start = found.end(), False
        if end < len(text):
            token_ids += self._segment(text[end:], at_start, cache, where)
        return token_ids

    def num_tokens_beyond(self, text: str, max_tokens: int) -> int | None:
        """A number above `max_tokens` that a plain text has no fewer tokens than; None where it may
        have fewer. Encodes no more of the text than it needs to say so."""
        num_chars = CHARS_PER_TOKEN * (max_tokens + CUT_TOKENS)
        while num_chars < len(text):
            beginning = text[:num_chars].encode("utf-8", "replace").decode()
            num_tokens = len(self._plain(beginning, False)) - CUT_TOKENS
            self.num_encoded += num_chars
            if num_tokens > max_tokens:
                return num_tokens
            num_chars *= 2
        return None

    def leading_specials(self, text: str) -> list[tuple[int, int]]:
        """The special tokens that a rendered text begins with, one after another, and how many
        characters the text takes up to the end of each."""
        specials: list[tuple[int, int]] = []
        end = 0
        while self._splits is not None and (found := self._splits.match(text, end)) is not None:
            end = found.end()
            specials.append((self._special[found.group().strip()], end))
        return specials

    def _segment(self, text: str, at_start: bool, cache: Cache, where: str) -> list[int]:
        at_start = at_start and self._first is not self._later
        token_ids = cache.get((text, at_start))
        if token_ids is None:
            plain = unguarded(text)
            try:
                plain.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{where}: {reprlib.repr(plain)} holds half a character ({error.reason}); "
                    "leave it out."
                ) from error
            self._alphabet.check(plain, where)
            token_ids = self._plain(plain, at_start)
            self.num_encoded += len(plain)
            cache[text, at_start] = token_ids
        return token_ids

    def _plain(self, text: str, at_start: bool) -> list[int]:
        backend = self._first if at_start else self._later
        if backend is not None:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
            return ids
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]
        return list(ids)

    def opening(self) -> list[int]:
        """What the tokenizer puts before a plain text, such as <bos>."""
        plain: list[int] = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        full: list[int] = self._tokenizer("a", add_special_tokens=True)["input_ids"]
        at = next(
            (i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain), 0
        )
        return full[:at]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens as they are written; halves of characters as U+FFFD."""
        backend = self._later
        if backend is not None:
            text: str = backend.decode(list(token_ids), skip_special_tokens=False)
            return text
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


def unguarded(text: str) -> str:
    if GUARD not in text:
        return text
    return GUARDED.sub(lambda found: chr(int(found.group(1))) if found.group(1) else "", text)


def _pattern(tokens: Sequence[str]) -> re.Pattern[str] | None:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if tokens else None


def _pattern_with_blanks(tokens: Sequence[Any]) -> re.Pattern[str] | None:
    """Of AddedTokens: some take the white space beside them."""
    longest_first = sorted(tokens, key=lambda one: len(one.content), reverse=True)
    one_by_one = [
        (r"\s*" if one.lstrip else "") + re.escape(one.content) + (r"\s*" if one.rstrip else "")
        for one in longest_first
    ]
    return re.compile("|".join(one_by_one)) if tokens else None


def _plain_backends(tokenizer: Any) -> tuple[Any, Any]:
    """Copies that take special tokens for text: for a path's beginning, and for what stands behind
    a token; the same but for those of SentencePiece, where a path's first word alone is preceded
    by a blank. (None, None): the tokenizer has no backend of the `tokenizers` library."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None, None
    from tokenizers import Tokenizer

    written: str = backend.to_str()
    copies = []
    behind = written.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
    for one in [written] if behind == written else [written, behind]:
        copy = Tokenizer.from_str(one)
        copy.no_truncation()
        copy.no_padding()
        copy.encode_special_tokens = True
        copies.append(copy)
    return copies[0], copies[-1]
