"""Preference and conversational rows in the formats of other libraries."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import pytest

from rlsys.config import DataConfig
from rlsys.data.preference_pairs import divided
from rlsys.data.prompts import PromptSource
from rlsys.launcher.tiny_models import build_tokenizer
from rlsys.types import Prompt
from tests.errors import invalid

TOKENIZER = build_tokenizer()
TOKENIZER.chat_template = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def source(
    rows: Sequence[Mapping[str, Any]],
    *,
    size: int = 2,
    column: str = "completions",
    chat: bool = False,
    max_tokens: int = 64,
    **data: Any,
) -> PromptSource:
    return PromptSource(
        DataConfig(shuffle=False, chat_template=chat, **data),
        TOKENIZER,
        seed=0,
        max_tokens=max_tokens,
        max_context=512,
        rows=rows,
        completions=(column, size),
        preferences=size == 2,
    )


def texts(prompt: Prompt) -> tuple[str, ...]:
    """Return the prompt and the completions as the model reads them."""
    return prompt.text, *(TOKENIZER.decode(one.token_ids) for one in prompt.completions)


EOS = TOKENIZER.eos_token

SKY: dict[str, dict[str, Any]] = {
    "explicit": {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    "implicit": {"chosen": "The sky is blue.", "rejected": "The sky is green."},
}

CHATS: dict[str, dict[str, Any]] = {
    "explicit": {
        "prompt": [user("Sky?")],
        "chosen": [assistant("Blue.")],
        "rejected": [assistant("Green.")],
    },
    "implicit": {
        "chosen": [user("Sky?"), assistant("Blue.")],
        "rejected": [user("Sky?"), assistant("Green.")],
    },
    "repeated": {
        "prompt": [user("Sky?")],
        "chosen": [user("Sky?"), assistant("Blue.")],
        "rejected": [user("Sky?"), assistant("Green.")],
    },
    "with the question as a text": {
        "prompt": "Sky?",
        "chosen": [user("Sky?"), assistant("Blue.")],
        "rejected": [user("Sky?"), assistant("Green.")],
    },
    "text, then messages": {
        "prompt": "Sky?",
        "chosen": [assistant("Blue.")],
        "rejected": [assistant("Green.")],
    },
}


@pytest.mark.parametrize("as_dataset", [False, True])
@pytest.mark.parametrize("form", SKY)
def test_pairs_of_texts(form: str, *, as_dataset: bool) -> None:
    rows = [{**SKY[form], "source": "weather"}]
    found = source(datasets.Dataset.from_list(rows) if as_dataset else rows).at(0)
    assert texts(found) == ("The sky is", f" blue.{EOS}", f" green.{EOS}")
    assert found.metadata["source"] == "weather"


@pytest.mark.parametrize("as_dataset", [False, True])
@pytest.mark.parametrize("form", CHATS)
def test_pairs_of_chats(form: str, *, as_dataset: bool) -> None:
    rows = [CHATS[form]]
    found = source(datasets.Dataset.from_list(rows) if as_dataset else rows, chat=True).at(0)
    assert texts(found) == ("user: Sky?\nassistant: ", "Blue.<eos>", "Green.<eos>")
    assert all(one.loss_mask is None or all(one.loss_mask) for one in found.completions)


def test_earlier_replies_belong_to_the_prompt() -> None:
    before = [user("Hi"), assistant("Hello"), user("Sky?")]
    row = {"chosen": [*before, assistant("Blue.")], "rejected": [*before, assistant("Red.")]}
    found = source([row], chat=True, system_prompt="Be brief.").at(0)
    assert found.text.startswith("system: Be brief.\nuser: Hi\nassistant: Hello")
    assert found.text.endswith("user: Sky?\nassistant: ")
    assert [one.text for one in found.completions] == ["Blue.<eos>", "Red.<eos>"]


def test_replies_with_a_question_between_them() -> None:
    row = {
        "prompt": [user("Hi")],
        "chosen": [assistant("Hello"), user("Sky?"), assistant("Blue.")],
        "rejected": [assistant("Go away")],
    }
    chosen, rejected = source([row], chat=True).at(0).completions
    assert chosen.loss_mask is not None
    trained = [t for t, is_on in zip(chosen.token_ids, chosen.loss_mask, strict=True) if is_on]
    assert chosen.text == "Hello<eos>\nuser: Sky?\nassistant: Blue.<eos>"
    assert TOKENIZER.decode(trained) == "Hello<eos>Blue.<eos>"
    assert rejected.text == "Go away<eos>"


@pytest.mark.parametrize("completion", [[assistant("Blue.")], [[assistant("Blue.")]]])
def test_a_prompt_and_its_completion_as_messages(completion: Any) -> None:
    rows = [{"prompt": [user("Sky?")], "completion": completion}]
    found = source(rows, size=1, column="completion", chat=True).at(0)
    assert texts(found) == ("user: Sky?\nassistant: ", "Blue.<eos>")


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ("The sky is blue", "The sky is black", ("The sky is", " blue", " black")),
        ("The sky", "The sky is", ("The sky", "", " is")),
        ("Q: 1\nA: yes", "Q: 1\nA: yesterday", ("Q: 1\nA:", " yes", " yesterday")),
        ("Q\n\nA", "Q\n\nB", ("Q\n\n", "A", "B")),
        ("天空是蓝", "天空是绿", ("天空是", "蓝", "绿")),
    ],
)
def test_texts_are_divided_between_words(
    chosen: str, rejected: str, expected: tuple[str, str, str]
) -> None:
    assert divided(None, chosen, rejected, "row") == expected


@pytest.mark.parametrize("row", [SKY["implicit"], CHATS["implicit"]])
def test_implicit_prompts_are_those_of_trl(row: dict[str, Any]) -> None:
    from trl import extract_prompt

    expected = extract_prompt(dict(row))
    found = divided(None, row["chosen"], row["rejected"], "row")
    assert found == (expected["prompt"], expected["chosen"], expected["rejected"])


def test_pairs_of_equal_completions_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"chosen": "1+1=2", "rejected": "1+1=2"},
        {"chosen": "1+1= 2", "rejected": "1+1= 3"},
        {"chosen": "2+2=4", "rejected": "2+2=4"},
    ]
    with caplog.at_level(logging.WARNING):
        found = source(rows)
    assert len(found) == 1
    assert found.at(0).completions[1].text == " 3"
    (record,) = caplog.records
    assert "2 of 3 rows" in record.getMessage()


@pytest.mark.parametrize(
    ("rows", "chat"),
    [
        ([{"prompt": "1+1=", "completions": ["2", "2"]}], False),
        ([{**CHATS["explicit"], "rejected": CHATS["explicit"]["chosen"]}], True),
        ([{**CHATS["implicit"], "rejected": CHATS["implicit"]["chosen"]}], True),
    ],
)
def test_equal_completions_of_every_format(rows: list[dict[str, Any]], *, chat: bool) -> None:
    found = source(rows, chat=chat)
    assert len(found) == 0
    with invalid("prompts_per_step", 1):
        found.check_size(1)


def test_keys_that_arrow_fills_make_no_difference() -> None:
    """The schema of a column fills missing keys of its rows with None."""
    rows = [
        CHATS["repeated"],
        {**CHATS["repeated"], "rejected": CHATS["repeated"]["chosen"]},
        {
            "prompt": [user("Sky?")],
            "chosen": [user("Sky?"), assistant("Blue.")],
            "rejected": [user("Sky?"), {**assistant("Green."), "name": "B"}],
        },
    ]
    found = source(datasets.Dataset.from_list(rows), chat=True)
    assert [found.at(n).row for n in range(len(found))] == [0, 2]
    assert texts(found.at(0)) == ("user: Sky?\nassistant: ", "Blue.<eos>", "Green.<eos>")


def test_equal_completions_without_preference_are_kept() -> None:
    rows = [{"prompt": "1+1=", "completions": ["2", "2"]}]
    found = PromptSource(
        DataConfig(),
        TOKENIZER,
        seed=0,
        max_tokens=9,
        max_context=64,
        rows=rows,
        completions=("completions", 2),
    )
    assert len(found) == 1


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"chosen": "yes", "rejected": "no"}, "chosen, rejected"),
        ({"chosen": "yes", "rejected": 3}, "rejected"),
        ({"chosen": "yes", "rejected": None}, "rejected"),
        ({"chosen": [user("A"), assistant("B")], "rejected": "A B"}, "chosen, rejected"),
        (
            {"chosen": [user("A"), assistant("B")], "rejected": [user("C"), assistant("D")]},
            "chosen, rejected",
        ),
        ({"chosen": [user("A"), assistant("B")], "rejected": [user("A")]}, "rejected"),
        ({"prompt": "Z", "chosen": [user("A"), assistant("B")], "rejected": [user("A")]}, "prompt"),
        ({"prompt": [user("Z")], **CHATS["implicit"]}, "chosen"),
    ],
)
def test_pairs_that_cannot_be_divided(row: dict[str, Any], columns: str) -> None:
    chat = not isinstance(row["chosen"], str)
    good = CHATS["implicit"] if chat else SKY["implicit"]
    with invalid(f"the recipe's data, row 1 (from 0): {columns}"):
        source([{**dict.fromkeys(row), **good}, row], chat=chat)


def test_a_prompt_column_that_is_named_must_exist() -> None:
    with invalid("data.prompt_column", "question"):
        source([SKY["implicit"]], prompt_column="question")
    row = {"info": {"question": "The sky is"}, "chosen": " blue.", "rejected": " green."}
    found = source([row], prompt_column="info.question").at(0)
    assert texts(found) == ("The sky is", f" blue.{EOS}", f" green.{EOS}")


def test_messages_need_the_chat_template() -> None:
    with invalid("data.chat_template", False):
        source([CHATS["explicit"]])


def test_a_continuation_that_is_too_long() -> None:
    rows = [CHATS["explicit"], {**CHATS["explicit"], "rejected": [assistant("Green. " * 20)]}]
    with invalid("sampling.max_tokens", 64) as found:
        source(rows, chat=True)
    assert "1 of 2 rows" in found.value.rule
    assert len(source(rows, chat=True, skip_long_prompts=True)) == 1


def test_pairs_in_a_mixture(tmp_path: Any) -> None:
    for name, row in SKY.items():
        datasets.Dataset.from_list([row]).to_json(str(tmp_path / f"{name}.jsonl"))
    found = PromptSource(
        DataConfig(
            source=f"{tmp_path}/explicit.jsonl*3,{tmp_path}/implicit.jsonl*1", shuffle=False
        ),
        TOKENIZER,
        seed=0,
        max_tokens=64,
        max_context=512,
        completions=("completions", 2),
    )
    assert len(found) == 4
    assert {texts(found.at(n)) for n in range(4)} == {
        ("The sky is", f" blue.{EOS}", f" green.{EOS}")
    }
