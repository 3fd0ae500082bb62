"""Unmodified recipes of tinker-cookbook against a real server.

The package brings many others, so it is not among the requirements of development. Install it into
a folder of its own, and name that folder:

    pip install --target /tmp/cookbook --no-deps tinker-cookbook chz blobfile pyrage termcolor \\
        tml-renderers pylatexenc lxml pycryptodomex
    TINKER_COOKBOOK_SITE=/tmp/cookbook pytest tests/e2e/test_cookbook.py
"""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.environment_primitives import KEY, serving

pytestmark = pytest.mark.slow

SITE = os.environ.get("TINKER_COOKBOOK_SITE", "")
ROOT = Path(__file__).parents[2]
RECIPES = Path(__file__).with_name("cookbook_recipes.py")
LIMIT_S = 900.0


def metrics(directory: Path) -> list[dict[str, float]]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.skipif(not SITE, reason="TINKER_COOKBOOK_SITE names no folder with tinker-cookbook")
def test_recipes_run_with_their_default_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    from rlsys.launcher.tiny_models import build_tiny_model

    model = build_tiny_model(
        tmp_path / "model",
        characters=string.ascii_letters + string.digits + string.punctuation + " \n",
        width=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        mlp_width=128,
    )
    # The server needs it too: it encrypts downloads with pyrage.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), SITE)))
    with serving(model, tmp_path, "--max-models", "5") as url:
        found = subprocess.run(
            [sys.executable, str(RECIPES), url, KEY, str(model), str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert found.returncode == 0, found.stderr[-4000:]
    for name in ("rl_loop", "sl_loop", "math_rl", "math_rl_async"):
        norms = [one["grad_norm"] for one in metrics(tmp_path / name) if "grad_norm" in one]
        assert len(norms) == 2, name
        assert min(norms) > 0, name
    # On-policy, the sampler and the trainer are one policy.
    first = metrics(tmp_path / "math_rl")[0]
    assert abs(first["optim/kl_sample_train_v1"]) < 1e-5
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(float(one.abs().max()) > 0 for name, one in adapter.items() if "lora_B" in name)
