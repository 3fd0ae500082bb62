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

# Fields that chat templates read, apart from the content. A client may add other fields, such as
# `id` or `cache_control`, to a message that it sends again.
RENDERED = (
    "role",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "reasoning",
    "thinking",
)

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

    Several nodes may have the same text and calls. Of these, the ones that the message identifies
    are followed (`_identified`), or else all. The path that keeps most sampled replies is taken,
    then the one on which most messages are known. If several remain, nothing that the client sent
    distinguishes them. The latest one that no prompt has continued is taken, or else the latest
    one.

    Raises:
        InvalidValue: An element is not a message.
    """
    nodes, ended = [root], list[Node]()  # ended: the next message is not known after them
    for message in messages:
        children = _known_children(nodes, message)
        if not children:
            break
        if len(nodes) > 1:
            parents = {id(child.parent) for child in children}
            ended += [one for one in nodes if id(one) not in parents]
        if identified := _identified(children, message):
            children, ended = identified, []
        nodes = children
    known = [*ended, *nodes]
    best = max((one.num_replies, one.depth) for one in known)
    node = _latest([one for one in known if (one.num_replies, one.depth) == best])
    for new in messages[node.depth + 1 :]:
        node = node.child(_checked(new, node.depth + 1))
    return node


def _latest(nodes: Sequence[Node]) -> Node:
    return next((one for one in reversed(nodes) if not one.children), nodes[-1])


def _known_children(nodes: Sequence[Node], message: Message) -> list[Node]:
    """Return the children of the nodes that a message may be, the latest one last."""
    if len(nodes) == 1 and len(nodes[0].children) == 1:
        # Fast path: nearly all nodes of a long conversation have one child.
        (child,) = nodes[0].children
        if child.message == message if child.reply is None else child.reply.message is message:
            return [child]
    return [
        child
        for node in nodes
        for child in node.children
        if (
            child.message == message or _renders_alike(child.message, message)
            if child.reply is None
            else child.reply.message is message or _is_same(child.reply.message, message)
        )
    ]


def _renders_alike(known: Message, message: object) -> bool:
    """Return whether a message differs from a known one at most in fields that are not rendered."""
    if not isinstance(message, Mapping):
        return False
    return known["content"] == text_of_content(message.get("content")) and all(
        (known.get(name) or None) == (message.get(name) or None) for name in RENDERED
    )


def _identified(nodes: list[Node], message: Message) -> list[Node]:
    """Return the nodes of several that a message identifies; none if it identifies none.

    The message object of a reply identifies it, then the ids of its calls, which are unique unless
    the model writes ids itself.
    """
    if len(nodes) < 2:
        return []
    same = [one for one in nodes if one.reply is not None and one.reply.message is message]
    if not same and (ids := _call_ids(message)):
        same = [one for one in nodes if one.reply and _call_ids(one.reply.message) == ids]
    return same


def _call_ids(message: Message) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls") or ()]


def _is_same(sampled: Message, message: Message) -> bool:
    """Return whether a message of a client may be the sampled one, sent back.

    Many clients do not send the reasoning. If it is sent, it must be the sampled one.
    """
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return False
    content = text_of_content(message.get("content"))
    if content is None or (sampled.get("content") or "").strip() != content.strip():
        return False
    reasoning = message.get("reasoning_content")
    own = sampled.get("reasoning_content") or ""
    if isinstance(reasoning, str) and reasoning.strip() not in ("", own.strip()):
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
