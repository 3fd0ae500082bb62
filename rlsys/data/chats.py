"""Chats that a dataset holds, whose replies are learnt.

In: a row's messages. Out: the prompt, which is what stands before the first reply; and all behind
it as one `Completion`, of which the replies alone are trained on.

    system, user ─► <prompt>      assistant ─► reply      user ─► between      assistant ─► reply
                                  trained                 read                 trained

A reply ends with what the chat template writes behind it, less white space. The template may change
the white space around a reply's text and thoughts, and nothing else of it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlsys.config import require
from rlsys.data.completions import check_length
from rlsys.data.prompt_rendering import PromptRenderer
from rlsys.text.chat_template import REPLY_ROLE, Ending
from rlsys.text.messages import Message
from rlsys.types import Completion

Messages = Sequence[Message]
Piece = tuple[str, bool]  # a text, and whether it is a reply

# Keys of a reply that hold its thoughts.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, kw_only=True)
class ChatColumn:
    """The column of a dataset with a chat in each row, whose part behind the prompt has at most
    `max_tokens` tokens. Raises ValueError at once where chats are not rendered.
    """

    name: str
    max_tokens: int
    renderer: PromptRenderer

    def __post_init__(self) -> None:
        require(
            self.renderer.config.chat_template,
            f"the completions of {self.name!r} are replies of a chat, and data.chat_template is "
            "off; set data.chat_template=true.",
        )

    def opening(self, value: object, where: str) -> Messages:
        """Return the messages before the first reply. Raises ValueError, beginning with `where`,
        for a chat without a reply, or without anything before it.
        """
        require(
            isinstance(value, Sequence) and not isinstance(value, str),
            f"{where}: {value!r} is no list of messages; make it one, or name another column for "
            "flow.dataset's completions.",
        )
        assert isinstance(value, Sequence)
        roles = [message.get("role") for message in value if isinstance(message, Mapping)]
        require(
            REPLY_ROLE in roles[1:] and roles[0] != REPLY_ROLE,
            f"{where}: a chat of the roles {roles} has no reply of {REPLY_ROLE!r} behind a message "
            "of another; leave the row out.",
        )
        return value[: roles.index(REPLY_ROLE)]

    def read(
        self,
        value: object,
        where: str,
        *,
        tools: object = None,
        num_continued: int | None = None,
    ) -> tuple[Completion, ...]:
        """Return the replies of one row's chat as a group of one completion. Raises ValueError,
        beginning with `where`. With `num_continued`, only the replies among the last so many
        messages are trained on, and the messages before them are the prompt.
        """
        pieces = self._pieces(value, where, tools, num_continued)
        token_ids = self._tokens(pieces, where)
        check_length(sum(map(len, token_ids)), self.max_tokens, where)
        return (
            Completion(
                text="".join(text for text, _ in pieces),
                token_ids=tuple(token for some in token_ids for token in some),
                loss_mask=tuple(
                    is_reply
                    for (_, is_reply), some in zip(pieces, token_ids, strict=True)
                    for _ in some
                ),
            ),
        )

    def too_long(
        self, rows: Iterable[tuple[object, object]], name: Callable[[int], str]
    ) -> dict[int, int]:
        """Return the lengths of rows that are too long, as CompletionColumn does."""
        found = {}
        for number, (value, tools) in enumerate(rows):
            where = name(number)
            pieces = self._pieces(value, where, tools)
            text = "".join(text for text, _ in pieces)
            if self.renderer.boundary.must_encode(text, self.max_tokens, where):
                found[number] = sum(map(len, self._tokens(pieces, where)))
        return {number: length for number, length in found.items() if length > self.max_tokens}

    def _pieces(
        self, value: object, where: str, tools: object, num_continued: int | None = None
    ) -> list[Piece]:
        """Return what follows the prompt: replies, and the texts between them."""
        self.opening(value, where)
        messages = self.renderer.messages(value, where)
        shown = self.renderer.tools(tools, where)
        first = 0 if num_continued is None else len(messages) - num_continued
        replies = [i for i, one in enumerate(messages) if one["role"] == REPLY_ROLE and i >= first]
        whole = self._text(messages[: replies[-1] + 1], where, shown)
        spans = [self._span(messages, reply, whole, where, shown) for reply in replies]
        for reply, span in zip(replies, spans, strict=True):
            _check_written(messages[reply], whole[slice(*span)], f"{where}, message {reply}")
        pieces = [(whole[slice(*spans[0])], True)]
        for (_, end), (start, next_end) in pairwise(spans):
            pieces += [(whole[end:start], False), (whole[start:next_end], True)]
        return pieces

    def _span(
        self, messages: Messages, reply: int, whole: str, where: str, tools: Messages
    ) -> tuple[int, int]:
        """Return where a reply stands in the whole text, its end of turn included."""
        before = self.renderer.chat_text(messages[:reply], where, tools=tools)
        closed = self._text(messages[: reply + 1], where, tools).rstrip()
        require(
            closed.startswith(before.rstrip()),
            f"{where}: the model's chat template begins a reply with {before[-20:]!r}, which it "
            f"leaves out of the written message {reply} (from 0), so that its tokens are not those "
            "of a reply. Use a template for training, or write that beginning into the message.",
        )
        after = self.renderer.boundary.shared_beginning(closed, whole).rstrip()
        # Beyond it: what ends a conversation, but no turn.
        is_same = closed == after or _visible(messages[reply]["content"]) in _visible(
            after[len(before) :]
        )
        require(
            after.startswith(before) and is_same,
            f"{where}: the model's chat template writes message {reply} (from 0) otherwise as soon "
            "as others follow it, so that its tokens are not those of a reply; give chats that end "
            "with their first reply.",
        )
        content = messages[reply]["content"].strip()
        require(
            not content or not after.endswith(content),
            f"{where}: the model's chat template writes nothing behind a reply, so that the model "
            "would not learn to end one; use a template that does, or columns of texts.",
        )
        return len(before), len(after)

    def _text(self, messages: Messages, where: str, tools: Messages) -> str:
        return self.renderer.chat_text(messages, where, ending=Ending.CLOSED, tools=tools)

    def _tokens(self, pieces: Sequence[Piece], where: str) -> list[list[int]]:
        """Encode piece by piece. A reply has exactly its text behind what comes before it; the text
        between replies has the tokens that it has in a prompt.
        """
        boundary, encoder = self.renderer.boundary, self.renderer.encoder
        found: list[list[int]] = []
        for text, is_reply in pieces:
            if is_reply:
                found += boundary.encode_written([text], where)
            else:
                found.append(encoder.encode(text, after=found[-1][-1], cache={}, where=where))
        return found


def _check_written(reply: Message, written: str, where: str) -> None:
    """Raise ValueError for a reply of which the template leaves something out."""
    visible = _visible(written)
    parts = {"content": reply["content"], **{key: reply.get(key) for key in THOUGHTS}}
    for number, call in enumerate(reply.get("tool_calls") or ()):
        parts[f"tool_calls[{number}]"] = (call.get("function") or call).get("name")
    for name, text in parts.items():
        require(
            not isinstance(text, str) or _visible(text) in visible,
            f"{where}: the model's chat template leaves out or changes its {name}, "
            f"{reprlib.repr(text)}, which would not be learnt. Use a template that writes it, or "
            "columns of texts.",
        )


def _visible(text: str) -> str:
    """Return a text without its white space."""
    return "".join(text.split())
