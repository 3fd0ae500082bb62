"""Conversion of the messages of one episode to token ids and of replies to messages.

In: the messages of each prompt, and the tokens sampled for it. Out: prompts as token ids, in which
earlier replies keep the tokens that were sampled; the episode as a `Trajectory`. No I/O, no clock.

    prompt(messages) ─► Path ─► (an engine samples) ─► reply(path, generation) ─► message
         ▲                                                                          │
         └──────────── messages + [message, {"role": "user", ...}] ◄────────────────┘

Messages form a tree. A prompt follows it as far as its messages are known; each reply on the way
keeps its tokens. Only the messages after the last reply are rendered, if the template is known to
render the earlier ones unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.environments.tokens.codec import Codec
from rlsys.environments.tokens.message_tree import Node, ParsedReply, find
from rlsys.environments.tokens.template import (
    Kept,
    Piece,
    ReplyShape,
    canonical_calls,
    for_template,
)
from rlsys.environments.tokens.token_tree import TokenTree, Trajectory, TreePlace
from rlsys.errors import InvalidValue, require
from rlsys.text.guarded import Cache
from rlsys.text.messages import Message
from rlsys.types import Generation

Line = tuple[str, str, bool]  # role, text, whether it was sampled


class TextTooLong(Exception):
    """A message that exceeds the context by itself: it has more than `num_tokens` tokens."""

    def __init__(self, num_chars: int, num_tokens: int) -> None:
        super().__init__(f"a text of {num_chars:,} characters (more than {num_tokens:,} tokens)")


@dataclass(eq=False, frozen=True, slots=True, kw_only=True)
class Path:
    """Token ids of a prompt."""

    token_ids: list[int]
    num_reused: int  # length of the prefix that the tree already contains
    seat: int
    begins_branch: bool  # a reply starts a new branch: no branch ends with this path
    _node: Node | None  # of the last message; None: the prompt is given as token ids
    _known: TreePlace | None
    _num_replies: int
    _tools: list[Message]

    @property
    def continued(self) -> TreePlace | None:
        """End of the branch that a reply continues; None if it begins a branch."""
        return None if self.begins_branch else self._known


class Conversation:
    """Messages and tokens of one episode.

    Several paths may be sampled at the same time. Forks and edited messages create branches.

    Args:
        max_tokens: Maximum length of a path. A text that is certainly longer is not encoded.
    """

    def __init__(self, codec: Codec, *, max_tokens: int | None = None) -> None:
        self._codec = codec
        self._max_tokens = max_tokens
        self._tree = TokenTree()
        self._roots: dict[int, Node] = {}
        self._encoded: Cache = {}
        self._replies: list[Node] = []
        self._of_tokens: dict[tuple[Node, tuple[int, ...]], Node] = {}
        self._tools: list[Message] = []
        self._guarded_tools: list[Message] = []

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, seat: int = 0
    ) -> Path:
        """Return the path of messages.

        Raises:
            InvalidValue: The messages are malformed, the template or the tokenizer cannot render
                them, or there are tools and the template does not render tools.
            TextTooLong: A text certainly has more than `max_tokens`.
        """
        codec = self._codec
        require(
            bool(messages), "messages", messages, rule="must not be empty", fix="Send a message."
        )
        if tools and not codec.renders_tools:
            state = "does not render tools" if codec.template else "is missing"
            raise InvalidValue(
                "tools",
                rule=f"the chat template of the model {state}, so it would not see the tools",
                fix="Use a model whose template renders tools, or describe them in a message.",
            )
        if tools and self._tools != list(tools):
            self._tools = copy.deepcopy(list(tools))
            self._guarded_tools = codec.text.guarded(self._tools)
        shown = self._guarded_tools if tools else []
        root = self._roots.setdefault(seat, Node(None, {}, -1))
        node = find(root, messages)
        known = self._continued(node, shown)
        token_ids, place = known if known is not None else (self._whole(node, shown), None)
        require(
            bool(token_ids),
            "messages",
            messages,
            rule="must contain a text, since a prompt needs at least one token",
            fix="Send a message with a text.",
        )
        if place is None or self._tree.has_continuation(place):
            place = self._tree.find(token_ids, seat)
        return self._path(token_ids, place, node, shown, seat)

    def prompt_of_tokens(self, token_ids: Sequence[int], *, seat: int = 0) -> Path:
        """Return the path of a prompt of token ids, which stay unchanged."""
        return self._path(list(token_ids), self._tree.find(token_ids, seat), None, [], seat)

    def placed(self, path: Path) -> Path:
        """Return a path that has not been sampled yet with the tokens that it shares by now."""
        if path._num_replies == self._tree.num_replies:
            return path
        place = self._tree.find(path.token_ids, path.seat)
        return self._path(path.token_ids, place, path._node, path._tools, path.seat)

    def _node_of_tokens(self, path: Path) -> Node:
        """Return the node of a prompt of token ids: those after the reply that it continues."""
        node, start = self._roots.setdefault(path.seat, Node(None, {}, -1)), 0
        for one in reversed(self._replies):
            if path._known and one.reply is not None and one.reply.place == path._known:
                node, start = one, path._known.length
                break
        key = (node, tuple(path.token_ids[start:]))
        if key[1] and key not in self._of_tokens:
            text = self._codec.boundary.decode_written(path.token_ids[start:])
            self._of_tokens[key] = node.child({"role": "user", "content": text})
        return self._of_tokens.get(key, node)

    def _path(
        self,
        token_ids: list[int],
        place: TreePlace | None,
        node: Node | None,
        tools: list[Message],
        seat: int,
    ) -> Path:
        return Path(
            token_ids=token_ids,
            num_reused=place.length if place else 0,
            seat=seat,
            begins_branch=place is None or self._tree.has_continuation(place),
            _node=node,
            _known=place,
            _num_replies=self._tree.num_replies,
            _tools=tools,
        )

    def reply(self, path: Path, generation: Generation) -> dict[str, Any]:
        """Add a reply and return it as an assistant's message.

        The caller may split tool calls off the content, in the returned message itself. A later
        prompt is matched with the reply by that object, or else by the content, the tool calls and
        the reasoning of that message.
        """
        codec = self._codec
        place = self._tree.add(
            path.token_ids,
            generation.token_ids.tolist(),
            generation.sampler_logprobs.tolist(),
            generation.policy_versions.tolist(),
            seat=path.seat,
            known=path._known,
            num_replies=path._num_replies,
        )
        reading = codec.read(generation)
        message: dict[str, Any] = {"role": "assistant", "content": reading.content}
        if reading.reasoning is not None:
            message["reasoning_content"] = reading.reasoning
        reply = ParsedReply(
            generation=generation,
            message=message,
            place=place,
            tools=path._tools,
        )
        node = self._node_of_tokens(path) if path._node is None else path._node
        self._replies.append(node.child(dict(message), reply))
        return message

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all branches, first prompt included: at least the trajectory's."""
        return self._tree.num_tokens

    @property
    def num_branches(self) -> int:
        """Number of branches of the trajectory."""
        return len(self._tree.numbers())

    def trajectory(self, turn_rewards: Sequence[float] = ()) -> Trajectory:
        """Return the columns of the episode.

        Args:
            turn_rewards: Reward of each reply, in the order of the calls of `reply`; missing ones
                are 0. The reward of a reply without tokens goes to the one before it.
        """
        return self._tree.trajectory(turn_rewards)

    def transcript(self) -> list[list[Line]]:
        """Return the messages of each branch of the trajectory, for people to read.

        Replies sampled on the path of the branch include reasoning and special tokens. Replies
        that are only repeated there count as not sampled.
        """
        last: dict[int, Node] = {}
        for node in self._replies:
            assert node.reply is not None
            last[node.reply.place.branch] = node
        return [
            [self._line(one, number) for one in last[number].chain()]
            for number in self._tree.numbers()
        ]

    def branch_seats(self) -> list[int]:
        """Return the seat of each branch of the transcript."""
        return [self._tree.seat(number) for number in self._tree.numbers()]

    def _line(self, node: Node, branch: int) -> Line:
        message, reply = node.message, node.reply
        if reply is not None and self._tree.contains(reply.place, branch):
            return (
                "assistant",
                self._codec.boundary.decode_written(reply.generation.token_ids.tolist()),
                True,
            )
        text = message.get("content") or ""
        if message.get("tool_calls"):
            text += canonical_calls(message["tool_calls"])
        return message["role"], text, False

    def _continued(self, node: Node, tools: list[Message]) -> tuple[list[int], TreePlace] | None:
        """Return the tokens up to the last reply with the new messages appended, and its place.

        None: the template renders the earlier messages differently now, or may do so.
        """
        following: list[Node] = []
        anchor = node
        while anchor.reply is None:
            if anchor.parent is None:
                return None
            following.append(anchor)
            anchor = anchor.parent
        reply = anchor.reply
        if reply.tools != tools:
            return None
        codec, messages = self._codec, [self._prepared(one) for one in reversed(following)]
        where = f"messages[{anchor.depth + 1}:]"
        if codec.template is None:
            text = "".join(one["content"] for one in messages)
            before = self._tree.tokens(reply.place)
            return before + self._encode(text, before[-1], where), reply.place
        kind = (
            anchor.shapes,
            bool(reply.shape.call_ids),
            tuple(one.shape for one in reversed(following)),
            bool(tools),
            anchor.num_replies.bit_length(),
        )
        if codec.is_append_only.get(kind) is False:
            return None
        shape = ReplyShape(anchor.has_reasoning, reply.shape.call_ids)
        tail = codec.template.tail(shape, messages, tools, has_system=anchor.has_system)
        if tail is None or codec.num_rewritten(tail, reply.generation):
            codec.is_append_only[kind] = False
            return None
        tail = codec.without_end(tail, reply.generation)
        before = self._tree.tokens(reply.place)
        token_ids = before + self._encode(tail, before[-1], where)
        if kind not in codec.is_append_only:
            codec.is_append_only[kind] = token_ids == self._whole(node, tools)
        return (token_ids, reply.place) if codec.is_append_only[kind] else None

    def _whole(self, node: Node, tools: list[Message]) -> list[int]:
        """Return the tokens of all messages, rendered together."""
        chain = node.chain()
        token_ids = list(self._codec.opening)
        last: Generation | None = None  # the previous piece, if it was sampled
        for piece in self._pieces(chain, tools):
            if isinstance(piece, Kept):
                reply = chain[piece.number].reply
                assert reply is not None
                kept, is_ended = self._kept(reply, piece.is_whole)
                token_ids += kept
                last = reply.generation if is_ended else None
                continue
            text = piece
            if last is not None:
                text = self._codec.without_end(piece, last)
                token_ids = token_ids[: len(token_ids) - self._codec.num_rewritten(piece, last)]
            is_first = len(token_ids) == len(self._codec.opening)
            after = None if is_first else token_ids[-1]
            token_ids += self._encode(text, after, "messages")
            last = None
        return token_ids

    def _pieces(self, chain: Sequence[Node], tools: Sequence[Message]) -> list[Piece]:
        template = self._codec.template
        if template is not None:
            messages = [one.reply.shape if one.reply else self._prepared(one) for one in chain]
            return template.pieces(messages, tools)
        pieces: list[Piece] = [""]
        for number, one in enumerate(chain):
            if one.reply is not None:
                pieces += [Kept(number, True), ""]
            else:
                text = pieces.pop()
                assert isinstance(text, str)
                pieces.append(text + self._prepared(one)["content"])
        return pieces

    def _kept(self, reply: ParsedReply, is_whole: bool) -> tuple[list[int], bool]:
        """Return the tokens of a reply, and whether its sampled end is among them."""
        token_ids: list[int] = reply.generation.token_ids.tolist()
        start = 0 if is_whole else self._codec.content_start(reply.generation)
        if start is None:  # the content begins inside of a token: encode its text again
            content = self._codec.read(reply.generation).content
            return self._codec.text.encode_plain(content), False
        return token_ids[start:], start < len(token_ids)

    def _prepared(self, node: Node) -> dict[str, Any]:
        if node.prepared is None:
            self._check_role(node)
            self._check_length(node)
            node.prepared = for_template(node.message, self._codec.text.guarded)
        return node.prepared

    def _check_role(self, node: Node) -> None:
        role, template = node.message["role"], self._codec.template
        if template is not None and not template.renders(role):
            raise InvalidValue(
                f"messages[{node.depth}].role",
                role,
                rule="the chat template of the model does not render messages of this role",
                fix="Use another role, or a model whose template renders it.",
            )

    def _check_length(self, node: Node) -> None:
        """Raise TextTooLong if the text of a message exceeds the context.

        Templates may omit most of an assistant's text, so it is not checked.
        """
        if self._max_tokens is not None and node.message["role"] != "assistant":
            text = (node.message.get("content") or "").strip()
            check_length(self._codec, text, self._max_tokens)

    def _encode(self, text: str, after: int | None, where: str) -> list[int]:
        return self._codec.text.encode(
            text, after=after, cache=self._encoded, where=where, change="the message"
        )


def check_length(codec: Codec, text: str, max_tokens: int) -> None:
    """Raise TextTooLong if a text certainly has more than `max_tokens`."""
    num_tokens = codec.text.num_tokens_beyond(text, max_tokens)
    if num_tokens is not None:
        raise TextTooLong(len(text), num_tokens)
