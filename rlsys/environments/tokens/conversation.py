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

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.environments.tokens.codec import Codec
from rlsys.environments.tokens.message_tree import Node, ParsedReply, find
from rlsys.environments.tokens.template import Kept, Piece, Said, canonical_calls, for_template
from rlsys.environments.tokens.token_tree import TokenTree, Trajectory, TreePlace
from rlsys.text.guarded import Cache
from rlsys.text.messages import Message
from rlsys.types import Generation

Line = tuple[str, str, bool]  # role, text, whether it was sampled


class TextTooLong(Exception):
    """A message's text that no path has room for: at least so many tokens."""

    def __init__(self, num_chars: int, num_tokens: int) -> None:
        super().__init__(
            f"a text of {num_chars:,} characters, which are more than {num_tokens:,} tokens"
        )


@dataclass(eq=False, frozen=True, slots=True, kw_only=True)
class Path:
    """Tokens to sample behind. `num_reused`: how many of them, from the first, stand in a path that
    something was sampled behind, or were sampled.
    """

    token_ids: list[int]
    num_reused: int
    seat: int
    begins_branch: bool  # a reply does not go on where a branch ends
    _node: Node
    _known: TreePlace | None
    _num_replies: int
    _tools: list[Message]


class Conversation:
    """Of one episode. Several paths may be sampled at the same time; forks and edited messages make
    branches. `max_tokens`: of a path; a longer text is not encoded only to be refused.
    """

    def __init__(self, codec: Codec, *, max_tokens: int | None = None) -> None:
        self._codec = codec
        self._max_tokens = max_tokens
        self._tree = TokenTree()
        self._roots: dict[int, Node] = {}
        self._encoded: Cache = {}
        self._replies: list[Node] = []
        self._tools: list[Message] = []
        self._guarded_tools: list[Message] = []

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, seat: int = 0
    ) -> Path:
        """Raises ValueError for messages that are none or that the chat template refuses, for tools
        where it renders none, and for text that the tokenizer has no tokens for; TextTooLong for
        one that certainly has more than `max_tokens`.
        """
        codec = self._codec
        if not messages:
            raise ValueError("messages=[] is no prompt; give at least one message.")
        if tools and not codec.renders_tools:
            what = "does not render tools" if codec.template else "is missing"
            raise ValueError(
                f"{len(tools)} tools are given, and the model's chat template {what}, so that the "
                "model would not see them; use a model whose template does, or describe the tools "
                "in a message."
            )
        if tools and self._tools != list(tools):
            self._tools = copy.deepcopy(list(tools))
            self._guarded_tools = codec.text.guarded(self._tools)
        shown = self._guarded_tools if tools else []
        root = self._roots.setdefault(seat, Node(None, {}, -1))
        node = find(root, messages)
        known = self._continued(node, shown)
        token_ids, place = known if known is not None else (self._whole(node, shown), None)
        if not token_ids:
            raise ValueError(
                f"{len(messages)} messages without any text are no prompt: there is no token to "
                "sample behind; give a message with a text."
            )
        if place is None or self._tree.goes_on(place):
            place = self._tree.find(token_ids, seat)
        return self._path(token_ids, place, node, shown, seat)

    def prompt_of_tokens(self, token_ids: Sequence[int], *, seat: int = 0) -> Path:
        """Return the path of a prompt that is given as its tokens. They stay as they are."""
        node = self._roots.setdefault(seat, Node(None, {}, -1))
        place = self._tree.find(token_ids, seat)
        start = 0
        for one in reversed(self._replies):
            if place is not None and one.reply is not None and one.reply.place == place:
                node, start = one, place.length
                break
        if text := self._codec.boundary.decode_written(list(token_ids[start:])):
            node = node.child({"role": "user", "content": text})
        return self._path(list(token_ids), place, node, [], seat)

    def _path(
        self,
        token_ids: list[int],
        place: TreePlace | None,
        node: Node,
        tools: list[Message],
        seat: int,
    ) -> Path:
        return Path(
            token_ids=token_ids,
            num_reused=place.length if place else 0,
            seat=seat,
            begins_branch=place is None or self._tree.goes_on(place),
            _node=node,
            _known=place,
            _num_replies=self._tree.num_replies,
            _tools=tools,
        )

    def reply(self, path: Path, generation: Generation) -> dict[str, Any]:
        """Keep what was sampled; returns the assistant's message. Whoever splits tool calls off its
        content does so in the message itself: it is recognised when it is sent back as it is then,
        by its content and its tool calls.
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
        self._replies.append(path._node.child(dict(message), reply))
        return message

    @property
    def num_tokens(self) -> int:
        """Of all branches, that of the first prompt included; no fewer than the trajectory has."""
        return self._tree.num_tokens

    @property
    def num_branches(self) -> int:
        """Of the trajectory."""
        return len(self._tree.numbers())

    def trajectory(self, turn_rewards: Sequence[float] = ()) -> Trajectory:
        """turn_rewards: one a reply, in the order in which `reply` was called; missing ones are 0.
        That of a reply without tokens goes to the one before it.
        """
        return self._tree.trajectory(turn_rewards)

    def transcript(self) -> list[list[Line]]:
        """The messages of each branch of the trajectory, to be read. What was sampled in the
        branch's path has its reasoning and special tokens; what is only repeated there counts as
        not sampled.
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
        """Whose each branch of the transcript is."""
        return [self._tree.seat(number) for number in self._tree.numbers()]

    def _line(self, node: Node, branch: int) -> Line:
        message, reply = node.message, node.reply
        if reply is not None and self._tree.holds(reply.place, branch):
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
        """The path of the last reply, what was sampled there, and the messages behind it; None
        where the template writes something before them otherwise now, or may.
        """
        behind: list[Node] = []
        anchor = node
        while anchor.reply is None:
            if anchor.parent is None:
                return None
            behind.append(anchor)
            anchor = anchor.parent
        reply = anchor.reply
        if reply.tools != tools:
            return None
        codec, messages = self._codec, [self._prepared(one) for one in reversed(behind)]
        where = f"messages[{anchor.depth + 1}:]"
        if codec.template is None:
            text = "".join(one["content"] for one in messages)
            before = self._tree.tokens(reply.place)
            return before + self._encode(text, before[-1], where), reply.place
        kind = (
            anchor.shapes,
            bool(reply.said.call_ids),
            tuple(one.shape for one in reversed(behind)),
            bool(tools),
            anchor.num_replies.bit_length(),
        )
        if codec.is_append_only.get(kind) is False:
            return None
        said = Said(anchor.has_reasoning, reply.said.call_ids)
        tail = codec.template.tail(said, messages, tools, has_system=anchor.has_system)
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
        """Tokens of all messages, rendered together."""
        chain = node.chain()
        token_ids = list(self._codec.opening)
        last: Generation | None = None  # of the piece before, if it was sampled
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

    def _kept(self, reply: ParsedReply, is_whole: bool) -> tuple[list[int], bool]:
        """What stands for a reply; whether with the end of it that was sampled."""
        token_ids: list[int] = reply.generation.token_ids.tolist()
        start = 0 if is_whole else self._codec.content_start(reply.generation)
        if start is None:  # within a token: what is left of it is another text
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
            raise ValueError(
                f"messages[{node.depth}] has the role {role!r}, of which the model's chat template "
                "writes nothing; use another role, or a model whose template knows it."
            )

    def _check_length(self, node: Node) -> None:
        """Of what is written as it is; of an assistant's text a template may leave most out."""
        text = (node.message.get("content") or "").strip()
        if self._max_tokens is None or node.message["role"] == "assistant":
            return
        num_tokens = self._codec.text.num_tokens_beyond(text, self._max_tokens)
        if num_tokens is not None:
            raise TextTooLong(len(text), num_tokens)

    def _encode(self, text: str, after: int | None, where: str) -> list[int]:
        return self._codec.text.encode(text, after=after, cache=self._encoded, where=where)
