"""The examples of docs/formats.md: each row is read by the command below it."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlsys import PREFERENCE
from rlsys.commands.evaluate_command import full_options
from rlsys.config import DataConfig
from rlsys.config.command_line import parse
from rlsys.data.prompts import PromptSource
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import DatasetStage
from rlsys.evaluation.model_evaluation import EvaluationConfig
from rlsys.launcher.tiny_models import build_tiny_model, build_tokenizer
from rlsys.rewards import Reward, example_rollout
from rlsys.rewards.named_rewards import named_reward
from rlsys.types import Prompt

ROOT = Path(__file__).parents[2]

TOKENIZER = build_tokenizer()
TOKENIZER.chat_template = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Example:
    title: str
    row: dict[str, Any]
    command: list[str]  # such as rlsys evaluate, or python recipes/sft.py


def examples() -> list[Example]:
    text = (ROOT / "docs" / "formats.md").read_text()
    found = re.findall(
        r"^### ([^\n]*)\n\n```json\n(.*?)\n```\n\n```bash\n(.*?)\n```$", text, re.M | re.S
    )
    return [
        Example(title, json.loads(row), shlex.split(command.replace("\\\n", " ")))
        for title, row, command in found
    ]


EXAMPLES = {one.title: one for one in examples()}

CHAT = "user: What is 2+2?\nassistant: "

# The prompt and the completions that the model reads; or a right and a wrong reply.
EXPECTED: dict[str, tuple[str, ...]] = {
    "Messages": ("system: Be brief.\n" + CHAT, "4<eos>"),
    "TRL: prompt only": ("4", "5"),
    "TRL: prompt and completion": ("2+2=", "4<eos>"),
    "TRL: prompt and completion as messages": (CHAT, "4<eos>"),
    "TRL: preference with a prompt": ("2+2=", "4<eos>", "5<eos>"),
    "TRL: preference without a prompt": ("What is 2+2? It is", " 4<eos>", " 5<eos>"),
    "TRL: preference as messages": (CHAT, "4<eos>", "5<eos>"),
    "TRL and OpenRLHF: preference as whole chats": (CHAT, "4<eos>", "5<eos>"),
    "OpenRLHF: prompts with a label": ("It is 4.", "It is 5."),
    "verl": ("#### 4", "#### 5"),
    "prime-rl and verifiers": ("4", "5"),
    "TACO and APPS": ("print(sum(map(int, input().split())))", "print(5)"),
    "MBPP": ("def add(a, b): return a + b", "def add(a, b): return a"),
}


def test_every_example_of_the_page_is_expected() -> None:
    assert {*EXAMPLES} == {*EXPECTED}


def arguments(example: Example, file: Path) -> list[str]:
    place = {"MODEL": "runs/model", "FILE": str(file)}
    return [place.get(word, word) for word in example.command[2:]]


def written(example: Example, directory: Path, ending: str) -> Path:
    """Write the row twice as a file of this type; an evaluation needs two prompts."""
    import datasets

    rows = datasets.Dataset.from_list([example.row] * 2)
    file = directory / f"rows{ending}"
    if ending == ".parquet":
        rows.to_parquet(str(file))
    else:
        file.write_text(f"{json.dumps(example.row)}\n" * 2)
    return file


def source(data: DataConfig, flow: Dataflow | None = None) -> PromptSource:
    stage = None if flow is None else flow.source
    return PromptSource(
        data,
        TOKENIZER,
        seed=0,
        max_tokens=64,
        max_context=512,
        completions=(stage.completions, stage.group_size)
        if isinstance(stage, DatasetStage)
        else None,
        preferences=flow is not None and flow.reads(PREFERENCE),
        evaluated=flow is None,
    )


def score(reward: Reward, reply: str, prompt: Prompt) -> float:
    result: Any = reward.function(example_rollout(reply, metadata=dict(prompt.metadata)))
    return float(asyncio.run(result) if asyncio.iscoroutine(result) else result)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example(title: str, ending: str, tmp_path: Path) -> None:
    example, expected = EXAMPLES[title], EXPECTED[title]
    given = arguments(example, written(example, tmp_path, ending))
    if example.command[:2] == ["rlsys", "evaluate"]:
        config = parse(EvaluationConfig, full_options(given)).config
        (reward,) = map(named_reward, config.rewards)
        prompts = source(config.data)
        prompts.check_rewards([reward])
        prompt = prompts.at(0)
        assert prompt.text.endswith("\nassistant: ")
        assert [score(reward, reply, prompt) for reply in expected] == [1.0, 0.0]
        return
    recipe = importlib.import_module(example.command[1].removesuffix(".py").replace("/", "."))
    name = Path(example.command[1]).stem
    cfg = parse(recipe.Config, given).config
    prompt = source(cfg.data, getattr(recipe, name)(cfg)).at(0)
    texts = [TOKENIZER.decode(one.token_ids) for one in prompt.completions]
    assert (prompt.text, *texts) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "title", ["TRL: preference without a prompt", "TRL: prompt and completion as messages", "verl"]
)
def test_a_command_of_the_page(title: str, tmp_path: Path) -> None:
    """A dry run reads the model and every row, and prints the first prompt."""
    example = EXAMPLES[title]
    model = tmp_path / "model"
    build_tiny_model(model)
    TOKENIZER.save_pretrained(model)
    file = written(example, tmp_path, ".parquet")
    words = [str(model) if word == "runs/model" else word for word in arguments(example, file)]
    if example.command[1].startswith("recipes/"):
        words += ["--prompts-per-step", "1", "--runs-dir", str(tmp_path / "runs")]
    module, name = example.command[:2]
    program = ["-m", module, name] if module == "rlsys" else [name]
    found = subprocess.run(
        [sys.executable, *program, *words, "--dry-run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr
