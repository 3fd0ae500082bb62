"""References and completions in the styles of MATH, GSM8K, AIME and data columns, by the judge."""

from __future__ import annotations

import pytest

pytest.importorskip("math_verify", reason="the extra 'math' is not installed")

from rlsys.rewards import math_child
from rlsys.rewards.math_child import answer_of, judge

RIGHT = [
    # Money, units and words after a number
    ("\\$36", "\\boxed{36}"),
    ("\\$36", "The answer is \\$36."),
    ("\\$36", "\\boxed{\\$36}"),
    ("\\$36.50 per hour", "\\boxed{36.50}"),
    ("$36", "36"),
    ("\N{EURO SIGN}5", "5"),
    ("5 dollars", "\\boxed{5}"),
    ("5 dollars", "5"),
    ("5 dollars", "\\boxed{5\\text{ dollars}}"),
    ("5 dollars", "\\boxed{5 dollars}"),
    ("12 cm^2", "\\boxed{12\\text{ cm}^2}"),
    ("-3/4 miles", "\\boxed{-\\frac{3}{4}}"),
    ("3 1/2 cups", "\\boxed{3.5}"),
    ("1 cup", "\\boxed{1}"),
    ("1/3 cup", "\\boxed{\\frac13}"),
    ("3 1/2 cup", "\\boxed{3.5}"),
    ("8 Ohms", "\\boxed{8}"),
    ("60 km/h", "\\boxed{60}"),
    ("12 sq ft", "\\boxed{12}"),
    ("9 cm squared", "\\boxed{9}"),
    ("7 Newtons per square meter", "\\boxed{7}"),
    ("-5 degrees Celsius", "\\boxed{-5}"),
    ("18 kg", "18 kg"),
    # Products and functions after a number
    ("2 xy", "\\boxed{2xy}"),
    ("2 ABCD", "\\boxed{2ABCD}"),
    # Infinite and very large
    ("\\infty", "\\boxed{\\infty}"),
    ("-\\infty", "\\boxed{-\\infty}"),
    (str(2**1024), f"\\boxed{{{2**1024}}}"),
    (str(10**400), "\\boxed{10^{400}}"),
    # Delimiters
    ("\\[\\frac{3}{4}\\]", "\\boxed{0.75}"),
    ("\\(x^2\\)", "$x^2$"),
    ("\\boxed{7}", "7"),
    # Float columns
    ("5e-05", "\\boxed{5e-05}"),
    ("5e-05", "$5 \\times 10^{-5}$"),
    ("5e-05", "0.00005"),
    ("1e-08", "\\boxed{1e-08}"),
    ("1e+22", "\\boxed{10^{22}}"),
    ("1e+22", "10000000000000000000000"),
    ("10.0", "\\boxed{10}"),
    ("0.1", "\\boxed{\\frac{1}{10}}"),
    ("2e+1", "\\boxed{1+2e}"),  # Euler's number
    ("9007199254740993", "9007199254740993"),
    # MATH
    ("\\frac{1}{2}", "\\boxed{\\dfrac12}"),
    ("90^\\circ", "\\boxed{90}"),
    ("50\\%", "\\boxed{50}"),
    ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}"),
    ("Evelyn", "\\boxed{\\text{Evelyn}}"),
    ("even", "\\boxed{\\text{even}}"),
    ("\\text{(A)}", "\\boxed{A}"),
    ("[1,2)", "\\boxed{[1,2)}"),
    ("10 or 12", "\\boxed{10 \\text{ or } 12}"),
    ("1 \\pm \\sqrt{19}", "\\boxed{1 \\pm \\sqrt{19}}"),
    ("3\\sqrt{13}", "\\sqrt{117} = \\boxed{3\\sqrt{13}}."),
    ("x^2 + 2x + 1", "So it is $(x+1)^2$."),
    ("x \\in [1,2)", "$[1,2)$"),
    (
        "\\begin{pmatrix} 1 \\\\[2pt] 2 \\end{pmatrix}",
        "\\boxed{\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}}",
    ),
    # GSM8K
    ("9 * 2 = 18\n#### 18", "The answer is 18."),
    ("She pays <<4*9=36>>36.\n#### $36", "#### 36"),
    ("#### 1,234", "\\boxed{1234}"),
    ("#### -5", "The final answer is $-5$."),
    # AIME
    ("204", "\\boxed{204}"),
    ("007", "\\boxed{7}"),
    ("25", "The answer is 025."),
]

WRONG = [
    ("\\$36", "\\boxed{63}"),
    ("5 dollars", "\\boxed{6}"),
    ("5 dollars", "\\boxed{5x}"),
    ("12 cm^2", "\\boxed{2}"),
    ("2 xy", "\\boxed{2}"),
    ("6 xyz", "\\boxed{6}"),
    ("2 wxyz", "\\boxed{2}"),
    ("2 ABCD", "\\boxed{2}"),
    ("3 max", "\\boxed{3}"),
    ("5 sinh", "\\boxed{5}"),
    ("5 arcsin x", "\\boxed{5}"),
    ("5 cm x", "\\boxed{5}"),
    ("4 theta", "\\boxed{4}"),
    ("5 million", "\\boxed{5}"),
    ("5 squared", "\\boxed{5}"),
    ("\\infty", "\\boxed{-\\infty}"),
    ("\\infty", "\\boxed{7}"),
    (str(2**1024), f"\\boxed{{{2**1024 + 1}}}"),
    ("5e-05", "\\boxed{0.0001}"),
    ("5e-05", "\\boxed{0.00006}"),
    ("1e-08", "\\boxed{2e-08}"),
    ("1e-08", "\\boxed{0}"),
    ("1e+22", "\\boxed{10^{21}}"),
    ("9007199254740993", "\\boxed{9007199254740992}"),
    ("3 1/2 cups", "\\boxed{\\frac{3}{2}}"),
    ("10 or 12", "\\boxed{10}"),
    ("\\[\\frac{3}{4}\\]", "\\boxed{\\frac{4}{3}}"),
    ("even", "\\boxed{\\text{odd}}"),
    ("[1,2)", "\\boxed{[1,2]}"),
    ("204", "\\boxed{205}"),
    ("x^2 + 2x + 1", "$(x+2)^2$"),
    ("18", "no idea"),
]


@pytest.mark.parametrize(("reference", "completion"), RIGHT)
def test_right_answers(reference: str, completion: str) -> None:
    assert judge(reference, completion) is True


@pytest.mark.parametrize(("reference", "completion"), WRONG)
def test_wrong_answers(reference: str, completion: str) -> None:
    assert judge(reference, completion) is False


@pytest.mark.parametrize("reference", ["", "#### ", "   "])
def test_a_reference_without_an_expression_is_an_error(reference: str) -> None:
    assert isinstance(judge(reference, "1"), str)


def test_an_exception_of_the_library_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(math_child, "verify", fail)
    answer = answer_of("2", "\\boxed{2}")
    assert isinstance(answer, str)
    assert "RecursionError" in answer
