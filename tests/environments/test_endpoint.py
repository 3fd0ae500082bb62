"""Agents that know OpenAI's client alone: what they are answered, and what their rollouts are."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

import rlsys
from rlsys.environments.episode_host import Ended
from rlsys.environments.tokens.token_tree import Trajectory
from rlsys.environments.workers.sync_worker import SyncWorkerFunctions
from tests.environments.asking import Asking, asking, client, play
from tests.environments.playing import played, request
from tests.environments.templates import THINKING
from tests.tiers import rest_slow

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}\n</tool_call>'


def trajectory_of(ended: Ended) -> Trajectory:
    assert ended.played is not None, ended.failure
    return ended.played.trajectory


def assert_sampled_once(ended: Ended, made: Asking) -> None:
    """Assert that the rollout contains each sampled token once, and no other as sampled."""
    trajectory = trajectory_of(ended)
    num_sampled = sum(len(one.token_ids) for one in made.sampler.sampled)
    assert int((trajectory.policy_versions >= 0).sum()) == num_sampled
    paths = [path.tolist() for path in trajectory.paths()]
    for asked, said in zip(made.sampler.asked, made.sampler.sampled, strict=True):
        whole = [*asked.prompt_token_ids, *said.token_ids.tolist()]
        assert any(path[: len(whole)] == whole for path in paths)


def test_a_chat_of_several_turns_is_one_branch() -> None:
    answers: list[Any] = []

    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            messages: list[Any] = [{"role": "system", "content": "Count."}]
            for number in range(5):
                messages.append({"role": "user", "content": f"{number}?"})
                answer = await policy.chat.completions.create(model="any", messages=messages)
                answers.append(answer)
                # All that the client's object has: refusal, annotations, audio, function_call ...
                messages.append(answer.choices[0].message.model_dump())
        return 1.0

    ended, made = play(mine, lambda text: f"  the number {len(text)}.\n")
    trajectory = trajectory_of(ended)
    assert trajectory.num_branches == 1
    assert_sampled_once(ended, made)
    (path,) = trajectory.paths()
    last, said = made.sampler.asked[-1], made.sampler.sampled[-1]
    assert path.tolist() == [*last.prompt_token_ids, *said.token_ids.tolist()]
    # The client's texts and the template's between special tokens, each once at most.
    injected = trajectory.token_ids[trajectory.policy_versions < 0]
    text = made.codec.boundary.decode([*trajectory.prompt_token_ids.tolist(), *injected.tolist()])
    assert made.codec.num_encoded <= len(text.replace("<|im_start|>", ""))
    first = answers[0]
    assert (first.object, first.model, first.policy_version) == ("chat.completion", "policy", 7)
    assert first.choices[0].message.content == "  the number 88.\n"
    assert first.choices[0].finish_reason == "stop"
    assert first.usage.prompt_tokens == len(made.sampler.asked[0].prompt_token_ids)
    assert first.usage.completion_tokens == len(made.sampler.sampled[0].token_ids)
    assert ended.played is not None
    assert [one["role"] for one in ended.played.transcript] == [
        "system",
        *["user", "assistant"] * 5,
    ]
    assert [one["sampled"] for one in ended.played.transcript][1:3] == [False, True]


def test_n_and_parallel_calls_are_branches() -> None:
    """Also if each may use all tokens: then one waits for the other."""
    numbers = iter(range(100))

    @rlsys.agent(max_turns=9)
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            question: list[Any] = [{"role": "user", "content": "?"}]
            three = await policy.chat.completions.create(model="m", messages=question, n=3)
            assert [one.index for one in three.choices] == [0, 1, 2]
            said = [one.message.content for one in three.choices]
            assert len(set(said)) == 3
            assert three.usage is not None
            assert three.usage.prompt_tokens == len(made[0].sampler.asked[0].prompt_token_ids)
            begun = [*question, {"role": "assistant", "content": said[1]}]
            again = [[*begun, {"role": "user", "content": text}] for text in ("a", "b")]
            await asyncio.gather(
                *(policy.chat.completions.create(model="m", messages=one) for one in again)
            )
        return 0.5

    made: list[Asking] = []

    async def run() -> Ended:
        async with asking(mine, lambda text: f"number {next(numbers)}") as one:
            made.append(one)
            (ended,) = await played(one.host, [request()])
        return ended

    ended = asyncio.run(run())
    trajectory = trajectory_of(ended)
    assert trajectory.num_branches == 4  # three answers, one continued twice
    assert_sampled_once(ended, made[0])


def test_calls_of_tools_are_read_and_recognised_when_they_come_back() -> None:
    choices: list[Any] = []

    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
            for _ in range(3):
                answer = await policy.chat.completions.create(
                    model="m", messages=messages, tools=TOOLS, tool_choice="auto"
                )
                choice = answer.choices[0]
                choices.append(choice)
                sent = choice.message.model_dump()
                for call in sent["tool_calls"] or ():
                    arguments = json.loads(call["function"]["arguments"])
                    call["function"]["arguments"] = json.dumps(arguments, indent=1)  # as some do
                messages.append(sent)
                for call in choice.message.tool_calls or ():
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        return 1.0

    replies = iter([CALL, f"Again.\n{CALL}\n{CALL}", "3"])
    ended, made = play(mine, lambda text: next(replies), template=THINKING)
    first, second, third = choices
    assert first.finish_reason == "tool_calls"
    assert first.message.content is None
    assert [one.function.name for one in first.message.tool_calls] == ["add"]
    assert json.loads(first.message.tool_calls[0].function.arguments) == {"a": 1, "b": [2, "é"]}
    assert second.message.content == "Again."
    ids = [one.id for one in (*first.message.tool_calls, *second.message.tool_calls)]
    assert len(set(ids)) == 3
    assert (third.finish_reason, third.message.content) == ("stop", "3")
    assert trajectory_of(ended).num_branches == 1
    assert_sampled_once(ended, made)
    last = made.codec.boundary.decode(list(made.sampler.asked[-1].prompt_token_ids))
    assert last.count('"name": "add"') == 4  # its schema, and three calls
    assert last.count("<tool_response>") == 3


def test_an_agent_may_set_the_format_of_calls() -> None:
    @rlsys.agent(tool_format="json")
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            answer = await policy.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "?"}], tools=TOOLS
            )
        calls = answer.choices[0].message.tool_calls
        assert calls is not None
        return float(calls[0].function.name == "add")

    says = '{"name": "add", "arguments": {"a": 1}}'
    ended, _ = play(mine, lambda text: says, template=THINKING)
    assert ended.played is not None, ended.failure
    assert ended.played.total == 1.0


def test_without_choice_of_tools_none_is_rendered() -> None:
    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            answer = await policy.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "?"}],
                tools=TOOLS,
                tool_choice="none",
            )
        assert answer.choices[0].message.content == CALL
        return 1.0

    ended, made = play(mine, lambda text: CALL, template=THINKING)
    assert ended.played is not None, ended.failure
    assert "add" not in made.codec.boundary.decode(list(made.sampler.asked[0].prompt_token_ids))


def test_reasoning_is_a_separate_field_and_kept() -> None:
    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            messages: list[Any] = [{"role": "user", "content": "?"}]
            answer = await policy.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            assert message.model_dump()["reasoning_content"] == "hm"
            assert message.tool_calls
            # Many clients send back what they know alone.
            sent = message.model_dump(include={"role", "content", "tool_calls"})
            messages += [
                sent,
                {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"},
            ]
            await policy.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        return 1.0

    replies = iter([f"<think>\nhm\n</think>\n\n{CALL}", "3"])
    ended, made = play(mine, lambda text: next(replies), template=THINKING)
    assert trajectory_of(ended).num_branches == 1
    assert_sampled_once(ended, made)


def test_the_chunks_of_a_stream_add_up_to_the_answer() -> None:
    texts: list[str] = []
    usages: list[Any] = []
    calls: list[tuple[str, str]] = []
    logprobs: list[float] = []
    reasons: list[str] = []

    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            question: Any = [{"role": "user", "content": "?"}]
            stream = await policy.chat.completions.create(
                model="m",
                messages=question,
                tools=TOOLS,
                n=2,
                stream=True,
                stream_options={"include_usage": True},
                logprobs=True,
            )
            said = ["", ""]
            async for chunk in stream:
                assert chunk.object == "chat.completion.chunk"
                usages.append(chunk.usage)
                for choice in chunk.choices:
                    said[choice.index] += choice.delta.content or ""
                    for call in choice.delta.tool_calls or ():
                        assert call.function is not None
                        calls.append((str(call.function.name), str(call.function.arguments)))
                    if choice.logprobs is not None and choice.index == 0:
                        logprobs.extend(one.logprob for one in choice.logprobs.content or ())
                    if choice.finish_reason:
                        reasons.append(choice.finish_reason)
            texts.extend(said)
            # The client's own way to put a stream together.
            async with policy.chat.completions.stream(model="m", messages=question) as events:
                final = await events.get_final_completion()
            texts.append(str(final.choices[0].message.content))
        return 1.0

    replies = iter(["one", f"two\n{CALL}", "three"])
    ended, made = play(mine, lambda text: next(replies), template=THINKING)
    assert ended.played is not None, ended.failure
    assert texts == ["one", "two", "three"]
    assert [name for name, _ in calls] == ["add"]
    assert json.loads(calls[0][1]) == {"a": 1, "b": [2, "é"]}
    assert reasons == ["stop", "tool_calls"]
    assert logprobs == [-0.5] * len(made.sampler.sampled[0].token_ids)
    assert usages[:-1] == [None] * (len(usages) - 1)
    said = sum(len(one.token_ids) for one in made.sampler.sampled[:2])
    assert usages[-1].completion_tokens == said


def test_log_probabilities_are_the_sampled_ones() -> None:
    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            answer = await policy.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "?"}],
                logprobs=True,
                top_logprobs=2,
                temperature=0.1,
                seed=3,
            )
            tokens = answer.choices[0].logprobs
            assert tokens is not None
            assert tokens.content is not None
            assert "".join(one.token for one in tokens.content) == "the end.<|im_end|>"
            assert {one.logprob for one in tokens.content} == {-0.5}
            assert set(answer.model_dump()["ignored"]) == {"top_logprobs", "temperature", "seed"}
            text = await policy.completions.create(model="m", prompt="the", logprobs=0)
            assert text.choices[0].logprobs is not None
            assert text.choices[0].logprobs.tokens[-1] == "<|im_end|>"
            assert text.model_dump()["policy_version"] == 7
            assert text.model_dump()["ignored"] == []
        return 1.0

    ended, _ = play(mine, lambda text: "the end.")
    assert ended.played is not None, ended.failure


def test_completions_continue_a_text_and_its_completion() -> None:
    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            text = "Q: 1+1\n"
            for step in ("Observation: 2\n", "Observation: 3\n", ""):
                answer = await policy.completions.create(
                    model="m", prompt=text, stop=["Observation:"], max_tokens=50
                )
                assert answer.choices[0].text == "Think.\n"  # without what it stopped at
                assert answer.choices[0].finish_reason == "stop"
                text += answer.choices[0].text + step
        return 1.0

    def says(text: str) -> str:
        return "Think.\nObservation:"

    ended, made = play(mine, says)
    trajectory = trajectory_of(ended)
    assert trajectory.num_branches == 1
    assert_sampled_once(ended, made)
    (path,) = trajectory.paths()
    text = made.codec.boundary.decode(path.tolist()).replace("<|im_end|>", "")
    assert text == ("Q: 1+1\nThink.\nObservation: 2\nThink.\nObservation: 3\nThink.\nObservation:")
    assert made.codec.without_template.num_encoded == len("Q: 1+1\n 2\n 3\n")


def test_the_same_text_again_is_sampled_again() -> None:
    """A reply that has ended is not continued."""
    replies = iter(["", "a", "b", "c"])

    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            said = [
                (await policy.completions.create(model="m", prompt="the")).choices[0].text
                for _ in range(3)
            ]
            assert said == ["", "a", "b"]
            again = await policy.completions.create(model="m", prompt="thea")
            assert again.choices[0].text == "c"
        return 1.0

    ended, made = play(mine, lambda text: next(replies))
    assert ended.played is not None, ended.failure
    prompts = [list(one.prompt_token_ids) for one in made.sampler.asked]
    assert prompts[0] == prompts[1] == prompts[2]
    assert not set(prompts[3]) & {int(made.sampler.sampled[0].token_ids[-1])}


def test_a_stop_text_ends_a_chats_reply_and_is_removed() -> None:
    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            messages: list[Any] = [{"role": "user", "content": "?"}]
            for _ in range(2):
                answer = await policy.chat.completions.create(
                    model="m", messages=messages, stop="END"
                )
                assert answer.choices[0].message.content == "Well, "
                messages += [
                    {"role": "assistant", "content": answer.choices[0].message.content},
                    {"role": "user", "content": "more"},
                ]
        return 1.0

    ended, made = play(mine, lambda text: "Well, END")
    assert trajectory_of(ended).num_branches == 1
    assert made.sampler.asked[0].sampling.stop == ("END",)
    assert_sampled_once(ended, made)


def test_an_episode_may_have_chats_and_texts() -> None:
    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            await policy.completions.create(model="m", prompt="What is it?")
            await policy.chat.completions.create(
                model="m", messages=[{"role": "user", "content": [{"type": "text", "text": "?"}]}]
            )
        return 1.0

    ended, made = play(mine, lambda text: "yes")
    trajectory = trajectory_of(ended)
    assert trajectory.num_branches == 2
    assert_sampled_once(ended, made)
    assert trajectory.prompt_token_ids.tolist() == list(made.sampler.asked[0].prompt_token_ids)


def test_there_is_one_model() -> None:
    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            names = [one.id async for one in policy.models.list()]
            assert names == [endpoint.model] == ["policy"]
            await policy.chat.completions.create(
                model="gpt-9", messages=[{"role": "user", "content": "?"}]
            )
        return 1.0

    ended, _ = play(mine, lambda text: "yes")
    assert ended.played is not None, ended.failure


@rlsys.agent(max_turns=2)
def blocking(endpoint: rlsys.Endpoint, task: Any) -> float:
    with openai.OpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as policy:
        answer = policy.chat.completions.create(
            model="m", messages=[{"role": "user", "content": task["question"]}]
        )
        if task["question"] == "raise":
            raise OSError("no server")
        text = policy.completions.create(model="m", prompt="the")
    return float(len(answer.choices[0].message.content or "") + len(text.choices[0].text))


@pytest.mark.parametrize("question", rest_slow(["?", "raise"]))
def test_a_synchronous_agent_runs_in_its_own_process(question: str) -> None:
    plain = SyncWorkerFunctions(blocking, memory_gib=8.0, start_timeout_s=120.0)
    ended, _ = play(blocking, lambda text: "yes", {"question": question}, executor=plain)
    if question == "?":
        assert ended.played is not None, ended.failure
        assert ended.played.total == 6.0
    else:
        assert ended.failure is not None
        assert "no server" in ended.failure.message


def test_an_agent_without_requests_has_a_reward_and_no_tokens() -> None:
    @rlsys.agent(num_retries=0)
    async def idle(endpoint: Any, task: Any) -> float:
        return 1.0

    ended, _ = play(idle, lambda text: "yes")
    assert ended.played is not None, ended.failure
    assert ended.played.total == 1.0
    assert len(ended.played.trajectory.token_ids) == 0
