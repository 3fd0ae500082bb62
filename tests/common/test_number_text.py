"""Numbers in what users write, and in messages."""

from __future__ import annotations

import pytest

from rlsys.common.number_text import counted, integer, number, significant, span, verb


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (46.43, "46"),
        (2.54, "2.5"),
        (0.0532, "0.053"),
        (0.05, "0.050"),
        (9.96, "10"),
        (0.0999, "0.10"),
        (1234.0, "1,200"),
        (100.0, "100"),
        (0.0, "0"),
        (-0.25, "-0.25"),
        (float("inf"), "inf"),
    ],
)
def test_two_digits_are_significant(value: float, text: str) -> None:
    assert significant(value) == text


def test_units_of_one_are_singular() -> None:
    assert counted(1, "resume") == "1 resume"
    assert counted(0, "checkpoint") == "0 checkpoints"
    assert counted(2000, "query", "queries") == "2,000 queries"
    assert [verb(number) for number in (0, 1, 2)] == ["are", "is", "are"]
    assert verb(1, "was", "were") == "was"


def test_a_range_of_one_is_its_value() -> None:
    assert span(3, 5) == "3 to 5"
    assert span(33, 33) == "33"
    assert span("976.4 MiB", "976.4 MiB") == "976.4 MiB"


def test_numbers_have_ascii_digits() -> None:
    assert integer("-12") == -12
    assert number("1.5e3") == 1500.0
    for text in ("\u0661\u0662", "\uff11", "1\u0968"):
        assert int(text) > 0  # Python accepts the digits of all scripts
        for parse in (integer, number):
            with pytest.raises(ValueError, match="ASCII"):
                parse(text)
