"""Compare measured and estimated memory of a training rank.

    python scripts/bench/memory.py [CASE ...]       # such as tp2, "bfloat16 dp2"
    python scripts/bench/train.py --only memory

A case is a precision, recomputation, layout and head. Ranks of one thread each train a random model
of 103M parameters: an optimizer step on short rows, to have the moments; short rows once more, to
have gradients; then full micro-batches of rows of 512 tokens. The measured value is the largest
RssAnon (scripts/bench/loading.py) of the rank with the most, minus its value after imports and
connection. The estimate is that of --dry-run.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Scripts of this folder have the names of recipes, so the checkout must come first.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from torch.multiprocessing.spawn import spawn

from rlsys.algorithms.aggregation import token_mean
from rlsys.algorithms.losses import clipped_surrogate
from rlsys.algorithms.values import value_loss
from rlsys.config import (
    Checkpointing,
    DataConfig,
    ModelConfig,
    Precision,
    RunConfig,
    SamplingConfig,
    TrainedRoleConfig,
    TrainerConfig,
)
from rlsys.dataflow.graph.stages import Head
from rlsys.engines.models.causal_lm import hide_progress_bars
from rlsys.engines.models.model_shape import model_shape
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.engines.training.ranks import init_process_group
from rlsys.engines.training.supervised import supervised_row
from rlsys.launcher.rank_estimate import estimate_rank
from rlsys.launcher.tiny_models import build_tokenizer
from rlsys.types import MicroBatch, TrainRow
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
NUM_PASSES = 4  # for a pipeline of two stages


@dataclass(frozen=True, kw_only=True)
class Case:
    """Precision, recomputation, layout and head."""

    dtype: Precision = "float32"
    how: Checkpointing = "none"
    layout: str = "dp1"
    head: Head = "logits"

    def __str__(self) -> str:
        parts = (self.dtype, self.how, self.layout, self.head)
        usual = ("float32", "none", "", "logits")
        return " ".join(part for part, plain in zip(parts, usual, strict=True) if part != plain)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return TrainerConfig(layout=self.layout).parallel.num_ranks

    def config(self, path: Path) -> RunConfig:
        """Return the trainer's configuration."""
        return RunConfig(
            model=ModelConfig(path=str(path), dtype=self.dtype, gradient_checkpointing=self.how),
            trainer=TrainerConfig(layout=self.layout, micro_batch_tokens=NUM_ROWS * ROW_TOKENS),
            data=DataConfig(max_prompt_tokens=1),
            sampling=SamplingConfig(max_tokens=ROW_TOKENS - 1),
        )


CASES = (
    Case(),
    Case(dtype="bfloat16"),
    Case(how="selective"),
    Case(how="full"),
    Case(layout="dp2"),
    Case(layout="dp2", dtype="bfloat16"),
    Case(layout="tp2"),
    Case(layout="cp2"),
    Case(layout="pp2"),
    Case(head="value"),
    Case(layout="dp2", head="value"),
)


def measure_memory(cases: list[str] | None = None) -> dict[str, Any]:
    """Return by case the measured and the estimated MB, and the relative error."""
    hide_progress_bars()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = build_random(Path(directory) / "model")
        for case in CASES:
            if cases and str(case) not in cases:
                continue
            estimated, peak = estimated_bytes(case, path), peak_bytes(case, path)
            results[str(case)] = {
                "measured_mb": peak // MB,
                "estimated_mb": estimated // MB,
                "off": round(estimated / peak - 1, 3),
            }
            print(case, results[str(case)], flush=True)
    return results


def build_random(directory: Path) -> Path:
    """Write the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **MODEL))
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory


def estimated_bytes(case: Case, path: Path) -> int:
    """Return the estimate of --dry-run."""
    config = case.config(path)
    trained = TrainedRoleConfig(model=config.model, trainer=config.trainer)
    rank = estimate_rank(config, trained, model_shape(str(path), case.head), case.head)
    if rank.unknown_reason:
        raise RuntimeError(f"{case}: {rank.unknown_reason}")
    return rank.total


def peak_bytes(case: Case, path: Path) -> int:
    """Return the peak of the rank that takes the most, beyond its memory after imports."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = spawn(train, (port, case, path), nprocs=case.num_ranks, join=False)
    peaks = [0] * case.num_ranks
    while not ranks.join(timeout=0.003):
        for rank, pid in enumerate(ranks.pids()):
            peaks[rank] = max(peaks[rank], anonymous_bytes(pid))
    before = [int((path / f"rank-{rank}").read_text()) for rank in range(case.num_ranks)]
    return max(peak - own for peak, own in zip(peaks, before, strict=True))


def train(rank: int, port: int, case: Case, path: Path) -> None:
    """Train on one rank."""
    # Imports do not count; torch's optimizers and checkpoints import its compiler.
    import torch._dynamo
    from transformers import Qwen3ForCausalLM, Qwen3ForSequenceClassification  # noqa: F401

    torch.set_num_threads(1)
    hide_progress_bars()
    config = case.config(path)
    if case.num_ranks > 1:
        init_process_group(rank, case.num_ranks, "127.0.0.1", port, "cpu", 600.0)
    (path / f"rank-{rank}").write_text(str(anonymous_bytes(os.getpid())))
    engine = FSDPEngine(
        model_path=path,
        trainer=config.trainer,
        model=config.model,
        loss=value_loss() if case.head == "value" else clipped_surrogate(0.2, 0.28),
        aggregation=token_mean,
        temperature=1.0,
        num_total_steps=2,
        seed=0,
        head=case.head,
        rank=rank,
        world_size=case.num_ranks,
    )
    engine.accumulate(passes(SHORT, 1))
    engine.optimizer_step()
    engine.accumulate(passes(SHORT, 1))
    engine.accumulate(passes(ROW_TOKENS, NUM_PASSES if config.trainer.parallel.pp > 1 else 1))
    engine.optimizer_step()
    engine.close()
    os._exit(0)


def passes(num_tokens: int, count: int) -> MicroBatch:
    """Return micro-batches."""
    return MicroBatch(rows=[row(first, num_tokens) for first in range(count * NUM_ROWS)])


def row(first: int, num_tokens: int) -> TrainRow:
    """Return a row, also with the columns of a critic."""
    plain = supervised_row(list(range(first, first + num_tokens)), 1)
    returns = np.ones(num_tokens - 1, np.float32)
    return replace(plain, columns={**plain.columns, "returns": returns})


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [str(case) for case in CASES]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: {', '.join(names)}")
    args = parser.parse_args()
    print(json.dumps(measure_memory(args.cases)))


if __name__ == "__main__":
    main()
