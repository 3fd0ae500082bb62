"""Whole runs on one GPU: the quickstart, its trainer and replica on shares of the same device.

    python -m scripts.gpu.runs [--device cpu --small]

Separate and colocated placement, staleness 0 and 1. Each line states the steps, the reward, the
seconds per step, and whether `rlsys audit` accepts the run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.gpu.records import Settings, measured, parse_settings

ROOT = Path(__file__).resolve().parents[2]
CASES = (("separate", 1), ("colocated", 0), ("separate", 0), ("colocated", 1))
TIMEOUT_S = 150.0


def main() -> None:
    """Measure and print result lines."""
    settings = parse_settings(__doc__)
    for placement, staleness in CASES[:1] if settings.small else CASES:
        if settings.cases and f"{placement}-{staleness}" not in settings.cases:
            continue
        with (
            tempfile.TemporaryDirectory() as runs_dir,
            measured(kind="run", placement=placement, max_staleness=staleness) as values,
        ):
            run(placement, staleness, Path(runs_dir), settings, values)


def options(placement: str, staleness: int, settings: Settings) -> list[str]:
    """Return the options of a run."""
    chosen = [
        f"--placement={placement}",
        f"--asynchrony.max-staleness={staleness}",
        f"--num-steps={2 if settings.small else 15}",
        f"--warm-start-steps={2 if settings.small else 100}",
    ]
    if settings.small:
        chosen += ["--prompts-per-step=4", "--group-size=2"]
    if settings.on_gpu:
        # Two actors that take turns share a whole device; others take a half each.
        share = 1 if placement == "colocated" else 0.5
        chosen += [f"--trainer.num-gpus={share}", f"--rollout.num-gpus={share}"]
    return chosen


def run(
    placement: str, staleness: int, runs_dir: Path, settings: Settings, values: dict[str, Any]
) -> None:
    """Run the quickstart, audit it and fill in its result line."""
    name = f"gpu-{placement}-{staleness}"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [
        *(sys.executable, str(ROOT / "recipes" / "quickstart.py"), f"--name={name}"),
        *(f"--runs-dir={runs_dir}", *options(placement, staleness, settings)),
    ]
    start = time.perf_counter()
    done = subprocess.run(
        command,
        env=environment,
        cwd=runs_dir,
        timeout=TIMEOUT_S,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    values["seconds"] = round(time.perf_counter() - start, 1)
    print(done.stdout[-6000:], flush=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-300:]}")
    lines = [
        json.loads(line) for line in (runs_dir / name / "metrics.jsonl").read_text().splitlines()
    ]
    values |= {
        "steps": len(lines),
        "step_s": round(statistics.median(line["time/step_s"] for line in lines), 3),
        "reward_first": round(lines[0]["reward/mean"], 3),
        "reward_last": round(lines[-1]["reward/mean"], 3),
        "kl_sampler_trainer": max(abs(line["kl/sampler_trainer"]) for line in lines),
    }
    syncs = [line["time/weight_sync_s"] for line in lines if "time/weight_sync_s" in line]
    values["weight_sync_s"] = round(statistics.median(syncs), 4) if syncs else None
    audit = subprocess.run(
        [sys.executable, "-m", "rlsys", "audit", str(runs_dir / name)],
        env=environment,
        timeout=60,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    values["audit"] = "clean" if audit.returncode == 0 else audit.stdout[-300:]
    if audit.returncode:
        raise RuntimeError(f"rlsys audit found faults: {audit.stdout[-300:]}")


if __name__ == "__main__":
    main()
