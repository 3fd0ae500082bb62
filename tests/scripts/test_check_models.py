"""Models compared with transformers, and the page with the results."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import check_models
from scripts.check_models import (
    Outcome,
    Verdict,
    check,
    in_words,
    read_page,
    row,
    summary,
    write_page,
)
from scripts.small_models import names
from tests.tiers import rest_slow

EQUAL = ["llama", "gpt_oss", "granite", "cohere2", "phimoe", "deepseek_v3", "gemma3_text"]


@pytest.fixture(autouse=True)
def quiet() -> None:
    from transformers import logging

    logging.set_verbosity_error()


@pytest.mark.parametrize("name", rest_slow(EQUAL))
def test_a_model_is_equal_in_both_engines(name: str) -> None:
    outcome = check(name)
    assert outcome.result == "equal", outcome


def test_models_are_refused_with_a_sentence_or_padded() -> None:
    outcome = check("bloom")
    assert outcome.trainer == Verdict(result="equal", remark="padded")
    assert outcome.engine.result == "refused"
    assert 'rollout.engine="vllm"' in outcome.engine.remark


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
    assert [row(one) for one in outcomes] == [
        "| a | A | equal, packed | equal, packed | |",
        "| b | B | equal, packed | refused | x |",
        "| c | C | wrong | refused | y |",
    ]


def test_the_page_has_every_model_and_counts_them() -> None:
    page = read_page()
    assert list(page) == names()
    assert in_words(summary(page.values())) in check_models.PAGE.read_text()


def test_rows_are_written_into_the_page(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    page.write_text(check_models.PAGE.read_text())
    write_page([], page)
    assert page.read_text() == check_models.PAGE.read_text()
    worse = Verdict(result="wrong", remark="a | b")
    write_page([Outcome(name="llama", kind="A", trainer=worse, engine=worse)], page)
    before, after = read_page(), read_page(page)
    assert after.pop("llama").engine == worse
    assert after == {name: one for name, one in before.items() if name != "llama"}
    assert " 1 are wrong." in page.read_text()


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", names())
def test_every_model_has_the_result_of_the_page(name: str) -> None:
    outcome = check(name)
    assert outcome.result != "wrong", outcome
    said = read_page()[name]
    assert (said.trainer.result, said.engine.result) == (
        outcome.trainer.result,
        outcome.engine.result,
    )
