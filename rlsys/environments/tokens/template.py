r"""Chat templates of conversations whose replies keep their sampled tokens.

In: messages, where a reply is a `ReplyShape`. Out: the pieces of the prompt, in order: texts of the
template and of other messages (guarded, see rlsys.text.guarded), and a `Kept` for each reply. A
reply is rendered with sentinels in place of its text, so its tokens need not be those that the
template would write:

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n  ⟦r1⟧ … ⟦c1⟧  <|im_end|>\n …
    text                                                         Kept(1)      text
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlsys.common.safe_json import canonical
from rlsys.data.hub import in_short
from rlsys.environments.tokens.token_tree import num_shared
from rlsys.errors import InvalidValue
from rlsys.text.chat_template import REFUSALS, Ending, render_chat
from rlsys.text.guarded import SENTINEL
from rlsys.text.messages import Message, with_object

MARK = re.compile(f"{SENTINEL}([rcn])([0-9]+){SENTINEL}")  # reasoning, content, name of a call
STAND_IN = f"{SENTINEL}s{SENTINEL}"
THINK_END = "</think>"
CALL_ID = "call00000"  # some templates require nine letters and digits


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """Stand-in for a sampled message, without its texts."""

    has_reasoning: bool = False
    call_ids: tuple[str, ...] = ()  # of its tool calls


@dataclass(frozen=True, slots=True)
class Kept:
    """Sampled tokens of the message `number`, with or without its reasoning."""

    number: int
    is_whole: bool


Piece = str | Kept


@dataclass(frozen=True, slots=True)
class Thinking:
    """Marks around the reasoning of a reply."""

    start: str
    end: str
    is_begun: bool  # the prompt contains the start


class ChatTemplate:
    """Chat template of a tokenizer.

    Raises:
        InvalidValue: The template cannot render one user message.
    """

    def __init__(self, tokenizer: Any, template: str | None, options: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options)
        self._template = template
        self._user = {"role": "user", "content": STAND_IN}
        self._prompt = self._render([self._user], [])
        bare = self._render([self._user], [], reply_follows=False)
        self._opening = self._prompt[num_shared(bare, self._prompt) :]
        self._short: dict[bool, tuple[list[Message], str]] = {}
        self._roles: dict[str, bool] = {}

    # Properties of the template, determined once

    @cached_property
    def end_of_turn(self) -> str:
        """Text after a reply at the end of a conversation."""
        text = self._render([self._user, _marked(1, ReplyShape())], [], reply_follows=False)
        found = list(MARK.finditer(text))
        return text[found[-1].end() :] if found else ""

    @cached_property
    def content_header(self) -> str:
        """Text that the model itself writes before its content, such as gpt-oss's channel."""
        text = self._render([self._user, _marked(1, ReplyShape())], [], reply_follows=False)
        found = MARK.search(text)
        return text[num_shared(self._prompt, text) : found.start()] if found else ""

    @cached_property
    def thinking(self) -> Thinking | None:
        """Marks around the reasoning of a reply; None if the template has no thinking."""
        marked = [self._user, _marked(1, ReplyShape(True))]
        text = self._render(marked, [], reply_follows=False)
        places = {found.group(1): found.span() for found in MARK.finditer(text)}
        start = ""
        if "r" in places and "c" in places and places["r"] < places["c"]:
            end = text[places["r"][1] : places["c"][0]].strip()
            before = text[: places["r"][0]]
            start = before[num_shared(self._prompt, before) :].strip()
        else:  # some templates only search the content for the end mark
            plain = {"role": "assistant", "content": f"x{THINK_END}{STAND_IN}"}
            kept = f"x{THINK_END}" in self._render([self._user, plain, self._user], [])
            end = "" if kept else THINK_END
        if not end:
            return None
        start = start or end.replace("/", "", 1)
        return Thinking(start, end, self._opening.rstrip().endswith(start))

    @cached_property
    def renders_tools(self) -> bool:
        """Return whether the template renders tools."""
        name = STAND_IN + "t"
        nothing = {"type": "object", "properties": {}}
        function = {"name": name, "description": "d", "parameters": nothing}
        tools = [{"type": "function", "function": function}]
        system = {"role": "system", "content": "s"}
        return any(
            name in (self._try([*before, self._user], tools) or "") for before in ([], [system])
        )

    def renders(self, role: str) -> bool:
        """Return whether the template renders messages of the role, or raises an error for them."""
        if role not in self._roles:
            mark = STAND_IN + "r"
            message = {"role": role, "content": mark, "tool_call_id": CALL_ID, "name": "f"}
            calls = ReplyShape(call_ids=(CALL_ID,))
            texts = [
                self._try(messages, [])
                for messages in ([message, self._user], [self._user, _marked(1, calls), message])
            ]
            written = [text for text in texts if text is not None]
            self._roles[role] = not written or any(mark in text for text in written)
        return self._roles[role]

    @cached_property
    def _needs_calls(self) -> bool:
        """Return whether the text after tool calls depends on the field `tool_calls`.

        If not, the calls are rendered as part of the content.
        """
        tool = {"role": "tool", "content": STAND_IN, "tool_call_id": CALL_ID, "name": "f"}
        for following in ([tool], [tool, _marked(3, ReplyShape()), self._user]):
            texts = [
                self._try([self._user, _marked(1, shape, True), *following], [])
                for shape in (ReplyShape(), ReplyShape(call_ids=(CALL_ID,)))
            ]
            plain, with_calls = (text and _after(text, 1) for text in texts)
            if with_calls and not (plain and with_calls.endswith(plain)):
                return True
        return False

    @cached_property
    def _gaps(self) -> tuple[str, ...]:
        """Texts between the start of a reply and its first sentinel, longest first.

        The model writes them itself, so they are among the sampled tokens.
        """
        gaps = {""}
        tool = {"role": "tool", "content": STAND_IN, "tool_call_id": CALL_ID, "name": "f"}
        plain, thinks = ReplyShape(), ReplyShape(True)
        calls = ReplyShape(call_ids=(CALL_ID,))
        for shape, *following in (
            *((plain,), (plain, self._user), (thinks,), (thinks, self._user)),
            *((calls, tool), (ReplyShape(True, calls.call_ids), tool)),
        ):
            text = self._try([self._user, _marked(1, shape, bool(shape.call_ids)), *following], [])
            found = MARK.search(text or "")
            if text and found is not None and text.startswith(self._prompt):
                gaps.add(text[len(self._prompt) : found.start()])
        return tuple(sorted(gaps, key=len, reverse=True))

    @cached_property
    def _end_mark(self) -> str:
        """Text that follows the tool calls of a reply."""
        return self.end_of_turn.strip() or self.end_of_turn

    # Rendering

    def own_text(self, tools: Sequence[Message]) -> str:
        """Return the text that the template adds to a user's message, schemas of tools included."""
        return self._render([self._user], tools).replace(STAND_IN, "")

    def pieces(
        self, messages: Sequence[Message | ReplyShape], tools: Sequence[Message]
    ) -> list[Piece]:
        """Return the texts of the prompt, with a `Kept` between them for each reply.

        Raises:
            InvalidValue: The template raises an error for a message.
        """
        rendered = self._render(
            [
                _marked(i, one, bool(one.call_ids) and self._needs_calls)
                if isinstance(one, ReplyShape)
                else one
                for i, one in enumerate(messages)
            ],
            tools,
        )
        pieces: list[Piece] = []
        end = 0
        for marks in _by_number(list(MARK.finditer(rendered))):
            shape = messages[int(marks[0].group(2))]
            assert isinstance(shape, ReplyShape)
            parts = {mark.group(1) for mark in marks}
            is_whole = not shape.has_reasoning or "r" in parts
            text = rendered[end : marks[0].start()]
            if is_whole or marks[0].group(1) == "n":
                text = self._without_gap(text, is_call=marks[0].group(1) == "n")
            pieces += [text, Kept(int(marks[0].group(2)), is_whole)]
            end = marks[-1].end()
            if "n" in parts:
                end = max(end, rendered.find(self._end_mark, end))
        return [*pieces, rendered[end:]]

    def _without_gap(self, text: str, *, is_call: bool) -> str:
        for gap in self._gaps:
            if text.endswith(self._opening + gap):
                return text[: len(text) - len(gap)]
        at = text.rfind(self._opening) if is_call and self._opening else -1
        return text[: at + len(self._opening)] if at >= 0 else text

    def tail(
        self,
        shape: ReplyShape,
        following: Sequence[Message],
        tools: Sequence[Message],
        *,
        has_system: bool,
    ) -> str | None:
        """Return the text after a reply with the messages that follow it.

        Only they are rendered, after a stand-in for the earlier messages. None: the template
        renders the text before them differently when they follow.
        """
        before: list[Message | ReplyShape] = [self._user]
        if has_system:
            before.insert(0, {"role": "system", "content": STAND_IN})
        known, prompt = self._short.get(has_system, ([], ""))
        if not prompt or known != tools:
            prompt = self._render(before, tools)
            self._short[has_system] = (list(tools), prompt)
        match self.pieces([*before, shape, *following], tools):
            case [str(text), Kept(is_whole=True), str(tail)] if text == prompt:
                return tail
        return None

    def _render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Message],
        *,
        reply_follows: bool = True,
    ) -> str:
        try:
            return self._apply(messages, tools, reply_follows)
        except REFUSALS as error:
            number = self._first_refused(messages, tools)
            role = messages[number]["role"]
            raise InvalidValue(
                f"messages[{number}].role",
                role,
                rule=f"the chat template of the model rejects the message ({in_short(error)})",
                fix="Change the messages, or use a model whose template accepts them.",
            ) from error

    def _first_refused(self, messages: Sequence[Any], tools: Sequence[Message]) -> int:
        for number in range(len(messages)):
            if self._try(messages[: number + 1], tools) is None:
                return number
        return len(messages) - 1

    def _try(self, messages: Sequence[Any], tools: Sequence[Message]) -> str | None:
        try:
            return self._apply(messages, tools, True)
        except REFUSALS:
            return None

    def _apply(self, messages: Sequence[Any], tools: Sequence[Message], reply: bool) -> str:
        return render_chat(
            self._tokenizer,
            messages,
            tools=tools,
            ending=Ending.REPLY if reply else Ending.CLOSED,
            template=self._template,
            options=self._options,
        )


