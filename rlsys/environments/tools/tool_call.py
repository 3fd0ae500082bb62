"""Tool calls as a model wrote them, and replies that contain them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlsys.common.safe_json import dump_json, parse_json


@dataclass(frozen=True)
class ToolCall:
    """A tool call.

    If the call is malformed, `error` is the reason, for the model; `arguments` is {} and `text`
    what the model wrote.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]
    error: str = ""
    text: str = ""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> ToolCall:
        """Return a call in OpenAI's format as a ToolCall.

        The format is {"id", "function": {"name", "arguments": JSON text or an object}}. Mistakes of
        the model become an `error`.
        """
        function = message["function"]
        name, value = function["name"], function["arguments"]
        if message.get("error"):
            return cls(message["id"], name, {}, message["error"], value)
        try:
            arguments = parse_json(value) if isinstance(value, str) else value
        except ValueError as error:
            return cls(message["id"], name, {}, f"the arguments are not valid JSON: {error}", value)
        if not isinstance(arguments, Mapping):
            return cls(message["id"], name, {}, NO_OBJECT, str(value))
        return cls(message["id"], name, arguments)

    @property
    def message(self) -> dict[str, Any]:
        """The call in OpenAI's format, for the `tool_calls` of an assistant message.

        A malformed call has an additional key "error"; its arguments are the text of the model.
        """
        arguments = self.text if self.error else dump_json(self.arguments, ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        error = {"error": self.error} if self.error else {}
        return {"id": self.id, "type": "function", "function": function, **error}


NO_OBJECT = "the arguments must be a JSON object, such as {}"


@dataclass(frozen=True)
class ToolReply:
    """A parsed reply: the text around its calls, and the calls in their order."""

    content: str
    calls: tuple[ToolCall, ...] = ()

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls in OpenAI's format."""
        return [call.message for call in self.calls]


@dataclass(frozen=True)
class RawCall:
    """A call as it was parsed. It is malformed if it has an error or no name."""

    name: str = ""
    arguments: Any = None
    error: str = ""
    text: str = ""
    id: str = ""


# A piece of a reply: text, or a call.
Piece = str | RawCall
