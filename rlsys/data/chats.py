"""Chats that a dataset holds, whose replies are learnt.

In: a row's messages. Out: the prompt, which is what stands before the first reply; and all behind
it as one `Completion`, of which the replies alone are trained on.

    system, user ─► <prompt>      assistant ─► reply      user ─► between      assistant ─► reply
                                  trained                 read                 trained

A reply ends with what the chat template writes behind it, less white space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rlsys.config import require
from rlsys.data.alphabet import Alphabet
from rlsys.data.completions import check_length
from rlsys.data.render import PromptRenderer
from rlsys.types import Completion

REPLY = "assistant"

Messages = Sequence[Mapping[str, Any]]
Piece = tuple[str, bool]  # a text, and whether it is a reply


@dataclass(frozen=True, kw_only=True)
class ChatColumn:
    """The column of a dataset with a chat in each row, whose part behind the prompt has at most
    `max_tokens` tokens. Raises ValueError at once where chats are not rendered."""

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
        """The messages before the first reply. Raises ValueError, beginning with `where`, for a
        chat without a reply, or without anything before it."""
        require(
            isinstance(value, Sequence) and not isinstance(value, str),
            f"{where}: {value!r} is no list of messages; make it one, or name another column for "
            "flow.dataset's completions.",
        )
        assert isinstance(value, Sequence)
        roles = [message.get("role") for message in value if isinstance(message, Mapping)]
        require(
            REPLY in roles[1:] and roles[0] != REPLY,
            f"{where}: a chat of the roles {roles} has no reply of {REPLY!r} behind a message of "
            "another; leave the row out.",
        )
        return value[: roles.index(REPLY)]

    def read(
        self, value: object, where: str, *, num_continued: int | None = None
    ) -> tuple[Completion, ...]:
        """Return the completion of one row, as a group of one. Raises ValueError, beginning with
        `where`. With `num_continued`, only the replies among the last so many messages are
        trained on, and the messages before them are the prompt."""
        pieces = self._pieces(value, where, num_continued)
        token_ids = self._tokens(pieces)
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

    def too_long(self, values: Iterable[object], name: Callable[[int], str]) -> dict[int, int]:
        """As of a CompletionColumn."""
        alphabet, found = Alphabet(self.renderer.tokenizer), {}
        for number, value in enumerate(values):
            pieces = self._pieces(value, name(number))
            for text, _ in pieces:
                alphabet.check(text, name(number))
            if sum(len(text.encode()) for text, _ in pieces) > self.max_tokens:
                found[number] = sum(map(len, self._tokens(pieces)))
        return {number: length for number, length in found.items() if length > self.max_tokens}

    def _pieces(self, value: object, where: str, num_continued: int | None = None) -> list[Piece]:
        """Return what follows the prompt: replies, and the text between them."""
        self.opening(value, where)
        messages = self.renderer.messages(value, where)
        first = 0 if num_continued is None else len(messages) - num_continued
        replies = [i for i, one in enumerate(messages) if one["role"] == REPLY and i >= first]
        whole = self._text(messages[: replies[-1] + 1], where)
        spans = [self._span(messages, reply, whole, where) for reply in replies]
        pieces = [(whole[slice(*spans[0])], True)]
        for (_, end), (start, next_end) in pairwise(spans):
            pieces += [(whole[end:start], False), (whole[start:next_end], True)]
        return pieces

    def _span(self, messages: Messages, reply: int, whole: str, where: str) -> tuple[int, int]:
        """Where a reply stands in the whole text, its end of turn included."""
        before = self.renderer.chat_text(messages[:reply], where)
        after = self._text(messages[: reply + 1], where).rstrip()
        require(
            after.startswith(before) and whole.startswith(after),
            f"{where}: the model's chat template writes message {reply} (from 0) otherwise as soon "
            "as others follow it, so that its tokens are not those of a reply; give chats that end "
            "with their first reply.",
        )
        content = messages[reply]["content"]
        said = content.strip() if isinstance(content, str) else ""
        require(
            not said or not after.endswith(said),
            f"{where}: the model's chat template writes nothing behind a reply, so that the model "
            "would not learn to end one; use a template that does, or columns of texts.",
        )
        return len(before), len(after)

    def _text(self, messages: Messages, where: str) -> str:
        return self.renderer.chat_text(messages, where, reply_follows=False)

    def _tokens(self, pieces: Sequence[Piece]) -> list[list[int]]:
        """Piece by piece: a reply's tokens are those that follow its prompt."""
        texts = [text for text, _ in pieces]
        encoded: list[list[int]] = self.renderer.tokenizer(texts, add_special_tokens=False)[
            "input_ids"
        ]
        return encoded
