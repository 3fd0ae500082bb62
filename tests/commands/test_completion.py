"""Completion, in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from rlsys.commands.command_table import COMMANDS
from rlsys.commands.completion_command import SHELLS, main, script, words_of


@cache
def written(shell: str) -> str:
    return script(shell)


def test_the_words_of_each_command() -> None:
    for name in COMMANDS:
        assert "--help" in words_of(name)
    assert words_of("completion")[:3] == ["bash", "zsh", "fish"]
    assert {"--host", "--port"} <= {*words_of("watch")}
    assert {"--data", "--reward", "--num-samples", "--rollout.engine"} <= {*words_of("evaluate")}
    assert {"--model.path", "--trainer.layout"} <= {*words_of("serve")}
    assert words_of("submit") == words_of("run")


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bash"])
    assert capsys.readouterr().out == written("bash")
    with pytest.raises(SystemExit):
        main(["csh"])


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_reads_the_script(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file = tmp_path / "completion"
    file.write_text(written(shell))
    ended = subprocess.run([shell, "-n", str(file)], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def proposals(shell: str, *words: str, directory: Path) -> set[str]:
    """Return what a shell proposes for the last word of a command line."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (directory / "completion").write_text(written(shell))
    line = " ".join(("rlsys", *words))
    if shell == "fish":
        program = f"source completion; complete -C '{line}'"
    else:
        program = (
            f"source completion; COMP_WORDS=(rlsys {' '.join(words[:-1])} '{words[-1]}'); "
            f'COMP_CWORD={len(words)}; _rlsys; printf "%s\\n" "${{COMPREPLY[@]}}"'
        )
    ended = subprocess.run(
        [shell, "-c", program], cwd=directory, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    return {line.split("\t")[0] for line in ended.stdout.splitlines() if line}


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_what_is_proposed(shell: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.py").touch()
    assert proposals(shell, "re", directory=tmp_path) == {"report"}
    assert proposals(shell, "run", "rec", directory=tmp_path) == {"recipe.py"}
    assert proposals(shell, "run", "recipe.py", "--num-st", directory=tmp_path) == {"--num-steps"}
    assert proposals(shell, "watch", "--h", directory=tmp_path) == {"--host", "--help"}
    assert proposals(shell, "completion", "z", directory=tmp_path) == {"zsh"}


def test_what_zsh_proposes(tmp_path: Path) -> None:
    """`_describe`, `_files` and `compdef` come from zsh's own functions; here they print."""
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    (tmp_path / "completion").write_text(written("zsh"))

    def proposed(*words: str) -> list[str]:
        program = (
            "compdef() { :; }; _files() { print FILES; }; "
            "_describe() { print -l -- $subcommands; }; "
            "compadd() { shift; print -l -- $@; }; source ./completion; "
            f"words=(rlsys {' '.join(words)}); CURRENT={len(words) + 1}; _rlsys"
        )
        ended = subprocess.run(
            ["zsh", "-fc", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.splitlines()

    assert [line.partition(":")[0] for line in proposed("x")][: len(COMMANDS)] == list(COMMANDS)
    assert proposed("watch", "--") == [*words_of("watch"), "FILES"]