def _marked(number: int, shape: ReplyShape, with_calls: bool = False) -> dict[str, Any]:
    """Return the message, with sentinels in place of its texts."""
    message = {"role": "assistant", "content": f"{SENTINEL}c{number}{SENTINEL}"}
    if shape.has_reasoning:
        message["reasoning_content"] = f"{SENTINEL}r{number}{SENTINEL}"
    if not shape.call_ids or not with_calls:
        return message
    function = {"name": f"{SENTINEL}n{number}{SENTINEL}", "arguments": {}}
    calls = [{"id": one, "type": "function", "function": function} for one in shape.call_ids]
    return {**message, "tool_calls": calls}


def _after(text: str, number: int) -> str:
    """Return the text after the sentinels of a message."""
    marks = [found for found in MARK.finditer(text) if found.group(2) == str(number)]
    return text[marks[-1].end() :] if marks else text


def _by_number(marks: Sequence[re.Match[str]]) -> list[list[re.Match[str]]]:
    groups: list[list[re.Match[str]]] = []
    for mark in marks:
        if groups and groups[-1][0].group(2) == mark.group(2):
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return groups


PLAIN = {"role", "content"}  # keys of a message that has only text


def for_template(message: Message, guarded: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a message that was not sampled in the form that templates need.

    Its texts contain no special tokens; arguments of tool calls are objects, not JSON.
    """
    if message.keys() == PLAIN:
        return {"role": guarded(message["role"]), "content": guarded(message["content"])}
    made: dict[str, Any] = {**message, "content": message.get("content") or ""}
    if made.get("tool_calls"):
        made["tool_calls"] = [with_object(call) for call in made["tool_calls"]]
    guarded_message: dict[str, Any] = guarded(made)
    return guarded_message


def canonical_calls(calls: Any) -> str:
    """Return tool calls as a text that does not depend on how their arguments are written."""
    made = [with_object(call).get("function") or {} for call in calls or ()]
    return canonical([[one.get("name"), one.get("arguments")] for one in made])
