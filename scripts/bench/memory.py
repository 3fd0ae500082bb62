"""Memory of a rank that trains, measured and estimated.

    python scripts/bench/memory.py [CASE ...]       # such as tp2, "bfloat16 dp2"
    python scripts/bench/train.py --only memory

A random model of 103M parameters on ranks of one thread each, for each case: precision,
recomputation, layout, head. They take an optimizer step on short rows, so that the moments are
there, then accumulate short rows once more, so that gradients are there, and full passes of rows
of 512 tokens. Measured is a process's own memory as scripts/bench/loading.py does it: the largest
RssAnon that this process reads every few milliseconds, of the rank with the most, less what that
rank had when it had imported everything and met the others. Estimated is what --dry-run prints.
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

# Before this folder, in which a script is called as the recipes are.
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
NUM_PASSES = 4  # of a pipeline of two stages


@dataclass(frozen=True, kw_only=True)
class Case:
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
        return TrainerConfig(layout=self.layout).parallel.num_ranks

    def config(self, path: Path) -> RunConfig:
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
    """By case: MB measured and estimated, and how far the estimate is off, as a part of what was
    measured.
    """
    hide_progress_bars()
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = build_random(Path(directory) / "model")
        for case in CASES:
            if cases and str(case) not in cases:
                continue
            estimated, peak = estimated_bytes(case, path), peak_bytes(case, path)
            told[str(case)] = {
                "measured_mb": peak // MB,
                "estimated_mb": estimated // MB,
                "off": round(estimated / peak - 1, 3),
            }
            print(case, told[str(case)], flush=True)
    return told


def build_random(directory: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **MODEL))
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory


def estimated_bytes(case: Case, path: Path) -> int:
    config = case.config(path)
    trained = TrainedRoleConfig(model=config.model, trainer=config.trainer)
    rank = estimate_rank(config, trained, model_shape(str(path), case.head), case.head)
    if rank.untold:
        raise RuntimeError(f"{case}: {rank.untold}")
    return rank.total


def peak_bytes(case: Case, path: Path) -> int:
    """Of the rank that takes the most, beyond what it had when everything was imported."""
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
    # Imported, not counted; torch's optimizers and checkpoints import its compiler.
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
    return MicroBatch(rows=[row(first, num_tokens) for first in range(count * NUM_ROWS)])


def row(first: int, num_tokens: int) -> TrainRow:
    """With what a critic learns from, too."""
    plain = supervised_row(list(range(first, first + num_tokens)), 1)
    returns = np.ones(num_tokens - 1, np.float32)
    return replace(plain, columns={**plain.columns, "returns": returns})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [str(case) for case in CASES]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: {', '.join(names)}")
    args = parser.parse_args()
    print(json.dumps(measure_memory(args.cases)))


if __name__ == "__main__":
    main()
