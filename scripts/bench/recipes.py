"""Train each recipe's small task as a user would, and report its result.

    python scripts/bench/recipes.py [NAME ...] [--runs-dir runs/recipes] [--num-steps 150]

Runs `python recipes/NAME.py` (recipes/quickstart.py for grpo), one process after the other. A run
that exists is not trained again. Prints one line of JSON last, with for each recipe: reward_first
and reward_last, means over the first and the last tenth of the steps, and minutes, including the
start; the same for its variants (eta8_reward_last); and other metrics of the last steps that
RECIPES lists. For a swarm it also has the cumulative reward of all its nodes and of as many that
share nothing, and for PPO the maximum that a critic could reach (explainable_variance).
scripts/plot_recipes.py draws the curves.
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
from statistics import fmean, pvariance, variance
from typing import Any

# Scripts of this folder have the names of recipes, so the checkout must come first.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.swarm_nodes import node_names
from rlsys import metrics
from rlsys.runs.observe.metrics_file import read_metrics

ROOT = Path(__file__).resolve().parents[2]
PREFERENCES = "preference/accuracy"  # metric of the model in training
TIMES = "minutes.json"  # in runs_dir: minutes of the runs that were trained here


Rollout = Mapping[str, Any]  # a line of rollouts.jsonl


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Description of a recipe's runs."""

    reward: str = metrics.REWARD_MEAN
    """The metric that should rise."""
    also: Mapping[str, str] = field(default_factory=dict)
    """More numbers of the last steps: {name here: metric}."""
    from_rollouts: Mapping[str, Callable[[Sequence[Rollout]], float]] = field(default_factory=dict)
    """More numbers of the later half of the recorded rollouts: {name here: function}."""
    before: Mapping[str, str] = field(default_factory=dict)
    """Runs that the same command trains first, and the metric that should rise
    there: {"NAME-SUFFIX": metric}."""
    variants: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Further runs with other options: {run: options}."""
    script: str | None = None
    """The recipe's file in recipes/, if it is not NAME.py."""
    num_nodes: int | None = None
    """Number of nodes of a swarm, whose reward is the mean over them."""

    def directories(self, run: str) -> list[str]:
        """Return the directories of a run's nodes, or of the single run."""
        return [run] if self.num_nodes is None else node_names(run, self.num_nodes)


def explainable_variance(rollouts: Sequence[Rollout]) -> float:
    """Return the largest explained variance that a critic can reach.

    It is 1 - E[Var(score | prompt, tokens so far)] / Var(score) over all tokens, for scores that
    come after the last token. Rollouts of one group with the same beginning give an unbiased
    estimate of the remaining variance; a beginning of a single rollout counts as if it determined
    the score.
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
    "grpo": Recipe(script="quickstart.py"),
    "dr_grpo": Recipe(),
    "rloo": Recipe(),
    "reinforce_pp": Recipe(),
    "gspo": Recipe(also={"clipped_frac": "ratio/clipped_frac"}),
    "dapo": Recipe(reward=metrics.REWARD_SAMPLED_MEAN, also={"trained": metrics.REWARD_MEAN}),
    "decoupled_ppo": Recipe(
        variants={
            "eta8": ("--asynchrony.max-staleness", "17"),
            "interpolated": ("--proximal", "interpolated"),
        }
    ),
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
        variants={"alone": ("--external-groups", "0")},
        num_nodes=4,
    ),
}


# Names of recipes that differ from those of their files.
ALIASES = {"quickstart": "grpo"}


def series(lines: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """Return the metric's values, with the reward for lines without it."""
    return [line[name] if name in line else line[metrics.REWARD_MEAN] for line in lines]


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the means over the first and the last tenth."""
    tenth = max(1, len(values) // 10)
    return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth


def train(name: str, run: str, runs_dir: Path, options: Sequence[str]) -> float:
    """Train a run and return the minutes; exit if the recipe fails."""
    recipe = RECIPES[name]
    start = time.monotonic()
    script = f"recipes/{recipe.script or name + '.py'}"
    command = [sys.executable, script, "--name", run, "--runs-dir", str(runs_dir)]
    command += [] if recipe.num_nodes is None else ["--num-nodes", str(recipe.num_nodes)]
    command += [*recipe.variants.get(run, ()), "--resume", "auto", *options]
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"error: {run} ended with code {done.returncode}.")
    return (time.monotonic() - start) / 60


def reward_of(recipe: Recipe, run: str, runs_dir: Path) -> list[list[float]]:
    """Return the reward by node and step.

    Raises:
        OSError: The run does not exist.
    """
    directories = [runs_dir / directory for directory in recipe.directories(run)]
    return [series(read_metrics(path / "metrics.jsonl"), recipe.reward) for path in directories]


def mean_over_nodes(nodes: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean by step, up to the last step of the slowest node."""
    return [fmean(step) for step in zip(*nodes, strict=False)]


