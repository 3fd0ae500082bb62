"""Replies with the same text or the same calls: which of them a later prompt continues."""

from __future__ import annotations

from typing import Any

import pytest

import rlsys
from rlsys.environments.tokens.codec import Codec
from rlsys.environments.tokens.conversation import Conversation
from tests.environments.asking import client, play
from tests.environments.templates import THINKING, tokenizer
from tests.environments.test_conversation import says, user
from tests.environments.test_endpoint import TOOLS, assert_sampled_once, trajectory_of
from tests.environments.test_responses import FUNCTION

CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
THOUGHTS = ("one", "two", "three")


def thinking(after: str) -> Any:
    """Return a policy that thinks differently in its first replies and answers "done" later."""
    thoughts = iter(THOUGHTS)
    return lambda text: (
        "done" if "<tool_response>" in text else f"<think>\n{next(thoughts)}\n</think>\n\n{after}"
    )


def thought_of(token_ids: Any) -> str:
    """Return the reasoning of the last reply in a prompt."""
    text = tokenizer().decode(list(token_ids))
    return str(text.rpartition("<think>\n")[2].partition("\n</think>")[0])


@pytest.mark.parametrize("sends", ["call ids", "reasoning"])
def test_a_chat_continues_the_reply_that_the_message_identifies(sends: str) -> None:
    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        question: Any = [{"role": "user", "content": "?"}]
        async with client(endpoint) as policy:
            answers = await policy.chat.completions.create(
                model="m", messages=question, tools=TOOLS, n=3, max_tokens=60
            )
            for choice in answers.choices:
                sent = choice.message.model_dump()
                call_id = sent["tool_calls"][0]["id"]
                if sends == "call ids":
                    del sent["reasoning_content"]
                else:
                    call_id = sent["tool_calls"][0]["id"] = "mine"
                result = {"role": "tool", "tool_call_id": call_id, "content": "3"}
                await policy.chat.completions.create(
                    model="m", messages=[*question, sent, result], tools=TOOLS, max_tokens=9
                )
        return 1.0

    ended, made = play(mine, thinking(CALL), template=THINKING)
    assert trajectory_of(ended).num_branches == 3
    assert_sampled_once(ended, made)
    prompts = [one.prompt_token_ids for one in made.sampler.asked[3:]]
    assert [thought_of(one) for one in prompts] == list(THOUGHTS)


@pytest.mark.parametrize("sends", ["id", "items"])
def test_a_response_continues_exactly_the_previous_one(sends: str) -> None:
    """Also if it has no call: the text of all three is the same."""

    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        body: Any = {"model": "m", "max_output_tokens": 60, "tools": [FUNCTION]}
        question = {"role": "user", "content": "?"}
        result = {"role": "user", "content": "<tool_response>"}
        async with client(endpoint) as policy:
            answers = [await policy.responses.create(input=[question], **body) for _ in range(3)]
            for answer in answers:
                items = [one.model_dump() for one in answer.output]
                sent = (
                    {"input": [result], "previous_response_id": answer.id}
                    if sends == "id"
                    else {"input": [question, *items, result]}
                )
                await policy.responses.create(**body, **sent)
        return 1.0

    ended, made = play(mine, thinking("same"), template=THINKING)
    assert trajectory_of(ended).num_branches == 3
    assert_sampled_once(ended, made)
    prompts = [one.prompt_token_ids for one in made.sampler.asked[3:]]
    assert [thought_of(one) for one in prompts] == list(THOUGHTS)


def conversation_of(*replies: str) -> Conversation:
    conversation = Conversation(Codec(tokenizer(), chat_template=THINKING))
    for reply in replies:
        conversation.reply(conversation.prompt([user("?")]), says(reply))
    return conversation


SENT = {"role": "assistant", "content": "same"}
SAME = [f"<think>\n{thought}\n</think>\n\nsame<|im_end|>" for thought in THOUGHTS[:2]]
AFTER = "<tool_response>"  # the template keeps reasoning before it


def test_replies_that_nothing_distinguishes_are_continued_once_each() -> None:
    """The latest one first. The same prompt again continues the same reply."""
    conversation = conversation_of(*SAME)
    thoughts = [
        thought_of(conversation.prompt([user("?"), SENT, user(AFTER + text)]).token_ids)
        for text in ("a", "b", "b", "a", "c")
    ]
    assert thoughts == ["two", "one", "one", "two", "two"]


def test_later_messages_show_which_reply_is_continued() -> None:
    """Even if another reply with the same text was sampled since."""
    conversation = conversation_of(SAME[0])
    messages = [user("?"), SENT, user(AFTER)]
    second = conversation.reply(conversation.prompt(messages), says("next<|im_end|>"))
    conversation.reply(conversation.prompt([user("?")]), says(SAME[1]))
    path = conversation.prompt([*messages, {**second}, user(AFTER)])
    assert thought_of(path.token_ids) == "one"
    assert path.num_reused > len(conversation.prompt(messages).token_ids)


def test_a_reply_with_changed_reasoning_is_a_new_message() -> None:
    conversation = conversation_of(SAME[0])
    changed = {**SENT, "reasoning_content": "other"}
    path = conversation.prompt([user("?"), changed, user(AFTER)])
    assert thought_of(path.token_ids) == "other"


@pytest.mark.parametrize("added", [{"id": "m1"}, {"cache_control": {"type": "ephemeral"}}])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_fields_that_no_template_reads_may_be_added_when_a_message_is_sent_again(
    added: dict[str, Any], number: int
) -> None:
    conversation = conversation_of(SAME[0])
    messages = [user("?"), dict(SENT), user(AFTER)]
    reply = "<think>\nlater\n</think>\n\nnext<|im_end|>"
    conversation.reply(conversation.prompt(messages), says(reply))
    sampled = conversation.num_tokens
    messages[number] |= added
    path = conversation.prompt([*messages, {"role": "assistant", "content": "next"}, user(AFTER)])
    assert path.num_reused == sampled
    assert thought_of(path.token_ids) == "later"


@pytest.mark.parametrize("field", ["role", "content", "name", "tool_call_id"])
def test_a_changed_field_that_templates_read_makes_a_new_message(field: str) -> None:
    conversation = conversation_of()
    first = {"role": "tool", "content": "?", "name": "one", "tool_call_id": "a"}
    conversation.reply(conversation.prompt([user("Hi"), first]), says(SAME[0]))
    changed = {**first, field: "user"}
    path = conversation.prompt([user("Hi"), changed, SENT, user(AFTER)])
    assert thought_of(path.token_ids) != "one"


def test_a_sampled_reply_is_preferred_to_the_same_message_of_the_client() -> None:
    """Also if the message after it is known only after the client's own message."""
    conversation = conversation_of()
    messages = [user("?"), SENT, user(AFTER)]
    conversation.reply(conversation.prompt(messages), says("next<|im_end|>"))
    conversation.reply(conversation.prompt([user("?")]), says(SAME[0]))
    assert thought_of(conversation.prompt(messages).token_ids) == "one"


def test_the_path_with_most_sampled_replies_is_continued() -> None:
    conversation = conversation_of()
    messages = [user("?"), SENT, user(AFTER)]
    for text in ("next", "last"):
        conversation.reply(conversation.prompt(messages), says(f"{text}<|im_end|>"))
        messages += [{"role": "assistant", "content": text}, user(AFTER)]
    sampled = conversation.num_tokens
    conversation.reply(conversation.prompt([user("?")]), says(SAME[0]))
    assert conversation.prompt(messages).num_reused == sampled
