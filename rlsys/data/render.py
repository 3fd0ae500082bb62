"""A row's prompt as text, and as tokens.

In: the prompt column's value, a string or a list of chat messages. Out: the text that the model
sees, plain or through the tokenizer's chat template; its token ids.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.config import DataConfig, require
from rlsys.data.hub import in_short


@dataclass(frozen=True)
class PromptRenderer:
    """Raises ValueError at once for a chat template that the tokenizer does not have."""

    config: DataConfig
    tokenizer: Any

    def __post_init__(self) -> None:
        require(
            not self.config.chat_template or bool(self.tokenizer.chat_template),
            "data.chat_template is on, but the tokenizer has no chat template; turn it off, or use "
            "a model that has one.",
        )

    @property
    def num_added_tokens(self) -> int:
        """Tokens, such as <bos>, that the tokenizer adds to a text."""
        # A chat template writes them itself.
        return 0 if self.config.chat_template else self.tokenizer.num_special_tokens_to_add()

    def text(self, value: object, where: str) -> str:
        """Raises ValueError, beginning with `where`, for what is no prompt."""
        if self.config.chat_template:
            return self.chat_text(self.messages(value, where), where)
        require(
            not isinstance(value, Sequence) or isinstance(value, str | bytes),
            f"{where} is a list of messages; set data.chat_template=true to render it.",
        )
        require(
            isinstance(value, str),
            f"{where}: {reprlib.repr(value)} is no text; make it a string.",
        )
        require(value != "", f"{where} is empty; leave the row out.")
        return _encodable(str(value), where)

    def messages(self, value: object, where: str) -> list[Mapping[str, Any]]:
        """Of a chat, or of a user's message alone, the configured system message first. Raises
        ValueError, beginning with `where`, for what is no chat."""
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        require(
            isinstance(messages, Sequence)
            and len(messages) > 0
            and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages),
            f"{where}: {reprlib.repr(value)} is no chat; make it a string, or a list of messages "
            "with role and content.",
        )
        assert isinstance(messages, Sequence)
        if self.config.system_prompt is not None:
            require(
                messages[0]["role"] != "system",
                f"{where} begins with a system message of its own; unset data.system_prompt.",
            )
            return [{"role": "system", "content": self.config.system_prompt}, *messages]
        return list(messages)

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], where: str, *, reply_follows: bool = True
    ) -> str:
        """By the chat template, with the beginning of a reply where one `reply_follows`."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=reply_follows
            )
        # Of jinja's own, or of whatever the template does with contents that are no text.
        except Exception as error:
            raise ValueError(
                f"{where} is refused by the model's chat template ({in_short(error)}); change the "
                "messages."
            ) from error
        return _encodable(text, where)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        add_special_tokens = not self.config.chat_template
        encoded = self.tokenizer(list(texts), add_special_tokens=add_special_tokens)
        token_ids: list[list[int]] = encoded["input_ids"]
        return token_ids


def _encodable(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: {reprlib.repr(text)} holds half a character ({error.reason}); mend the row "
            "or leave it out."
        ) from error
    return text
