"""Resample measured kernel latencies into the small tables of rlsys/planner/data.

    pip install --no-deps --target /tmp/tables aiconfigurator-core==0.12.*
    PYTHONPATH=.:/tmp/tables python scripts/plan/distill_kernels.py

    parquet files of aiconfigurator-core ─► log(latency / roofline) on a coarse grid ─► float16 npz

The package has one row per measured kernel: GEMM by (m, n, k), attention by batch, length and
heads, experts by tokens and shapes, collectives by bytes. The logarithm of latency over roofline
varies slowly, so a coarse grid and linear interpolation keep it within a few percent. Axes are log2
of the sizes. Missing cells take the value of the nearest measured cell. rlsys/planner/data/NOTICE
names the source and its license.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.planner.hardware import GPUS, Gpu
from rlsys.planner.roofline import gemm_roofline

DATA = Path(__file__).resolve().parents[2] / "rlsys/planner/data"
SYSTEMS = {
    "A100": ("a100_sxm", "0.14.0"),
    "H100": ("h100_sxm", "0.24.0"),
    "H200": ("h200_sxm", "0.24.0"),
    "B200": ("b200_sxm", "0.24.0"),
    "GB200": ("gb200", "0.24.0"),
    "L40S": ("l40s", "0.24.0"),
}
NCCL = {"A100": "2.27.3", "H100": "2.27.3", "H200": "2.29.2", "B200": "2.27.3", "L40S": "2.27.3"}
ALL_REDUCE = {"L40S": "0.22.0"}

M = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16384)
N = (128, 256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192, 10240, 12288, 16384, 51200)
WIDTHS = (64, 128, 256)
LENGTHS = tuple(2**power for power in range(4, 15))
CONTEXTS = tuple(2**power for power in range(6, 18))
UNITS = tuple(2**power for power in range(0, 15, 2))
EXPERT_ROWS = tuple(2.0**power for power in range(-6, 13))
LOCAL_EXPERTS = (1, 4, 16, 32, 64, 128, 256)
EXPERT_WEIGHTS = tuple(2**power for power in range(18, 29, 2))
MESSAGES = tuple(2**power for power in range(10, 30))
DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "fp4"}
BYTES = {"bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "fp4": 0.5625}

Cell = tuple[int, ...]


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a parquet file, or none if it does not exist."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = import_module("pyarrow.parquet").read_table(path).to_pylist()
    return rows


def nearest(axis: Sequence[float], value: float) -> int:
    """Return the index of the nearest point of an axis, by ratio."""
    return int(np.argmin(np.abs(np.log2(axis) - np.log2(max(value, 1e-9)))))


def grid(
    samples: Iterable[tuple[Sequence[float], float]], axes: Sequence[Sequence[float]]
) -> np.ndarray:
    """Return the median of samples at their nearest grid point; empty cells take the nearest's."""
    cells: dict[Cell, list[float]] = defaultdict(list)
    for point, value in samples:
        cells[tuple(nearest(axis, at) for axis, at in zip(axes, point, strict=True))].append(value)
    filled = np.array(sorted(cells))
    values = np.array([np.median(cells[tuple(cell)]) for cell in filled.tolist()])
    result = np.empty([len(axis) for axis in axes])
    scaled = [np.log2(np.asarray(axis, float)) for axis in axes]
    known = np.stack([scaled[d][filled[:, d]] for d in range(len(axes))], axis=1)
    for cell in np.ndindex(*result.shape):
        at = np.array([scaled[d][cell[d]] for d in range(len(axes))])
        distance = np.abs(known - at).sum(axis=1)
        result[cell] = values[distance <= distance.min() + 1e-6].mean()
    return result


def only_on_grid(
    rows: Iterable[Mapping[str, Any]], on: Callable[[Mapping[str, Any]], bool]
) -> list[Mapping[str, Any]]:
    """Return the rows whose sizes are grid points, or all rows if there are few of them."""
    rows = list(rows)
    kept = [row for row in rows if on(row)]
    return kept if len(kept) >= 200 else rows


