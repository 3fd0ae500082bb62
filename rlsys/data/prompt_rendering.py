"""Rendering of a row's prompt as text and as tokens.

In: the value of the prompt column, a string or a list of chat messages, and the row's tools. Out:
the text that the model sees, plain or through the tokenizer's chat template, and its token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlsys.config import DataConfig
from rlsys.data.hub import in_short
from rlsys.errors import InvalidValue, require
from rlsys.text.chat_template import (
    PROBE,
    REPLY_ROLE,
    Ending,
    ending_of,
    render_chat,
    template_text,
)
from rlsys.text.guarded import TextEncoder
from rlsys.text.messages import Message, plain_messages, plain_tools
from rlsys.text.tokenizer_boundary import TokenizerBoundary, check_encodable

TOOLS_COLUMN = "tools"


def check_no_sharegpt(value: object, where: str) -> None:
    """Raise InvalidValue about `where` for messages with "from" and "value"."""
    require(
        not isinstance(value, Sequence)
        or isinstance(value, str | bytes)
        or not any(
            isinstance(one, Mapping) and {"from", "value"} <= {*one} and "role" not in one
            for one in value
        ),
        where,
        rule="has messages with the keys 'from' and 'value' (ShareGPT's format)",
        fix="Convert each one to 'role' and 'content', as docs/formats.md#messages shows.",
    )


@dataclass(frozen=True)
class PromptRenderer:
    """Renderer and encoder of prompts with one tokenizer.

    Raises InvalidValue for a chat template that the tokenizer does not have.
    """

    config: DataConfig
    tokenizer: Any

    def __post_init__(self) -> None:
        require(
            not self.config.chat_template or bool(template_text(self.tokenizer)),
            "data.chat_template",
            value=True,
            rule="the tokenizer has no chat template",
            fix="Set data.chat_template=false, or use a model with a chat template.",
        )
        require(
            self.config.chat_template or not self.config.template_options,
            "data.template_options",
            list(self.config.template_options),
            rule="is ignored without data.chat_template",
            fix="Set data.chat_template=true.",
        )

    @cached_property
    def boundary(self) -> TokenizerBoundary:
        """The tokenizer's boundary between texts and tokens."""
        return TokenizerBoundary(self.tokenizer)

    @cached_property
    def encoder(self) -> TextEncoder:
        """The encoder of texts that may contain special tokens as plain text."""
        return TextEncoder(self.boundary)

    @property
    def num_added_tokens(self) -> int:
        """Number of tokens before a text, such as <bos>. A chat template writes them itself."""
        return 0 if self.config.chat_template else len(self.boundary.opening)

    def text(self, value: object, where: str, *, tools: object = None) -> str:
        """Return the text of a prompt.

        The text of a chat that ends with a reply stays open, so that the model continues the reply.

        Args:
            value: The value of the prompt column.
            where: The field of an InvalidValue.
            tools: The value of the row's tools column.

        Raises:
            InvalidValue: The value is not a prompt, or the template does not write all of it.
        """
        if self.config.chat_template:
            messages = self.messages(value, where)
            shown = self.tools(tools, where)
            return self.chat_text(messages, where, ending=ending_of(messages), tools=shown)
        require(
            not isinstance(value, Sequence) or isinstance(value, str | bytes),
            where,
            value,
            rule="is a list of messages, which the model's chat template renders",
            fix="Set data.chat_template=true.",
        )
        if value is None:
            raise InvalidValue(where, None, rule="is null", fix="Fill it, or leave the row out.")
        require(isinstance(value, str), where, value, rule="is not a text", fix="Give a string.")
        require(value != "", where, value, rule="is empty", fix="Leave the row out.")
        return check_encodable(str(value), where, change="the row")

    def messages(self, value: object, where: str) -> list[Message]:
        """Return the messages of a chat, or of a user's text, after the configured system message.

        Raises:
            InvalidValue: The value is not a chat. The field is `where`.
        """
        check_no_sharegpt(value, where)
        chat = [{"role": "user", "content": value}] if isinstance(value, str) else value
        messages: list[Message] = list(plain_messages(chat, where))
        if self.config.system_prompt is None:
            return messages
        require(
            messages[0]["role"] != "system",
            where,
            rule="begins with its own system message, and data.system_prompt is set",
            fix="Unset data.system_prompt.",
        )
        return [{"role": "system", "content": self.config.system_prompt}, *messages]

    def tools(self, value: object, where: str) -> list[Message]:
        """Return a row's tools, or raise InvalidValue if the template does not write tools."""
        tools: list[Message] = list(plain_tools(value, where))
        require(
            not tools or self._renders_tools,
            where,
            rule=f"the row has {len(tools)} tools, and the model's chat template does not write "
            "tools",
            fix=f"Use a model whose template does, or rename the column {TOOLS_COLUMN!r}.",
        )
        return tools

    def chat_text(
        self,
        messages: Sequence[Message],
        where: str,
        *,
        ending: Ending = Ending.REPLY,
        tools: Sequence[Message] = (),
    ) -> str:
        """Return the text of plain messages.

        Raises:
            InvalidValue: The template refuses the messages or leaves some out. The field is
                `where`.
        """
        try:
            text = render_chat(self.tokenizer, messages, tools=tools, ending=ending)
            unwritten = self._unwritten(messages, text, ending, tools)
        except Exception as error:  # a template may raise anything
            raise InvalidValue(
                where,
                rule=f"the model's chat template refuses the messages ({in_short(error)})",
                fix="Change the messages.",
            ) from error
        require(
            unwritten is None,
            where,
            rule=f"the model's chat template does not write messages with the role {unwritten!r}",
            fix="Change the role, or leave the message out.",
        )
        return check_encodable(text, where, change="the messages")

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of rendered prompts."""
        return self.boundary.encode_prompts(texts, with_opening=not self.config.chat_template)

    def _unwritten(
        self, messages: Sequence[Message], text: str, ending: Ending, tools: Sequence[Message]
    ) -> str | None:
        """Return a role whose messages the template leaves out, or None if it writes all.

        Each role is checked once, by rendering its message with another text.
        """
        for number, message in enumerate(messages):
            role = str(message["role"])
            if role in self._written_roles or not message["content"]:
                continue
            other = [*messages]
            other[number] = {**message, "content": message["content"] + PROBE}
            if render_chat(self.tokenizer, other, tools=tools, ending=ending) == text:
                return role
            self._written_roles.add(role)
        return None

    @cached_property
    def _written_roles(self) -> set[str]:
        return {REPLY_ROLE}  # templates leave out the reasoning of earlier replies

    @cached_property
    def ends_turns(self) -> bool:
        """Return whether the template writes something after a reply."""
        messages = [{"role": "user", "content": "a"}, {"role": REPLY_ROLE, "content": PROBE}]
        try:
            text = render_chat(self.tokenizer, messages, ending=Ending.CLOSED)
        except Exception:  # noqa: BLE001 - a template may refuse these messages
            return True
        return not text.rstrip().endswith(PROBE)

    @cached_property
    def _renders_tools(self) -> bool:
        function = {"name": PROBE, "description": "", "parameters": {"type": "object"}}
        tool = {"type": "function", "function": {**function}}
        user = {"role": "user", "content": "a"}
        for messages in ([user], [{"role": "system", "content": "b"}, user]):
            try:
                if PROBE in render_chat(self.tokenizer, messages, tools=[tool]):
                    return True
            except Exception:  # noqa: BLE001 - a template may refuse a role or this tool
                continue
        return False
