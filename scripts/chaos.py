"""Kills and stops what a run consists of, at moments that a seed decides, and audits what is left.

    python scripts/chaos.py --runs 20 --seed 1
    python scripts/chaos.py --runs 50 --seed 1 --resume-only
    python scripts/chaos.py --runs 20 --seed 1 -- --placement colocated --model.dtype bfloat16

Each run trains a tiny model on two Ray nodes of this machine, with two ranks and two replicas, at
staleness 0, 1 or 4; options behind `--` are every run's. One to three blows fall on it: a replica,
a rank, a reward worker, a shard of the store, a keeper of snapshots, a whole node or the recipe's
own process is killed, stopped for good, or stopped for two seconds. A lost node is replaced, a
killed recipe started again with the same command. Then the run must end by itself with every step
trained, its files must pass the audit (scripts/audit.py), and nothing of it may be left.

With --resume-only every process of a run on this machine is killed at once, and the same command is
started again; at staleness 0 its numbers must be those of a run that was left alone.

A line for each run; then one line of JSON: `runs`, `ended_well`, `audit_errors` and `leftovers` are
counts; `replica_back_s`, `rank_back_s` and `node_back_s` the longest time from a replica's death to
its successor's tokens, from a rank's to the next optimizer step, and from when a node joins in
place of a lost one to the tokens of a replica there (null: none was killed); `resampled` the groups
that resumed runs sampled anew, `resampled_older` those among them that the checkpoint should have
kept. What ended badly stays in the directory that its line names.
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="decides every blow and its moment")
    parser.add_argument(
        "--kinds",
        default=",".join(ALL_KINDS),
        help=f"what may be hurt, with commas between; default: {','.join(ALL_KINDS)}",
    )
    parser.add_argument("--resume-only", action="store_true", help="kill everything at once")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of a run")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for one run to end")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="of every run, behind --")
    given = parser.parse_args(argv)
    kinds = given.kinds.split(",")
    if unknown := set(kinds) - set(ALL_KINDS):
        parser.error(f"--kinds {','.join(sorted(unknown))}: there are {', '.join(ALL_KINDS)}")
    if given.steps < 4 or given.runs < 1:
        parser.error("use --steps of at least 4 and --runs of at least 1")
    outcomes = []
    trials = _resumes(given) if given.resume_only else _blows(given, kinds)
    for outcome in trials:
        outcomes.append(outcome)
        for line in outcome.lines():
            print(line, flush=True)
    print(json.dumps(summary(outcomes)))
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def _blows(given: argparse.Namespace, kinds: Sequence[str]) -> Iterator[Outcome]:
    for number in range(given.runs):
        yield hurt(
            plan(given.seed, number, num_steps=given.steps, kinds=kinds),
            num_steps=given.steps,
            limit_s=given.limit_s,
            options=given.options,
        )


def _resumes(given: argparse.Namespace) -> Iterator[Outcome]:
    with undisturbed(
        seed=given.seed, num_steps=given.steps, limit_s=given.limit_s, options=given.options
    ) as reference:
        for number in range(given.runs):
            when = kills(given.seed, number, num_steps=given.steps)
            yield kill_and_resume(
                when,
                reference if when.max_staleness == 0 else None,
                seed=given.seed,
                num_steps=given.steps,
                limit_s=given.limit_s,
                options=given.options,
            )


def summary(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
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