def results_of(name: str, runs_dir: Path, minutes: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers of a run."""
    recipe = RECIPES[name]
    found: dict[str, float] = {}
    for run in (name, *recipe.variants):
        prefix = "" if run == name else f"{run}_"
        nodes = reward_of(recipe, run, runs_dir)
        means = mean_over_nodes(nodes)
        found[f"{prefix}reward_first"], found[f"{prefix}reward_last"] = ends(means)
        found[f"{prefix}steps"] = len(means)
        if recipe.num_nodes is not None:
            found[f"{prefix}cumulative_reward"] = sum(map(sum, nodes))
        if run in minutes:
            found[f"{prefix}minutes"] = minutes[run]
    if recipe.also or recipe.from_rollouts:
        found |= _more(name, runs_dir)
    for other, metric in recipe.before.items():
        theirs = read_metrics(runs_dir / other / "metrics.jsonl")
        key = other.removeprefix(f"{name}-")
        found[f"{key}_reward_last"] = ends(series(theirs, metric))[1]
        found[f"{key}_minutes"] = (
            theirs[-1][metrics.TIME_UNIX_S] - theirs[0][metrics.TIME_UNIX_S]
        ) / 60
    return {key: round(value, 4) for key, value in found.items()}


def _more(name: str, runs_dir: Path) -> dict[str, float]:
    recipe, directory = RECIPES[name], runs_dir / name
    lines = read_metrics(directory / "metrics.jsonl")
    found = {
        key: ends([line[metric] for line in lines if metric in line])[1]
        for key, metric in recipe.also.items()
    }
    if recipe.from_rollouts:
        text = (directory / "rollouts.jsonl").read_text()
        later = [one for one in map(json.loads, text.splitlines()) if one["step"] > len(lines) // 2]
        found |= {key: function(later) for key, function in recipe.from_rollouts.items()}
    return found


def main() -> None:
    """Run the recipes."""
    parser = argparse.ArgumentParser(description="Train the recipes' small tasks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(RECIPES)}")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--num-steps", type=int, help="steps of each run; default: the recipe's")
    parser.add_argument("--seed", type=int, help="seed of each run; default: the recipe's")
    given = parser.parse_args()
    names = [ALIASES.get(name, name) for name in given.names] or [*RECIPES]
    if unknown := [name for name in names if name not in RECIPES]:
        parser.error(f"{unknown[0]!r} is not a recipe. Use some of {', '.join(RECIPES)}.")
    runs_dir = given.runs_dir.resolve()
    options = [] if given.num_steps is None else ["--num-steps", str(given.num_steps)]
    options += [] if given.seed is None else ["--seed", str(given.seed)]
    times = runs_dir / TIMES
    known = json.loads(times.read_text()) if times.exists() else {}
    for name in names:
        recipe = RECIPES[name]
        for run in (name, *recipe.variants):
            files = [runs_dir / one / "metrics.jsonl" for one in recipe.directories(run)]
            was_there = all(file.exists() for file in files)
            minutes = train(name, run, runs_dir, options)
            if not was_there:
                known[run] = minutes
                times.write_text(json.dumps(known))
    found = {name: results_of(name, runs_dir, known) for name in names}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
