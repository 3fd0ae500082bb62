"""Tree of the messages of one episode: a node's children are the messages that followed it.

In: the messages of a prompt. Out: the node of the last message. Known messages are matched with
their nodes; a message that a client sends back is matched with the reply that was sampled as it.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsys.environments.tokens.template import ReplyShape, canonical_calls
from rlsys.environments.tokens.token_tree import TreePlace
from rlsys.errors import InvalidValue
from rlsys.text.messages import Message, text_of_content
from rlsys.types import Generation

Shape = tuple[Hashable, ...]  # what a template may look at in a message, apart from its texts


@dataclass(eq=False, slots=True)
class ParsedReply:
    """A sampled reply and its message."""

    generation: Generation
    message: dict[str, Any]  # shared with the caller, which may have split off tool calls since
    place: TreePlace  # after its last token
    tools: list[Message]

    @property
    def shape(self) -> ReplyShape:
        """The shape of the message, for a template."""
        calls = self.message.get("tool_calls") or ()
        ids = tuple(str(call.get("id", "")) for call in calls)
        return ReplyShape("reasoning_content" in self.message, ids)


@dataclass(eq=False, slots=True)
class Node:
    """A message in the tree."""

    parent: Node | None
    message: dict[str, Any]
    depth: int  # index of the message in its conversation
    reply: ParsedReply | None = None
    children: list[Node] = field(default_factory=list)
    prepared: dict[str, Any] | None = None
    shapes: frozenset[Shape] = frozenset()  # of this message and those before it
    num_replies: int = 0
    has_reasoning: bool = False  # in any reply up to this message
    has_system: bool = False  # as first message

    def child(self, message: dict[str, Any], reply: ParsedReply | None = None) -> Node:
        """Add a message after this one and return its node."""
        node = Node(self, message, self.depth + 1, reply)
        self.children.append(node)
        node.shapes = self.shapes if node.shape in self.shapes else self.shapes | {node.shape}
        node.num_replies = self.num_replies + (reply is not None)
        node.has_reasoning = self.has_reasoning or (reply is not None and reply.shape.has_reasoning)
        node.has_system = self.has_system or (node.depth == 0 and message["role"] == "system")
        return node

    @property
    def shape(self) -> Shape:
        """Return the parts of the message that a template may read, apart from its texts."""
        message = self.message
        return (
            message["role"],
            self.reply is not None,
            bool(message.get("reasoning_content")),
            bool(message.get("tool_calls")),
            bool(message.get("content")),
        )

    def chain(self) -> list[Node]:
        """Return the nodes from the first message to this one."""
        nodes = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def find(root: Node, messages: Sequence[Message]) -> Node:
    """Return the node of the last message. New messages are added.

    Raises:
        InvalidValue: An element is not a message.
    """
    node = root
    for message in messages:
        # Fast path: nearly all nodes of a long conversation have one child.
        known = node.children[0] if len(node.children) == 1 else None
        if known is not None and not (
            known.message == message if known.reply is None else known.reply.message is message
        ):
            known = None
        known = known or _known_child(node, message)
        node = known or node.child(_checked(message, node.depth + 1))
    return node


def _known_child(node: Node, message: Message) -> Node | None:
    """Return the child with this message; the latest one if several have the same text."""
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
        elif _is_same(child.reply.message, message):
            return child
    return None


def _is_same(sampled: Message, message: Message) -> bool:
    """Return whether a message of a client is the sampled one, sent back."""
    content = text_of_content(message.get("content"))
    if message.get("role") != "assistant" or content is None:
        return False
    if (sampled.get("content") or "").strip() != content.strip():
        return False
    calls, others = sampled.get("tool_calls"), message.get("tool_calls")
    return calls == others or canonical_calls(calls) == canonical_calls(others)


def _checked(message: Message, number: int) -> dict[str, Any]:
    """Return a copy of a message whose content is a text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidValue(
            f"messages[{number}]",
            message,
            rule="must be a message",
            fix="Use a dict with role and content.",
        )
    content = text_of_content(message.get("content"))
    if content is None:
        raise InvalidValue(
            f"messages[{number}].content",
            message["content"],
            rule="must be text",
            fix="Use a string, or parts of type text.",
        )
    copied = {**message, "content": content}
    is_flat = all(isinstance(value, str) for value in copied.values())
    return copied if is_flat else copy.deepcopy(copied)
