"""The messages of one episode, as a tree: those that came behind the same ones, side by side.

In: the messages of a prompt. Out: the node of the last, down a way on which those that are known
are found again, with what was sampled as them; what a client sends back of it is recognised.
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsys.environments.tokens.template import Said, canonical_calls
from rlsys.environments.tokens.token_tree import TreePlace
from rlsys.text.messages import Message, text_of_content
from rlsys.types import Generation

Shape = tuple[Hashable, ...]  # what a template may look at of a message, beside its texts


@dataclass(eq=False, slots=True)
class ParsedReply:
    """What was sampled as a message."""

    generation: Generation
    message: dict[str, Any]  # as it was given out; its owner may have split tool calls off since
    place: TreePlace  # behind its last token
    tools: list[Message]

    @property
    def said(self) -> Said:
        calls = self.message.get("tool_calls") or ()
        ids = tuple(str(call.get("id", "")) for call in calls)
        return Said("reasoning_content" in self.message, ids)


@dataclass(eq=False, slots=True)
class Node:
    """A message, behind others."""

    parent: Node | None
    message: dict[str, Any]
    depth: int  # its number among the messages
    reply: ParsedReply | None = None
    children: list[Node] = field(default_factory=list)
    prepared: dict[str, Any] | None = None
    shapes: frozenset[Shape] = frozenset()  # of it and those before it
    num_replies: int = 0
    has_reasoning: bool = False  # any reply of it and those before it
    has_system: bool = False  # the first message

    def child(self, message: dict[str, Any], reply: ParsedReply | None = None) -> Node:
        """A new one behind it."""
        made = Node(self, message, self.depth + 1, reply)
        self.children.append(made)
        made.shapes = self.shapes if made.shape in self.shapes else self.shapes | {made.shape}
        made.num_replies = self.num_replies + (reply is not None)
        made.has_reasoning = self.has_reasoning or (reply is not None and reply.said.has_reasoning)
        made.has_system = self.has_system or (made.depth == 0 and message["role"] == "system")
        return made

    @property
    def shape(self) -> Shape:
        message = self.message
        return (
            message["role"],
            self.reply is not None,
            bool(message.get("reasoning_content")),
            bool(message.get("tool_calls")),
            bool(message.get("content")),
        )

    def chain(self) -> list[Node]:
        """From the first message."""
        nodes = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def find(root: Node, messages: Sequence[Message]) -> Node:
    """Where the last of them stands; those that are new are put there. Raises ValueError for what
    is no message.
    """
    node = root
    for message in messages:
        # The usual case, which long conversations have at each of their messages.
        known = node.children[0] if len(node.children) == 1 else None
        if known is not None and not (
            known.message == message if known.reply is None else known.reply.message is message
        ):
            known = None
        known = known or _known_child(node, message)
        node = known or node.child(_checked(message, node.depth + 1))
    return node


def _known_child(node: Node, message: Message) -> Node | None:
    """The latest that was sampled comes first, where several say the same."""
    for child in node.children:
        if child.reply is not None and child.reply.message is message:
            return child
    as_text = message
    if isinstance(message, Mapping) and not isinstance(message.get("content"), str):
        as_text = {**message, "content": text_of_content(message.get("content"))}
    for child in reversed(node.children):
        if child.reply is None:
            if child.message == message or child.message == as_text:
                return child
        elif _says(child.reply.message, message):
            return child
    return None


def _says(sampled: Message, message: Message) -> bool:
    """Whether a message is one that was sampled, sent back by a client."""
    content = text_of_content(message.get("content"))
    if message.get("role") != "assistant" or content is None:
        return False
    if (sampled.get("content") or "").strip() != content.strip():
        return False
    calls, others = sampled.get("tool_calls"), message.get("tool_calls")
    return calls == others or canonical_calls(calls) == canonical_calls(others)


def _checked(message: Message, number: int) -> dict[str, Any]:
    """A copy."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(
            f"messages[{number}]={message!r} is no message; give a dict with role and content."
        )
    content = text_of_content(message.get("content"))
    if content is None:
        raise ValueError(
            f"messages[{number}]: content={reprlib.repr(message['content'])} is no text; give a "
            "string, or parts of type text."
        )
    copied = {**message, "content": content}
    is_flat = all(isinstance(value, str) for value in copied.values())
    return copied if is_flat else copy.deepcopy(copied)
