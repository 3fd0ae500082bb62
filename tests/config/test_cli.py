"""The command line of a recipe: precedence, types, errors, help."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config import DataConfig, RunConfig
from rlsys.config.command_line import MAX_WIDTH, field_docs, help_text, parse
from rlsys.config.fields import leaves, to_dict, to_toml
from tests.errors import error_about


@dataclass(frozen=True, kw_only=True)
class ToyConfig(RunConfig):
    """A recipe of these tests."""

    clip: float = 0.2
    """Clip range of the
    policy ratio."""
    kl: float | None = None
    """Weight of the penalty."""
    betas: tuple[float, ...] = (0.5, 0.75)
    """Two averages."""
    loss: Literal["ppo", "cispo"] = "ppo"
    """Which loss."""
    group_size: int = 4
    data: DataConfig = field(default_factory=lambda: DataConfig(prompt_column="question"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size == 1:
            raise ValueError("group_size=1 makes every advantage zero; use group_size >= 2.")


def read(*argv: str) -> ToyConfig:
    return parse(ToyConfig, argv).config


def error(capsys: pytest.CaptureFixture[str], *argv: str, count: int = 1) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(ToyConfig, argv)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == count
    assert "Traceback" not in err
    return err


def test_no_arguments_give_the_defaults() -> None:
    with error_about(TypeError, "ToyConfig"):
        parse(ToyConfig(), [])  # type: ignore[arg-type]
    parsed = parse(ToyConfig, [])
    assert parsed.config == ToyConfig()
    assert not parsed.dry_run


def test_every_type_is_read() -> None:
    config = read(
        *("--clip", "1e-3", "--kl=0.5", "--loss", "cispo", "--num-steps", "7"),
        *("--trainer.learning-rate", "1", "--model.path", "a b", "--asynchrony.stream", "false"),
        *("--data.subset", "main", "--betas", "1,2.5"),
    )
    assert (config.clip, config.kl, config.loss, config.num_steps) == (1e-3, 0.5, "cispo", 7)
    assert config.trainer.learning_rate == 1.0
    assert isinstance(config.trainer.learning_rate, float)
    assert config.model.path == "a b"
    assert config.asynchrony.stream is False
    assert config.data.subset == "main"
    assert config.betas == (1.0, 2.5)


def test_dashes_and_underscores_are_the_same() -> None:
    assert read("--trainer.learning_rate", "1e-3") == read("--trainer.learning-rate", "1e-3")


@pytest.mark.parametrize(
    ("argv", "resume", "num_steps"),
    [
        (("--resume",), True, 100),
        (("--resume", "--num-steps", "3"), True, 3),
        (("--resume", "true", "--num-steps", "3"), True, 3),
        (("--resume", "False", "--num-steps", "3"), False, 3),
        (("--resume=false",), False, 100),
        (("--resume", "yes"), True, 100),
        (("--resume", "no"), False, 100),
        (("--resume", "auto"), "auto", 100),
        (("--resume=Auto", "--num-steps", "3"), "auto", 3),
    ],
)
def test_a_bare_flag_is_true(argv: tuple[str, ...], resume: bool | str, num_steps: int) -> None:
    config = read(*argv)
    assert (config.resume, config.num_steps) == (resume, num_steps)


def test_lists_are_given_at_once_or_item_by_item_or_empty() -> None:
    assert read("--sampling.stop", "a,b").sampling.stop == ("a", "b")
    assert read("--sampling.stop", "a", "--sampling.stop", "b").sampling.stop == ("a", "b")
    assert read("--betas=").betas == ()


def test_none_unsets_an_optional_field_only() -> None:
    assert read("--kl", "none").kl is None
    assert read("--name", "none").name == "none"


def test_an_option_given_twice_takes_the_last_value_with_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert read("--num-steps", "3", "--num_steps", "4").num_steps == 4
    note = capsys.readouterr().err
    assert note.count("\n") == 1
    assert all(part in note for part in ("--num-steps", "3", "4"))
    assert read("--num-steps", "3", "--num-steps", "3").num_steps == 3
    assert capsys.readouterr().err == ""


def test_setting_a_field_keeps_other_defaults_of_the_recipe() -> None:
    config = read("--data.source", "x.jsonl")
    assert config.data.prompt_column == "question"
    assert config.group_size == 4


def test_dry_run_is_not_part_of_the_configuration() -> None:
    parsed = parse(ToyConfig, ["--dry-run", "--num-steps", "3"])
    assert parsed.dry_run
    assert parsed.config == ToyConfig(num_steps=3)


def test_command_line_wins_over_file_and_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'num-steps = 5\nkl = "none"\nbetas = [1, 2]\n'
        '[trainer]\nlearning_rate = 1\nnum-cpus = 2\n[sampling]\nstop = [","]\n'
    )
    config = read("--trainer.num-cpus", "3", "--config", str(file), "--sampling.top-k", "2")
    assert config.num_steps == 5
    assert config.kl is None
    assert config.betas == (1.0, 2.0)
    assert config.trainer.learning_rate == 1.0
    assert config.trainer.num_cpus == 3.0
    assert config.sampling.stop == (",",)
    assert config.sampling.top_k == 2
    assert config.clip == 0.2


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (("--trainer.learning-rat", "1"), ["--trainer.learning-rat:", "--trainer.learning-rate?"]),
        (("--learning-rate", "1"), ["--learning-rate:", "--trainer.learning-rate?"]),
        (
            ("--num-cpus", "1"),
            ["--rollout.num-cpus or --trainer.num-cpus or --evaluation.num-cpus?"],
        ),
        (("--qqq", "1"), ["--qqq", "--help"]),
        (("--trainer.lr", "1"), ["--trainer.lr:", "--trainer.learning-rate?"]),
        (("--lr", "1"), ["--lr:", "--trainer.learning-rate?"]),
        (("--trainer.max-toekns", "1"), ["--trainer.max-toekns:", "--sampling.max-tokens?"]),
        (("--trainer.qqq", "1"), ["--trainer.qqq:", "--help"]),
        (("--clip", "nan"), ["clip=nan:"]),
        (("--trainer.learning-rate", "-inf"), ["trainer.learning_rate=-inf:"]),
        (("--num-steps", "1.5"), ["--num-steps", "'1.5'", "whole number"]),
        (("--clip", "wide"), ["--clip", "'wide'", "a number"]),
        (("--kl", "wide"), ["'wide'", "a number, or none"]),
        (("--resume=maybe",), ["--resume", "'maybe'", "true, false or auto"]),
        (("--resume", "auot"), ["--resume='auot'", "true, false or auto"]),
        (("--dry-run", "run.toml"), ["--dry-run='run.toml'", "8xH100"]),
        (("--dry-run=maybe",), ["--dry-run='maybe'", "8xH100"]),
        (("--loss", "pp"), ["--loss", "'pp'", "one of ppo, cispo"]),
        (("--betas", "1,x"), ["--betas", "'1,x'", "a list, each item a number"]),
        (("--num-steps",), ["--num-steps:", "whole number"]),
        (("--num-steps", "--resume"), ["--num-steps:", "whole number"]),
        (("train.jsonl",), ["train.jsonl:", "--num-steps 10"]),
        (("--trainer", "3"), ["--trainer:", "--trainer.layout: layout, learning"]),
        (("--trainer=3",), ["--trainer:", "--trainer.layout"]),
        (("--config", "run.yaml"), ["--config='run.yaml':", "TOML"]),
        (("--group-size", "1"), ["group_size=1", "use group_size >= 2"]),
        (("--prompts-per-step", "5", "--trainer.layout", "dp2"), ["=5", "dp2", "multiple"]),
        (("--config", "/nowhere.toml"), ["/nowhere.toml", "No such file"]),
        (("--config", ""), ["--config=''", "No such file"]),
        (("--config", "/"), ["--config='/'", "Is a directory"]),
    ],
)
def test_a_mistake_is_one_line_with_value_and_fix(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], parts: list[str]
) -> None:
    message = error(capsys, *argv)
    for part in parts:
        assert part in message


def test_all_wrong_options_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ("--num-steps", "ten", "--qqq", "1", "--clip=wide", "--trainer", "3", "--kl")
    message = error(capsys, *wrong, count=5)
    lines = message.splitlines()
    starts = ("--num-steps='ten':", "--qqq:", "--clip='wide':", "--trainer:", "--kl:")
    assert [start in line for start, line in zip(starts, lines, strict=True)] == [True] * 5


def test_mistakes_of_several_sections_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ("--trainer.layout", "x2", "--sampling.top-p", "3", "--group-size", "0")
    message = error(capsys, *wrong, count=2)
    first, second = message.splitlines()  # the run itself is only checked with valid sections
    assert "sampling.top_p=3.0:" in first
    assert "trainer.layout='x2':" in second


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("num_step = 1", [": num_step:", " num_steps?"]),
        ("[trainer]\nlr = 1", [": trainer.lr:", " trainer.learning_rate?"]),
        ("[trainer]\nlearning_ratio = 2", ["trainer.learning_ratio:", " trainer.learning_rate?"]),
        ("[trainers]\nnum_cpus = 1", [": trainers:", " trainer?"]),
        ("trainer = 3", ["trainer=3", "trainer.layout"]),
        ("[num_steps]\nx = 1", ["num_steps={'x': 1}", "whole number"]),
        ("num_steps = 1.5", ["num_steps=1.5", "whole number"]),
        ("num_steps = true", ["num_steps=True", "whole number"]),
        ('clip = "1e-3"', ["clip='1e-3'", "a number"]),
        ("name = 3", ["name=3", "text"]),
        ("resume = 1", ["resume=1", "true, false or auto"]),
        ('resume = "yes"', ["resume='yes'", "true, false or auto"]),
        ("{", ["run.toml", "JSON"]),
        ('{"config": {"num_steps": "5"}}', ["num_steps='5'", "whole number"]),
        ('{"num_step": 5}', [": num_step:", " num_steps?"]),
        ('{"clip": NaN}', ["clip=nan"]),
        ("clip = inf", ["clip=inf"]),
        ('name = "a\\u0000b"', ["name='a\\x00b'"]),
        ('loss = "grpo"', ["loss='grpo'", "one of ppo, cispo"]),
        ("betas = 1", ["betas=1", "a list"]),
        ("betas = [true]", ["betas=True", "a number"]),
        ("num_steps = ", ["run.toml", "TOML", "at end of document", "num_steps = 10"]),
        ("num_steps: 3", ["run.toml", "TOML", "at line 1", "[trainer]"]),
    ],
)
def test_a_mistake_in_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, parts: list[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    message = error(capsys, "--config", str(file))
    for part in parts:
        assert part in message


def test_help_shows_every_field_with_its_docstring_within_the_width(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(ToyConfig, ["--num-steps", "x", "--help"], doc="What this recipe does.")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("What this recipe does.\n")
    assert max(map(len, text.splitlines())) <= MAX_WIDTH
    words = " ".join(text.split())
    for leaf in leaves(ToyConfig):
        doc = field_docs(leaf.owner).get(leaf.name.rpartition(".")[2], "")
        assert doc, f"{leaf.name} has no docstring"
        assert f"--{leaf.name.replace('_', '-')} " in words
        assert doc in words


def test_help_starts_with_the_run_and_the_recipe() -> None:
    text = help_text(ToyConfig)
    order = "config dry-run name num-steps resume group-size clip kl model.path data.source"
    places = [text.index(f"  --{option} ") for option in f"{order} observe.wandb".split()]
    assert places == sorted(places)
    own, *_ = (block for block in text.split("\n\n") if "--clip" in block)
    assert own.startswith("A recipe of these tests.\n  --clip FLOAT")
    assert "--group-size INT\n        Rollouts per prompt" in text
    assert "--clip FLOAT\n        Clip range of the policy ratio. [0.2]" in own
    assert "--kl FLOAT|none\n        Weight of the penalty. [none]" in own
    assert "--betas A,B,...\n        Two averages. [0.5,0.75]" in own
    assert "--loss ppo|cispo\n" in own
    assert "--data.prompt-column TEXT" in text
    assert "[question]" in text
    assert "--resume [true|false|auto]" in text


def test_the_text_above_help_is_filled_except_commands() -> None:
    doc = "word " * 40 + "\n\n    a command   as it stands"
    text = help_text(ToyConfig, doc=doc)
    assert text.startswith("word word")
    assert "\n\n    a command   as it stands\n\n" in text
    assert max(map(len, text.splitlines())) <= MAX_WIDTH


def test_a_recipe_script_as_users_run_it(tmp_path: Path) -> None:
    script = tmp_path / "recipe.py"
    script.write_text(
        textwrap.dedent(
            '''
            """Counts sheep.

            python recipe.py --sheep 3
            """

            from dataclasses import dataclass
            from rlsys.config.command_line import parse
            from rlsys.config import RunConfig

            @dataclass(frozen=True, kw_only=True)
            class SheepConfig(RunConfig):
                """Sheep."""

                sheep: int = 1
                """How many."""

            if __name__ == "__main__":
                print(parse(SheepConfig).config.sheep)
            '''
        ).lstrip()
    )

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        root = str(Path(__file__).parents[2])
        command = [sys.executable, str(script), *argv]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=300, env={"PYTHONPATH": root}
        )

    assert run("--sheep", "3").stdout == "3\n"
    shown = run("--help")
    assert shown.returncode == 0
    assert shown.stdout.startswith("Counts sheep.\n\npython recipe.py --sheep 3\n")
    assert "--sheep INT\n        How many. [1]" in shown.stdout
    headless = subprocess.run(
        f"{shlex.quote(sys.executable)} {shlex.quote(str(script))} --help | head -c 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (headless.stdout, headless.stderr) == ("C", "")
    wrong = run("--sheep", "many")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("recipe.py: error: --sheep='many': ")
    assert wrong.stderr.count("\n") == 1


# Any text. On the command line "none" unsets an option, and items of lists cannot have a comma.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = TEXT.filter(lambda text: text.lower() != "none" and "\0" not in text)
OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "clip": FINITE,
        "kl": st.none() | FINITE,
        "betas": st.lists(FINITE, max_size=3).map(tuple),
        "loss": st.sampled_from(["ppo", "cispo"]),
        "seed": st.integers(0, 2**62),
        "resume": st.booleans() | st.just("auto"),
        "model.path": PLAIN,
        "data.subset": st.none() | PLAIN,
        "sampling.stop": st.lists(PLAIN.filter(lambda t: t and "," not in t), max_size=3).map(
            tuple
        ),
    },
)


@given(OVERRIDES)
def test_toml_and_options_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, overrides: dict[str, Any]
) -> None:
    def text(value: Any) -> str:
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return str(value).lower() if value is None or isinstance(value, bool) else str(value)

    config = read(*(f"--{name}={text(value)}" for name, value in overrides.items()))
    found = {leaf.name: value_at(config, leaf.name) for leaf in leaves(ToyConfig)}
    assert overrides.items() <= found.items()
    file = tmp_path_factory.getbasetemp() / "resolved.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert read("--config", str(file)) == config
    file.write_text(json.dumps({"config": to_dict(config), "versions": {}}))  # a run's config.json
    assert read("--config", str(file)) == config
    file.write_text(json.dumps(to_dict(config)))
    assert read("--config", str(file)) == config


def value_at(config: object, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config
