"""Formats in which models write tool calls.

In: the text of a reply with special tokens, which some formats use, and without reasoning. Out: a
`ToolReply`: the calls in their order and the text around them. A malformed call is a `ToolCall`
with an `error` for the model. No text of a model raises an exception.

`detect(template)` finds the format in a chat template, `tool_format(name)` selects it by name.
tool_json.py and tool_xml.py contain the parsers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.common.structural_tags import Format
from rlsys.environments.tools.tool_call import NO_OBJECT, Piece, RawCall, ToolCall, ToolReply
from rlsys.environments.tools.tool_grammars import (
    hermes_calls,
    llama3_calls,
    mistral_args_calls,
    mistral_calls,
    plain_json_calls,
    qwen3_coder_calls,
)
from rlsys.environments.tools.tool_json import hermes, llama3, mistral, plain_json
from rlsys.environments.tools.tool_xml import qwen3_coder
from rlsys.errors import InvalidValue

# Maximum number of calls parsed per reply. It is above the number that a ToolSet runs, so that the
# model gets an error for the others.
MAX_CALLS_READ = 64

# Number of characters of a malformed call that are quoted to the model.
MAX_QUOTED = 200


@dataclass(frozen=True)
class ToolFormat:
    """Format of tool calls.

    Attributes:
        name: Name of the format.
        pieces: Parser: takes a reply and the schemas of the tools, yields texts and calls.
        calls: Takes schemas and whether several calls are allowed, returns the format of a reply
            that must call one of these tools. None: calls cannot be forced.
    """

    name: str
    pieces: Callable[[str, Sequence[Mapping[str, Any]]], Iterator[Piece]]
    calls: Callable[[Sequence[Mapping[str, Any]], bool], Format] | None = None

    def parse(
        self, text: str, tools: Sequence[Mapping[str, Any]] = (), *, num_before: int = 0
    ) -> ToolReply:
        """Parse a reply. The content of a reply without calls is its unchanged text.

        Ids of calls have the nine letters and digits that Mistral's templates require: the model's
        own ids if they have them, else made from `num_before`, the number of earlier calls of the
        episode.
        """
        found: list[Piece] = []
        calls: list[RawCall] = []
        for one in self.pieces(text, tools):
            found.append(one)
            if isinstance(one, RawCall):
                calls.append(one)
            if len(calls) == MAX_CALLS_READ:
                break
        if not calls:
            return ToolReply(text)
        around = [one.strip() for one in found if isinstance(one, str)]
        return ToolReply(
            "\n".join(one for one in around if one),
            tuple(_call(one, num_before + index) for index, one in enumerate(calls)),
        )


def _call(raw: RawCall, number: int) -> ToolCall:
    id = raw.id or f"call{number:05d}"
    error = raw.error
    if not error and not raw.name:
        error = 'a call must have a "name", a string'
    if not error and not isinstance(raw.arguments, dict):
        error = NO_OBJECT
    if not error:
        return ToolCall(id, raw.name, raw.arguments)
    quoted = raw.text.strip()[:MAX_QUOTED]
    return ToolCall(id, raw.name, {}, f"malformed call: {error}. The call was: {quoted}", quoted)


FORMATS = {
    one.name: one
    for one in (
        ToolFormat("hermes", hermes, hermes_calls),
        ToolFormat("qwen3_coder", qwen3_coder, qwen3_coder_calls),
        ToolFormat("llama3", llama3, llama3_calls),
        ToolFormat("mistral", mistral, mistral_calls),
        ToolFormat("mistral_args", mistral, mistral_args_calls),
        ToolFormat("json", plain_json, plain_json_calls),
    )
}

# Texts by which the format of a template is recognized, in this order. None: not supported.
SIGNS: tuple[tuple[str, str | None], ...] = (
    ("<arg_key>", None),  # GLM
    ("<function=", "qwen3_coder"),
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ('"parameters": ', "llama3"),
    ("<|python_tag|>", "llama3"),
)


def tool_format(name: str) -> ToolFormat:
    """Return the format with this name. Raises InvalidValue if there is none."""
    if name not in FORMATS:
        raise InvalidValue(
            "tool_format",
            name,
            rule="there is no format with this name",
            fix=f"Use one of {', '.join(FORMATS)}.",
        )
    return FORMATS[name]


def detect(template: str | None) -> ToolFormat:
    """Return the format of a chat template; plain JSON without a template.

    Raises:
        InvalidValue: The template does not render tools, or the format is not supported.
    """
    if template is None:
        return FORMATS["json"]
    if "tools" not in template:
        raise InvalidValue(
            "tools",
            rule="the chat template of the model does not render tools, so it would not see them",
            fix="Use a model whose template renders tools, or describe them in a message and set "
            'tool_format="json".',
        )
    for sign, name in SIGNS:
        if sign in template:
            if name is None:
                break
            return FORMATS[name]
    raise InvalidValue(
        "tool_format",
        rule="the chat template of the model writes tool calls in an unknown format",
        fix=f"Set tool_format to one of {', '.join(FORMATS)}.",
    )


def chosen_format(choice: str | ToolFormat, template: str | None) -> ToolFormat:
    """Return the format of an environment's `tool_format`: a format, its name, or "" to detect it.

    Raises InvalidValue.
    """
    if isinstance(choice, ToolFormat):
        return choice
    return tool_format(choice) if choice else detect(template)
