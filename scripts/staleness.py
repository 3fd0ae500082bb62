"""Measure the cost of staleness for several losses: AReaL's ablation (2505.24298).

    python scripts/staleness.py [--runs-dir runs/staleness] [--out docs/staleness.svg]

Trains the arithmetic task with two updates per step and sampling up to η steps ahead, with:

    naive         PPO's clip around the policy that sampled
    decoupled     the clip around the policy of the step's beginning, from a forward pass
    interpolated  the same without the forward pass (A-3PO)
    corrected     the same clip with dropped (IcePop) instead of bounded weights

The largest η is trained with all seeds, the others with the first one. Runs that exist are not
trained again. Prints a table and one line of JSON with, for each loss and η, means over the seeds:
the reward of the last tenth of the steps, of all steps (`area`), and the staleness of the tokens in
updates. --out draws it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rlsys
from recipes import arithmetic
from recipes.decoupled_ppo import Config, decoupled_ppo
from rlsys import AsyncConfig, Dataflow, Prompts, RewardFn, metrics
from rlsys.algorithms import (
    clipped_surrogate,
    corrected,
    grpo_advantage,
    icepop,
    token_mean,
)
from rlsys.runs.observe.metrics_file import read_metrics
from scripts.plot_run import FAINT, INK, smoothed

UPDATES_PER_STEP = 2  # as in the recipe
COLOURS = {
    "naive": "#c4622d",
    "decoupled": "#1f5fa8",
    "interpolated": "#4b7f52",
    "corrected": "#8a5a9e",
}


def naive(
    cfg: Config, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """Return the graph of PPO's clip around the policy that sampled."""
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    advantages = flow.per_group(grpo_advantage, flow.score(rollouts, rewards))
    loss = clipped_surrogate(cfg.clip_low, cfg.clip_high)
    flow.train(policy, rollouts, advantages, loss=loss, aggregation=token_mean)
    return flow


def interpolated(cfg: Config, rewards: Sequence[RewardFn], **arguments: Any) -> Dataflow:
    """Return the graph of decoupled PPO with an interpolated π_prox."""
    return decoupled_ppo(replace(cfg, proximal="interpolated"), rewards, **arguments)


