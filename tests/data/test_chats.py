"""Chats in a dataset: replies are trained on, the texts between them are not."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rlsys.config import DataConfig
from rlsys.data.prompts import PromptSource
from rlsys.engines.generation.dataset_engine import DatasetEngine
from rlsys.errors import NOT_GIVEN
from rlsys.launcher.tiny_models import build_tokenizer
from rlsys.types import INJECTED, GenerationRequest, SamplingParams
from tests.errors import invalid

ENDS = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
# Like templates that leave out the reasoning of earlier turns.
FORGETS = ENDS.replace(
    "m['content'] }}", "(m['content'] if loop.last or m['role'] == 'user' else '') }}"
)
CHAT = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "23"},
    {"role": "user", "content": "4"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "6"},
]

# A template that ends no turn, and a reply without a text.
UNENDED = ENDS.replace("<eos>", "").replace(
    "m['content'] }}", "m['content'] }}{% for c in m['tool_calls'] %}{{ c['name'] }}{% endfor %}"
)
CALL = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]


def source(chat: Any, template: str | None = ENDS, **options: Any) -> PromptSource:
    tokenizer = build_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    data = {"prompt_column": "messages", "chat_template": True, **options.pop("data", {})}
    defaults: dict[str, Any] = {"max_tokens": 32, "completions": ("messages", 1)}
    return PromptSource(
        DataConfig(**data),
        tokenizer,
        seed=0,
        max_context=64,
        rows=[{"messages": chat, "id": 7}],
        **defaults | options,
    )


def test_replies_are_trained_on_and_texts_between_them_are_not() -> None:
    found = source(CHAT)
    prompt = found.at(0)
    (completion,) = prompt.completions
    assert prompt.text == "u:1\na:"
    assert completion.text == "23<eos>\nu:4\na:5<eos>"
    assert completion.loss_mask is not None
    decode = build_tokenizer().decode
    trained, between = (
        [t for t, m in zip(completion.token_ids, completion.loss_mask, strict=True) if m is which]
        for which in (True, False)
    )
    assert decode(trained) == "23<eos>5<eos>"
    assert decode(between) == "\nu:4\na:"
    assert prompt.asked == CHAT[:1]
    assert prompt.metadata == {"id": 7}


def test_the_configured_system_message_is_part_of_the_prompt() -> None:
    prompt = source(CHAT[:2], data={"system_prompt": "0"}).at(0)
    assert prompt.text == "s:0\nu:1\na:"
    assert prompt.completions[0].loss_mask == (True, True, True)


def test_tokens_between_replies_have_no_version() -> None:
    engine = DatasetEngine()
    (completion,) = source(CHAT).at(0).completions
    request = GenerationRequest(
        request_id="0",
        prompt_token_ids=[1],
        sampling=SamplingParams(),
        seed=0,
        completion=completion,
    )
    engine.submit([request])
    (generation,) = asyncio.run(engine.collect())
    versions = generation.policy_versions
    assert completion.loss_mask is not None
    assert versions.tolist() == np.where(completion.loss_mask, 0, INJECTED).tolist()


ROW = "the recipe's data, row 0 (from 0): messages"


@pytest.mark.parametrize(
    ("chat", "options", "field", "value"),
    [
        (CHAT[:1], {}, ROW, ["user"]),
        (CHAT[1:3], {}, ROW, ["assistant", "user"]),
        ("1", {}, ROW, "1"),
        (None, {}, ROW, None),
        (CHAT, {"max_tokens": 11}, "sampling.max_tokens", 11),
        (CHAT, {"template": None}, ROW, NOT_GIVEN),
        (CHAT, {"template": FORGETS}, ROW, NOT_GIVEN),
        (CALL, {"template": UNENDED}, ROW, NOT_GIVEN),
        ([{"from": "human", "value": "1"}], {}, ROW, NOT_GIVEN),
        (CHAT, {"completions": ("messages", 2)}, "flow.dataset: group_size", 2),
        (CHAT, {"data": {"chat_template": False}}, "data.chat_template", False),
    ],
)
def test_chats_that_cannot_be_trained_on_are_refused_at_the_start(
    chat: Any, options: dict[str, Any], field: str, value: Any
) -> None:
    with invalid(field, value):
        source(chat, **options)


def test_a_chat_of_one_reply_needs_only_a_template_that_ends_it() -> None:
    (completion,) = source(CHAT[:2], FORGETS).at(0).completions
    assert completion.text == "23<eos>"


def test_a_call_without_a_text_needs_only_a_template_that_ends_it() -> None:
    template = UNENDED.replace("{{ '\\n' }}", "<eos>{{ '\\n' }}")
    (completion,) = source(CALL, template).at(0).completions
    assert completion.text == "f<eos>"


def test_a_template_that_thinks_by_default_names_its_option() -> None:
    template = ENDS.replace("a:{%", "a:{% if enable_thinking is not false %}<think>{% endif %}{%")
    with invalid(ROW) as error:
        source(CHAT[:2], template)
    assert "enable_thinking=false" in error.value.fix


def test_a_reply_after_a_prompt_that_ends_with_a_reply_is_another_message() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = ENDS
    prompt = PromptSource(
        DataConfig(chat_template=True),
        tokenizer,
        seed=0,
        max_tokens=32,
        max_context=64,
        rows=[{"prompt": CHAT[:2], "completion": [{"role": "assistant", "content": "5"}]}],
        completions=("completion", 1),
    ).at(0)
    assert (prompt.text, prompt.completions[0].text) == ("u:1\na:23<eos>\na:", "5<eos>")
