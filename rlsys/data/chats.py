"""Chats in a dataset whose replies are trained on.

In: the messages of a row. Out: the prompt, which is the messages before the first reply, and
everything after it as one `Completion`, of which only the replies are trained on.

    system, user ─► <prompt>      assistant ─► reply      user ─► between      assistant ─► reply
                                  trained                 not trained          trained

A reply ends with what the chat template writes after it, without white space. The template may
change the white space around the text and the reasoning of a reply, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlsys.common.option_names import option
from rlsys.data.completions import check_length
from rlsys.data.prompt_rendering import PromptRenderer, check_no_sharegpt
from rlsys.errors import InvalidValue, require
from rlsys.text.chat_template import REPLY_ROLE, Ending, template_text
from rlsys.text.messages import Message
from rlsys.types import Completion

Messages = Sequence[Message]
Piece = tuple[str, bool]  # a text, and whether it is a reply

# Keys of a reply that hold its reasoning.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, kw_only=True)
class ChatColumn:
    """Dataset column with a chat in each row.

    The part after the prompt has at most `max_tokens` tokens. Raises InvalidValue if
    data.chat_template is off.
    """

    name: str
    max_tokens: int
    renderer: PromptRenderer

    def __post_init__(self) -> None:
        require(
            self.renderer.config.chat_template,
            "data.chat_template",
            value=False,
            rule=f"the completions in column {self.name!r} are messages of a chat, which need the "
            "model's chat template",
            fix="Set data.chat_template=true.",
        )

    def opening(self, value: object, where: str) -> Messages:
        """Return the messages before the first reply.

        Raises:
            InvalidValue: The chat has no reply, or nothing before it. The field is `where`.
        """
        check_no_sharegpt(value, where)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise InvalidValue(
                where,
                value,
                rule="is null" if value is None else "is not a list of messages",
                fix="Give a list of messages, or name another column as the completions of "
                "flow.dataset.",
            )
        roles = [message.get("role") for message in value if isinstance(message, Mapping)]
        require(
            REPLY_ROLE in roles[1:] and roles[0] != REPLY_ROLE,
            where,
            roles,
            rule=f"a chat with these roles has no message of {REPLY_ROLE!r} after a message of "
            "another role",
            fix="Leave the row out.",
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
        """Return the replies of one row's chat as a group of one completion.

        Args:
            value: The messages.
            where: The field of an InvalidValue.
            tools: The value of the row's tools column.
            num_continued: If given, only the replies among the last `num_continued` messages are
                trained on, and the messages before them are the prompt.
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
        """Return the texts after the prompt: replies, and the texts between them."""
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
        """Return the start and end of a reply in the whole text, including its end of turn."""
        before = self.renderer.chat_text(messages[:reply], where, tools=tools)
        closed = self._text(messages[: reply + 1], where, tools).rstrip()
        require(
            closed.startswith(before.rstrip()),
            where,
            rule=f"the model's chat template begins a generated reply with {before[-20:]!r}, but "
            f"leaves this out of the written message {reply} (from 0)",
            fix=self._beginning_fix(before),
        )
        after = self.renderer.boundary.shared_beginning(closed, whole).rstrip()
        # Text after it ends the conversation, not the turn.
        is_same = closed == after or _visible(messages[reply]["content"]) in _visible(
            after[len(before) :]
        )
        require(
            after.startswith(before) and is_same,
            where,
            rule=f"the model's chat template writes message {reply} (from 0) differently when "
            "other messages follow it, so its tokens are not those of a generated reply",
            fix="Give chats that end with their first reply.",
        )
        content = messages[reply]["content"].strip()
        require(
            not after.endswith(content) if content else self.renderer.ends_turns,
            where,
            rule="the model's chat template writes nothing after a reply, so the model would not "
            "learn to end one",
            fix="Use a template that ends replies, or columns with texts.",
        )
        return len(before), len(after)

    def _beginning_fix(self, before: str) -> str:
        """Return the fix for a reply that lacks the beginning that the template generates."""
        template = template_text(self.renderer.tokenizer) or ""
        if before.rstrip().endswith("<think>") and "enable_thinking" in template:
            written = option("data.template_options", "enable_thinking=false")
            return f"The generation prompt opens <think>. Set {written}."
        return "Use a template for training, or write that beginning into the message."

    def _text(self, messages: Messages, where: str, tools: Messages) -> str:
        return self.renderer.chat_text(messages, where, ending=Ending.CLOSED, tools=tools)

    def _tokens(self, pieces: Sequence[Piece], where: str) -> list[list[int]]:
        """Encode piece by piece.

        The tokens of a reply decode to exactly its text. The text between replies has the same
        tokens as in a prompt.
        """
        boundary, encoder = self.renderer.boundary, self.renderer.encoder
        found: list[list[int]] = []
        for text, is_reply in pieces:
            if is_reply:
                found += boundary.encode_written([text], where, change="the row")
            else:
                after = found[-1][-1]
                found.append(
                    encoder.encode(text, after=after, cache={}, where=where, change="the row")
                )
        return found


def _check_written(reply: Message, written: str, where: str) -> None:
    """Raise InvalidValue if the template leaves out a part of a reply."""
    visible = _visible(written)
    parts = {"content": reply["content"], **{key: reply.get(key) for key in THOUGHTS}}
    for number, call in enumerate(reply.get("tool_calls") or ()):
        parts[f"tool_calls[{number}]"] = (call.get("function") or call).get("name")
    for name, text in parts.items():
        require(
            not isinstance(text, str) or _visible(text) in visible,
            f"{where}: {name}",
            text,
            rule="the model's chat template leaves this out or changes it, so it would not be "
            "trained on",
            fix="Use a template that writes it, or columns with texts.",
        )


def _visible(text: str) -> str:
    """Return a text without its white space."""
    return "".join(text.split())
