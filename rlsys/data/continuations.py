"""Completions that are messages: the continuations of a prompt by chat messages.

In: a row's prompt, a text or messages, and one continuation or several, each a list of messages
that begins with a reply. Out: a `Completion` for each, rendered by the chat template as the replies
of a whole chat are (chats.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.config import require
from rlsys.data.chats import ChatColumn, Messages
from rlsys.data.completions import check_length
from rlsys.data.preference_pairs import is_chat
from rlsys.data.prompt_rendering import PromptRenderer
from rlsys.text.chat_template import REPLY_ROLE
from rlsys.types import Completion

# A row's prompt, its continuations and its tools.
Continued = tuple[object, object, object]


def has_continuations(value: object) -> bool:
    """Return whether a column's value holds messages: one continuation, or a list of them."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return is_chat(value) or (is_list and is_chat(value[0]))  # type: ignore[index]


@dataclass(frozen=True, kw_only=True)
class ContinuationColumn:
    """The column with `group_size` continuations in each row, each of at most `max_tokens` tokens.
    One continuation may be there without a list around it.
    """

    name: str
    group_size: int
    max_tokens: int
    renderer: PromptRenderer

    def read(self, value: Continued, where: str) -> tuple[Completion, ...]:
        """Return the completions of one row. Raises ValueError, beginning with `where`, for
        another number of continuations, for messages that are none, and for one that is too
        long.
        """
        found = self._read(value, where)
        check_length(max(len(one.token_ids) for one in found), self.max_tokens, where)
        return found

    def too_long(self, values: Iterable[Continued], name: Callable[[int], str]) -> dict[int, int]:
        """Return the number of tokens of the longest completion of each row that has too many.
        Raises as `read` does for any other fault.
        """
        found = {}
        for number, value in enumerate(values):
            completions = self._read(value, name(number))
            found[number] = max(len(one.token_ids) for one in completions)
        return {number: length for number, length in found.items() if length > self.max_tokens}

    def _read(self, value: Continued, where: str) -> tuple[Completion, ...]:
        column = ChatColumn(name=self.name, max_tokens=sys.maxsize, renderer=self.renderer)
        prompt, given, tools = value
        return tuple(
            column.read(chat, where, tools=tools, num_continued=num)[0]
            for chat, num in self._all(prompt, given, where)
        )

    def _all(self, prompt: object, given: object, where: str) -> list[tuple[Messages, int]]:
        """Return the whole chat of each continuation, and the number of messages in that."""
        found: Any = [given] if self.group_size == 1 and is_chat(given) else given
        require(
            isinstance(found, Sequence)
            and not isinstance(found, str)
            and len(found) == self.group_size
            and all(is_chat(one) and one[0]["role"] == REPLY_ROLE for one in found),
            f"{where}: {given!r} is no list of {self.group_size} chats that begin with a message "
            f"of {REPLY_ROLE!r}; flow.dataset has groups of group_size={self.group_size}.",
        )
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        require(is_chat(asked), f"{where}: {prompt!r} is no prompt of a chat.")
        return [([*asked, *one], len(one)) for one in found]  # type: ignore[misc]
