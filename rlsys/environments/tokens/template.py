"""A chat template, seen from a conversation of which parts were sampled.

In: messages, where what was sampled is a `Said`. Out: pieces, in the order in which they stand in
the prompt: texts of the template and of others (guarded, see rlsys.text.guarded), and `Kept`, the
place of what was sampled. A sampled message is rendered with sentinels in place of its text, so
that it need not be as the template would have written it:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n  ⟦r1⟧ … ⟦c1⟧  <|im_end|>\\n …
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
from rlsys.text.chat_template import REFUSALS, Ending, render_chat
from rlsys.text.guarded import SENTINEL
from rlsys.text.messages import Message, with_object

MARK = re.compile(f"{SENTINEL}([rcn])([0-9]+){SENTINEL}")  # reasoning, content, name of a call
STAND_IN = f"{SENTINEL}s{SENTINEL}"
THINK_END = "</think>"
CALL_ID = "call00000"  # some templates want nine letters and digits


@dataclass(frozen=True, slots=True)
class Said:
    """A message that was sampled, for a template: only its shape."""

    has_reasoning: bool = False
    call_ids: tuple[str, ...] = ()  # of its tool calls


@dataclass(frozen=True, slots=True)
class Kept:
    """What was sampled as the message of this number; all of it, or without its reasoning."""

    number: int
    is_whole: bool


Piece = str | Kept


@dataclass(frozen=True, slots=True)
class Thinking:
    """What stands around the reasoning of a reply."""

    start: str
    end: str
    is_begun: bool  # by the prompt


class ChatTemplate:
    """Raises ValueError for a template that cannot render one user message."""

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

    # What the template does, found out once.

    @cached_property
    def end_of_turn(self) -> str:
        """What follows a reply at the end of a conversation."""
        text = self._render([self._user, _marked(1, Said())], [], reply_follows=False)
        found = list(MARK.finditer(text))
        return text[found[-1].end() :] if found else ""

    @cached_property
    def content_header(self) -> str:
        """What stands before a reply's content and is the model's to write, such as gpt-oss's
        channel.
        """
        text = self._render([self._user, _marked(1, Said())], [], reply_follows=False)
        found = MARK.search(text)
        return text[num_shared(self._prompt, text) : found.start()] if found else ""

    @cached_property
    def thinking(self) -> Thinking | None:
        """None: it knows none."""
        marked = [self._user, _marked(1, Said(True))]
        text = self._render(marked, [], reply_follows=False)
        places = {found.group(1): found.span() for found in MARK.finditer(text)}
        start = ""
        if "r" in places and "c" in places and places["r"] < places["c"]:
            end = text[places["r"][1] : places["c"][0]].strip()
            before = text[: places["r"][0]]
            start = before[num_shared(self._prompt, before) :].strip()
        else:  # some only look for the end of it in the content
            plain = {"role": "assistant", "content": f"x{THINK_END}{STAND_IN}"}
            kept = f"x{THINK_END}" in self._render([self._user, plain, self._user], [])
            end = "" if kept else THINK_END
        if not end:
            return None
        start = start or end.replace("/", "", 1)
        return Thinking(start, end, self._opening.rstrip().endswith(start))

    @cached_property
    def renders_tools(self) -> bool:
        name = STAND_IN + "t"
        nothing = {"type": "object", "properties": {}}
        function = {"name": name, "description": "d", "parameters": nothing}
        tools = [{"type": "function", "function": function}]
        system = {"role": "system", "content": "s"}
        return any(
            name in (self._try([*before, self._user], tools) or "") for before in ([], [system])
        )

    def renders(self, role: str) -> bool:
        """Whether it writes what messages of the role say, or refuses them aloud."""
        if role not in self._roles:
            mark = STAND_IN + "r"
            message = {"role": role, "content": mark, "tool_call_id": CALL_ID, "name": "f"}
            calls = Said(call_ids=(CALL_ID,))
            texts = [
                self._try(messages, [])
                for messages in ([message, self._user], [self._user, _marked(1, calls), message])
            ]
            written = [text for text in texts if text is not None]
            self._roles[role] = not written or any(mark in text for text in written)
        return self._roles[role]

    @cached_property
    def _needs_calls(self) -> bool:
        """Whether what follows tool calls is written otherwise if they are part of the content."""
        tool = {"role": "tool", "content": STAND_IN, "tool_call_id": CALL_ID, "name": "f"}
        for behind in ([tool], [tool, _marked(3, Said()), self._user]):
            texts = [
                self._try([self._user, _marked(1, said, True), *behind], [])
                for said in (Said(), Said(call_ids=(CALL_ID,)))
            ]
            plain, with_calls = (text and _behind(text, 1) for text in texts)
            if with_calls and not (plain and with_calls.endswith(plain)):
                return True
        return False

    @cached_property
    def _gaps(self) -> tuple[str, ...]:
        """What may stand between the beginning of a reply and its first sentinel, where the model
        said it itself; longest first.
        """
        gaps = {""}
        tool = {"role": "tool", "content": STAND_IN, "tool_call_id": CALL_ID, "name": "f"}
        plain, calls = Said(), Said(call_ids=(CALL_ID,))
        for said, *behind in (
            *((plain,), (plain, self._user), (Said(True),), (Said(True), self._user)),
            *((calls, tool), (Said(True, calls.call_ids), tool)),
        ):
            text = self._try([self._user, _marked(1, said, bool(said.call_ids)), *behind], [])
            found = MARK.search(text or "")
            if text and found is not None and text.startswith(self._prompt):
                gaps.add(text[len(self._prompt) : found.start()])
        return tuple(sorted(gaps, key=len, reverse=True))

    @cached_property
    def _end_mark(self) -> str:
        """What a reply with tool calls ends before."""
        return self.end_of_turn.strip() or self.end_of_turn

    # Rendering.

    def pieces(self, messages: Sequence[Message | Said], tools: Sequence[Message]) -> list[Piece]:
        """Texts, and between them what is kept. Raises ValueError for messages that the template
        refuses, and says which.
        """
        rendered = self._render(
            [
                _marked(i, one, bool(one.call_ids) and self._needs_calls)
                if isinstance(one, Said)
                else one
                for i, one in enumerate(messages)
            ],
            tools,
        )
        pieces: list[Piece] = []
        end = 0
        for marks in _by_number(list(MARK.finditer(rendered))):
            said = messages[int(marks[0].group(2))]
            assert isinstance(said, Said)
            parts = {mark.group(1) for mark in marks}
            is_whole = not said.has_reasoning or "r" in parts
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
        self, said: Said, behind: Sequence[Message], tools: Sequence[Message], *, has_system: bool
    ) -> str | None:
        """What stands behind a reply with these messages behind it, rendered without those before
        it; None: the template writes what is before them otherwise now.
        """
        before: list[Message | Said] = [self._user]
        if has_system:
            before.insert(0, {"role": "system", "content": STAND_IN})
        known, prompt = self._short.get(has_system, ([], ""))
        if not prompt or known != tools:
            prompt = self._render(before, tools)
            self._short[has_system] = (list(tools), prompt)
        match self.pieces([*before, said, *behind], tools):
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
            raise ValueError(
                f"messages[{number}] with role {role!r} is refused by the model's chat template "
                f"({in_short(error)}); change the messages, or give the environment a "
                "model whose template takes them."
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


def _marked(number: int, said: Said, with_calls: bool = False) -> dict[str, Any]:
    """The message, with sentinels in place of its texts."""
    message = {"role": "assistant", "content": f"{SENTINEL}c{number}{SENTINEL}"}
    if said.has_reasoning:
        message["reasoning_content"] = f"{SENTINEL}r{number}{SENTINEL}"
    if not said.call_ids or not with_calls:
        return message
    function = {"name": f"{SENTINEL}n{number}{SENTINEL}", "arguments": {}}
    calls = [{"id": one, "type": "function", "function": function} for one in said.call_ids]
    return {**message, "tool_calls": calls}


def _behind(text: str, number: int) -> str:
    """What a message of sentinels is followed by."""
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


PLAIN = {"role", "content"}  # of a message that only says something


def for_template(message: Message, guarded: Callable[[Any], Any]) -> dict[str, Any]:
    """A message of others as templates want it: no special tokens in its texts, and the arguments
    of tool calls as objects, not as JSON.
    """
    if message.keys() == PLAIN:
        return {"role": guarded(message["role"]), "content": guarded(message["content"])}
    made: dict[str, Any] = {**message, "content": message.get("content") or ""}
    if made.get("tool_calls"):
        made["tool_calls"] = [with_object(call) for call in made["tool_calls"]]
    guarded_message: dict[str, Any] = guarded(made)
    return guarded_message


def canonical_calls(calls: Any) -> str:
    """The same for tool calls that differ in how their arguments are written."""
    made = [with_object(call).get("function") or {} for call in calls or ()]
    return canonical([[one.get("name"), one.get("arguments")] for one in made])
