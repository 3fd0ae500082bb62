"""The loss on held-out completions: its graphs and its value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.dpo import DPOConfig, dpo
from recipes.grpo import GRPOConfig, grpo
from recipes.reward_model import RewardModelConfig, reward_model
from recipes.sft import SFTConfig, sft
from rlsys.config import DataConfig, ModelConfig, RunConfig, SamplingConfig
from rlsys.evaluation.held_out import evaluation_config
from rlsys.evaluation.held_out_loss import held_out_loss, train_rows
from rlsys.launcher.tiny_models import build_tiny_model
from tests.errors import invalid

ROWS = [
    {"prompt": "1+1=", "completion": "2"},
    {"prompt": "9+9=", "completion": "18"},
    {"prompt": "7+1=", "completion": "8"},
]
SIZES: dict[str, Any] = {
    "data": DataConfig(max_prompt_tokens=16),
    "sampling": SamplingConfig(max_tokens=4),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loss") / "model"
    return build_tiny_model(path, characters="0123456789+=", width=16, num_layers=1, max_context=64)


def test_it_exists_for_losses_that_only_read_the_dataset() -> None:
    run = RunConfig()
    assert held_out_loss(run, sft(SFTConfig())) is not None
    assert held_out_loss(run, reward_model(RewardModelConfig())) is not None
    assert held_out_loss(run, dpo(DPOConfig())) is None  # reads what a reference says
    assert held_out_loss(run, grpo(GRPOConfig(), [len])) is None


def test_it_is_the_mean_over_the_tokens_of_completions(model: Path) -> None:
    """The reference computes -log p of the 7 completion tokens with transformers alone."""
    tokenizer, network = (
        AutoTokenizer.from_pretrained(model),
        AutoModelForCausalLM.from_pretrained(model),
    )
    losses = []
    for row in ROWS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        tokens = [*prompt, *tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = network(torch.tensor([tokens])).logits[0].log_softmax(-1)
        losses += [-logprobs[i - 1, tokens[i]].item() for i in range(len(prompt), len(tokens))]
    assert len(losses) == 7

    cfg = SFTConfig(model=ModelConfig(path=str(model)), **SIZES)
    asked = held_out_loss(cfg, sft(cfg, rows=ROWS))
    assert asked is not None
    passes: list[int] = []
    found = asked.metrics(
        evaluation_config(cfg, model), rows=ROWS, on_pass=lambda: passes.append(1)
    )
    assert found["eval/loss"] == pytest.approx(sum(losses) / 7, abs=1e-5)
    assert (found["eval/prompts"], len(passes)) == (3, 1)
    assert 0 < found["eval/entropy"] <= 2.8


def test_rows_of_pairs_have_their_preference() -> None:
    rows = [{"prompt": "1+1=", "completions": ["2", "13"]}] * 2
    cfg = RewardModelConfig(model=ModelConfig(path="m"), **SIZES)
    asked = held_out_loss(cfg, reward_model(cfg, rows=rows))
    assert asked is not None
    assert asked.completions == ("completions", 2)


def test_a_row_without_a_completion_is_refused(model: Path) -> None:
    cfg = SFTConfig(model=ModelConfig(path=str(model)), **SIZES)
    loss = held_out_loss(cfg, sft(cfg, rows=ROWS))
    assert loss is not None
    with invalid("flow.dataset: completions", "completion"):
        loss.prompts(
            evaluation_config(cfg, model),
            AutoTokenizer.from_pretrained(model),
            [{"prompt": "1+1="}] * 2,
        )
    assert train_rows([]) == []
