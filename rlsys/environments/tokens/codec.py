"""How messages become tokens, and tokens a message: one tokenizer and its chat template.

In: a tokenizer. Out: a `Codec`, shared by all episodes of a process; it holds what was found out
about the template, and nothing of any episode.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from rlsys.environments.tokens.template import ChatTemplate, Thinking
from rlsys.text.chat_template import template_text
from rlsys.text.guarded import TextEncoder
from rlsys.text.tokenizer_boundary import TokenizerBoundary
from rlsys.types import FinishReason, Generation

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Reading:
    """The text of what was sampled."""

    content: str
    reasoning: str | None  # None: the template knows no thinking, or there was none


class Codec:
    """chat_template: one in place of the tokenizer's, "" for none: contents are then joined as they
    are. template_kwargs: what it is given beside messages and tools, such as enable_thinking.
    stop_token_ids: tokens that end a reply beside those that the tokenizer and the template name.

    Raises ValueError for a template that cannot render a message of a user.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] = NO_OPTIONS,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self.boundary = TokenizerBoundary(tokenizer)
        self.text = TextEncoder(self.boundary)
        own = template_text(tokenizer) if chat_template is None else chat_template
        self.template: ChatTemplate | None = None
        self.opening: list[int] = []
        self._end_of_turn = ""
        self._end_token_ids: list[int] = []  # special ones, that the end of turn begins with
        if own:
            self.template = ChatTemplate(tokenizer, chat_template, template_kwargs)
            self._end_of_turn = self.template.end_of_turn
            specials = self.text.leading_specials(self._end_of_turn)
            self._end_token_ids = [token_id for token_id, _ in specials]
        else:
            self.opening = self.boundary.opening
        named = [tokenizer.eos_token_id, *self._end_token_ids[:1], *stop_token_ids]
        self._stops = {int(one) for one in named if one is not None}
        self._specials = set(self.text.special_token_ids.values())
        # Kinds of conversation for which rendering the new messages alone was compared with
        # rendering them all.
        self.is_append_only: dict[Hashable, bool] = {}

    @property
    def end_token_id(self) -> int:
        """A token that ends a text: the tokenizer's own, or another that ends a reply, or 0."""
        own = self._tokenizer.eos_token_id
        return int(own) if own is not None else min(self._stops, default=0)

    @cached_property
    def without_template(self) -> Codec:
        """Of texts that stand as they are."""
        return self if self.template is None else Codec(self._tokenizer, chat_template="")

    @property
    def vocabulary_size(self) -> int:
        """Of the tokenizer, added tokens included."""
        return len(self._tokenizer)

    @property
    def thinking(self) -> Thinking | None:
        return self.template.thinking if self.template else None

    @property
    def writes_channels(self) -> bool:
        """Whether the model writes special tokens before its content, as gpt-oss does."""
        if self.template is None or self.thinking is not None:
            return False
        return bool(self.text.leading_specials(self.template.content_header))

    @property
    def renders_tools(self) -> bool:
        return self.template is not None and self.template.renders_tools

    @property
    def num_encoded(self) -> int:
        """Characters given to the tokenizer since the start."""
        return self.text.num_encoded

    def read(self, generation: Generation) -> Reading:
        token_ids: list[int] = generation.token_ids.tolist()
        if generation.finish_reason == FinishReason.STOP:
            token_ids = token_ids[: len(token_ids) - self._num_end_tokens(token_ids)]
        text = self.boundary.decode_written(token_ids)
        if self.ends_turn(text, generation):
            text = text[: -len(self._end_of_turn)]
        thinking = self.thinking
        if thinking is None:
            return Reading(self._behind_header(text), None)
        before, end, after = text.partition(thinking.end)
        begins = before.lstrip().startswith(thinking.start)
        if not (end or begins or thinking.is_begun):
            return Reading(text, None)
        if begins:
            before = before.lstrip().removeprefix(thinking.start)
        return Reading(after.lstrip("\n"), before.strip("\n"))

    def _behind_header(self, text: str) -> str:
        """The content of a reply, where the model writes a header of special tokens before it: what
        stands before the last one, such as the channel of its thoughts, is none; nor is a reply
        that is cut off there. One without any of that is content as it is.
        """
        header = self.template.content_header if self.template else ""
        specials = self.text.leading_specials(header)
        if not specials:
            return text
        _, found, content = text.rpartition(header)
        is_cut = text.startswith(header[: specials[0][1]])
        return content if found or not is_cut else ""

    def _num_end_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of a reply's last tokens say that it has ended."""
        if num_end_tokens := _num_shared_ends(token_ids, self._end_token_ids):
            return num_end_tokens
        is_end = token_ids and (token_ids[-1] in self._stops or token_ids[-1] in self._specials)
        return int(bool(is_end))

    def ends_turn(self, text: str, generation: Generation) -> bool:
        """Whether a reply ended with the template's own end of turn, written as plain text."""
        is_stop = generation.finish_reason == FinishReason.STOP
        return is_stop and bool(self._end_of_turn) and text.endswith(self._end_of_turn)

    def without_end(self, tail: str, generation: Generation) -> str:
        """What stands behind a reply, less the end of turn that was sampled with it."""
        token_ids: list[int] = generation.token_ids.tolist()
        specials = self.text.leading_specials(tail)[: max(len(self._end_token_ids), 1)]
        if num_sampled := _num_shared_ends(token_ids, [token_id for token_id, _ in specials]):
            return tail[specials[num_sampled - 1][1] :]
        if not specials and tail.startswith(self._end_of_turn):
            last = self.boundary.decode_written(token_ids[-64:])
            if self.ends_turn(last, generation):
                return tail[len(self._end_of_turn) :]
        return tail

    def num_rewritten(self, tail: str, generation: Generation) -> int:
        """How many of a reply's last tokens end a conversation, where the template ends a turn with
        other special tokens once something follows (gpt-oss: <|return|>, then <|end|>).
        """
        end, specials = self._end_token_ids, self.text.leading_specials(tail)
        token_ids: list[int] = generation.token_ids.tolist()
        if not end or not specials or specials[0][0] == end[0]:
            return 0
        return len(end) if token_ids[-len(end) :] == end else 0

    def content_start(self, generation: Generation) -> int | None:
        """The token that the content begins with, behind the reasoning; None: it begins within
        one.
        """
        assert self.thinking is not None
        token_ids: list[int] = generation.token_ids.tolist()
        end = self.thinking.end
        low, high = 0, len(token_ids)
        if end not in self.boundary.decode_written(token_ids):
            return high
        while low < high:  # the fewest tokens whose text has all of the reasoning's end
            middle = (low + high) // 2
            if end in self.boundary.decode_written(token_ids[:middle]):
                high = middle
            else:
                low = middle + 1
        if not self.boundary.decode_written(token_ids[:low]).rstrip("\n").endswith(end):
            return None
        while low < len(token_ids) and not self.boundary.decode_written(
            token_ids[low : low + 1]
        ).strip("\n"):
            low += 1
        return low


def _num_shared_ends(token_ids: Sequence[int], end: Sequence[int]) -> int:
    """The most tokens that `end` begins with and `token_ids` ends with."""
    for number in range(min(len(token_ids), len(end)), 0, -1):
        if list(token_ids[-number:]) == list(end[:number]):
            return number
    return 0
