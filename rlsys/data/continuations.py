"""Completions that continue a prompt with chat messages.

In: the prompt of a row, a text or messages, and one or several continuations, each a list of
messages that begins with a reply. Out: a `Completion` for each, rendered by the chat template like
the replies of a whole chat (chats.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.data.chats import ChatColumn, Messages
from rlsys.data.completions import check_length
from rlsys.data.preference_pairs import is_chat
from rlsys.data.prompt_rendering import PromptRenderer
from rlsys.errors import InvalidValue, require
from rlsys.text.chat_template import REPLY_ROLE
from rlsys.types import Completion

# The prompt of a row, its continuations and its tools.
Continued = tuple[object, object, object]


def has_continuations(value: object) -> bool:
    """Return whether the value of a column is a continuation by messages, or a list of them."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return is_chat(value) or (is_list and is_chat(value[0]))  # type: ignore[index]


@dataclass(frozen=True, kw_only=True)
class ContinuationColumn:
    """Dataset column with `group_size` continuations in each row, each of at most `max_tokens`.

    A single continuation needs no list around it.
    """

    name: str
    group_size: int
    max_tokens: int
    renderer: PromptRenderer

    def read(self, value: Continued, where: str) -> tuple[Completion, ...]:
        """Return the completions of one row.

        Raises:
            InvalidValue: The number of continuations is wrong, the messages are not a chat, or one
                is too long. The field is `where`.
        """
        found = self._read(value, where)
        check_length(max(len(one.token_ids) for one in found), self.max_tokens, where)
        return found

    def too_long(self, values: Iterable[Continued], name: Callable[[int], str]) -> dict[int, int]:
        """Return the lengths of rows that are too long, as CompletionColumn does."""
        found = {}
        for number, value in enumerate(values):
            completions = self._read(value, name(number))
            found[number] = max(len(one.token_ids) for one in completions)
        return {number: length for number, length in found.items() if length > self.max_tokens}

    def _read(self, value: Continued, where: str) -> tuple[Completion, ...]:
        column = ChatColumn(name=self.name, max_tokens=sys.maxsize, renderer=self.renderer)
        prompt, continuations, tools = value
        return tuple(
            column.read(chat, where, tools=tools, num_continued=num)[0]
            for chat, num in self._chats(prompt, continuations, where)
        )

    def _chats(self, prompt: object, value: object, where: str) -> list[tuple[Messages, int]]:
        """Return the whole chat of each continuation and the continuation's number of messages."""
        if value is None:
            raise InvalidValue(where, None, rule="is null", fix="Fill it, or leave the row out.")
        found: Any = [value] if self.group_size == 1 and is_chat(value) else value
        require(
            isinstance(found, Sequence)
            and not isinstance(found, str)
            and len(found) == self.group_size
            and all(is_chat(one) and one[0]["role"] == REPLY_ROLE for one in found),
            where,
            value,
            rule=f"is not a list of {self.group_size} chats that begin with a message of "
            f"{REPLY_ROLE!r} (group_size={self.group_size})",
            fix="Change the row, or leave it out.",
        )
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        require(
            is_chat(asked),
            where,
            rule=f"the prompt before it, {prompt!r}, is neither a text nor a list of messages",
            fix="Change the row, or leave it out.",
        )
        return [([*asked, *one], len(one)) for one in found]  # type: ignore[misc]
