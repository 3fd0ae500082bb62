"""Kill and stop parts of runs at random moments, and audit the results.

    python scripts/chaos.py --runs 20 --seed 1
    python scripts/chaos.py --runs 50 --seed 1 --resume-only
    python scripts/chaos.py --runs 20 --seed 1 -- --placement colocated --model.dtype bfloat16

Each run trains a tiny model on two Ray nodes of this machine, with two ranks and two replicas, at
staleness 0, 1 or 4. Options after `--` go to every run. One to three faults hit the run: a replica,
a rank, a reward worker, a shard of the store, a holder of snapshots, a whole node or the recipe's
own process is killed, stopped for good, or stopped for two seconds. A lost node is replaced. A
killed recipe is started again with the same command. The run must then end by itself with every
step trained, its files must pass the audit (`rlsys audit`), and nothing of it may be left.

With --resume-only every process of a run on this machine is killed at once, and the same command is
started again. At staleness 0 its numbers must equal those of an undisturbed run.

Prints a line for each run, then one line of JSON. `runs`, `ended_well`, `audit_errors` and
`leftovers` are counts. `replica_back_s`, `rank_back_s` and `node_back_s` are the longest times from
a replica's death to its successor's tokens, from a rank's death to the next optimizer step, and
from the start of a replacement node to the tokens of a replica there (null: none was killed).
`resampled` counts the groups that resumed runs sampled again, and `resampled_older` those of them
that the checkpoint should have kept. The line of a bad run names its directory, which is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.crashes.judgement import BACK, Outcome
from scripts.crashes.plan import ALL_KINDS, kills, plan
from scripts.crashes.trial import hurt, kill_and_resume, undisturbed


def main(argv: Sequence[str] | None = None) -> int:
    """Run all trials and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10, help="number of runs")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the faults")
    parser.add_argument(
        "--kinds",
        default=",".join(ALL_KINDS),
        help=f"parts to kill or stop, separated by commas; default: {','.join(ALL_KINDS)}",
    )
    parser.add_argument("--resume-only", action="store_true", help="kill all processes at once")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of each run")
    parser.add_argument("--limit-s", type=float, default=600.0, help="time limit of one run")
    parser.add_argument(
        "options", nargs="*", metavar="OPTION", help="options of all runs, after --"
    )
    options = parser.parse_args(argv)
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(ALL_KINDS):
        parser.error(f"--kinds {','.join(sorted(unknown))}: use some of {', '.join(ALL_KINDS)}")
    if options.steps < 4 or options.runs < 1:
        parser.error("use --steps of at least 4 and --runs of at least 1")
    outcomes = []
    trials = _resume_trials(options) if options.resume_only else _fault_trials(options, kinds)
    for outcome in trials:
        outcomes.append(outcome)
        for line in outcome.lines():
            print(line, flush=True)
    print(json.dumps(summary(outcomes)))
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def _fault_trials(options: argparse.Namespace, kinds: Sequence[str]) -> Iterator[Outcome]:
    for number in range(options.runs):
        yield hurt(
            plan(options.seed, number, num_steps=options.steps, kinds=kinds),
            num_steps=options.steps,
            limit_s=options.limit_s,
            options=options.options,
        )


def _resume_trials(options: argparse.Namespace) -> Iterator[Outcome]:
    with undisturbed(
        seed=options.seed, num_steps=options.steps, limit_s=options.limit_s, options=options.options
    ) as reference:
        for number in range(options.runs):
            when = kills(options.seed, number, num_steps=options.steps)
            yield kill_and_resume(
                when,
                reference if when.max_staleness == 0 else None,
                seed=options.seed,
                num_steps=options.steps,
                limit_s=options.limit_s,
                options=options.options,
            )


def summary(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Return the counts and times of all trials for the line of JSON."""
    return {
        "runs": len(outcomes),
        "ended_well": sum(outcome.ended_well for outcome in outcomes),
        "audit_errors": sum(len(outcome.audit_errors) for outcome in outcomes),
        "leftovers": sum(len(outcome.leftovers) for outcome in outcomes),
        **{
            f"{what}_back_s": _longest([s for one in outcomes for s in one.back_s.get(what, ())])
            for what in BACK
        },
        "resampled": sum(outcome.resampled for outcome in outcomes),
        "resampled_older": sum(outcome.resampled_older for outcome in outcomes),
    }


def _longest(seconds: Sequence[float]) -> float | None:
    return round(max(seconds), 1) if seconds else None


if __name__ == "__main__":
    sys.exit(main())
