r"""Predict the training steps that scripts/gpu/check.py measured, and compare.

    python -m scripts.plan.own_gpu docs/gpu/h200-2026-11-27.jsonl

Rows of separate prompts are predicted without calibration, as one rank that packs rows of 2,048
tokens. Prints a table and one line of JSON: the median absolute error and the share of pairs of one
shape whose order is right, of those more than 5 % apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.planner.hardware import Cluster, parse_cluster
from rlsys.planner.model_config import named_model
from rlsys.planner.plan_report import aligned
from rlsys.planner.plans import TrainingPlan
from rlsys.planner.training_time import train_step_time

MODELS = {name: f"Qwen/Qwen3-{name.upper()}" for name in ("0.6b", "1.7b", "4b", "8b")}
ROW_TOKENS, PACKS_PER_STEP = 2048, 2  # as scripts/gpu/training.py makes them
APART = 0.05


def main() -> None:
    """Print the table and the line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="results.jsonl of check.py")
    parser.add_argument("--cluster", default="H200", help="the GPU that measured")
    args = parser.parse_args()
    rows = [row for path in args.results for row in training_rows(path)]
    cluster = parse_cluster(args.cluster)
    seconds = [predicted_s(row, cluster) for row in rows]
    table = [("shape", "tokens", "recompute", "measured s", "predicted s", "off")]
    for row, time_s in zip(rows, seconds, strict=True):
        off = f"{time_s / row['step_s'] - 1:+.1%}"
        table.append(
            (
                *(row["shape"], str(row["tokens"]), row["recompute"]),
                *(f"{row['step_s']:.2f}", f"{time_s:.2f}", off),
            )
        )
    print("\n".join(aligned(table)))
    print(dump_json(summary(rows, seconds)))


def training_rows(path: Path) -> list[dict[str, Any]]:
    """Return the measured steps with separate prompts."""
    rows = [parse_json(line) for line in path.read_text().splitlines()]
    return [
        row
        for row in rows
        if row.get("kind") == "train" and row["rows"] == "separate" and row["shape"] in MODELS
    ]


def predicted_s(row: dict[str, Any], cluster: Cluster) -> float:
    """Return the predicted seconds of a step."""
    plan = TrainingPlan(
        row_tokens=row["tokens"],
        attended_tokens=ROW_TOKENS,
        micro_batches=PACKS_PER_STEP,
        recompute=row["recompute"],
    )
    return train_step_time(named_model(MODELS[row["shape"]]), cluster, plan).seconds


def summary(rows: Sequence[dict[str, Any]], seconds: Sequence[float]) -> dict[str, float]:
    """Return the numbers of the line of JSON."""
    errors = [abs(time_s / row["step_s"] - 1) for row, time_s in zip(rows, seconds, strict=True)]
    right = [
        (one["step_s"] < two["step_s"]) == (time_one < time_two)
        for (one, time_one), (two, time_two) in combinations(zip(rows, seconds, strict=True), 2)
        if one["shape"] == two["shape"]
        and abs(one["step_s"] / two["step_s"] - 1) > APART
        and one["tokens"] == two["tokens"]
    ]
    return {
        "rows": float(len(rows)),
        "median_error": round(median(errors), 4),
        "pairs": float(len(right)),
        "order_right": round(sum(right) / len(right), 4) if right else 1.0,
    }


if __name__ == "__main__":
    main()
