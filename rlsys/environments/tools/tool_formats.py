"""The ways in which models write calls of tools.

In: the text of a reply, special tokens included (some formats are made of these), reasoning taken
off. Out: a `ToolReply`: the calls in their order, and the text around them. A call that cannot be
read is a `ToolCall` with an `error` that the model can be told; nothing that a model writes raises.

The format is the chat template's: `detect(template)` finds it there, `tool_format(name)` overrides.
The formats themselves are read in tool_json.py and tool_xml.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.common.structural_tags import Format
from rlsys.environments.tools.tool_call import NO_OBJECT, Piece, ToolCall, ToolReply, Written
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

# Of one reply; what follows is not read. More than a ToolSet makes, so that it says so.
MAX_CALLS_READ = 64

# Of what a model wrote wrong, this much is quoted back.
MAX_QUOTED = 200


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls. `pieces` takes a reply, and the schemas of the tools. `calls` takes
    schemas, and whether several calls are allowed, and returns the format of a reply that must call
    one of these tools; None: calls cannot be forced.
    """

    name: str
    pieces: Callable[[str, Sequence[Mapping[str, Any]]], Iterator[Piece]]
    calls: Callable[[Sequence[Mapping[str, Any]], bool], Format] | None = None

    def parse(
        self, text: str, tools: Sequence[Mapping[str, Any]] = (), *, num_before: int = 0
    ) -> ToolReply:
        """Read a reply. `num_before`: calls that this episode has made already, so that no two of
        its calls share an id; ids have the nine letters and digits that Mistral's templates ask
        for, and are the model's own where it wrote such. A reply without calls is its text as it
        is.
        """
        found: list[Piece] = []
        calls: list[Written] = []
        for one in self.pieces(text, tools):
            found.append(one)
            if isinstance(one, Written):
                calls.append(one)
            if len(calls) == MAX_CALLS_READ:
                break
        if not calls:
            return ToolReply(text)
        around = [one.strip() for one in found if isinstance(one, str)]
        return ToolReply(
            "\n".join(one for one in around if one),
            tuple(_call(one, num_before + place) for place, one in enumerate(calls)),
        )


def _call(written: Written, place: int) -> ToolCall:
    id = written.id or f"call{place:05d}"
    error = written.error
    if not error and not written.name:
        error = 'a call has a "name", which is a string'
    if not error and not isinstance(written.arguments, dict):
        error = NO_OBJECT
    if not error:
        return ToolCall(id, written.name, written.arguments)
    quoted = written.text.strip()[:MAX_QUOTED]
    return ToolCall(
        id, written.name, {}, f"the call cannot be read: {error}. It was: {quoted}", quoted
    )


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

# What a template must hold to be of a format, looked for in this order; None: of one that is not
# read here.
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
    """The format of a name. Raises ValueError for one that is not there."""
    if name not in FORMATS:
        raise ValueError(
            f"tool_format={name!r} is none that is read here; use one of {', '.join(FORMATS)}."
        )
    return FORMATS[name]


def detect(template: str | None) -> ToolFormat:
    """The format of a chat template's text; plain JSON where there is no template. Raises
    ValueError for a template that renders no tools, or calls in another format.
    """
    if template is None:
        return FORMATS["json"]
    if "tools" not in template:
        raise ValueError(
            "the chat template does not render tools, so the model would not hear of them; use a "
            'model whose template does, or tell it of them in a message and set tool_format="json".'
        )
    for sign, name in SIGNS:
        if sign in template:
            if name is None:
                break
            return FORMATS[name]
    raise ValueError(
        "the chat template writes calls of tools in a format that is not known; say how this model "
        f"writes them with tool_format=, one of {', '.join(FORMATS)}."
    )


def chosen_format(given: str | ToolFormat, template: str | None) -> ToolFormat:
    """What an environment's `tool_format` means: itself, the format of a name, or, where it is
    empty, that of the chat template. Raises ValueError.
    """
    if isinstance(given, ToolFormat):
        return given
    return tool_format(given) if given else detect(template)
