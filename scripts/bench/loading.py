"""Measure the memory of ranks that load a model.

    python scripts/bench/loading.py     # the same as scripts/bench/train.py --only load

A process's own memory is the kernel's RssAnon: the memory that it allocated and wrote. Pages of
mapped files (checkpoint, libraries) do not count: they belong to the page cache, which processes
share and the kernel drops when memory is short. This process reads RssAnon of all ranks every few
milliseconds until their engines are created, and subtracts the value before loading, when the ranks
had imported everything and connected. The model is a critic, so no memory is needed for published
weights.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from rlsys.algorithms.aggregation import token_mean
from rlsys.algorithms.values import value_loss
from rlsys.config import ModelConfig, TrainerConfig
from rlsys.engines.models.causal_lm import hide_progress_bars
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.engines.training.ranks import init_process_group
from rlsys.launcher.tiny_models import build_tokenizer

LAYOUTS = ("dp4", "dp2tp2")
NUM_RANKS = 4
MODEL: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 64_000,
    "tie_word_embeddings": True,
}
MB = 1 << 20


def measure_loading() -> dict[str, Any]:
    """Return by layout the largest peak and the masters of a rank in MB, and the seconds.

    The seconds are those of the slowest rank.
    """
    hide_progress_bars()
    with tempfile.TemporaryDirectory() as directory:
        num_parameters = _build(Path(directory) / "model")
        reports = {}
        for layout in LAYOUTS:
            reports[layout] = _measure(layout, Path(directory))
            print(f"load {layout}", reports[layout], flush=True)
    shard_mb = 4 * num_parameters // NUM_RANKS // MB
    return {"parameters": num_parameters, "shard_mb": shard_mb, **reports}


def _build(path: Path) -> int:
    """Write a Qwen3 in bfloat16 that repeats the same random numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3", **MODEL)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    row = torch.randn(max(MODEL["hidden_size"], MODEL["intermediate_size"])).mul(0.02).bfloat16()
    numbers = {
        name: row[: x.shape[-1]].repeat(*x.shape[:-1], 1).view(x.shape)
        for name, x in model.named_parameters()
    }
    model.save_pretrained(path, state_dict=numbers, max_shard_size="500MB")
    build_tokenizer().save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def _measure(layout: str, directory: Path) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = spawn(_rank, (port, layout, directory), nprocs=NUM_RANKS, join=False)
    peaks = [0] * NUM_RANKS
    while not ranks.join(timeout=0.003):
        for rank, pid in enumerate(ranks.pids()):
            peaks[rank] = max(peaks[rank], anonymous_bytes(pid))
    reports = [
        json.loads((directory / f"{layout}-{rank}").read_text()) for rank in range(NUM_RANKS)
    ]
    beyond = [peak - before for peak, (before, _, _) in zip(peaks, reports, strict=True)]
    return {
        "peak_mb": max(beyond) // MB,
        "end_mb": max(end - before for before, end, _ in reports) // MB,
        "seconds": round(max(seconds for _, _, seconds in reports), 1),
    }


def anonymous_bytes(pid: int) -> int:
    """Return RssAnon of a process."""
    try:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:  # the process has just ended
        return 0
    return 1024 * int(found[1]) if found else 0


def _rank(rank: int, port: int, layout: str, directory: Path) -> None:
    # Imports do not count.
    from transformers import Qwen3ForCausalLM, Qwen3ForSequenceClassification  # noqa: F401

    torch.set_num_threads(1)
    hide_progress_bars()
    init_process_group(rank, NUM_RANKS, "127.0.0.1", port, "cpu", 600.0)
    before, start = anonymous_bytes(os.getpid()), time.monotonic()
    engine = FSDPEngine(
        model_path=directory / "model",
        trainer=TrainerConfig(layout=layout),
        model=ModelConfig(dtype="bfloat16"),
        loss=value_loss(),
        head="value",
        aggregation=token_mean,
        temperature=1.0,
        num_total_steps=1,
        seed=0,
        rank=rank,
        world_size=NUM_RANKS,
    )
    reports = (before, anonymous_bytes(os.getpid()), time.monotonic() - start)
    (directory / f"{layout}-{rank}").write_text(json.dumps(reports))
    engine.close()
    os._exit(0)


if __name__ == "__main__":
    argparse.ArgumentParser(description="Measure memory while loading.").parse_args()
    print(json.dumps(measure_loading()))
