"""Published measurements, and their split into rows for fitting and rows for reporting.

    data/published.json.gz ─► rows ─► *_rows.py ─► Case | Skip

Each row has its source (repository, file, commit), and each table its caveats. A hash of the row's
group decides once whether a row may be used for fitting; all rows of a group go the same way.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlsys.common.safe_json import parse_json
from rlsys.planner.architecture import Architecture
from rlsys.planner.hardware import Cluster, Gpu, cluster_of, gpu_named
from rlsys.planner.model_config import architecture_from_config, named_model, plain_name
from rlsys.planner.profiles import Constants

DATA = Path(__file__).parent / "data/published.json.gz"
Row = Mapping[str, Any]

# Tables that are not scored, and why.
NOT_SCORED = {
    "seed_papers": "layout and workload are not stated",
    "ratios": "ratios of systems, not times",
    "areal_bailing": "layout and workload are not stated",
    "slime_sync": "GPUs are not stated",
    "verl_one_step": "number of GPUs is ambiguous in the source",
    "gpustack": "load is not stated",
    "zero_memory": "a formula, tested in tests/planner",
    "aiconfigurator_nccl": "collectives, tested in tests/planner",
    "apex_traces": "arrival times are needed: replay them in the simulator",
}


@dataclass(frozen=True)
class Case:
    """A row that can be predicted.

    Attributes:
        row: The published row.
        kind: dense, moe, decode, rl_step or memory.
        profile: Name of the software profile.
        measured: Measured value in seconds or bytes.
        predict: Returns the predicted value for some constants.
        baseline: Prediction of the naive model of this kind, up to one factor per GPU.
        note: Assumptions about what the row does not state.
    """

    row: Row
    kind: str
    profile: str
    measured: float
    predict: Callable[[Constants], float]
    baseline: float = 0.0
    note: str = ""

    @property
    def group(self) -> str:
        """Group of rows that are split together."""
        return str(self.row["group"])

    @property
    def for_fitting(self) -> bool:
        """Whether constants may be fitted on this row."""
        return is_for_fitting(self.group)


@dataclass(frozen=True)
class Skip:
    """A row that cannot be predicted, and the reason."""

    row: Row
    reason: str


def is_for_fitting(group: str) -> bool:
    """Return whether the hash of a group assigns it to the rows for fitting."""
    return hashlib.sha256(group.encode()).digest()[0] % 2 == 0


@lru_cache(maxsize=1)
def published() -> dict[str, Any]:
    """Return the file of published measurements."""
    content: dict[str, Any] = parse_json(gzip.decompress(DATA.read_bytes()))
    return content


def rows_of(kind: str) -> list[Row]:
    """Return the rows of a kind."""
    return [row for row in published()["rows"] if row["kind"] == kind]


def value_of(row: Row, metric: str) -> float | None:
    """Return a measured value, or None."""
    for one in row["measured"]:
        if one["metric"] == metric:
            return float(one["value"])
    return None


# Names in the tables that differ from those of rlsys/planner/data/models.json.
_MODELS = {
    "llama38b": "Llama-3-8B",
    "llama370b": "Llama-3-70B",
    "llama370b2node": "Llama-3-70B",
    "llama3405b": "Llama-3.1-405B",
    "llama3.18binstruct": "Llama-3.1-8B",
    "llama3bplaybook": "Llama-3.2-3B",
    "llama4maverick400b": "Llama-4-Maverick-17B-128E",
    "llama4scout109ba17b": "Llama-4-Scout-17B-16E",
    "grok1314b": "Grok-1",
    "qwen2.532b2node": "Qwen2.5-32B",
    "qwen3moe30b": "Qwen3-30B-A3B",
    "qwen330ba3btokendrop": "Qwen3-30B-A3B",
    "qwen330b3a": "Qwen3-30B-A3B",
    "qwen330ba3binstruct2507": "Qwen3-30B-A3B",
    "qwen330ba3bbase": "Qwen3-30B-A3B",
    "qwen34binstruct2507": "Qwen3-4B",
    "qwen3235b": "Qwen3-235B-A22B",
    "qwen3235ba22bfp8": "Qwen3-235B-A22B",
    "omtp": "DeepSeek-V3",
    "mtp": "DeepSeek-V3",
    "deepseekv3tokendrop": "DeepSeek-V3",
    "deepseekv3dropless": "DeepSeek-V3",
    "nemotron340b": "Nemotron-4-340B",
    "nemotron3nano": "Nemotron-3-Nano-30B-A3B",
    "nemotron35lightning": "Nemotron-3-Nano-30B-A3B",
    "nemotron3super": "Nemotron-3-Super-120B-A12B",
    "nemotron3ultra": "Nemotron-3-Ultra-550B-A55B",
    "nemotronv3super120b26.02": "Nemotron-3-Super-120B-A12B",
    "nemotronv3ultra550b26.04": "Nemotron-3-Ultra-550B-A55B",
    "mtnlg530b": "gpt:105:20480:128:51200",
    "gpt530b": "gpt:105:20480:128:51200",
    "gpt35b": "gpt:24:4096:32:51200",
    "gpt320b": "gpt:44:6144:48:51200",
    "gpt3175b": "gpt:96:12288:96:51200",
    "gpt175b": "gpt:96:12288:96:51200",
    "gpt20b": "gpt:44:6144:48:51200",
    "gpt6.7b": "gpt:32:4096:32:51200",
    "gpt1.3b": "gpt:24:2048:32:51200",
    "gpt350m": "gpt:24:1024:16:51200",
    "nemotron8b": "gpt:32:4096:32:256000",
    "nemotron22b": "gpt:40:6144:48:256000",
    "phi1.51.3b": "Phi-1.5",
    "tinyllama": "TinyLlama-1.1B",
    "stablelmbasealpha3b": "StableLM-Alpha-3B",
}


def gpt(layers: int, hidden: int, heads: int, vocab: int, positions: int = 2048) -> Architecture:
    """Return a GPT-2 shaped model."""
    config = {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "vocab_size": vocab,
        "n_positions": positions,
    }
    return architecture_from_config(config, name=f"gpt-{layers}x{hidden}")


@lru_cache(maxsize=512)
def model_named(name: str) -> Architecture:
    """Return the architecture of a model as the tables name it.

    Raises:
        InvalidValue: The model is unknown.
    """
    known = _MODELS.get(plain_name(name), name)
    if known.startswith("gpt:"):
        layers, hidden, heads, vocab = (int(part) for part in known.split(":")[1:])
        return gpt(layers, hidden, heads, vocab)
    return named_model(known)


def model_of(row: Row) -> Architecture:
    """Return the architecture of a row.

    Raises:
        InvalidValue: The model is unknown.
    """
    workload = row["workload"]
    if {"hidden", "layers", "heads"} <= workload.keys():
        return gpt(
            workload["layers"],
            workload["hidden"],
            workload["heads"],
            workload.get("vocab", 51200),
            workload.get("seq", 2048),
        )
    return model_named(str(row["model"]))


# Clusters whose links differ from the usual ones of their GPU, by table, in GB/s per GPU.
_NETWORKS = {"internevo": 6.25, "bigscience_176b": 6.25, "litgpt_a10g": 3.0}


def gpu_of(row: Row) -> Gpu:
    """Return the GPU of a row."""
    gpu = gpu_named(re.sub(r"\s*\(.*", "", str(row["gpu"])))
    network = _NETWORKS.get(row["table"])
    return replace(gpu, network=network) if network else gpu


def cluster_of_row(row: Row) -> Cluster:
    """Return the cluster of a row."""
    return cluster_of(gpu_of(row), int(row["num_gpus"]))
