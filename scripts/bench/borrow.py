"""Measure a run with and without borrowed replicas on this machine.

    python scripts/bench/borrow.py [--pairs 3] [--num-steps 20] [-- OPTIONS of the recipe]

Trains recipes/quickstart.py with two trainer ranks and two replicas, alternately with
`--rollout.borrow 0` and `2`, at staleness 0. Replicas sample few completions at a time, so that the
trainer waits for them.

Prints a line for each run and one line of JSON: `step_ratio` is the median over all pairs of the
step's time with lending over that without it, `equal` whether both have the same numbers in each
step, `audit_errors` the faults that the audit has found. The first steps, before the first
hand-over, do not count.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlsys import metrics
from rlsys.common.safe_json import dump_json
from rlsys.runs.observe.metrics_file import read_metrics
from scripts.crashes.judgement import audited

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 3  # steps
OPTIONS = (
    *("--warm-start-steps", "2", "--warm-start-batch", "8"),
    *("--prompts-per-step", "16", "--group-size", "4", "--rollout.max-running", "2"),
    *("--trainer.layout", "dp2", "--rollout.num-replicas", "2"),
    *("--trainer.num-cpus", "0.5", "--rollout.num-cpus", "0.5"),
    *("--asynchrony.max-staleness", "0", "--checkpoint-every", "0"),
)


def train(directory: Path, name: str, borrow: int, options: Sequence[str]) -> dict[str, Any]:
    """Train one run, and return its numbers, the mean time of its steps and the audit's faults."""
    command = [
        *(sys.executable, str(ROOT / "recipes" / "quickstart.py"), *OPTIONS),
        *("--runs-dir", str(directory), "--name", name, "--rollout.borrow", str(borrow)),
        *options,
    ]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    lines = read_metrics(directory / name / "metrics.jsonl")
    result = {
        "name": name,
        "step_s": fmean(line[metrics.TIME_STEP_S] for line in lines[WARM_UP:]),
        "lent_s": fmean(line.get(metrics.LENT_S, 0.0) for line in lines[WARM_UP:]),
        "audit_errors": len(audited(directory / name)[1]),
    }
    print(dump_json(result), flush=True)
    return {**result, "numbers": [metrics.without_times(line) for line in lines]}


def main(argv: Sequence[str] | None = None) -> None:
    """Run all pairs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3, help="runs of each kind")
    parser.add_argument("--num-steps", type=int, default=20, help="optimizer steps of a run")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="of the recipe, after --")
    given = parser.parse_args(argv)
    if given.pairs < 1 or given.num_steps <= WARM_UP:
        parser.error(f"use --pairs of at least 1 and --num-steps above {WARM_UP}")
    options = ["--num-steps", str(given.num_steps), *given.options]
    with tempfile.TemporaryDirectory(prefix="borrow-") as directory:
        pairs = [
            [train(Path(directory), f"{pair}-borrow{n}", n, options) for n in (0, 2)]
            for pair in range(given.pairs)
        ]
    print(
        dump_json(
            {
                "step_ratio": round(median(b["step_s"] / a["step_s"] for a, b in pairs), 3),
                "lent_s": round(fmean(b["lent_s"] for _, b in pairs), 3),
                "equal": all(a["numbers"] == b["numbers"] for a, b in pairs),
                "audit_errors": sum(one["audit_errors"] for pair in pairs for one in pair),
            }
        )
    )


if __name__ == "__main__":
    main()