def icepop_corrected(
    cfg: Config, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """Return the graph of the clip around π_prox with IcePop's weights."""
    clipped = clipped_surrogate(cfg.clip_low, cfg.clip_high, denominator="proximal")
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    advantages = flow.per_group(grpo_advantage, flow.score(rollouts, rewards))
    proximal = flow.infer(policy, rollouts, writes="proximal_logprobs")
    loss = corrected(clipped, icepop(0.5, 2.0))
    flow.train(policy, rollouts, advantages, proximal, loss=loss, aggregation=token_mean)
    return flow


LOSSES: dict[str, Callable[..., Dataflow]] = {
    "naive": naive,
    "decoupled": decoupled_ppo,
    "interpolated": interpolated,
    "corrected": icepop_corrected,
}


@dataclass(frozen=True)
class Trial:
    """One run of the study."""

    loss: str
    eta: int
    seed: int

    @property
    def name(self) -> str:
        """Return the name of the run."""
        return f"{self.loss}-eta{self.eta}-seed{self.seed}"

    def config(self, runs_dir: Path, num_steps: int) -> Config:
        """Return the configuration of the run."""
        # Of the two updates of an on-policy step, the first has staleness 0 and the second 1.
        bound = UPDATES_PER_STEP * self.eta + UPDATES_PER_STEP - 1
        return Config(
            name=self.name,
            runs_dir=str(runs_dir),
            num_steps=num_steps,
            seed=self.seed,
            resume="auto",
            asynchrony=AsyncConfig(max_staleness=bound),
        )


def trials(losses: Sequence[str], etas: Sequence[int], seeds: Sequence[int]) -> Iterator[Trial]:
    """Yield all runs, those with the largest η first."""
    for eta in sorted(etas, reverse=True):
        for seed in seeds if eta == max(etas) else seeds[:1]:
            for loss in losses:
                yield Trial(loss, eta, seed)


Found = dict[str, dict[int, dict[str, float]]]  # by loss and η


def found(done: Sequence[Trial], runs_dir: Path) -> Found:
    """Return the numbers of each loss at each η, over its seeds."""
    by_cell: dict[tuple[str, int], list[dict[str, float]]] = {}
    for trial in done:
        lines = read_metrics(runs_dir / trial.name / "metrics.jsonl")
        rewards = [line[metrics.REWARD_MEAN] for line in lines]
        last = rewards[-max(1, len(rewards) // 10) :]
        numbers = {
            "reward_last": statistics.fmean(last),
            "area": statistics.fmean(rewards),
            "staleness": statistics.fmean(line[metrics.STALENESS_MEAN] for line in lines),
        }
        by_cell.setdefault((trial.loss, trial.eta), []).append(numbers)
    table: Found = {}
    for (loss, eta), runs in sorted(by_cell.items()):
        cell = {key: round(statistics.fmean(run[key] for run in runs), 4) for key in runs[0]}
        lasts = [run["reward_last"] for run in runs]
        cell |= {"least": round(min(lasts), 4), "most": round(max(lasts), 4), "seeds": len(runs)}
        table.setdefault(loss, {})[eta] = cell
    return table


def as_markdown(table: Found) -> str:
    """Return the table in Markdown."""
    etas = sorted({eta for cells in table.values() for eta in cells})
    lines = [
        "| loss | " + " | ".join(f"η = {eta}" for eta in etas) + " |",
        "|---|" + "---|" * len(etas),
    ]
    for loss, cells in table.items():
        shown = [_cell(cells[eta]) if eta in cells else "" for eta in etas]
        lines.append(f"| {loss} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _cell(cell: Mapping[str, float]) -> str:
    if cell["seeds"] == 1:
        return f"{cell['reward_last']:.3f}"
    return f"{cell['reward_last']:.3f} ({cell['least']:.3f} to {cell['most']:.3f})"


def draw(table: Found, done: Sequence[Trial], runs_dir: Path) -> Any:
    """Return a figure with the last reward over η, and the curves at the largest η."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.edgecolor": FAINT, "svg.hashsalt": "rlsys"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    largest = max(trial.eta for trial in done)
    places = {eta: n for n, eta in enumerate(sorted({trial.eta for trial in done}))}
    for loss, cells in table.items():
        colour = COLOURS[loss]
        where = [places[eta] for eta in cells]
        means = [cell["reward_last"] for cell in cells.values()]
        below = [cell["reward_last"] - cell["least"] for cell in cells.values()]
        above = [cell["most"] - cell["reward_last"] for cell in cells.values()]
        left.errorbar(where, means, (below, above), color=colour, marker="o", capsize=3, label=loss)
        for trial in done:
            if (trial.loss, trial.eta) == (loss, largest):
                lines = read_metrics(runs_dir / trial.name / "metrics.jsonl")
                rewards = smoothed([line[metrics.REWARD_MEAN] for line in lines], 8)
                steps = [line[metrics.STEP] for line in lines]
                right.plot(steps, rewards, color=colour, linewidth=1.2, alpha=0.8)
    left.set_xticks(list(places.values()), [str(eta) for eta in places])
    left.set_xlabel("η, steps that sampling may run ahead")
    left.set_ylabel("reward, last tenth of the steps")
    left.legend(frameon=False)
    right.set_xlabel(f"optimizer step, at η = {largest}")
    for panel in (left, right):
        panel.grid(axis="y", color=FAINT, linewidth=0.6)
        panel.tick_params(colors=INK, length=0)
        panel.spines[["top", "right", "left"]].set_visible(False)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the study and print its numbers."""
    parser = argparse.ArgumentParser(description="Train the staleness study and print its numbers.")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--losses", default=",".join(LOSSES), help=f"some of {', '.join(LOSSES)}")
    parser.add_argument("--etas", default="0,1,2,4,8", help="steps that sampling may run ahead")
    parser.add_argument(
        "--seeds", default="0,1,2", help="seeds of the largest η; the other η use the first one"
    )
    parser.add_argument("--num-steps", type=int, default=150, help="steps of each run")
    parser.add_argument("--out", type=Path, help="picture to write, .svg or .png")
    options = parser.parse_args(arguments)
    losses = options.losses.split(",")
    if unknown := [loss for loss in losses if loss not in LOSSES]:
        parser.error(f"--losses {unknown[0]}: is unknown. Use {', '.join(LOSSES)}.")
    try:
        etas, seeds = ([int(n) for n in text.split(",")] for text in (options.etas, options.seeds))
    except ValueError as error:
        parser.error(f"--etas and --seeds must be whole numbers separated by commas: {error}")
    if options.out and options.out.suffix not in (".svg", ".png"):
        parser.error(f"--out {options.out} ends in {options.out.suffix!r}; use .svg or .png.")
    runs_dir = options.runs_dir.resolve()
    done = list(trials(losses, etas, seeds))
    for trial in done:
        try:
            arithmetic.run(trial.config(runs_dir, options.num_steps), LOSSES[trial.loss])
        except rlsys.RunFailed as error:
            sys.exit(f"error: {trial.name}: {error}")
    table = found(done, runs_dir)
    print(as_markdown(table))
    if options.out:
        try:
            draw(table, done, runs_dir).savefig(options.out, facecolor="white")
        except ImportError as error:
            sys.exit(f"error: drawing needs matplotlib ({error}); pip install 'rlsys[plot]'.")
    print(json.dumps(table))


if __name__ == "__main__":
    main()
