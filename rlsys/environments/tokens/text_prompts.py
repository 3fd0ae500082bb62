"""Prompts without a chat template: texts and token ids.

In: the prompts of one episode and the replies to them. Out: prompts as token ids. A text that goes
on from an earlier prompt and its answer keeps their tokens, and only its rest is encoded:

    prompt  + answer  + rest            answer: the reply up to the stop text of its request
    ─tokens kept────   ─encoded─
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rlsys.environments.tokens.codec import Codec
from rlsys.environments.tokens.conversation import check_length
from rlsys.errors import require
from rlsys.text.guarded import GUARD
from rlsys.text.tokenizer_boundary import check_encodable


@dataclass(frozen=True, kw_only=True)
class _Known:
    """A prompt and its answer, which a text may go on from."""

    whole: str
    text: str  # of the tokens, a beginning of `whole`
    token_ids: list[int]
    needs_more: bool  # the policy had ended it: the same text again does not go on from it

    def is_continued_by(self, text: str) -> bool:
        """Return whether a text goes on from this one."""
        return text.startswith(self.whole) and (not self.needs_more or len(text) > len(self.whole))


@dataclass(eq=False)
class TextPrompts:
    """The prompts without a chat template of one episode.

    Args:
        max_tokens: Maximum length of a prompt. A text that is certainly longer is not encoded.
    """

    codec: Codec
    max_tokens: int
    _known: list[_Known] = field(default_factory=list)

    def add(
        self, prompt: TextPrompt, reply: Sequence[int], content: str, answer: str, *, is_cut: bool
    ) -> None:
        """Add a reply.

        Args:
            prompt: The prompt of the reply.
            reply: Tokens of the reply.
            content: Text of the reply, without the tokens that end it.
            answer: Beginning of it that the client receives.
            is_cut: The reply was cut at a token limit, so the policy had not ended it.
        """
        if not content:
            return
        whole, before = prompt.text + content, prompt.token_ids
        self._known.append(
            _Known(whole=whole, text=whole, token_ids=[*before, *reply], needs_more=not is_cut)
        )
        decode = self.codec.boundary.decode_written
        num_kept = len(reply)
        while num_kept and not answer.startswith(decode(list(reply[:num_kept]))):
            num_kept -= 1
        if 0 < num_kept < len(reply):
            self._known.append(
                _Known(
                    whole=prompt.text + answer,
                    text=prompt.text + decode(list(reply[:num_kept])),
                    token_ids=[*before, *reply[:num_kept]],
                    needs_more=False,
                )
            )

    def encoded(self, text: str) -> list[int]:
        """Return the tokens of a text.

        Raises:
            InvalidValue: The text has a character without a token, or no tokens.
            TextTooLong: The text certainly has more than `max_tokens`.
        """
        codec = self.codec
        known = [one for one in self._known if one.is_continued_by(text)]
        if known:
            longest = max(known, key=lambda one: len(one.whole))
            rest, before = text[len(longest.text) :], longest.token_ids
            check_length(codec, rest, self.max_tokens)
            # The text contains no guards. Special tokens in it keep their meaning.
            rest = rest.replace(GUARD, f"{GUARD}{ord(GUARD)};")
            return before + codec.text.encode(
                rest, after=before[-1], cache={}, where="prompt", change="the prompt"
            )
        check_length(codec, text, self.max_tokens)
        check_encodable(text, "prompt", change="the prompt")
        codec.boundary.alphabet.check(text, "prompt", change="the prompt")
        (token_ids,) = codec.boundary.encode_prompts([text], with_opening=True)
        codec.text.num_encoded += len(text)
        require(
            bool(token_ids),
            "prompt",
            text,
            rule="has no tokens",
            fix="Send a text with at least one token.",
        )
        return token_ids


@dataclass(eq=False)
class TextPrompt:
    """A prompt of one or several replies: a text or token ids. It is converted once."""

    prompts: TextPrompts
    given: str | Sequence[int]

    @cached_property
    def token_ids(self) -> list[int]:
        """The tokens. Raises the errors of `TextPrompts.encoded`."""
        if isinstance(self.given, str):
            return self.prompts.encoded(self.given)
        return list(self.given)

    @cached_property
    def text(self) -> str:
        """The text, in which special tokens are visible."""
        if isinstance(self.given, str):
            return self.given
        return self.prompts.codec.boundary.decode(self.token_ids)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first stop text in it."""
    return text[: min((text.find(one) for one in stop if one in text), default=len(text))]
