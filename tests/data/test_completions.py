"""Completions that a dataset holds: their tokens, and rows that have none."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rlsys.config import DataConfig
from rlsys.data.prompts import PromptSource
from rlsys.launcher.tiny_models import build_tokenizer

TOKENIZER = build_tokenizer("0123456789+=")
EOS = TOKENIZER.eos_token_id
ROW = {"prompt": "1+1=", "completions": ["2", "13"], "answer": "2"}


def source(
    rows: Sequence[Mapping[str, Any]],
    *,
    tokenizer: Any = TOKENIZER,
    column: str = "completions",
    **data: Any,
) -> PromptSource:
    return PromptSource(
        DataConfig(shuffle=False, **data),
        tokenizer,
        seed=0,
        max_tokens=4,
        max_context=64,
        rows=rows,
        completions=(column, 2),
    )


def test_completions_come_with_the_prompt_and_end_like_sampled_ones() -> None:
    prompt = source([ROW]).at(0)
    digits = {text: TOKENIZER(text)["input_ids"] for text in ("2", "13")}
    assert [one.text for one in prompt.completions] == ["2", "13"]
    assert [list(one.token_ids) for one in prompt.completions] == [
        [*digits["2"], EOS],
        [*digits["13"], EOS],
    ]
    assert prompt.metadata["answer"] == "2"


def test_one_completion_may_stand_without_a_list() -> None:
    rows = [{"prompt": "1+1=", "completion": one} for one in ("2", ["2"])]
    found = PromptSource(
        DataConfig(shuffle=False),
        TOKENIZER,
        seed=0,
        max_tokens=4,
        max_context=64,
        rows=rows,
        completions=("completion", 1),
    )
    assert found.at(0).completions == found.at(1).completions
    assert found.at(0).completions[0].text == "2"


def test_an_empty_completion_is_an_end_of_sequence() -> None:
    prompt = source([{**ROW, "completions": ["2", ""]}]).at(0)
    assert prompt.completions[1].token_ids == (EOS,)


@pytest.mark.parametrize(
    ("completions", "message"),
    [
        (
            ["2"],
            "'completions' in row 1 (from 0) of the recipe's data: ['2'] is no list of 2 texts",
        ),
        ("23", "is no list of 2 texts"),
        (["2", 3], "is no list of 2 texts"),
        (None, "is no list of 2 texts"),
        (
            ["2", "1234"],
            "completions in 1 of 2 rows of the recipe's data are longer than 4 tokens, end of "
            "sequence included (sampling.max_tokens), first that of row 1 (from 0) with 5; raise "
            "that limit, or set data.skip_long_prompts=true.",
        ),
    ],
)
def test_rows_that_are_none_are_refused_at_the_start(completions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        source([ROW, {**ROW, "completions": completions}])


def test_rows_with_a_long_completion_or_prompt_are_left_out_with_a_warning_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    long = {**ROW, "completions": ["2", "1234"]}
    rows = [long, ROW, {**ROW, "prompt": "1+1+1="}, {**long, "prompt": "1+1+1="}]
    with caplog.at_level(logging.WARNING):
        prompts = source(rows, skip_long_prompts=True, max_prompt_tokens=4)
    assert [prompts.row(index) for index in range(2)] == [1, 1]
    assert prompts.at(0).completions[1].text == "13"
    completions, asked = caplog.messages
    assert completions.startswith("completions in 2 of 4 rows of the recipe's data are longer than")
    assert completions.endswith("first that of row 0 (from 0) with 5; they are left out.")
    assert asked.startswith("prompts in 2 of 4 rows")


def test_a_column_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"flow.dataset's completions='chosen' is no column"):
        source([ROW], column="chosen")


def test_a_tokenizer_without_an_end_is_refused() -> None:
    endless = build_tokenizer("0123456789+=")
    endless.eos_token = None
    with pytest.raises(ValueError, match="no end of sequence"):
        source([ROW], tokenizer=endless)


def test_a_completion_with_a_character_that_would_be_left_out_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'completions' in row 1 .* holds the character ' '"):
        source([ROW, {**ROW, "completions": ["2", "1 3"]}])
