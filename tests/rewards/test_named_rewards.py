from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlsys.rewards import RewardResult, example_rollout
from rlsys.rewards.named_rewards import BUILT_IN, named_reward
from tests.errors import invalid
from tests.rewards.reward_harness import run, running

OWN = """
import rlsys

SHIFT = 2.0

def length(rollout):
    return len(rollout.completion_text) + SHIFT

@rlsys.reward(weight=0.5, required_columns=("answer",))
def half(rollout):
    return rollout.completion_text == rollout.metadata["answer"]
"""


def test_built_in_rewards_read_the_column_that_is_named() -> None:
    right = example_rollout("It is 5.", metadata={"answer": "4", "solution": "#### 5"})
    assert named_reward("numeric_answer")(right) == 0.0
    assert named_reward("numeric_answer:solution")(right) == 1.0
    assert named_reward("exact_match:solution").required_columns == ("solution",)
    for name in BUILT_IN:
        assert named_reward(name).name == name


def test_functions_of_a_module() -> None:
    found = named_reward("recipes.quickstart:correct")
    assert found.name == "correct"
    assert found(example_rollout("5", metadata={"answer": "5"})) == 1.0


def test_functions_of_a_file_run_in_another_process(tmp_path: Path) -> None:
    file = tmp_path / "my_rewards.py"
    file.write_text(OWN)
    length, half = named_reward(f"{file}:length"), named_reward(f"{file}:half")
    assert (half.weight, half.required_columns) == (0.5, ("answer",))

    async def scenario() -> None:
        async with running(length, half) as runner:
            (result,) = await runner.score([example_rollout("abc", metadata={"answer": "abc"})])
        assert isinstance(result, RewardResult)
        assert result.total == 5.0 + 0.5

    run(scenario)


def test_a_file_imports_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes a neighbour that a function imports when another process calls it."""
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "neighbour_of_file.py").write_text("SHIFT = 3.0\n")
    (tmp_path / "package_of_file").mkdir()
    (tmp_path / "package_of_file" / "__init__.py").write_text("")
    (tmp_path / "package_of_file" / "late.py").write_text("FACTOR = 2.0\n")
    file = tmp_path / "file_with_neighbours.py"
    file.write_text(
        "import neighbour_of_file\n"
        "def shifted(rollout):\n"
        "    from package_of_file.late import FACTOR\n"
        "    return len(rollout.completion_text) * FACTOR + neighbour_of_file.SHIFT\n"
    )
    shifted = named_reward(f"{file}:shifted")

    async def scenario() -> None:
        async with running(shifted) as runner:
            (result,) = await runner.score([example_rollout("abc")])
        assert isinstance(result, RewardResult)
        assert result.total == 3 * 2.0 + 3.0

    run(scenario)


def test_a_neighbour_of_another_file_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "neighbour_twice.py").write_text(f"NAME = {name!r}\n")
        (tmp_path / name / f"file_{name}.py").write_text(
            "from neighbour_twice import NAME\ndef f(rollout):\n    return float(NAME == 'two')\n"
        )
    named_reward(f"{tmp_path}/one/file_one.py:f")
    with invalid("reward", f"{tmp_path}/two/file_two.py:f"):
        named_reward(f"{tmp_path}/two/file_two.py:f")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("numeric", "numeric_answer"),
        ("", "code_tests"),
        ("recipes.quickstart:", "module:function"),
        ("no_such_package.rewards:right", "'no_such_package'"),
        ("recipes.no_such_module:right", "'recipes.no_such_module'"),
        ("recipes.quickstart:right", "correct"),
        ("recipes.quickstart:CHARACTERS", "'CHARACTERS'"),
        ("nowhere/rewards.py:right", "nowhere/rewards.py"),
    ],
)
def test_a_text_that_names_no_function_is_refused(text: str, part: str) -> None:
    with invalid("reward", text) as found:
        named_reward(text)
    assert part in found.value.rule + found.value.fix


def test_a_wrong_reward_in_a_file_keeps_its_own_error(tmp_path: Path) -> None:
    file = tmp_path / "wrong_rewards.py"
    file.write_text("import rlsys\n\n@rlsys.reward(weight='1')\ndef f(rollout):\n    return 1.0\n")
    with invalid("reward 'f': weight", "1"):
        named_reward(f"{file}:f")


def test_the_completion_of_an_example_is_a_text() -> None:
    with invalid("completion_text", 5):
        example_rollout(5)  # type: ignore[arg-type]
