"""A chat template, seen from a conversation of which parts were sampled.

In: messages, where what was sampled is a `Said`. Out: pieces, in the order in which they stand in
the prompt: texts of the template and of others (guarded, see text_encoding), and `Kept`, the place
of what was sampled. A sampled message is rendered with sentinels in place of its text, so that it
need not be as the template would have written it:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n  ⟦r1⟧ … ⟦c1⟧  <|im_end|>\\n …
    text                                                         Kept(1)      text
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from rlsys.environments.text_encoding import SENTINEL
from rlsys.json_text import parse_json

Message = Mapping[str, Any]

MARK = re.compile(f"{SENTINEL}([rc])([0-9]+){SENTINEL}")
STAND_IN = f"{SENTINEL}s{SENTINEL}"
THINK_END = "</think>"
# Jinja's own errors, and those of operations on what a template did not expect.
REFUSALS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Said:
    """A message that was sampled, for a template: only its shape."""

    has_reasoning: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """What was sampled as the message of this number; all of it, or without its reasoning."""

    number: int
    is_whole: bool


Piece = str | Kept


@dataclass(frozen=True, slots=True)
class Thinking:
    """What stands around the reasoning of a reply."""

    start: str  # "": the prompt ends with it, or there is none
    end: str


class ChatTemplate:
    """Raises ValueError for a template that cannot render one user message."""

    def __init__(self, tokenizer: Any, template: str | None, options: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options)
        self._template = template
        user = {"role": "user", "content": STAND_IN}
        bare = self._render([user], [], reply_follows=False)
        prompt = self._render([user], [])
        self._user = user
        self._opening = prompt[len(bare) :] if prompt.startswith(bare) else ""

    # What the template does, found out once.

    @cached_property
    def end_of_turn(self) -> str:
        """What follows a reply at the end of a conversation."""
        text = self._render([self._user, _marked(1, Said(False))], [], reply_follows=False)
        found = list(MARK.finditer(text))
        return text[found[-1].end() :] if found else ""

    @cached_property
    def thinking(self) -> Thinking | None:
        """None: it knows none."""
        text = self._render([self._user, _marked(1, Said(True))], [], reply_follows=False)
        places = {found.group(1): found.span() for found in MARK.finditer(text)}
        if "r" in places and "c" in places and places["r"] < places["c"]:
            end = text[places["r"][1] : places["c"][0]].strip()
            start = self._behind_opening(text[: places["r"][0]]).strip()
            return Thinking(start, end) if end else None
        plain = {"role": "assistant", "content": f"x{THINK_END}{STAND_IN}"}
        text = self._render([self._user, plain, self._user], [])
        if f"x{THINK_END}" in text:
            return None
        return Thinking(THINK_END.replace("/", ""), THINK_END)

    @cached_property
    def renders_tools(self) -> bool:
        tool = {
            "type": "function",
            "function": {
                "name": STAND_IN + "t",
                "description": "d",
                "parameters": {"type": "object", "properties": {}},
            },
        }
        system = {"role": "system", "content": "s"}
        return any(
            STAND_IN + "t" in self._render(messages, [tool])
            for messages in ([self._user], [system, self._user])
        )

    @cached_property
    def _gaps(self) -> tuple[str, ...]:
        """What may stand between the beginning of a reply and its first sentinel, where the model
        said it itself; longest first."""
        gaps = {""}
        for said in (Said(False), Said(True)):
            for behind in ([], [self._user]):
                messages = [self._user, _marked(1, said), *behind]
                text = self._render(messages, [], reply_follows=bool(behind))
                if (found := MARK.search(text)) is not None:
                    gaps.add(self._behind_opening(text[: found.start()]))
        return tuple(sorted(gaps, key=len, reverse=True))

    def _behind_opening(self, text: str) -> str:
        at = text.rfind(self._opening) if self._opening else -1
        return text[at + len(self._opening) :] if at >= 0 else ""

    # Rendering.

    def pieces(self, messages: Sequence[Message | Said], tools: Sequence[Message]) -> list[Piece]:
        """Raises ValueError for messages that the template refuses, and says which."""
        rendered = self._render(
            [_marked(i, one) if isinstance(one, Said) else one for i, one in enumerate(messages)],
            tools,
        )
        pieces: list[Piece] = []
        end = 0
        for marks in _by_number(list(MARK.finditer(rendered))):
            said = messages[int(marks[0].group(2))]
            assert isinstance(said, Said)
            is_whole = not said.has_reasoning or marks[0].group(1) == "r"
            text = rendered[end : marks[0].start()]
            if is_whole:
                gap = next((gap for gap in self._gaps if text.endswith(self._opening + gap)), "")
                text = text[: len(text) - len(gap)]
            pieces += [text, Kept(int(marks[0].group(2)), is_whole)]
            end = marks[-1].end()
        return [*pieces, rendered[end:]]

    def tail(
        self, said: Said, behind: Sequence[Message], tools: Sequence[Message], *, has_system: bool
    ) -> str | None:
        """What stands behind a reply with these messages behind it, rendered without those before
        it; None: the template writes what is before them otherwise now."""
        before: list[Message | Said] = [self._user]
        if has_system:
            before.insert(0, {"role": "system", "content": STAND_IN})
        pieces = self.pieces([*before, said, *behind], tools)
        if len(pieces) != 3 or pieces[1] != Kept(len(before), True):
            return None
        prompt, _, tail = pieces
        assert isinstance(tail, str)
        return tail if prompt == self._render(before, tools) else None

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
            raise ValueError(
                f"messages[{number}] with role {role!r} is refused by the model's chat template "
                f"({reprlib.repr(str(error))}); change the messages, or give the environment a "
                "model whose template takes them."
            ) from error

    def _first_refused(self, messages: Sequence[Any], tools: Sequence[Message]) -> int:
        for number in range(len(messages)):
            try:
                self._apply(messages[: number + 1], tools, True)
            except REFUSALS:
                return number
        return len(messages) - 1

    def _apply(self, messages: Sequence[Any], tools: Sequence[Message], reply: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=reply,
            **self._options,
        )
        return text


def _marked(number: int, said: Said) -> dict[str, Any]:
    message = {"role": "assistant", "content": f"{SENTINEL}c{number}{SENTINEL}"}
    if said.has_reasoning:
        message["reasoning_content"] = f"{SENTINEL}r{number}{SENTINEL}"
    return message


def _by_number(marks: Sequence[re.Match[str]]) -> list[list[re.Match[str]]]:
    groups: list[list[re.Match[str]]] = []
    for mark in marks:
        if groups and groups[-1][0].group(2) == mark.group(2):
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return groups


def for_template(message: Message, guarded: Callable[[Any], Any]) -> dict[str, Any]:
    """A message of others as templates want it: no special tokens in its texts, and the arguments
    of tool calls as objects, not as JSON."""
    made: dict[str, Any] = {**message, "content": message.get("content") or ""}
    if made.get("tool_calls"):
        made["tool_calls"] = [_with_object(call) for call in made["tool_calls"]]
    guarded_message: dict[str, Any] = guarded(made)
    return guarded_message


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            parsed = parse_json(function["arguments"])
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    return {**call, "function": function}


def canonical_calls(calls: Any) -> str:
    """The same for tool calls that differ in how their arguments are written."""
    made = [_with_object(call)["function"] for call in calls or ()]
    return json.dumps([[one.get("name"), one.get("arguments")] for one in made], sort_keys=True)
