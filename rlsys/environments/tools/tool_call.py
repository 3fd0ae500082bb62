"""A call of a tool as a model wrote it, and a reply that holds some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlsys.common.safe_json import dump_json, parse_json


@dataclass(frozen=True)
class ToolCall:
    """One call. Where the model wrote none that can be read, `error` tells it why, `arguments` is
    {} and `text` what it wrote.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]
    error: str = ""
    text: str = ""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> ToolCall:
        """From OpenAI's shape: {"id", "function": {"name", "arguments": JSON text or an object}}.
        What the model may have written wrong becomes an `error`.
        """
        function = message["function"]
        name, given = function["name"], function["arguments"]
        if message.get("error"):
            return cls(message["id"], name, {}, message["error"], given)
        try:
            arguments = parse_json(given) if isinstance(given, str) else given
        except ValueError as error:
            return cls(message["id"], name, {}, f"the arguments are no JSON: {error}", given)
        if not isinstance(arguments, Mapping):
            return cls(message["id"], name, {}, NO_OBJECT, str(given))
        return cls(message["id"], name, arguments)

    @property
    def message(self) -> dict[str, Any]:
        """OpenAI's shape, for the `tool_calls` of an assistant message; with "error" beside, where
        the call cannot be read: what it holds for arguments then is no more than what was
        written.
        """
        arguments = self.text if self.error else dump_json(self.arguments, ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        told = {"error": self.error} if self.error else {}
        return {"id": self.id, "type": "function", "function": function, **told}


NO_OBJECT = "the arguments are no JSON object, such as {}"


@dataclass(frozen=True)
class ToolReply:
    """What a model said: the text around its calls, and the calls in their order."""

    content: str
    calls: tuple[ToolCall, ...] = ()

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return [call.message for call in self.calls]


@dataclass(frozen=True)
class Written:
    """One call as it was read; without a name, or with an error, it is malformed."""

    name: str = ""
    arguments: Any = None
    error: str = ""
    text: str = ""
    id: str = ""


# A piece of a reply: text, or a call.
Piece = str | Written
