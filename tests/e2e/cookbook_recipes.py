"""Recipes of tinker-cookbook against a server, in their own process.

    python cookbook_recipes.py URL KEY MODEL DIRECTORY

Runs the recipes with their default losses. Without a network, the data sets and the tokenizer are
replaced, and so are the rewards, which a model with random weights would never earn. Prints the
path of a checkpoint at the end.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

NAME = "tiny"
TARGET = "7"


def main(url: str, key: str, model: str, directory: Path) -> None:
    os.environ.update(TINKER_BASE_URL=url, TINKER_API_KEY=key)
    _replace_downloads(model)
    rl_loop(directory / "rl_loop")
    sl_loop(directory / "sl_loop")
    math_rl(directory / "math_rl", max_steps_off_policy=None)
    math_rl(directory / "math_rl_async", max_steps_off_policy=1)
    path = download(directory)
    print(path, flush=True)


def _replace_downloads(model: str) -> None:
    import datasets
    from tinker_cookbook import model_info, tokenizer_utils
    from transformers import AutoTokenizer

    tokenizer_utils.register_tokenizer(NAME, lambda: AutoTokenizer.from_pretrained(model))
    model_info.get_recommended_renderer_names = lambda name: ["role_colon"]

    def load_dataset(name: str, *options: Any, **named: Any) -> datasets.DatasetDict:
        rows = [_row(name, number) for number in range(8)]
        return datasets.DatasetDict(train=datasets.Dataset.from_list(rows))

    datasets.load_dataset = load_dataset


def _row(name: str, number: int) -> dict[str, Any]:
    if name == "openai/gsm8k":
        return {"question": f"What is {number}?", "answer": f"#### {number}"}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": str(number)}]
    return {"messages": messages}


def rl_loop(log_path: Path) -> None:
    from tinker_cookbook.recipes import rl_loop

    # Rewards differ within each group, so that each batch has advantages.
    rl_loop.get_reward = lambda response, answer: len(set(response)) / 8
    config = rl_loop.Config(
        log_path=str(log_path),
        model_name=NAME,
        batch_size=4,
        group_size=4,
        lora_rank=8,
        max_tokens=8,
        learning_rate=1e-3,
        save_every=1,
        max_steps=2,
    )
    assert config.loss_fn == "stable_reinforce"
    rl_loop.main(config)


def sl_loop(log_path: Path) -> None:
    from tinker_cookbook.recipes import sl_loop

    sl_loop.main(
        sl_loop.Config(
            log_path=str(log_path),
            model_name=NAME,
            batch_size=4,
            lora_rank=8,
            max_length=256,
            save_every=1,
        )
    )


def math_rl(log_path: Path, *, max_steps_off_policy: int | None) -> None:
    from tinker_cookbook.recipes.math_rl import arithmetic_env, train

    arithmetic_env.ArithmeticEnv.check_answer = lambda self, text: TARGET in text
    config = train.CLIConfig(
        model_name=NAME,
        log_path=str(log_path),
        groups_per_batch=4,
        group_size=4,
        lora_rank=8,
        max_tokens=8,
        eval_every=0,
        save_every=1,
        max_steps=2,
        max_steps_off_policy=max_steps_off_policy,
        behavior_if_log_dir_exists="delete",
    )
    assert config.loss_fn == "stable_reinforce"
    asyncio.run(train.cli_main(config))


def download(directory: Path) -> str:
    """Download the last checkpoint of rl_loop as the tutorials do."""
    from tinker_cookbook import checkpoint_utils, weights

    last = checkpoint_utils.get_last_checkpoint(str(directory / "rl_loop"))
    assert last is not None
    path: str = last.state_path
    weights.download(tinker_path=path, output_dir=str(directory / "adapter"))
    return path


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
