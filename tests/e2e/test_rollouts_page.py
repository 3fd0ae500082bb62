"""The commands of docs/rollouts.md run, with small sizes."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.runs.observe.metrics_file import read_metrics
from tests.e2e.job import PATIENCE_S, ROOT, SMALL_QUICKSTART, run
from tests.engines.vllm_harness import build_variant

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * PATIENCE_S),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

SIZES = {
    "scripts/bench/speculation.py": "--concurrent 1 2 --tokens 16 --repeats 1",
    "scripts/bench/quantised_rollouts.py": "--sequences 2 --tokens 8",
    "scripts/bench/preemptions.py": "--seeds 1 --completions 40",
    "recipes/quickstart.py": shlex.join(SMALL_QUICKSTART),
    "recipes/sums_in_words.py": "--prompts-per-step 2 --group-size 2 --num-steps 2 "
    "--rollout.kv-cache-gib 0.1 --evaluation.every 0 --sampling.max-tokens 8 "
    "--data.max-prompt-tokens 100",
}


def commands() -> list[list[str]]:
    """Return the page's commands, without those that need servers (test_servers.py)."""
    found = []
    page = (ROOT / "docs" / "rollouts.md").read_text()
    for block in re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if "rollout.urls" not in block:
            lines = block.replace("\\\n", " ").splitlines()
            found += [shlex.split(line) for line in lines if line.startswith("python ")]
    return found


COMMANDS = commands()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return models by the names that the page gives them."""
    root = tmp_path_factory.mktemp("models")
    dense = str(build_tiny_model(root / "dense"))
    experts = build_variant(
        root / "experts",
        0,
        model_type="qwen3_moe",
        tied=False,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )
    return {"MODEL": dense, "MODEL_DIR": dense, "MOE_DIRECTORY": str(experts)}


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[1:])[:80])
def test_a_command_runs(command: list[str], models: dict[str, str], tmp_path: Path) -> None:
    _, script, *options = [models.get(word, word) for word in command]
    if script == "-m":
        subprocess.run([sys.executable, "-m", *options], cwd=ROOT, check=True)
        return
    options += shlex.split(SIZES[script])
    if script.startswith("recipes/"):
        options += ["--runs-dir", str(tmp_path / "runs")]
    job = run(script, options, tmp_path)
    assert job.returncode == 0, job.output
    for metrics in (tmp_path / "runs").glob("*/metrics.jsonl"):
        assert len(read_metrics(metrics)) >= 2
