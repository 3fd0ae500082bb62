"""`rlsys run`: the same as `python recipe.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlsys.commands.run_command import check_recipe, main, option_names
from rlsys.config import RunConfig
from rlsys.config.fields import leaves
from rlsys.errors import NOT_GIVEN
from tests.commands.rlsys_process import RLSYS, ROOT
from tests.commands.rlsys_process import rlsys as run
from tests.e2e.own_recipe import own_recipe
from tests.errors import invalid

SHOWS_ITSELF = """
import beside, os, sys
print(__name__, sys.argv, beside.NAME, sys.path[0], sorted(os.environ))
if __name__ == "__main__":
    raise SystemExit(int(sys.argv[1]))
"""


def outcome(*command: str, directory: Path) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_a_recipe_sees_what_it_sees_from_python(tmp_path: Path) -> None:
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "mine.py").write_text(SHOWS_ITSELF)
    (directory / "beside.py").write_text("NAME = 'beside'\n")
    for code in ("0", "7", "141"):
        arguments = ["project/mine.py", code, "--name", "a b"]
        by_python = outcome(sys.executable, *arguments, directory=tmp_path)
        assert by_python[0] == int(code)
        assert outcome(*RLSYS, "run", *arguments, directory=tmp_path) == by_python


def test_the_process_is_that_of_the_recipe_and_gets_its_signals(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, signal, sys\n"
        "def ended(*_):\n"
        "    print('ended', flush=True)\n"
        "    sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, ended)\n"
        "print(os.getpid(), flush=True)\n"
        "while True:\n"
        "    signal.pause()\n"
    )
    process = subprocess.Popen(
        [*RLSYS, "run", "mine.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"{process.pid}\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "ended\n"
    assert process.returncode == 3


@pytest.mark.slow
def test_the_help_and_the_mistakes_are_those_of_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(own_recipe())
    shown = run("run", "mine.py", "--help", directory=tmp_path)
    assert shown.returncode == 0
    assert "--clip FLOAT" in shown.stdout
    assert "usage: mine.py" in shown.stdout
    wrong = run("run", "mine.py", "--num-step", "1", directory=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("mine.py: error: --num-step")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def main():\n    pass\n", "__main__"),
        ('"""Text."""\nimport rlsys\n\n@rlsys.reward\ndef right(rollout): ...\n', "launch"),
        ("X = 1\n", "launch"),
        ("X = 1\ndef main(): ...\nY = dict(a=1)\n", "__main__"),
        ("[trainer\n", "--config"),
        ("def f(:\n", "--config"),
    ],
)
def test_a_file_that_starts_nothing_is_refused(text: str, names: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with invalid("RECIPE", str(file)) as error:
        check_recipe(file)
    assert names in error.value.fix


@pytest.mark.parametrize(
    "text",
    [
        own_recipe(),
        "import rlsys\nresult = rlsys.launch(config, flow)\n",
        "main()\n",
        "with a:\n    main()\n",
        "from recipes.quickstart import main\nif __name__ == '__main__':\n    main()\n",
    ],
)
def test_a_program_is_accepted(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    check_recipe(file)


def test_every_recipe_of_the_checkout_is_accepted() -> None:
    for name in ("quickstart", "grpo", "guess", "sums_in_words", "swarm", "sft"):
        check_recipe(ROOT / "recipes" / f"{name}.py")


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").touch()
    for wrong in (tmp_path / "recip.py", tmp_path):
        with invalid("RECIPE", str(wrong)) as error:
            check_recipe(wrong)
        assert str(tmp_path / "recipe.py") in error.value.fix
    with invalid("RECIPE", str(tmp_path / "zzz.py")) as error:
        check_recipe(tmp_path / "zzz.py")
    assert "rlsys new" in error.value.fix
    settings = tmp_path / "config.toml"
    settings.write_text("num_steps = 10\n[trainer]\n")  # is Python too
    with invalid("RECIPE", str(settings)) as error:
        check_recipe(settings)
    assert "--config" in error.value.fix
    binary = tmp_path / "recipe.bin"
    binary.write_bytes(b"\x00\x01\xff")
    with invalid("RECIPE", str(binary)):
        check_recipe(binary)


@pytest.mark.parametrize(
    ("arguments", "value"), [([], NOT_GIVEN), (["--num-steps", "3"], "--num-steps")]
)
def test_the_file_comes_first(arguments: list[str], value: object) -> None:
    with invalid("RECIPE", value):
        main(arguments)


def test_the_options_of_every_recipe_are_completed() -> None:
    names = option_names()
    assert {"--config", "--dry-run", "--plan", "--num-steps", "--trainer.learning-rate"} <= {*names}
    assert len(names) == len(leaves(RunConfig)) + 4
