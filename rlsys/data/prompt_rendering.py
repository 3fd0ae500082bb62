"""A row's prompt as text, and as tokens.

In: the prompt column's value, a string or a list of chat messages, and the row's tools. Out: the
text that the model sees, plain or through the tokenizer's chat template; its token ids.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlsys.config import DataConfig, require
from rlsys.data.hub import in_short
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


@dataclass(frozen=True)
class PromptRenderer:
    """Renders and encodes prompts with one tokenizer.

    Raises ValueError for a chat template that the tokenizer does not have.
    """

    config: DataConfig
    tokenizer: Any

    def __post_init__(self) -> None:
        require(
            not self.config.chat_template or bool(template_text(self.tokenizer)),
            "data.chat_template is on, but the tokenizer has no chat template; turn it off, or use "
            "a model that has one.",
        )
        require(
            self.config.chat_template or not self.config.template_options,
            f"data.template_options={list(self.config.template_options)} is set, but "
            "data.chat_template is off, so it would be ignored; set data.chat_template=true.",
        )

    @cached_property
    def boundary(self) -> TokenizerBoundary:
        return TokenizerBoundary(self.tokenizer)

    @cached_property
    def encoder(self) -> TextEncoder:
        return TextEncoder(self.boundary)

    @property
    def num_added_tokens(self) -> int:
        """Tokens, such as <bos>, that stand before a text. A chat template writes them itself."""
        return 0 if self.config.chat_template else len(self.boundary.opening)

    def text(self, value: object, where: str, *, tools: object = None) -> str:
        """Return the text of a prompt. A chat that ends with a reply ends within it: the model goes
        on with that reply.

        Args:
            value: The prompt column's value.
            where: What a message of an error begins with.
            tools: The value of the row's tools column.

        Raises:
            ValueError: The value is no prompt, or the template does not write all of it.
        """
        if self.config.chat_template:
            messages = self.messages(value, where)
            shown = self.tools(tools, where)
            return self.chat_text(messages, where, ending=ending_of(messages), tools=shown)
        require(
            not isinstance(value, Sequence) or isinstance(value, str | bytes),
            f"{where} is a list of messages; set data.chat_template=true to render it.",
        )
        require(
            isinstance(value, str),
            f"{where}: {reprlib.repr(value)} is no text; make it a string.",
        )
        require(value != "", f"{where} is empty; leave the row out.")
        return check_encodable(str(value), where)

    def messages(self, value: object, where: str) -> list[Message]:
        """Return a chat's messages, or a user's message alone, behind the configured system
        message. Raises ValueError, beginning with `where`, for a value that is no chat.
        """
        given = [{"role": "user", "content": value}] if isinstance(value, str) else value
        messages: list[Message] = list(plain_messages(given, where))
        if self.config.system_prompt is None:
            return messages
        require(
            messages[0]["role"] != "system",
            f"{where} begins with a system message of its own; unset data.system_prompt.",
        )
        return [{"role": "system", "content": self.config.system_prompt}, *messages]

    def tools(self, value: object, where: str) -> list[Message]:
        """Return a row's tools. Raises ValueError for tools that the template does not write."""
        tools: list[Message] = list(plain_tools(value, where))
        require(
            not tools or self._renders_tools,
            f"{where}: the row has {len(tools)} tools, and the model's chat template does not "
            "write tools. Use a model whose template does, or rename the column.",
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
        """Return the text of plain messages. Raises ValueError, beginning with `where`, for
        messages that the template refuses or does not write.
        """
        try:
            text = render_chat(self.tokenizer, messages, tools=tools, ending=ending)
            unwritten = self._unwritten(messages, text, ending, tools)
        # Jinja's own errors, and whatever else a template raises.
        except Exception as error:
            raise ValueError(
                f"{where} is refused by the model's chat template ({in_short(error)}); change the "
                "messages."
            ) from error
        require(
            unwritten is None,
            f"{where}: the model's chat template does not write messages of the role "
            f"{unwritten!r}. Change the role, or leave the message out.",
        )
        return check_encodable(text, where)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return self.boundary.encode_prompts(texts, with_opening=not self.config.chat_template)

    def _unwritten(
        self, messages: Sequence[Message], text: str, ending: Ending, tools: Sequence[Message]
    ) -> str | None:
        """Return a role whose messages the template leaves out; None: it writes all. A role is
        looked at once: its message is rendered with another text.
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
        return {REPLY_ROLE}  # templates leave the thoughts of earlier replies out

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
