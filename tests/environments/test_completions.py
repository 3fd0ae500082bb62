"""Completions of tokens, of several prompts, with echo and token ids, by OpenAI's client."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import openai
import pytest

import rlsys
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.environments.environment import Environment
from rlsys.environments.episode_host import Ended
from rlsys.environments.token_budget import EpisodeLimits
from rlsys.environments.tokens.codec import Codec
from rlsys.environments.tokens.text_prompts import TextPrompt, TextPrompts
from tests.environments.asking import asking, client, play
from tests.environments.playing import Scripted, played, request
from tests.environments.templates import tokenizer
from tests.environments.test_endpoint import assert_sampled_once, trajectory_of
from tests.environments.test_room import CODEC, episode
from tests.errors import invalid


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer()(text, add_special_tokens=False)["input_ids"]
    return found


def play_on(hosts: list[Any], agent: Environment, limits: EpisodeLimits) -> Ended:
    """Play one episode on a new host, which is appended to `hosts` before it starts."""

    async def run() -> Ended:
        async with asking(agent, lambda text: "yes", limits=limits) as made:
            hosts.append(made)
            (ended,) = await asyncio.wait_for(played(made.host, [request()]), 60)
        return ended

    return asyncio.run(run())


def test_prompts_of_token_ids_stay_unchanged() -> None:
    """Even if encoding their text would give other tokens."""
    prompt = [*ids("a"), *ids("b"), *ids("<|im_end|>"), *ids("c")]
    whole: list[int] = []

    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            first = await policy.completions.create(
                model="m", prompt=prompt, extra_body={"return_token_ids": True}
            )
            (choice,) = first.choices
            made = choice.model_dump()
            assert made["prompt_token_ids"] == prompt
            assert tokenizer().decode(made["token_ids"]) == "yes<|im_end|>"
            assert first.model_dump()["ignored"] == []
            whole.extend([*prompt, *made["token_ids"], *ids("more")])
            second = await policy.completions.create(model="m", prompt=whole)
            assert second.usage.prompt_tokens == len(whole)
        return 1.0

    ended, made = play(mine, lambda text: "yes")
    assert trajectory_of(ended).num_branches == 1
    assert_sampled_once(ended, made)
    assert [list(one.prompt_token_ids) for one in made.sampler.asked] == [prompt, whole]
    assert made.sampler.asked[1].num_shared_tokens == len(whole) - len(ids("more"))
    assert ended.played is not None
    texts = [one["text"] for one in ended.played.transcript]
    assert texts == ["ab<|im_end|>c", "yes<|im_end|>", "more", "yes<|im_end|>"]


def test_several_prompts_are_answered_in_order() -> None:
    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            texts = await policy.completions.create(
                model="m", prompt=["a", "bb"], n=2, max_tokens=9, echo=True
            )
            said = [one.text for one in texts.choices]
            assert said == ["a1", "a1", "bb2", "bb2"]
            assert [one.index for one in texts.choices] == [0, 1, 2, 3]
            tokens = await policy.completions.create(
                model="m", prompt=[ids("ccc"), ids("d")], max_tokens=9
            )
            assert [one.text for one in tokens.choices] == ["3", "1"]
            assert tokens.usage.prompt_tokens == len(ids("ccc")) + len(ids("d"))
            assert texts.usage.prompt_tokens == len(ids("a")) + len(ids("bb"))
        return 1.0

    ended, made = play(mine, lambda text: str(len(text)))
    assert ended.played is not None, ended.failure
    assert_sampled_once(ended, made)


def test_a_chat_gives_its_token_ids_where_they_are_asked_for() -> None:
    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            answer = await policy.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "?"}],
                extra_body={"return_token_ids": True},
            )
        fields = answer.model_dump()
        text = tokenizer().decode(fields["prompt_token_ids"])
        assert text == "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer().decode(fields["choices"][0]["token_ids"]) == "yes<|im_end|>"
        assert fields["ignored"] == []
        return 1.0

    ended, _ = play(mine, lambda text: "yes")
    assert ended.played is not None, ended.failure


def test_special_tokens_of_a_text_are_encoded_as_the_tokenizer_does() -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n"

    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            first = await policy.completions.create(model="m", prompt=text, max_tokens=9)
            more = text + first.choices[0].text + "<|im_start|>"
            await policy.completions.create(model="m", prompt=more, max_tokens=9)
        return 1.0

    ended, made = play(mine, lambda text: "yes")
    assert_sampled_once(ended, made)
    first, second = (list(one.prompt_token_ids) for one in made.sampler.asked)
    assert first == ids(text)
    assert len(first) < len(ids("im_start")) + len(text)
    assert second == [*first, *made.sampler.sampled[0].token_ids.tolist(), *ids("<|im_start|>")]


def test_a_text_is_encoded_with_the_beginning_that_the_tokenizer_writes() -> None:
    """The tokens are those of the model's tokenizer, as for a prompt of a dataset."""
    from tokenizers.processors import TemplateProcessing

    own = copy.deepcopy(tokenizer())
    start = own.convert_tokens_to_ids("<s>")
    own.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", start)]
    )
    prompts = TextPrompts(Codec(own, chat_template=""), 100)
    for text in ("the end", "<|User|>the end"):
        assert TextPrompt(prompts, text).token_ids == own(text)["input_ids"] == [start, *ids(text)]


