"""Completions of tokens, of several prompts, with echo and token ids, by OpenAI's client."""

from __future__ import annotations

from typing import Any

import rlsys
from tests.environments.asking import client, play
from tests.environments.templates import tokenizer
from tests.environments.test_endpoint import assert_sampled_once, trajectory_of


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer()(text, add_special_tokens=False)["input_ids"]
    return found


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
