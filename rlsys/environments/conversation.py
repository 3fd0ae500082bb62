"""The token paths of one episode: messages in, tokens to sample behind out, and back.

In: the messages of each prompt, and what was sampled behind it. Out: prompts as token ids, in which
what was sampled stands as it was sampled; the episode as a `Trajectory`. No I/O and no clock.

    prompt(messages) ─► Path ─► (an engine samples) ─► reply(path, generation) ─► message
         ▲                                                                          │
         └──────────── messages + [message, {"role": "user", ...}] ◄────────────────┘

Messages are remembered as a tree. A prompt goes down it as far as its messages are known; each
sampled one on the way keeps its tokens. Behind the last, only the new messages are rendered, where
the template is known to write those before them as it did.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsys.environments.codec import Codec
from rlsys.environments.template import (
    Kept,
    Message,
    Piece,
    Said,
    canonical_calls,
    for_template,
)
from rlsys.environments.text_encoding import Cache
from rlsys.environments.token_tree import Place, TokenTree, Trajectory
from rlsys.types import Generation

Shape = tuple[Hashable, ...]  # what a template may look at of a message, beside its texts
Line = tuple[str, str, bool]  # role, text, whether it was sampled


@dataclass(eq=False, slots=True)
class _Reply:
    """What was sampled as a message."""

    generation: Generation
    message: dict[str, Any]  # as it was given out; its owner may have split tool calls off since
    said: Said
    text: str
    place: Place  # behind its last token
    tools: Sequence[Message]


@dataclass(eq=False, slots=True)
class _Node:
    """A message, behind others."""

    parent: _Node | None
    message: dict[str, Any]
    depth: int  # its number among the messages
    reply: _Reply | None = None
    children: list[_Node] = field(default_factory=list)
    prepared: dict[str, Any] | None = None
    shapes: frozenset[Shape] = frozenset()  # of it and those before it
    num_replies: int = 0
    has_reasoning: bool = False  # any reply of it and those before it
    has_system: bool = False  # the first message

    def chain(self) -> list[_Node]:
        """From the first message."""
        nodes = []
        node: _Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(eq=False, frozen=True, slots=True, kw_only=True)
class Path:
    """Tokens to sample behind. `num_reused`: how many of them, from the first, stand in a path that
    something was sampled behind, or were sampled."""

    token_ids: list[int]
    num_reused: int
    seat: int
    _node: _Node
    _known: Place | None
    _tools: Sequence[Message]


class Conversation:
    """Of one episode. Several paths may be sampled at the same time; forks and edited messages make
    branches."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._tree = TokenTree()
        self._roots: dict[int, _Node] = {}
        self._encoded: Cache = {}
        self._replies: list[_Node] = []

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, seat: int = 0
    ) -> Path:
        """Raises ValueError for messages that are none or that the chat template refuses, for tools
        where it renders none, and for text that the tokenizer has no tokens for."""
        codec = self._codec
        if not messages:
            raise ValueError("messages=[] is no prompt; give at least one message.")
        if tools and not (codec.template and codec.template.renders_tools):
            what = "does not render tools" if codec.template else "is missing"
            raise ValueError(
                f"{len(tools)} tools are given, and the model's chat template {what}, so that the "
                "model would not see them; use a model whose template does, or describe the tools "
                "in a message."
            )
        node = self._find(messages, seat)
        known = self._continued(node, tools)
        if known is not None:
            token_ids, place = known
            return self._path(node, token_ids, place, tools, seat)
        token_ids = self._whole(node, tools)
        return self._path(node, token_ids, self._tree.find(token_ids, seat), tools, seat)

    def reply(self, path: Path, generation: Generation) -> dict[str, Any]:
        """Keep what was sampled; returns the assistant's message. Whoever splits tool calls off its
        content does so in the message itself: it is recognised when it is sent back as it is then,
        by its content and its tool calls."""
        codec = self._codec
        place = self._tree.add(
            path.token_ids,
            generation.token_ids.tolist(),
            generation.sampler_logprobs.tolist(),
            generation.policy_versions.tolist(),
            seat=path.seat,
            known=path._known,
        )
        reading = codec.read(generation, prompt_thinks=self._thinks(path))
        message: dict[str, Any] = {"role": "assistant", "content": reading.content}
        if reading.reasoning is not None:
            message["reasoning_content"] = reading.reasoning
        node = _child(path._node, dict(message))
        node.reply = _Reply(
            generation=generation,
            message=message,
            said=Said(reading.reasoning is not None),
            text=codec.text.decode(generation.token_ids.tolist()),
            place=place,
            tools=path._tools,
        )
        _summarise(node)
        self._replies.append(node)
        return message

    def trajectory(self, turn_rewards: Sequence[float] = ()) -> Trajectory:
        """turn_rewards: one a reply, in the order in which `reply` was called; missing ones are 0.
        That of a reply without tokens goes to the one before it."""
        return self._tree.trajectory(turn_rewards)

    def transcript(self) -> list[list[Line]]:
        """The messages of each branch of the trajectory, to be read: what was sampled with its
        reasoning and special tokens."""
        last: dict[int, _Node] = {}
        for node in self._replies:
            assert node.reply is not None
            last[node.reply.place.branch] = node
        kept = self._tree.numbers()
        return [
            [_line(one) for one in last[number].chain()] if number in last else []
            for number in kept
        ]

    def _path(
        self,
        node: _Node,
        token_ids: list[int],
        place: Place | None,
        tools: Sequence[Message],
        seat: int,
    ) -> Path:
        return Path(
            token_ids=token_ids,
            num_reused=place.length if place else 0,
            seat=seat,
            _node=node,
            _known=place,
            _tools=tools,
        )

    # Messages.

    def _find(self, messages: Sequence[Message], seat: int) -> _Node:
        """Where they stand in the tree of messages; those that are new are put there."""
        node = self._roots.get(seat)
        if node is None:
            node = self._roots[seat] = _Node(None, {}, -1)
        for message in messages:
            found = _known_child(node, message)
            if found is None:
                found = _child(node, _checked(message, node.depth + 1))
                _summarise(found)
            node = found
        return node

    # Tokens.

    def _continued(self, node: _Node, tools: Sequence[Message]) -> tuple[list[int], Place] | None:
        """The path of the last reply, what was sampled there, and the messages behind it; None
        where the template writes something before them otherwise now, or may."""
        behind: list[_Node] = []
        anchor = node
        while anchor.reply is None:
            if anchor.parent is None:
                return None
            behind.append(anchor)
            anchor = anchor.parent
        reply = anchor.reply
        if reply.tools is not tools and list(reply.tools) != list(tools):
            return None
        codec, messages = self._codec, [self._prepared(one) for one in reversed(behind)]
        where = f"messages[{anchor.depth + 1}:]"
        if codec.template is None:
            text = "".join(one["content"] for one in messages)
            return self._tree.tokens(reply.place) + self._encode(text, False, where), reply.place
        kind = (
            anchor.shapes,
            reply.said,
            tuple(_shape(one) for one in reversed(behind)),
            bool(tools),
            anchor.num_replies.bit_length(),
        )
        if codec.is_append_only.get(kind) is False:
            return None
        tail = codec.template.tail(
            Said(anchor.has_reasoning), messages, tools, has_system=anchor.has_system
        )
        if tail is None:
            return None
        tail = codec.without_end(tail, reply.generation)
        token_ids = self._tree.tokens(reply.place) + self._encode(tail, False, where)
        if kind not in codec.is_append_only:
            codec.is_append_only[kind] = token_ids == self._whole(node, tools)
        return (token_ids, reply.place) if codec.is_append_only[kind] else None

    def _whole(self, node: _Node, tools: Sequence[Message]) -> list[int]:
        """Tokens of all messages, rendered together."""
        chain = node.chain()
        token_ids = list(self._codec.opening)
        last: Generation | None = None  # of the piece before, if it was sampled
        for piece in self._pieces(chain, tools):
            if isinstance(piece, Kept):
                reply = chain[piece.number].reply
                assert reply is not None
                kept = self._kept(reply, piece.is_whole, f"messages[{piece.number}]")
                token_ids += kept
                last = reply.generation if kept else None
                continue
            text = piece if last is None else self._codec.without_end(piece, last)
            token_ids += self._encode(text, not token_ids, "messages")
            last = None
        return token_ids

    def _pieces(self, chain: Sequence[_Node], tools: Sequence[Message]) -> list[Piece]:
        template = self._codec.template
        if template is not None:
            made = [one.reply.said if one.reply else self._prepared(one) for one in chain]
            return template.pieces(made, tools)
        pieces: list[Piece] = [""]
        for number, one in enumerate(chain):
            if one.reply is not None:
                pieces += [Kept(number, True), ""]
            else:
                text = pieces.pop()
                assert isinstance(text, str)
                pieces.append(text + self._prepared(one)["content"])
        return pieces

    def _kept(self, reply: _Reply, is_whole: bool, where: str) -> list[int]:
        token_ids: list[int] = reply.generation.token_ids.tolist()
        if is_whole:
            return token_ids
        start = self._codec.content_start(reply.generation)
        if start is None:  # within a token: what is left of it is another text
            return self._encode(reply.message["content"], False, where)
        return token_ids[start:]

    def _prepared(self, node: _Node) -> dict[str, Any]:
        if node.prepared is None:
            node.prepared = for_template(node.message, self._codec.text.guarded)
        return node.prepared

    def _encode(self, text: str, at_start: bool, where: str) -> list[int]:
        return self._codec.text.encode(text, at_start=at_start, cache=self._encoded, where=where)

    def _thinks(self, path: Path) -> bool:
        thinking = self._codec.thinking
        if thinking is None or not thinking.end:
            return False
        end = self._codec.text.decode(path.token_ids[-16:]).rstrip()
        start = thinking.start or thinking.end.replace("/", "")
        return end.endswith(start)


