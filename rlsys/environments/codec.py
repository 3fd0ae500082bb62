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

from rlsys.environments.template import ChatTemplate, Thinking
from rlsys.environments.text_encoding import TextEncoder
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
        self.text = TextEncoder(tokenizer)
        own = tokenizer.chat_template if chat_template is None else chat_template
        self.template: ChatTemplate | None = None
        self.opening: list[int] = []
        self._end_of_turn = ""
        end_token: tuple[int, int] | None = None
        if own:
            self.template = ChatTemplate(tokenizer, chat_template, template_kwargs)
            self._end_of_turn = self.template.end_of_turn
            end_token = self.text.leading_special(self._end_of_turn)
        else:
            self.opening = self.text.opening()
        named = [tokenizer.eos_token_id, end_token[0] if end_token else None, *stop_token_ids]
        self._stops = {int(one) for one in named if one is not None}
        self._specials = set(self.text.special_token_ids.values())
        # Kinds of conversation for which rendering the new messages alone was compared with
        # rendering them all.
        self.is_append_only: dict[Hashable, bool] = {}

    @cached_property
    def without_template(self) -> Codec:
        """Of texts that stand as they are."""
        return self if self.template is None else Codec(self._tokenizer, chat_template="")

    @property
    def thinking(self) -> Thinking | None:
        return self.template.thinking if self.template else None

    @property
    def renders_tools(self) -> bool:
        return self.template is not None and self.template.renders_tools

    @property
    def num_encoded(self) -> int:
        """Characters given to the tokenizer since the start."""
        return self.text.num_encoded

    def read(self, generation: Generation) -> Reading:
        token_ids: list[int] = generation.token_ids.tolist()
        if generation.finish_reason == FinishReason.STOP and self._ends(token_ids):
            token_ids = token_ids[:-1]
        text = self.text.decode(token_ids)
        if self.ends_turn(text, generation):
            text = text[: -len(self._end_of_turn)]
        thinking = self.thinking
        if thinking is None:
            return Reading(text, None)
        before, end, after = text.partition(thinking.end)
        begins = before.lstrip().startswith(thinking.start)
        if not (end or begins or thinking.is_begun):
            return Reading(text, None)
        if begins:
            before = before.lstrip().removeprefix(thinking.start)
        return Reading(after.lstrip("\n"), before.strip("\n"))

    def _ends(self, token_ids: Sequence[int]) -> bool:
        return bool(token_ids) and (token_ids[-1] in self._stops or token_ids[-1] in self._specials)

    def ends_turn(self, text: str, generation: Generation) -> bool:
        """Whether a reply ended with the template's own end of turn, written as plain text."""
        is_stop = generation.finish_reason == FinishReason.STOP
        return is_stop and bool(self._end_of_turn) and text.endswith(self._end_of_turn)

    def without_end(self, tail: str, generation: Generation) -> str:
        """What stands behind a reply, less the end of turn that was sampled with it."""
        token_ids = generation.token_ids
        special = self.text.leading_special(tail)
        if special is not None and len(token_ids) and token_ids[-1] == special[0]:
            return tail[special[1] :]
        if special is None and tail.startswith(self._end_of_turn):
            last = self.text.decode(token_ids[-64:].tolist())
            if self.ends_turn(last, generation):
                return tail[len(self._end_of_turn) :]
        return tail

    def content_start(self, generation: Generation) -> int | None:
        """The token that the content begins with, behind the reasoning; None: it begins within
        one."""
        assert self.thinking is not None
        token_ids: list[int] = generation.token_ids.tolist()
        end = self.thinking.end
        low, high = 0, len(token_ids)
        if end not in self.text.decode(token_ids):
            return high
        while low < high:  # the fewest tokens whose text has all of the reasoning's end
            middle = (low + high) // 2
            if end in self.text.decode(token_ids[:middle]):
                high = middle
            else:
                low = middle + 1
        if not self.text.decode(token_ids[:low]).rstrip("\n").endswith(end):
            return None
        while low < len(token_ids) and not self.text.decode(token_ids[low : low + 1]).strip("\n"):
            low += 1
        return low
