"""Memory of a rank that trains, measured and estimated.

    python scripts/bench/memory.py [DTYPE ...]
    python scripts/bench/train.py --only memory

A random model of 103M parameters in a process of its own, for each precision. It takes an optimizer
step on one short row, so that the moments are there, and then accumulates another short row, so
that gradients are there, and a full pass of rows of 512 tokens. Measured is the process's own
memory as scripts/bench/loading.py does it: the largest RssAnon that this process reads every few
milliseconds, less what it was when everything was imported. Estimated is what --dry-run prints.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

# Before this folder, in which a script is called as the recipes are.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from rlsys.algorithms.aggregation import token_mean
from rlsys.algorithms.losses import clipped_surrogate
from rlsys.config import (
    Checkpointing,
    DataConfig,
    ModelConfig,
    Precision,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
)
from rlsys.engines.causal_lm import hide_progress_bars
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.engines.training.supervised import supervised_row
from rlsys.estimate import estimate_activations, estimate_memory, model_shape
from rlsys.tiny_models import build_tokenizer
from rlsys.types import MicroBatch
from scripts.bench.loading import MB, anonymous_bytes

MODEL: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "vocab_size": 32_000,
    "tie_word_embeddings": True,
}
NUM_ROWS, ROW_TOKENS, SHORT = 2, 512, 16
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
CASES: tuple[tuple[Precision, Checkpointing], ...] = (
    *((dtype, "none") for dtype in PRECISIONS),
    ("float32", "selective"),
    ("float32", "full"),
)


def measure_memory(dtypes: list[str] | None = None) -> dict[str, Any]:
    """By precision and recomputation: MB measured and estimated, and how far the estimate is off,
    as a part of what was measured."""
    hide_progress_bars()
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = build_random(Path(directory))
        for dtype, how in CASES:
            if dtypes and dtype not in dtypes:
                continue
            config = config_of(path, dtype, how)
            estimated, peak = estimated_bytes(config), peak_bytes(path, dtype, how)
            told[f"{dtype} {how}"] = {
                "measured_mb": peak // MB,
                "estimated_mb": estimated // MB,
                "off": round(estimated / peak - 1, 3),
            }
            print(dtype, how, told[f"{dtype} {how}"], flush=True)
    return told


def build_random(directory: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **MODEL))
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory


def config_of(path: Path, dtype: Precision, how: Checkpointing) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path=str(path), dtype=dtype, gradient_checkpointing=how),
        trainer=TrainerConfig(micro_batch_tokens=NUM_ROWS * ROW_TOKENS),
        data=DataConfig(max_prompt_tokens=1),
        sampling=SamplingConfig(max_tokens=ROW_TOKENS - 1),
    )


def estimated_bytes(config: RunConfig) -> int:
    shape = model_shape(config.model.path)
    activations = estimate_activations(config, shape)
    return estimate_memory(config, shape, activation_bytes=activations).trainer_rank.total


def peak_bytes(path: Path, dtype: str, how: str) -> int:
    """Of a process that trains, beyond what it had when everything was imported."""
    command = [sys.executable, __file__, "--train", str(path), dtype, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        before = int(rank.stdout.readline())
        peak = 0
        while rank.poll() is None:
            peak = max(peak, anonymous_bytes(rank.pid))
            time.sleep(0.003)
    if rank.returncode:
        raise RuntimeError(f"the rank ended with {rank.returncode}; its message stands above.")
    return peak - before


def train(path: Path, dtype: Precision, how: Checkpointing) -> None:
    from transformers import Qwen3ForCausalLM  # noqa: F401  # imported, not counted

    torch.set_num_threads(1)
    hide_progress_bars()
    config = config_of(path, dtype, how)
    print(anonymous_bytes(os.getpid()), flush=True)
    engine = FSDPEngine(
        model_path=path,
        trainer=config.trainer,
        model=config.model,
        loss=clipped_surrogate(0.2, 0.28),
        aggregation=token_mean,
        temperature=1.0,
        num_total_steps=2,
        seed=0,
    )
    short = MicroBatch(rows=[supervised_row(list(range(SHORT)), 1)])
    engine.accumulate(short)
    engine.optimizer_step()
    engine.accumulate(short)
    rows = [supervised_row(list(range(k, k + ROW_TOKENS)), 1) for k in range(NUM_ROWS)]
    engine.accumulate(MicroBatch(rows=rows))
    engine.optimizer_step()
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dtypes", nargs="*", help="default: all")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        path, dtype, how = args.train
        assert dtype in get_args(Precision)
        train(Path(path), dtype, how)
    else:
        print(json.dumps(measure_memory(args.dtypes)))


if __name__ == "__main__":
    main()
