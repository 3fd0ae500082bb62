"""Trains each recipe's small task as a user would, and tells what came of it.

    python scripts/bench/recipes.py [NAME ...] [--runs-dir runs/recipes] [--num-steps 150]

Each is `python recipes/NAME.py` in a process of its own, one after the other; a run that is there
already is not trained again. Prints one line of JSON last, per recipe: reward_first and
reward_last, means over a tenth of the steps at either end, and minutes, with all that a start
takes; whatever else RECIPES asks of the last steps. Of a swarm, also the cumulative reward of all
its nodes, and that of as many which share nothing. Of PPO, also what no critic could exceed
(explainable_variance). scripts/plot_recipes.py draws the curves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import pvariance, variance
from typing import Any

# Before this folder, in which a script is called as the recipes are.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.swarm_nodes import node_names
from rlsys import metrics
from rlsys.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
PREFERENCES = "preference/accuracy"  # of pairs, as the model in training has them
NUM_NODES = 4  # of a swarm
TIMES = "minutes.json"  # in runs_dir, by run: of those that were trained here


Rollout = Mapping[str, Any]  # a line of rollouts.jsonl


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is asked of a recipe's run."""

    reward: str = metrics.REWARD_MEAN
    """The metric that should rise."""
    also: Mapping[str, str] = field(default_factory=dict)
    """More numbers of the last steps: {name here: metric}."""
    from_rollouts: Mapping[str, Callable[[Sequence[Rollout]], float]] = field(default_factory=dict)
    """More numbers of the later half of the recorded rollouts: {name here: function}."""
    before: Mapping[str, str] = field(default_factory=dict)
    """Runs beside its own that the same command trains first, and the metric that should rise
    there: {"NAME-SUFFIX": metric}."""
    swarms: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Swarms of NUM_NODES nodes in its place, each with options of its own: {name: options}; the
    first is the recipe's, the others stand beside it."""


def explainable_variance(rollouts: Sequence[Rollout]) -> float:
    """The largest explained variance that a critic can have of scores that come after the last
    token: 1 - E[Var(score | prompt, tokens so far)] / Var(score), over all tokens.

    Rollouts of one group that begin alike say how far scores still differ after that beginning
    (estimated without bias); a beginning that no other rollout has counts as if it said all.
    """
    scores: dict[tuple[int, tuple[int, ...]], list[float]] = defaultdict(list)
    for rollout in rollouts:
        tokens = rollout["token_ids"]
        for place in range(len(tokens)):
            beginning = (rollout["group_id"], tuple(tokens[:place]))
            scores[beginning].append(rollout["columns"]["score"])
    alike = [same for same in scores.values() if len(same) > 1]
    num_tokens = sum(map(len, scores.values()))
    left = sum(len(same) * variance(same) for same in alike) / num_tokens
    return 1 - left / pvariance([score for same in scores.values() for score in same])


RECIPES: dict[str, Recipe] = {
    "quickstart": Recipe(),
    "dr_grpo": Recipe(),
    "rloo": Recipe(),
    "reinforce_pp": Recipe(),
    "gspo": Recipe(also={"clipped_frac": "ratio/clipped_frac"}),
    "dapo": Recipe(reward=metrics.REWARD_SAMPLED_MEAN, also={"trained": metrics.REWARD_MEAN}),
    "decoupled_ppo": Recipe(),
    "llamarl": Recipe(),
    "scalerl": Recipe(also={"staleness": metrics.STALENESS_MEAN}),
    "distill": Recipe(
        also={"kl_teacher": "kl/teacher"}, before={"distill-teacher": metrics.REWARD_MEAN}
    ),
    "reward_model": Recipe(reward=PREFERENCES, also={"margin": "preference/margin"}),
    "dpo": Recipe(reward=PREFERENCES, also={"margin": "preference/margin"}),
    "ppo": Recipe(
        also={
            "accuracy": metrics.REWARD_MEAN,
            "score": "score/mean",
            "explained_variance": "critic/value/explained_variance",
        },
        from_rollouts={"explainable_variance": explainable_variance},
        before={"ppo-reward_model": PREFERENCES},
    ),
    "swarm": Recipe(
        reward=metrics.REWARD_SAMPLED_MEAN,
        swarms={"swarm": (), "alone": ("--external-groups", "0")},
    ),
}


