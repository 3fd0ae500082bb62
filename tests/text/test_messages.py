"""Messages and tools of datasets for chat templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from datasets import Dataset

from rlsys.config import DataConfig
from rlsys.data.prompts import PromptSource
from rlsys.text.messages import plain_messages, plain_tools, text_of_content
from tests.environments.templates import THINKING, TRIMMING, tokenizer
from tests.errors import invalid
from tests.text.families import tokenizer_of

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "home"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"text": "a"}], "a"),
        ([{"type": "image", "text": "a"}], None),
        ([{"type": "text", "text": None}], None),
        (["a"], None),
        (b"a", None),
        (7, None),
    ],
)
def test_a_content_is_one_text_or_none(content: Any, text: str | None) -> None:
    assert text_of_content(content) == text


def test_a_message_without_content_keeps_its_calls_and_loses_none_values() -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "Hi", "tool_calls": None}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": {"n": 1}}}],
                }
            ]
        },
    ]
    read = [plain_messages(row["messages"], "x") for row in Dataset.from_list(rows)]
    assert read == [
        [USER],
        [{"role": "assistant", "content": "", "tool_calls": [CALL]}],
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "f", "arguments": {"n": 1}}}],
            }
        ],
    ]


def test_arguments_as_json_become_an_object() -> None:
    call = {"function": {"name": "look", "arguments": json.dumps({"at": None})}}
    (message,) = plain_messages([{"role": "assistant", "tool_calls": [call]}], "x")
    assert message["tool_calls"] == [{"function": {"name": "look", "arguments": {"at": None}}}]


@pytest.mark.parametrize("value", [None, "", [], "  "])
def test_a_row_may_have_no_tools(value: Any) -> None:
    assert plain_tools(value, "x") == []


@pytest.mark.parametrize("value", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_tools_are_schemas_or_their_json(value: Any) -> None:
    assert plain_tools(value, "x") == [TOOL]


@pytest.mark.parametrize("value", [7, "look", [7], {"name": "look"}])
def test_other_tools_are_refused(value: Any) -> None:
    with invalid("x", value):
        plain_tools(value, "x")


def source(rows: Any, of: Any = None, **options: Any) -> PromptSource:
    if of is None:
        of = tokenizer()
        of.chat_template = THINKING
    data = {"chat_template": True, "max_prompt_tokens": 2000, **options.pop("data", {})}
    return PromptSource(
        DataConfig(**data), of, seed=0, max_tokens=500, max_context=4000, rows=rows, **options
    )


def test_a_rows_tools_are_rendered_with_its_prompt_and_its_replies() -> None:
    rows = [{"prompt": "Hi", "tools": [TOOL]}]
    assert '"name": "look"' in source(rows).at(0).text
    chat: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "dark"},
        {"role": "assistant", "content": "Dark."},
    ]
    of = tokenizer_of("qwen2.5")
    data = {"prompt_column": "messages"}
    rows = [{"messages": chat, "tools": json.dumps([TOOL])}]
    found = source(rows, of, data=data, completions=("messages", 1)).at(0)
    assert '"name": "look"' in found.text
    completion = found.completions[0]
    mask = completion.loss_mask
    assert mask is not None
    trained = [t for t, is_reply in zip(completion.token_ids, mask, strict=True) if is_reply]
    said = of.decode(trained)
    assert said == (
        '<tool_call>\n{"name": "look", "arguments": {"at": "home"}}\n</tool_call><|im_end|>'
        "Dark.<|im_end|>"
    )


def test_tools_that_the_template_does_not_write_are_refused() -> None:
    of = tokenizer_of("gpt2 chatml")
    with invalid("the recipe's data, row 0 (from 0): prompt") as found:
        source([{"prompt": "Hi", "tools": [TOOL]}], of)
    assert "1 tools" in found.value.rule
    assert source([{"prompt": "Hi", "tools": []}], of).at(0).text.startswith("<|im_start|>user")


def test_named_templates_are_chosen_by_the_rows_tools() -> None:
    of = tokenizer_of("named templates")
    rows = [{"prompt": "Hi", "tools": tools} for tools in ([TOOL], [])]
    found = source(rows, of, data={"shuffle": False})
    assert found.at(0).text.startswith('{"type": "function"')
    assert found.at(1).text.startswith("<|im_start|>user")


def test_a_role_that_the_template_does_not_write_is_refused() -> None:
    with invalid("the recipe's data, row 0 (from 0): prompt") as found:
        source([{"prompt": [USER, {"role": "critic", "content": "No."}, USER]}])
    assert "'critic'" in found.value.rule


R1 = "{% for m in messages %}{{ m.role + ':' + m.content.split('</think>')[-1] + '<|im_end|>' }}"
R1 += "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"


@pytest.mark.parametrize(
    ("reply", "key"),
    [
        ({"content": "<think>Hm.</think>Yes."}, "content"),
        ({"content": "Yes.", "reasoning_content": "Hm."}, "reasoning_content"),
    ],
)
def test_a_reply_is_refused_if_the_template_drops_its_thoughts(reply: Any, key: str) -> None:
    of = tokenizer()
    of.chat_template = R1
    rows = [{"messages": [USER, {"role": "assistant", **reply}]}]
    data = {"prompt_column": "messages"}
    with invalid(f"the recipe's data, row 0 (from 0): messages, message 1: {key}") as found:
        source(rows, of, data=data, completions=("messages", 1))
    assert "Hm." in found.value.value


def test_a_template_may_trim_a_reply() -> None:
    of = tokenizer()
    of.chat_template = TRIMMING
    rows = [{"messages": [USER, {"role": "assistant", "content": " Yes.\n"}]}]
    found = source(rows, of, data={"prompt_column": "messages"}, completions=("messages", 1))
    assert found.at(0).completions[0].text == "Yes.<|eot_id|>"


def test_a_character_that_would_become_the_unknown_token_is_refused() -> None:
    with invalid("the recipe's data, row 0 (from 0): prompt") as found:
        source([{"prompt": "漢"}], tokenizer_of("unigram"))
    assert "'漢'" in found.value.rule
