"""Rendering of a chat by the tokenizer's template, for data, judges and environments.

In: plain messages (messages.py) and tools. Out: the text that the model sees. How it ends:

    Ending.REPLY      ... user: Hi <end> assistant:           a reply follows
    Ending.CLOSED     ... user: Hi <end>                      nothing follows
    Ending.CONTINUED  ... user: Hi <end> assistant: Well,     the last reply goes on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from jinja2 import TemplateError

from rlsys.common.safe_json import parse_json
from rlsys.config import require
from rlsys.text.messages import Message, with_text_arguments

REPLY_ROLE = "assistant"

# Noncharacters of Unicode, which no text should hold.
CUT = "\ufdd3"
PROBE = "\ufdd4"

# Jinja's own errors, and those of operations on what a template did not expect.
REFUSALS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

# Where a tokenizer keeps the options of its template: an attribute travels with its pickle.
OPTIONS = "rlsys_template_options"


class Ending(Enum):
    REPLY = "reply"
    CLOSED = "closed"
    CONTINUED = "continued"


def ending_of(messages: Sequence[Message]) -> Ending:
    """Return how a prompt of these messages ends: a last reply goes on, any other is followed by
    one.
    """
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
        tokenizer: Has the template, or several by name: "tool_use" where there are tools, else
            "default".
        messages: Plain messages.
        tools: JSON schemas.
        ending: How the text ends.
        template: A template in place of the tokenizer's.
        options: What the template is given beside those of `set_template_options`.

    Raises:
        Exception: The template refuses the messages, with an error of its own (see REFUSALS).
    """
    if ending is Ending.CONTINUED:
        return _continued(tokenizer, messages, tools, template, options)

    def render(given: Sequence[Message]) -> str:
        text: str = tokenizer.apply_chat_template(
            list(given),
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
        # Some templates, DeepSeek-V3's for one, join the arguments of calls to other text.
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
    """Cut behind the last message's text, wherever the template puts it."""
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
        raise ValueError("it does not write the text of the last message, which goes on")
    return before + content[len(written) :]


def template_text(tokenizer: Any, *, with_tools: bool = False) -> str | None:
    """Return the tokenizer's template, of several the one that `render_chat` would use; None: it
    has none. Raises ValueError for named templates without a default.
    """
    found = tokenizer.chat_template
    if isinstance(found, Mapping):
        if with_tools and "tool_use" in found:
            return str(found["tool_use"])
        require(
            "default" in found,
            f"the tokenizer has chat templates named {sorted(found)} and none named 'default'. "
            "Name one of them so.",
        )
        found = found["default"]
    return found or None


def parse_options(given: Sequence[str], setting: str) -> dict[str, Any]:
    """Return template options by name from texts such as "enable_thinking=false". A value is JSON,
    or else text. Raises ValueError, with the name of the setting, for a text without a name.
    """
    options: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        require(
            bool(equals) and name.isidentifier() and name not in options,
            f"{setting}={list(given)}: {one!r} is not name=value with a name of its own, such as "
            "enable_thinking=false.",
        )
        try:
            options[name] = parse_json(value)
        except ValueError:
            options[name] = value
    return options


def set_template_options(tokenizer: Any, given: Sequence[str], setting: str) -> None:
    """Let `render_chat` give options to the template of this tokenizer, wherever it travels.

    Raises:
        ValueError: An option is malformed, or the template does not use its name.
    """
    options = parse_options(given, setting)
    templates = tokenizer.chat_template
    texts = list(templates.values()) if isinstance(templates, Mapping) else [templates or ""]
    for name in options:
        require(
            any(name in text for text in texts),
            f"{setting}: the model's chat template does not use {name!r}. Leave it out.",
        )
    setattr(tokenizer, OPTIONS, options)


def template_options(tokenizer: Any) -> Mapping[str, Any]:
    """Return what `set_template_options` has set."""
    options: Mapping[str, Any] = getattr(tokenizer, OPTIONS, {})
    return options