def _child(parent: _Node, message: dict[str, Any]) -> _Node:
    node = _Node(parent, message, parent.depth + 1)
    parent.children.append(node)
    return node


def _summarise(node: _Node) -> None:
    """What of it and those before it a template may look at."""
    parent = node.parent
    assert parent is not None
    shape = _shape(node)
    node.shapes = parent.shapes if shape in parent.shapes else parent.shapes | {shape}
    node.num_replies = parent.num_replies + (node.reply is not None)
    said = node.reply.said.has_reasoning if node.reply else False
    node.has_reasoning = parent.has_reasoning or said
    node.has_system = parent.has_system or (node.depth == 0 and node.message["role"] == "system")


def _shape(node: _Node) -> Shape:
    message = node.message
    return (
        message["role"],
        node.reply is not None,
        bool(message.get("reasoning_content")),
        bool(message.get("tool_calls")),
        bool(message.get("content")),
    )


def _known_child(node: _Node, message: Message) -> _Node | None:
    """The latest that was sampled comes first, where several say the same."""
    for child in node.children:
        if child.reply is not None and child.reply.message is message:
            return child
    for child in reversed(node.children):
        if child.reply is None:
            if child.message == message:
                return child
        elif _says(child.reply.message, message):
            return child
    return None


def _says(sampled: Message, message: Message) -> bool:
    """Whether a message is one that was sampled, sent back by a client."""
    if message.get("role") != "assistant":
        return False
    if (sampled.get("content") or "").strip() != _text(message.get("content")).strip():
        return False
    calls, others = sampled.get("tool_calls"), message.get("tool_calls")
    return calls == others or canonical_calls(calls) == canonical_calls(others)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else ""


def _checked(message: Message, number: int) -> dict[str, Any]:
    """A copy."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(
            f"messages[{number}]={message!r} is no message; give a dict with role and content."
        )
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise ValueError(
            f"messages[{number}]: content={content!r} is no text; give a string, such as the text "
            "parts joined."
        )
    return dict(message)


def _line(node: _Node) -> Line:
    if node.reply is not None:
        return "assistant", node.reply.text, True
    message = node.message
    text = message.get("content") or ""
    if message.get("tool_calls"):
        text += canonical_calls(message["tool_calls"])
    return message["role"], text, False