@pytest.mark.parametrize("stop", ["END", " END", "2 END"])
def test_a_text_keeps_the_tokens_of_an_answer_before_its_stop_text(stop: str) -> None:
    """Those whose text is in the answer: a token may begin in the answer and end in the stop."""
    reply = "the number is 42 END"

    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            first = await policy.completions.create(
                model="m", prompt="Q: ", stop=[stop], max_tokens=90
            )
            answer = first.choices[0].text
            assert answer == reply.partition(stop)[0]
            await policy.completions.create(model="m", prompt=f"Q: {answer}, so", max_tokens=9)
        return 1.0

    replies = iter([reply, "yes"])
    ended, made = play(mine, lambda text: next(replies))
    assert_sampled_once(ended, made)
    first, second = made.sampler.asked
    # A prompt shares tokens with the reply, up to the longest number whose text is in the answer.
    sampled = made.sampler.sampled[0].token_ids.tolist()
    shared = [
        number
        for number in range(len(sampled) + 1)
        if reply.partition(stop)[0].startswith(tokenizer().decode(sampled[:number]))
    ]
    whole = [*first.prompt_token_ids, *sampled[: shared[-1]]]
    assert shared[-1] > 3
    assert list(second.prompt_token_ids)[: len(whole)] == whole
    assert second.num_shared_tokens >= len(whole)
    assert tokenizer().decode(second.prompt_token_ids) == f"Q: {reply.partition(stop)[0]}, so"


def test_a_text_continues_the_echo_of_token_ids() -> None:
    """Even if encoding the text would give other tokens."""
    prompt = [*ids("a"), *ids("n"), *ids("s")]

    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            first = await policy.completions.create(
                model="m", prompt=prompt, echo=True, max_tokens=9
            )
            text = first.choices[0].text
            assert text == "ansyes"
            await policy.completions.create(model="m", prompt=text + " more", max_tokens=9)
        return 1.0

    ended, made = play(mine, lambda text: "yes")
    assert trajectory_of(ended).num_branches == 1
    assert_sampled_once(ended, made)
    sampled = made.sampler.sampled[0].token_ids.tolist()
    assert list(made.sampler.asked[1].prompt_token_ids) == [*prompt, *sampled, *ids(" more")]


def test_token_ids_that_are_too_many_are_not_decoded() -> None:
    decoded: list[int] = []
    limits = EpisodeLimits(max_prompt_tokens=60, max_tokens=100, max_context=200)

    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            question: Any = [{"role": "user", "content": "?"}]
            await policy.chat.completions.create(model="m", messages=question, max_tokens=9)
            hosts[0].codec.without_template.boundary.decode = count
            with pytest.raises(openai.BadRequestError) as found:
                await policy.completions.create(model="m", prompt=ids("a") * 9999, n=3)
            assert found.value.code == "context_length_exceeded"
        return 1.0

    def count(token_ids: Any) -> str:
        decoded.append(len(token_ids))
        return ""

    hosts: list[Any] = []
    ended = play_on(hosts, mine, limits)
    assert ended.played is not None, ended.failure
    assert decoded == []


def test_waiting_calls_render_their_prompt_once() -> None:
    """Each may use all remaining tokens, so they run one after the other."""
    rendered: list[str] = []

    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            template = hosts[0].codec.template
            pieces = template.pieces

            def counted(messages: Any, tools: Any) -> Any:
                rendered.append(messages[-1]["content"])
                return pieces(messages, tools)

            template.pieces = counted
            questions = [[{"role": "user", "content": f"{number}?"}] for number in range(8)]
            await asyncio.gather(
                *(policy.chat.completions.create(model="m", messages=one, n=2) for one in questions)
            )
        return 1.0

    hosts: list[Any] = []
    limits = EpisodeLimits(max_prompt_tokens=60, max_tokens=2000, max_context=2000)
    ended = play_on(hosts, mine, limits)
    assert_sampled_once(ended, hosts[0])
    assert sorted(rendered) == [f"{number}?" for number in range(8)]


def test_no_prompt_is_sampled_if_one_is_invalid() -> None:
    """The episode's tokenizer has no token for the character of the second prompt."""

    async def run() -> None:
        sampler = Scripted(CODEC, lambda text: "1")
        one = episode(sampler, max_turns=2)
        with invalid("prompt"):
            await one.complete([one.text_prompt("?"), one.text_prompt("x")])
        assert not sampler.asked
        assert len(await one.complete([one.text_prompt("?"), one.text_prompt("1")])) == 2

    run_in_virtual_time(run())
