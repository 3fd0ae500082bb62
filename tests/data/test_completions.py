"""Completions in a dataset: their tokens, and rows without them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rlsys.config import DataConfig
from rlsys.data.prompts import PromptSource
from rlsys.launcher.tiny_models import build_tokenizer
from tests.errors import invalid

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


def test_one_completion_needs_no_list() -> None:
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


WHERE = "the recipe's data, row 1 (from 0): completions"


@pytest.mark.parametrize("completions", [["2"], "23", ["2", 3], None])
def test_rows_without_two_texts_are_refused_at_the_start(completions: Any) -> None:
    with invalid(WHERE, completions):
        source([ROW, {**ROW, "completions": completions}])


def test_a_null_among_single_completions_is_named_with_its_row() -> None:
    rows = [{"prompt": "1+1=", "completion": one} for one in ("2", None)]
    with invalid("the recipe's data, row 1 (from 0): completion", None) as found:
        PromptSource(
            DataConfig(shuffle=False),
            TOKENIZER,
            seed=0,
            max_tokens=4,
            max_context=64,
            rows=rows,
            completions=("completion", 1),
        )
    assert found.value.rule == "is null"


def test_a_long_completion_is_refused_with_the_limit_that_fits_it() -> None:
    with invalid("sampling.max_tokens", 4) as found:
        source([ROW, {**ROW, "completions": ["2", "1234"]}])
    assert "1 of 2 rows" in found.value.rule
    assert "row 1, from 0, with 5" in found.value.rule
    assert "at least 5" in found.value.fix
    assert "data.skip_long_prompts=true" in found.value.fix


def test_rows_with_a_long_completion_or_prompt_are_skipped_with_a_warning_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    long = {**ROW, "completions": ["2", "1234"]}
    rows = [long, ROW, {**ROW, "prompt": "1+1+1="}, {**long, "prompt": "1+1+1="}]
    with caplog.at_level(logging.WARNING):
        prompts = source(rows, skip_long_prompts=True, max_prompt_tokens=4)
    assert [prompts.row(index) for index in range(2)] == [1, 1]
    assert prompts.at(0).completions[1].text == "13"
    for message, what in zip(caplog.messages, ("completions", "prompts"), strict=True):
        assert message.startswith(f"{what} in 2 of 4 rows of the recipe's data")
    assert "row 0, from 0, with 5" in caplog.messages[0]


def test_a_missing_column_is_refused_with_the_columns_of_a_pair() -> None:
    with invalid("flow.dataset: completions", "both") as found:
        source([{"completion": "2", "label": True}], column="both")
    assert "(chosen and rejected missing)" in found.value.rule
    with invalid("flow.dataset: completions", "both") as found:
        source([{"rejected": "2"}], column="both")
    assert "(chosen missing)" in found.value.rule
    assert found.value.fix.startswith("Add chosen, ")


def test_a_tokenizer_without_an_end_is_refused() -> None:
    endless = build_tokenizer("0123456789+=")
    endless.eos_token = None
    with invalid("model.path"):
        source([ROW], tokenizer=endless)


def test_a_completion_with_an_unknown_character_is_refused() -> None:
    with invalid(WHERE) as found:
        source([ROW, {**ROW, "completions": ["2", "1 3"]}])
    assert "' '" in found.value.rule