def gemm_tables(rows: list[dict[str, Any]], gpu: Gpu) -> dict[str, np.ndarray]:
    """Return log(latency / roofline) by (m, n, k) for each precision."""
    tables = {}
    for source, dtype in DTYPES.items():
        mine = [row for row in rows if row["gemm_dtype"] == source]
        if not mine:
            continue
        chosen = only_on_grid(mine, lambda row: row["m"] in M and row["n"] in N and row["k"] in N)
        best: dict[tuple[int, int, int], float] = {}
        for row in chosen:
            cell = (row["m"], row["n"], row["k"])
            best[cell] = min(best.get(cell, np.inf), row["latency"])
        precision = dtype.removesuffix("_block")
        samples = [
            (
                (m, n, k),
                np.log(latency / 1e3 / gemm_roofline(gpu, m, n, k, precision, BYTES[dtype])),
            )
            for (m, n, k), latency in best.items()
        ]
        tables[f"gemm_{dtype}"] = grid(samples, (M, N, N))
    return tables


def fastest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fastest row of each shape, of all engines."""
    names = (
        "batch_size",
        "isl",
        "step",
        "num_heads",
        "num_key_value_heads",
        "head_dim",
        "attn_dtype",
        "kv_cache_dtype",
        "window_size",
    )
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        shape = tuple(row.get(name) or 0 for name in names)
        if shape not in best or row["latency"] < best[shape]["latency"]:
            best[shape] = row
    return list(best.values())


def prefill_table(rows: list[dict[str, Any]], gpu: Gpu) -> dict[str, np.ndarray]:
    """Return log(latency / time at peak) of causal attention by (width, length, batch x heads)."""
    samples = []
    for row in rows:
        if row["attn_dtype"] != "bfloat16" or row["kv_cache_dtype"] != "bfloat16":
            continue
        if row.get("window_size") or row["head_dim"] not in WIDTHS:
            continue
        length, units = row["isl"], row["batch_size"] * row["num_heads"]
        flops = 2 * units * length * length * row["head_dim"]
        samples.append(
            (
                (row["head_dim"], length, units),
                np.log(row["latency"] / 1e3 / (flops / gpu.peak("bf16"))),
            )
        )
    return {"prefill": grid(samples, (WIDTHS, LENGTHS, UNITS))} if samples else {}


def decode_table(rows: list[dict[str, Any]], gpu: Gpu) -> dict[str, np.ndarray]:
    """Return log(latency / time of the KV bytes) by (width, context, batch x KV heads)."""
    tables = {}
    for source, dtype in (("bfloat16", "bf16"), ("fp8", "fp8")):
        samples = []
        for row in rows:
            if row["kv_cache_dtype"] != source or row["head_dim"] not in WIDTHS:
                continue
            if row.get("window_size"):
                continue
            context = row["step"] + 1
            kv_heads = row["num_key_value_heads"] or row["num_heads"]
            units = row["batch_size"] * kv_heads
            num_bytes = 2 * units * context * row["head_dim"] * BYTES[dtype]
            seconds = num_bytes / (gpu.bandwidth * 1e12)
            samples.append(
                ((row["head_dim"], context, units), np.log(row["latency"] / 1e3 / seconds))
            )
        if samples:
            tables[f"decode_{dtype}"] = grid(samples, (WIDTHS, CONTEXTS, UNITS))
    return tables


def expert_tables(rows: list[dict[str, Any]], gpu: Gpu) -> dict[str, np.ndarray]:
    """Return log(latency / roofline) of experts by (rows and number of local experts, weights).

    The roofline counts products at the peak, and the weights of the experts that rows reach.
    """
    tables = {}
    for source, dtype in {**DTYPES, "w4a16_mxfp4": "w4", "int4_wo": "w4"}.items():
        size = BYTES.get(dtype, 0.53)
        best: dict[tuple[float, ...], dict[tuple[Any, ...], float]] = defaultdict(dict)
        samples: list[tuple[tuple[float, ...], float]] = []
        for row in rows:
            if row["moe_dtype"] != source:
                continue
            local = max(row["num_experts"] // row["moe_ep_size"], 1)
            weights = 3 * row["hidden_size"] * row["inter_size"] / row["moe_tp_size"]
            routed = row["num_tokens"] * row["topk"] / row["moe_ep_size"]
            reached = local * (1 - np.exp(-routed / local))
            precision = dtype.removesuffix("_block") if dtype != "w4" else "bf16"
            seconds = max(
                2 * routed * weights / gpu.peak(precision),
                reached * weights * size / (gpu.bandwidth * 1e12),
            )
            key = (routed / local, local, weights)
            shape = (row["num_tokens"], row["topk"], row["num_experts"], row["distribution"])
            value = np.log(row["latency"] / 1e3 / seconds)
            old = best[key].get(shape, np.inf)
            best[key][shape] = min(old, value)
        for at, values in best.items():
            samples.extend((at, value) for value in values.values())
        if samples and f"experts_{dtype}" not in tables:
            tables[f"experts_{dtype}"] = grid(samples, (EXPERT_ROWS, LOCAL_EXPERTS, EXPERT_WEIGHTS))
    return tables


def collective_tables(
    nccl: list[dict[str, Any]], custom: list[dict[str, Any]]
) -> dict[str, np.ndarray]:
    """Return log(microseconds) of collectives by (ranks, bytes)."""
    tables = {}
    for operation in ("all_gather", "reduce_scatter", "all_reduce", "alltoall"):
        samples = [
            ((row["num_gpus"], 2 * row["message_size"]), np.log(row["latency"] * 1e3))
            for row in nccl
            if row["op_name"] == operation and row["nccl_dtype"] == "half"
        ]
        if samples:
            tables[f"nccl_{operation}"] = grid(samples, ((2, 4, 8), MESSAGES))
    samples = [
        ((row["num_gpus"], 2 * row["message_size"]), np.log(row["latency"] * 1e3))
        for row in custom
        if "graph" in row["kernel_source"]
    ]
    if samples:
        tables["engine_all_reduce"] = grid(samples, ((2, 4, 8), MESSAGES))
    return tables


def engines(folder: Path, name: str) -> list[Path]:
    """Return the newest file of each engine.

    A cell takes the fastest kernel of all engines: some collectors timed launches of the host,
    which CUDA graphs hide.
    """
    found: list[Path] = []
    for engine in ("vllm", "sglang", "trtllm"):
        versions = sorted(path.parent for path in (folder / engine).glob(f"*/{name}.parquet"))
        found.extend(one / f"{name}.parquet" for one in versions[-1:])
    return found


def distill(systems: Path, name: str) -> dict[str, np.ndarray]:
    """Return all tables of one GPU."""
    folder, version = SYSTEMS[name]
    base, gpu = systems / "data" / folder, GPUS[name]
    prompts = [
        row for path in engines(base / "attention", "context_attention_perf") for row in read(path)
    ]
    steps = [
        row
        for path in engines(base / "attention", "generation_attention_perf")
        for row in read(path)
    ]
    custom = base / "comm/vllm" / ALL_REDUCE.get(name, version) / "custom_allreduce_perf.parquet"
    nccl = base / "comm/nccl" / NCCL.get(name, "2.23") / "nccl_perf.parquet"
    gemms = [row for path in engines(base / "gemm", "gemm_perf") for row in read(path)]
    experts = [row for path in engines(base / "moe", "moe_perf") for row in read(path)]
    return {
        **gemm_tables(gemms, gpu),
        **prefill_table(fastest(prompts), gpu),
        **decode_table(fastest(steps), gpu),
        **expert_tables(experts, gpu),
        **collective_tables(read(nccl), read(custom)),
    }


AXES = {
    "axis_m": M,
    "axis_n": N,
    "axis_width": WIDTHS,
    "axis_length": LENGTHS,
    "axis_context": CONTEXTS,
    "axis_units": UNITS,
    "axis_expert_rows": EXPERT_ROWS,
    "axis_experts": LOCAL_EXPERTS,
    "axis_expert_weights": EXPERT_WEIGHTS,
    "axis_ranks": (2, 4, 8),
    "axis_message": MESSAGES,
}


def main() -> None:
    """Write one npz per GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gpus", nargs="*", help=f"of {', '.join(SYSTEMS)}")
    arguments = parser.parse_args()
    spec = find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        raise SystemExit("aiconfigurator-core is not installed; see the first lines of this file")
    systems = Path(spec.origin).parent / "systems"
    for name in arguments.gpus or SYSTEMS:
        tables: dict[str, Any] = {
            key: value.astype(np.float16) for key, value in distill(systems, name).items()
        }
        axes: dict[str, Any] = {key: np.asarray(value, float) for key, value in AXES.items()}
        path = DATA / f"kernels_{name}.npz"
        np.savez_compressed(path, **axes, **tables)
        print(path.name, path.stat().st_size, *sorted(tables), flush=True)


if __name__ == "__main__":
    main()
