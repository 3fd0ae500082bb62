"""Conversion of messages to tokens and back, with one tokenizer and its chat template.

In: a tokenizer. Out: a `Codec`, shared by all episodes of a process. It caches properties of the
template and has no state of an episode.
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
    """Text of a sampled reply."""

    content: str
    reasoning: str | None  # None: the template has no thinking, or the reply had none


class Codec:
    """Tokenizer and chat template of one model.

    Args:
        chat_template: Template to use in place of the tokenizer's. "": none, contents are
            concatenated.
        template_kwargs: Options of the template, such as enable_thinking.
        stop_token_ids: Further tokens that end a reply, besides the tokenizer's and the template's.

    Raises:
        InvalidValue: The template cannot render a user message.
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
        self._end_token_ids: list[int] = []  # special tokens at the start of the end of turn
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
        # By kind of conversation: whether the new messages, rendered alone, give the same tokens
        # as all messages rendered together.
        self.is_append_only: dict[Hashable, bool] = {}

    @property
    def end_token_id(self) -> int:
        """A token that ends a text: the tokenizer's, else a stop token, else 0."""
        own = self._tokenizer.eos_token_id
        return int(own) if own is not None else min(self._stops, default=0)

    @cached_property
    def without_template(self) -> Codec:
        """The codec of the same tokenizer without a template."""
        return self if self.template is None else Codec(self._tokenizer, chat_template="")

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens of the tokenizer, added tokens included."""
        return len(self._tokenizer)

    @property
    def thinking(self) -> Thinking | None:
        """Marks around the reasoning of a reply; None if the template has no thinking."""
        return self.template.thinking if self.template else None

    @property
    def writes_channels(self) -> bool:
        """Return whether the model writes special tokens before its content, as gpt-oss does."""
        if self.template is None or self.thinking is not None:
            return False
        return bool(self.text.leading_specials(self.template.content_header))

    @property
    def renders_tools(self) -> bool:
        """Return whether the template renders tools."""
        return self.template is not None and self.template.renders_tools

    def check_template(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Check that the template's own text and the schemas of tools have tokens.

        Raises:
            InvalidValue: A character has none, so that no conversation can be encoded.
        """
        if self.template is not None:
            shown = self.text.guarded(list(tools)) if self.renders_tools else []
            self.text.encode(
                self.template.own_text(shown),
                after=None,
                cache={},
                where="the chat template of the model",
                change="the template or the texts of the tools",
            )

    @property
    def num_encoded(self) -> int:
        """Number of characters that the tokenizer has encoded so far."""
        return self.text.num_encoded

    def read(self, generation: Generation) -> Reading:
        """Return the content and the reasoning of a reply, without its end of turn."""
        token_ids: list[int] = generation.token_ids.tolist()
        if generation.finish_reason == FinishReason.STOP:
            token_ids = token_ids[: len(token_ids) - self._num_end_tokens(token_ids)]
        text = self.boundary.decode_written(token_ids)
        if self.ends_turn(text, generation):
            text = text[: -len(self._end_of_turn)]
        thinking = self.thinking
        if thinking is None:
            return Reading(self._after_header(text), None)
        before, end, after = text.partition(thinking.end)
        begins = before.lstrip().startswith(thinking.start)
        if not (end or begins or thinking.is_begun):
            return Reading(text, None)
        if begins:
            before = before.lstrip().removeprefix(thinking.start)
        return Reading(after.lstrip("\n"), before.strip("\n"))

    def _after_header(self, text: str) -> str:
        """Return the content of a reply, without the header that some models write before it.

        The header consists of special tokens, such as gpt-oss's channel. The text before the last
        header, such as the channel of thoughts, is dropped, and so is a reply that was cut there.
        """
        header = self.template.content_header if self.template else ""
        specials = self.text.leading_specials(header)
        if not specials:
            return text
        _, found, content = text.rpartition(header)
        is_cut = text.startswith(header[: specials[0][1]])
        return content if found or not is_cut else ""

    def _num_end_tokens(self, token_ids: Sequence[int]) -> int:
        """Return the number of last tokens of a reply that end it."""
        if num_end_tokens := _num_shared_ends(token_ids, self._end_token_ids):
            return num_end_tokens
        is_end = token_ids and (token_ids[-1] in self._stops or token_ids[-1] in self._specials)
        return int(bool(is_end))

    def ends_turn(self, text: str, generation: Generation) -> bool:
        """Return whether a reply ended with the template's end of turn, written as plain text."""
        is_stop = generation.finish_reason == FinishReason.STOP
        return is_stop and bool(self._end_of_turn) and text.endswith(self._end_of_turn)

    def without_end(self, tail: str, generation: Generation) -> str:
        """Return the text after a reply, without the end of turn that was sampled with it."""
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
        """Return the number of last tokens of a reply that the template replaces.

        Some templates end the last turn of a conversation with other special tokens than a turn
        that is followed by another (gpt-oss: <|return|> and <|end|>).
        """
        end, specials = self._end_token_ids, self.text.leading_specials(tail)
        token_ids: list[int] = generation.token_ids.tolist()
        if not end or not specials or specials[0][0] == end[0]:
            return 0
        return len(end) if token_ids[-len(end) :] == end else 0

    def content_start(self, generation: Generation) -> int | None:
        """Return the index of the first token of the content, after the reasoning.

        None: the content begins inside of a token.
        """
        assert self.thinking is not None
        token_ids: list[int] = generation.token_ids.tolist()
        end = self.thinking.end
        low, high = 0, len(token_ids)
        if end not in self.boundary.decode_written(token_ids):
            return high
        while low < high:  # bisect for the fewest tokens whose text contains the end of reasoning
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
    """Return the length of the longest prefix of `end` that `token_ids` ends with."""
    for number in range(min(len(token_ids), len(end)), 0, -1):
        if list(token_ids[-number:]) == list(end[:number]):
            return number
    return 0
