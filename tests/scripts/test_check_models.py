"""Models against transformers, and the page that says which run."""

from __future__ import annotations

import re

import pytest

from scripts import check_models
from scripts.check_models import Outcome, Verdict, check, summary, table
from scripts.small_models import names

EQUAL = ["llama", "gpt_oss", "granite", "cohere2", "phimoe", "deepseek_v3", "gemma3_text"]


@pytest.fixture(autouse=True)
def quiet() -> None:
    from transformers import logging

    logging.set_verbosity_error()


@pytest.mark.parametrize("name", EQUAL)
def test_a_model_is_equal_in_both_engines(name: str) -> None:
    outcome = check(name)
    assert outcome.result == "equal", outcome


def test_models_are_refused_with_a_sentence_or_padded() -> None:
    outcome = check("bloom")
    assert outcome.trainer == Verdict(result="equal", remark="padded")
    assert outcome.engine.result == "refused"
    assert 'use rollout.engine="vllm"' in outcome.engine.remark


def test_rows_beyond_a_rotary_limit_are_refused() -> None:
    outcome = check("phi3, longrope")
    assert outcome.result == "equal"
    assert "rows beyond 16 tokens are refused" in outcome.trainer.remark


def test_counts_add_up() -> None:
    equal, refused = Verdict(result="equal", remark="packed"), Verdict(result="refused", remark="x")
    wrong = Verdict(result="wrong", remark="y")
    outcomes = [
        Outcome(name="a", kind="A", trainer=equal, engine=equal),
        Outcome(name="b", kind="B", trainer=equal, engine=refused),
        Outcome(name="c", kind="C", trainer=wrong, engine=refused),
    ]
    assert summary(outcomes) == {
        "equal": 1,
        "refused": 1,
        "wrong": 1,
        "trainer_only": 1,
        "models": 3,
    }
    assert list(table(outcomes))[2:] == [
        "| a | A | equal, packed | equal, packed | |",
        "| b | B | equal, packed | refused | x |",
        "| c | C | wrong | refused | y |",
    ]


def test_the_page_has_every_model() -> None:
    assert [name for name, *_ in page_rows()] == names()


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", names())
def test_every_model_is_what_the_page_says(name: str) -> None:
    outcome = check(name)
    assert outcome.result != "wrong", outcome
    (row,) = [row for row in page_rows() if row[0] == name]
    assert [one.partition(",")[0] for one in row[2:4]] == [
        outcome.trainer.result,
        outcome.engine.result,
    ]


def page_rows() -> list[list[str]]:
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in check_models.PAGE.read_text().splitlines()
        if line.startswith("| ")
    ]
    return rows[1:]
