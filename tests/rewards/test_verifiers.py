"""Exact match, final numbers and formats, with values computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.rewards import Reward, exact_match, format_reward, numeric_answer
from rlsys.rewards.answer_match import final_number
from rlsys.types import FinishReason, Rollout
from tests.errors import invalid

GSM8K = Path(__file__).parents[2] / "recipes" / "data" / "gsm8k"


def value(reward: Reward, completion: str, **metadata: Any) -> Any:
    no_tokens = np.zeros(0, np.int32)
    rollout = Rollout(
        group_id=0,
        index=0,
        prompt_text="",
        completion_text=completion,
        prompt_token_ids=no_tokens,
        token_ids=no_tokens,
        finish_reason=FinishReason.STOP,
        metadata=metadata,
    )
    return reward(rollout)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", 18),
        ("She has 3 + 4 = 7 apples.", 7),
        ("1,234,567.5 in all.", 1234567.5),
        ("1, 2", 2),
        ("1,2", 2),
        ("(1,2345)", 2345),
        (".5", 0.5),
        ("and so...18", 18),
        ("1e-3", 0.001),
        ("-5", -5),
        ("x=-5", -5),
        ("\N{MINUS SIGN}7", -7),
        ("+7", 7),
        ("10-12", 12),
        ("$20", 20),
        ("-$1,000", -1000),
        ("$-5$", -5),
        ("US$20", 20),
        ("50%", 50),
        ("5km", 5),
        ("3/4", 0.75),
        ("3 / 4", 0.75),
        ("-3/4", -0.75),
        ("1 1/2", 1.5),
        ("-1 1/2 cups", -1.5),
        ("1/2.", 0.5),
        ("3/0", None),
        ("2, not 3/0", 2),
        ("\\boxed{18}", 18),
        ("**18**", 18),
        ("18 kg of CO2", 18),
        ("see v1.2", None),
        ("nothing", None),
        ("", None),
        ("1 + 1\n#### 18 dollars for 2", 18),
        ("#### 1 #### 2", 2),
        ("12 ####", None),
    ],
)
def test_the_final_number_of_a_text(text: str, number: float | None) -> None:
    assert final_number(text) == number


@given(st.integers(-(10**9), 10**9), st.sampled_from(["{}", "{:,}", "so ${}$.", "#### {}"]))
def test_an_integer_is_read_in_every_notation(number: int, form: str) -> None:
    assert final_number(form.format(number)) == number


@given(st.text(st.sampled_from("0123456789.,-$/ e#x\n"), max_size=200))
def test_every_text_has_a_number_or_none(text: str) -> None:
    number = final_number(text)
    assert number is None or isinstance(number, float)


def test_numbers_too_large_for_memory_are_wrong() -> None:
    for completion in ("1e999999999", "9" * 10_000):
        assert value(numeric_answer(), completion, answer="1") == 0.0


def test_numeric_answer_compares_up_to_its_tolerance() -> None:
    assert value(numeric_answer(), "It is 18.0", answer="2 * 9 = 18\n#### 18") == 1.0
    assert value(numeric_answer(), "It is 19", answer="#### 18") == 0.0
    assert value(numeric_answer(), "no idea", answer="#### 18") == 0.0
    assert value(numeric_answer("n"), "3.0000001", n=3) == 1.0
    assert value(numeric_answer("n"), "3.01", n=3) == 0.0
    assert value(numeric_answer("n", tolerance=0.1), "3.01", n=3) == 1.0
    # Absolute, so that neighbouring integers never count as equal.
    assert value(numeric_answer("n"), "12345678", n=12345679) == 0.0


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        (9007199254740993, "9007199254740993", 1.0),
        (9007199254740993, "9,007,199,254,740,993", 1.0),
        (9007199254740993, "9007199254740992", 0.0),  # equal as floats
        ("123456789012345678901234567890", "123456789012345678901234567891", 0.0),
        (1e22, "10000000000000000000000", 1.0),
        (1e22, "10000000000000000000001", 0.0),
        (5e-05, "0.00005", 1.0),
        (5e-05, "5e-5", 1.0),
        ("1e-5000", "0", 1.0),
        ("18", "1e5000", 0.0),
        ("1" * 5000, "1", ValueError),
        ("0." + "3" * 30, "1/3", 1.0),
        ("\\$36", "It costs \\$36.", 1.0),
        ("\\[\\frac{3}{4}\\]", "\\boxed{4}", 1.0),  # math_answer reads LaTeX, this does not
        ("5 dollars", "5", 1.0),
        ("204", "\\boxed{204}", 1.0),
        ("007", "The answer is 7.", 1.0),
        ("#### 1,234", "So she has $1,234.00 left.", 1.0),
    ],
)
def test_numbers_are_compared_exactly(answer: Any, completion: str, expected: Any) -> None:
    if expected is ValueError:
        with invalid("metadata['answer']", answer):
            value(numeric_answer(), completion, answer=answer)
    else:
        assert value(numeric_answer(), completion, answer=answer) == expected


def test_numeric_answer_reads_every_reference_of_gsm8k() -> None:
    rows = [
        json.loads(line)
        for split in ("train", "test")
        for line in (GSM8K / f"{split}.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 600
    for row in rows:
        _, _, answer = row["answer"].rpartition("#### ")
        assert value(numeric_answer(), f"The answer is {answer}.", **row) == 1.0
        assert value(numeric_answer(), f"The answer is {answer}7.", **row) == 0.0


@pytest.mark.parametrize("metadata", [{"answer": "none"}, {"answer": "1e99999"}, {"answer": "1/0"}])
def test_a_reference_without_a_number_is_an_error_of_the_dataset(metadata: dict[str, str]) -> None:
    with invalid("metadata['answer']", metadata["answer"]):
        value(numeric_answer(), "1", **metadata)


@pytest.mark.parametrize("reward", [exact_match("solution"), numeric_answer("solution")])
def test_a_missing_reference_names_the_columns(reward: Reward) -> None:
    assert reward.required_columns == ("solution",)
    with invalid("metadata['solution']") as found:
        value(reward, "1", answer="1")
    assert "['answer']" in found.value.rule
    with invalid("metadata['solution']"):
        value(reward, "1", solution=None)


def test_exact_match_compares_normalized_texts() -> None:
    assert value(exact_match(), " 46\n", answer="46") == 1.0
    assert value(exact_match(), "46.", answer="46") == 0.0
    assert value(exact_match(), "46", answer=46) == 1.0
    assert value(exact_match(), "Paris", answer="paris") == 0.0
    assert value(exact_match(normalize=str.casefold), "Paris", answer="paris") == 1.0
    assert value(exact_match(normalize=str.casefold), "Paris ", answer="paris") == 0.0


def test_format_reward_searches_the_completion() -> None:
    reward = format_reward(r"(?s)^<think>.*</think>.*#### -?\d+$", name="thinking")
    assert reward.name == "thinking"
    assert value(reward, "<think>\nhm\n</think>\n#### 18") == 1.0
    assert value(reward, "#### 18") == 0.0


def test_a_wrong_pattern_is_refused() -> None:
    with invalid("format_reward: pattern", "("):
        format_reward("(")


@pytest.mark.parametrize("answer", [4.0, ["4"], {"is": 4}, True])
def test_a_reference_of_another_type_is_an_error_and_not_a_zero(answer: Any) -> None:
    with invalid("metadata['answer']", answer):
        value(exact_match(), "4", answer=answer)
    assert value(exact_match(), "4", answer=4) == 1.0
