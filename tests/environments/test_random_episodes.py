"""Random episodes with several kinds of templates: kept, encoded and trained tokens.

The expected path is rendered by the template from the same messages. A reply that the template
would write differently is rendered as a mark, which is then replaced by the text of the reply.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rlsys.environments.tokens.codec import Codec
from rlsys.environments.tokens.conversation import Conversation, Path
from rlsys.environments.tokens.token_tree import Trajectory, num_shared
from rlsys.text.tokenizer_boundary import Position
from rlsys.types import INJECTED, FinishReason, Generation
from tests.environments.templates import (
    ADDED,
    CHATML,
    FORGETTING,
    MOVING_TOOLS,
    SPECIAL,
    THINKING,
    TRIMMING,
    tokenizer,
)

Message = dict[str, Any]

JOINTS = (
    *("", " ", "\n", "\n\n", "  the", "is \n", "\t", "é", "漢", "🙂", "42", " Yes, no", '{"a": 1}'),
    *("<|im_end|>", "<|eot_id|>\n", "</s>", "<|im_start|>assistant\n", "[INST]", "<|im_", "end|>"),
    *("<think>", "</think>", "<tool_response>\nx", "\ufdd0r1\ufdd0", "\ufdd1_", "\ufdd164976;"),
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    template: str
    end: str = ""  # of a turn
    options: dict[str, Any] = field(default_factory=dict)
    has_system: bool = True
    has_tools: bool = False
    thinks: bool = False
    begins_thinking: bool = False
    is_append_only: bool = False


KINDS = {
    "none": Kind(template="", end="<|endoftext|>", is_append_only=True),
    "append-only": Kind(template=CHATML, end="<|im_end|>", is_append_only=True),
    "thinking": Kind(template=THINKING, end="<|im_end|>", has_tools=True, thinks=True),
    "not thinking": Kind(
        template=THINKING, end="<|im_end|>", has_tools=True, options={"enable_thinking": False}
    ),
    "begun thinking": Kind(
        template=THINKING,
        end="<|im_end|>",
        has_tools=True,
        options={"begin_thinking": True},
        thinks=True,
        begins_thinking=True,
    ),
    "trimming": Kind(template=TRIMMING, end="<|eot_id|>", has_tools=True),
    "moving tools": Kind(template=MOVING_TOOLS, end="</s>", has_tools=True, has_system=False),
    "forgetting": Kind(
        template=FORGETTING, end="<|eos|>", has_system=False, thinks=True, begins_thinking=True
    ),
}


def encoded(text: str) -> list[int]:
    ids: list[int] = tokenizer()(text, add_special_tokens=False)["input_ids"]
    return ids


def decoded(token_ids: Sequence[int]) -> str:
    text: str = tokenizer().decode(list(token_ids), skip_special_tokens=False)
    return text


class Episode:
    def __init__(self, codec: Codec, kind: Kind, seed: int) -> None:
        self.random = random.Random(seed)
        self.kind, self.codec = kind, codec
        self.conversation = Conversation(codec)
        self.encoded: list[str] = []
        self.sampled: list[tuple[Path, Generation]] = []
        self.wild: dict[int, tuple[Message, list[int]]] = {}  # by id of the message
        self.tools = self.some_tools()
        self.num_said = 0

    def some_tools(self) -> list[Message]:
        return [
            {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
            for name in ("look", "clock <|im_end|>")[: self.random.randint(0, 2)]
            if self.kind.has_tools
        ]

    def text(self) -> str:
        return "".join(self.random.choices(JOINTS, k=self.random.randint(0, 4)))

    def run(self) -> None:
        system = self.kind.has_system and self.random.random() < 0.3
        messages = [{"role": "system", "content": self.text()}] if system else []
        asked = [[*messages, {"role": "user", "content": f"Q{self.text()}"}]]
        for _ in range(self.random.randint(1, 6)):
            match self.random.random():
                case chance if chance < 0.15:
                    base = self.random.choice(asked)
                case chance if chance < 0.25:
                    *before, last = self.random.choice(asked)
                    base = [*before, {**last, "content": f"Q{self.text()}"}]
                case _:
                    base = asked[-1]
            if self.random.random() < 0.1:
                self.tools = self.some_tools()
            paths = [self.prompt(base) for _ in range(self.random.choice((1, 1, 1, 2)))]
            for path in paths:
                said = self.reply(base, path)
                behind = self.behind(said)
                if id(said) not in self.wild and self.random.random() < 0.5:
                    said = json.loads(json.dumps({**said, "reasoning_content": None}))
                    del said["reasoning_content"]
                asked.append([*base, said, *behind])

    def behind(self, said: Message) -> list[Message]:
        if said.get("tool_calls"):
            return [
                {"role": "tool", "content": self.text(), "tool_call_id": one["id"], "name": "look"}
                for one in said["tool_calls"]
            ]
        return [{"role": "user", "content": self.text()}]

    def prompt(self, messages: list[Message]) -> Path:
        path = self.conversation.prompt(messages, self.tools)
        assert decoded(path.token_ids) == self.expected(messages)
        before = [[*one.token_ids, *generation.token_ids] for one, generation in self.sampled]
        shared = max((num_shared(path.token_ids, one) for one in before), default=0)
        assert path.num_reused == shared or (self.wild and path.num_reused < shared)
        return path

    def reply(self, messages: list[Message], path: Path) -> Message:
        self.num_said += 1
        is_wild = self.random.random() < 0.4
        reply, message = ([], {}) if is_wild else self.canonical(messages)
        if is_wild:
            names = set(encoded("".join(ADDED)))
            reply = [
                one
                for one in self.random.choices(range(len(tokenizer())), k=self.random.randint(0, 6))
                if one not in names
            ]
            reply += self.random.choice(([], encoded(self.kind.end), encoded("<|endoftext|>")))
        is_cut = not reply or (bool(self.kind.template) and self.random.random() < 0.15)
        if is_cut and not is_wild:
            del reply[-1]  # the end of the turn, which is then written for it
        generation = Generation(
            request_id="r",
            token_ids=np.array(reply, np.int32),
            sampler_logprobs=np.array([-self.random.random() for _ in reply], np.float32),
            policy_versions=np.array([self.random.randint(0, 9) for _ in reply], np.int32),
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
        )
        said = self.conversation.reply(path, generation)
        self.sampled.append((path, generation))
        if is_wild:
            self.wild[id(said)] = (said, reply)
            return said
        assert said.get("reasoning_content") == message.get("reasoning_content")
        said["content"] = message["content"]  # without the tool calls, as their parser does
        if "tool_calls" in message:
            said["tool_calls"] = message["tool_calls"]
        return said

    def canonical(self, messages: list[Message]) -> tuple[list[int], Message]:
        """Return the rendered text of a message, to the end of its turn, and the message."""
        message: Message = {"role": "assistant", "content": f"say {self.num_said}"}
        if self.kind.has_tools and self.random.random() < 0.4:
            function = {"name": "look", "arguments": json.dumps({"at": self.num_said})}
            call_id = f"call{self.num_said:05}"
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
            if self.kind.template == MOVING_TOOLS or self.kind.template == TRIMMING:
                message["content"] = ""
        thought = f"think {self.num_said}" if self.kind.thinks else ""
        if self.kind.begins_thinking or (thought and self.random.random() < 0.7):
            message["reasoning_content"] = thought
        if self.kind.template == FORGETTING:
            text = f"{thought}\n</think>\n\n{message['content']}{self.kind.end}"
        elif not self.kind.template:
            text = message["content"] + self.kind.end
        else:
            question = {"role": "user", "content": "Hi"}
            made = message
            behind: list[Message] = [question]
            if self.kind.thinks or message.get("tool_calls"):
                behind = [{"role": "tool", "content": "", "tool_call_id": "call00000"}]
            whole = self.rendered([question, made, *behind], [])
            prompt = self.rendered([question], [])
            if not whole.startswith(prompt):  # of an empty thought, which no later prompt has
                assert self.kind.options == {"enable_thinking": False}
                prompt = prompt.removesuffix("<think>\n\n</think>\n\n")
            text = whole[len(prompt) :]
            text = text[: text.index(self.kind.end) + len(self.kind.end)]
        return encoded(text), message

    def rendered(self, messages: list[Message], tools: list[Message]) -> str:
        made = []
        for one in messages:
            calls = [
                {**call, "function": {**call["function"], "arguments": json.loads(arguments)}}
                for call in one.get("tool_calls", ())
                if (arguments := call["function"]["arguments"])
            ]
            made.append({**one, "tool_calls": calls} if calls else one)
        text: str = tokenizer().apply_chat_template(
            made,
            tools=tools or None,
            chat_template=self.kind.template,
            tokenize=False,
            add_generation_prompt=True,
            **self.kind.options,
        )
        return text

    def joined(self, messages: list[Message]) -> str:
        """Decoded together: halves of characters in two replies may meet."""
        token_ids: list[int] = []
        for one in messages:
            end = self.kind.end if one["role"] == "assistant" else ""
            wild = self.wild.get(id(one))
            token_ids += wild[1] if wild else encoded(one["content"] + end)
        return decoded(token_ids)

    def expected(self, messages: list[Message]) -> str:
        if not self.kind.template:
            return self.joined(messages)
        marked = []
        for number, one in enumerate(messages):
            if id(one) in self.wild:
                content = f"ZQ{number}Q"
                marked.append({"role": "assistant", "content": content})
                if "reasoning_content" in one and self.kind.template != FORGETTING:
                    marked[-1]["reasoning_content"] = content + "R"
            else:
                marked.append(self.with_reasoning(one))
        text = self.rendered(marked, self.tools)
        end = encoded(self.kind.end)[-1]
        for number, one in enumerate(messages):
            if id(one) not in self.wild:
                continue
            reply = self.wild[id(one)][1]
            mark, said = f"ZQ{number}Q", decoded(reply)
            if self.kind.template == MOVING_TOOLS:
                mark = f" {mark}"
            if "reasoning_content" in one:  # begun, and never ended
                whole = f"{mark}R\n</think>\n\n{mark}"
                if whole not in text:
                    text, reply, said = text.replace(mark, ""), [], ""
                    continue
                mark = whole
            if reply and reply[-1] == end:
                mark += self.kind.end
            assert mark in text
            text = text.replace(mark, said)
        return text

    def with_reasoning(self, message: Message) -> Message:
        """A client has left it out; the conversation knows it."""
        if message["role"] != "assistant":
            return message
        for node in self.conversation._replies:
            said = node.reply.message if node.reply else {}
            if said["content"] == message["content"] and said.get("tool_calls") == message.get(
                "tool_calls"
            ):
                return said
        raise AssertionError(message)

    def check_trajectory(self) -> None:
        rewards = [float(number + 1) for number in range(len(self.sampled))]
        made = self.conversation.trajectory(rewards)
        assert made.turn_rewards.sum() == (sum(rewards) if len(made.token_ids) else 0)
        trained = made.policy_versions != INJECTED
        assert trained.sum() == sum(len(one.token_ids) for _, one in self.sampled)
        assert not made.sampler_logprobs[~trained].any()
        paths = list(made.paths())
        assert len(self.conversation.transcript()) == len(paths)
        for (path, generation), end in zip(self.sampled, made.reply_ends.tolist(), strict=True):
            if not len(generation.token_ids):
                assert end == -1
                continue
            span = slice(end + 1 - len(generation.token_ids), end + 1)
            np.testing.assert_array_equal(made.token_ids[span], generation.token_ids)
            np.testing.assert_array_equal(made.sampler_logprobs[span], generation.sampler_logprobs)
            np.testing.assert_array_equal(made.policy_versions[span], generation.policy_versions)
            branch, length = position(made, end)
            assert paths[branch][: length + 1].tolist() == [
                *path.token_ids,
                *generation.token_ids.tolist(),
            ]


def position(made: Trajectory, index: int) -> tuple[int, int]:
    """Return the branch of each token of [T] and its position in the path of the branch."""
    start = 0
    for branch, (num_own, _, at, _) in enumerate(made.branches.reshape(-1, 4).tolist()):
        if index < start + num_own:
            return branch, at + index - start
        start += num_own
    raise AssertionError(index)


def play(name: str, num_episodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS[name]
    codec = Codec(tokenizer(), chat_template=kind.template, template_kwargs=kind.options)
    texts: list[tuple[str, Position]] = []
    plain = codec.boundary.encode_plain

    def noted(text: str, position: Position) -> list[int]:
        texts.append((text, position))
        return plain(text, position)

    monkeypatch.setattr(codec.boundary, "encode_plain", noted)
    num_branches = 0
    for seed in range(num_episodes):
        texts.clear()
        episode = Episode(codec, kind, seed)
        episode.run()
        assert len(set(texts)) == len(texts)  # none was encoded twice at the same kind of place
        episode.check_trajectory()
        num_branches += episode.conversation.trajectory().num_branches
    assert num_branches > num_episodes
    if kind.is_append_only:
        assert all(codec.is_append_only.values())


@pytest.mark.parametrize("name", KINDS)
def test_random_episodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play(name, 60, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_ten_thousand_random_episodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play(name, 10_000 // len(KINDS), monkeypatch)


def test_special_tokens_of_the_templates_are_the_only_ones() -> None:
    """However many special tokens the messages spell."""
    numbers = set(encoded("".join(SPECIAL)))
    for kind in KINDS.values():
        codec = Codec(tokenizer(), chat_template=kind.template, template_kwargs=kind.options)
        counts = {
            sum(token in numbers for token in Conversation(codec).prompt(messages).token_ids)
            for text in ("plain", "".join(SPECIAL))
            if (messages := [{"role": "user", "content": text}])
        }
        assert len(counts) == 1
