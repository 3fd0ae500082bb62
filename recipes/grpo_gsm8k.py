r"""Grade-school mathematics (GSM8K) with GRPO, on any Hugging Face model.

On a GPU, with vLLM:

    python recipes/grpo_gsm8k.py --model.path Qwen/Qwen3-0.6B --model.dtype bfloat16 \
        --rollout.engine vllm --rollout.num-gpus 1 --trainer.num-gpus 1 \
        --data.source openai/gsm8k --data.subset main

Without --data.source it trains on the few hundred problems of this repository. Without --model.path
it trains a tiny random model, which learns nothing but shows that everything runs, also on a CPU.
--rollout.engine selects the torch engine or vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import rlsys
from recipes.grpo import GRPOConfig, grpo
from rlsys import AsyncConfig, DataConfig, OwnModel, SamplingConfig, TrainerConfig
from rlsys.rewards import format_reward, numeric_answer

PROBLEMS = Path(__file__).parent / "data" / "gsm8k" / "train.jsonl"

INSTRUCTION = (
    "Solve the problem step by step. End with a line that holds four hashes and the final number, "
    "such as: #### 42"
)


@dataclass(frozen=True, kw_only=True)
class GSM8KConfig(GRPOConfig):
    """Settings for a model with less than two billion parameters on one or two GPUs."""

    format_weight: float = 0.1
    """Reward for an answer line in the requested format, right or wrong; a right number gives 1."""
    name: str = "gsm8k"
    """Name of the run's directory below runs_dir."""
    data: DataConfig = field(
        default_factory=lambda: DataConfig(
            source=str(PROBLEMS),
            prompt_column="question",
            system_prompt=INSTRUCTION,
            chat_template=True,
            max_prompt_tokens=1280,  # all of GSM8K fits, even byte by byte
        )
    )
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=512))
    asynchrony: AsyncConfig = field(default_factory=lambda: AsyncConfig(max_staleness=1))
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(learning_rate=1e-6))


@rlsys.main
def main() -> None:
    """Run the recipe."""
    parsed = rlsys.parse(GSM8KConfig)
    cfg = parsed.config
    rewards = [
        numeric_answer(),
        format_reward(r"####\s*-?[\d,.]+\s*$").weighted(cfg.format_weight),
    ]
    rlsys.launch(cfg, grpo(cfg, rewards), own_model=OwnModel(name="bytes"), dry_run=parsed.dry_run)


if __name__ == "__main__":
    main()
