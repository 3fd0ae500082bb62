"""Rendering of a chat by the tokenizer's template, for data, judges and environments.

In: plain messages (messages.py) and tools. Out: the text that the model sees, with one of these
endings:

    Ending.REPLY      ... user: Hi <end> assistant:           a reply follows
    Ending.CLOSED     ... user: Hi <end>                      nothing follows
    Ending.CONTINUED  ... user: Hi <end> assistant: Well,     the last reply continues
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from jinja2 import TemplateError

from rlsys.common.safe_json import parse_json
from rlsys.errors import require
from rlsys.text.messages import Message, with_text_arguments

REPLY_ROLE = "assistant"

# Unicode noncharacters, which texts do not contain.
CUT = "\ufdd3"
PROBE = "\ufdd4"

# Errors of Jinja, and of operations on values that a template does not expect.
REFUSALS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

# Attribute of a tokenizer for the options of its template; it is pickled with the tokenizer.
OPTIONS = "rlsys_template_options"


class Ending(Enum):
    """End of a rendered chat."""

    REPLY = "reply"
    CLOSED = "closed"
    CONTINUED = "continued"


def ending_of(messages: Sequence[Message]) -> Ending:
    """Return the ending of a prompt: CONTINUED if the last message is a reply, else REPLY."""
    return Ending.CONTINUED if messages[-1]["role"] == REPLY_ROLE else Ending.REPLY


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Message] = (),
    ending: Ending = Ending.REPLY,
    template: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of a chat.

    Args:
        tokenizer: Tokenizer with a template, or with several named ones: "tool_use" is used with
            tools, else "default".
        messages: Plain messages.
        tools: JSON schemas.
        ending: How the text ends.
        template: A template instead of the tokenizer's.
        options: Options of the template in addition to those of `set_template_options`.

    Raises:
        Exception: The template rejects the messages, with one of REFUSALS.
    """
    if ending is Ending.CONTINUED:
        return _continued(tokenizer, messages, tools, template, options)

    def render(chat: Sequence[Message]) -> str:
        text: str = tokenizer.apply_chat_template(
            list(chat),
            tools=list(tools) or None,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=ending is Ending.REPLY,
            **{**template_options(tokenizer), **(options or {})},
        )
        return text

    try:
        return render(messages)
    except TypeError:
        # Some templates, such as DeepSeek-V3's, need the arguments of calls as text.
        if not any(message.get("tool_calls") for message in messages):
            raise
        return render([with_text_arguments(message) for message in messages])


def _continued(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Message],
    template: str | None,
    options: Mapping[str, Any] | None,
) -> str:
    """Return the rendered chat up to the end of the last message's text."""
    content = str(messages[-1]["content"])
    written = content.rstrip()
    if not written:
        text = render_chat(
            tokenizer, messages[:-1], tools=tools, template=template, options=options
        )
        return text + content
    marked = [*messages[:-1], {**messages[-1], "content": written + CUT}]
    text = render_chat(
        tokenizer,
        marked,
        tools=tools,
        ending=Ending.CLOSED,
        template=template,
        options=options,
    )
    before, found, _ = text.partition(CUT)
    if not found:
        raise ValueError("the chat template does not write the text of the last message")
    return before + content[len(written) :]


def template_text(tokenizer: Any, *, with_tools: bool = False) -> str | None:
    """Return the template that `render_chat` uses, or None if the tokenizer has none.

    Raises:
        InvalidValue: The tokenizer has named templates without a default.
    """
    found = tokenizer.chat_template
    if isinstance(found, Mapping):
        if with_tools and "tool_use" in found:
            return str(found["tool_use"])
        require(
            "default" in found,
            "chat_template",
            sorted(found),
            rule="the tokenizer has named templates, but none is named 'default'",
            fix="Name one of them 'default'.",
        )
        found = found["default"]
    return found or None


def parse_options(texts: Sequence[str], setting: str) -> dict[str, Any]:
    """Return template options by name from texts such as "enable_thinking=false".

    Values are JSON, or else text. `setting` is the name of the option in errors.

    Raises:
        InvalidValue: A text has no name, or a name occurs twice.
    """
    options: dict[str, Any] = {}
    for one in texts:
        name, equals, value = one.partition("=")
        require(
            bool(equals) and name.isidentifier() and name not in options,
            setting,
            list(texts),
            rule=f"{one!r} is not NAME=VALUE with a name that no other option has",
            fix="Write such as enable_thinking=false.",
        )
        try:
            options[name] = parse_json(value)
        except ValueError:
            options[name] = value
    return options


def set_template_options(tokenizer: Any, texts: Sequence[str], setting: str) -> None:
    """Set the options that `render_chat` passes to the template of this tokenizer or its copies.

    Raises:
        InvalidValue: An option is malformed, or the template does not use its name.
    """
    options = parse_options(texts, setting)
    templates = tokenizer.chat_template
    contents = list(templates.values()) if isinstance(templates, Mapping) else [templates or ""]
    for name in options:
        require(
            any(name in content for content in contents),
            setting,
            list(texts),
            rule=f"the model's chat template does not use {name!r}",
            fix="Leave it out.",
        )
    setattr(tokenizer, OPTIONS, options)


def template_options(tokenizer: Any) -> Mapping[str, Any]:
    """Return the options that `set_template_options` has set."""
    options: Mapping[str, Any] = getattr(tokenizer, OPTIONS, {})
    return options