def series(lines: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """The metric's values; where a line has none of it, the reward that every line has."""
    return [line[name] if name in line else line[metrics.REWARD_MEAN] for line in lines]


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Means over the first and the last tenth."""
    tenth = max(1, len(values) // 10)
    return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth


def train(name: str, runs_dir: Path, options: Sequence[str]) -> float:
    """Minutes that it took. Ends this process where the recipe fails."""
    start = time.monotonic()
    swarms = RECIPES[name].swarms
    for run, own in (swarms or {name: ()}).items():
        command = [sys.executable, f"recipes/{name}.py", "--name", run, "--runs-dir", str(runs_dir)]
        nodes = ["--num-nodes", str(NUM_NODES)] if swarms else []
        command += [*nodes, *own, "--resume", "auto", *options]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode:
            sys.exit(f"error: {run} ended with code {done.returncode}.")
    return (time.monotonic() - start) / 60


def is_there(name: str, runs_dir: Path) -> bool:
    runs = [node for swarm in RECIPES[name].swarms for node in node_names(swarm, NUM_NODES)]
    return all((runs_dir / run / "metrics.jsonl").exists() for run in runs or [name])


def told_of_swarms(name: str, runs_dir: Path, minutes: float | None) -> dict[str, float]:
    recipe = RECIPES[name]
    found: dict[str, float] = {} if minutes is None else {"minutes": minutes}
    for run in recipe.swarms:
        prefix = "" if run == name else f"{run}_"
        nodes = [
            series(read_metrics(runs_dir / node / "metrics.jsonl"), recipe.reward)
            for node in node_names(run, NUM_NODES)
        ]
        means = [sum(step) / NUM_NODES for step in zip(*nodes, strict=True)]
        found[f"{prefix}reward_first"], found[f"{prefix}reward_last"] = ends(means)
        found[f"{prefix}cumulative_reward"] = sum(map(sum, nodes))
    return {key: round(value, 4) for key, value in found.items()}


def told(name: str, runs_dir: Path, minutes: float | None) -> dict[str, float]:
    recipe = RECIPES[name]
    if recipe.swarms:
        return told_of_swarms(name, runs_dir, minutes)
    lines = read_metrics(runs_dir / name / "metrics.jsonl")
    first, last = ends(series(lines, recipe.reward))
    found = {"reward_first": first, "reward_last": last, "steps": len(lines)}
    if minutes is not None:
        found["minutes"] = minutes
    for key, metric in recipe.also.items():
        found[key] = ends([line[metric] for line in lines if metric in line])[1]
    for key, function in recipe.from_rollouts.items():
        with (runs_dir / name / "rollouts.jsonl").open() as file:
            rollouts = [json.loads(line) for line in file]
        found[key] = function([one for one in rollouts if one["step"] > len(lines) // 2])
    for other, metric in recipe.before.items():
        theirs = read_metrics(runs_dir / other / "metrics.jsonl")
        key = other.removeprefix(f"{name}-")
        found[f"{key}_reward_last"] = ends(series(theirs, metric))[1]
        found[f"{key}_minutes"] = (
            theirs[-1][metrics.TIME_UNIX_S] - theirs[0][metrics.TIME_UNIX_S]
        ) / 60
    return {key: round(value, 4) for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the recipes' small tasks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--num-steps", type=int, help="of each; by default the recipe's own")
    parser.add_argument("--seed", type=int, help="of each; by default the recipe's own")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in RECIPES]:
        parser.error(f"no recipe is called {unknown[0]!r}; give some of {', '.join(RECIPES)}.")
    runs_dir = given.runs_dir.resolve()
    options = [] if given.num_steps is None else ["--num-steps", str(given.num_steps)]
    options += [] if given.seed is None else ["--seed", str(given.seed)]
    times = runs_dir / TIMES
    for name in given.names or RECIPES:
        was_there = is_there(name, runs_dir)
        minutes = train(name, runs_dir, options)
        if not was_there:
            known = json.loads(times.read_text()) if times.exists() else {}
            times.write_text(json.dumps(known | {name: minutes}))
    known = json.loads(times.read_text()) if times.exists() else {}
    found = {name: told(name, runs_dir, known.get(name)) for name in given.names or RECIPES}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
