"""Evaluation during training: data, rewards, configuration and steps.

    exported model of a step ─┬► model_evaluation.py ─┬► evaluation_log.py
                              └► held_out_loss.py ────┘        │
                            evaluations.jsonl, best/ ◄─────────┘

The exported files are evaluated, so that `rlsys evaluate` computes the same rewards.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from rlsys.config import FrozenModelConfig, RunConfig
from rlsys.config.speculation import untrained
from rlsys.data.source_names import takes_subset
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import PlayStage, RewardFn, ScoreStage
from rlsys.environments.environment import Environment
from rlsys.evaluation.held_out_data import HeldOut
from rlsys.evaluation.model_evaluation import EvaluationConfig

EXPORT_NAME = re.compile(r"step_(\d{6,})")


def rewards_of(flow: StageGraph, held_out: HeldOut) -> list[RewardFn]:
    """Return the reward functions of sampled completions; may be empty."""
    scored = flow.all(ScoreStage)
    rewards: list[RewardFn] = [*(scored[0].rewards if scored and held_out.rewards is None else [])]
    return rewards + list(held_out.rewards or [])


def environment_of(flow: StageGraph) -> Environment | None:
    """Return the environment of held-out tasks, or None without flow.play."""
    played = flow.all(PlayStage)
    return played[0].environment if played else None


def evaluation_config(run: RunConfig, model: Path | str) -> EvaluationConfig:
    """Return the configuration for evaluating one exported model of a run."""
    own = run.evaluation
    return EvaluationConfig(
        num_samples=own.num_samples,
        k=own.k,
        greedy=own.greedy,
        num_prompts=own.num_prompts,
        seed=run.seed,
        model=FrozenModelConfig(path=str(model), dtype=run.model.dtype),
        data=replace(
            run.data,
            source=own.source or run.data.source,
            subset=run.data.subset if takes_subset(own.source or run.data.source) else None,
            split=own.split,
            shuffle=False,
        ),
        sampling=run.sampling,
        rollout=replace(
            run.rollout,
            urls=(),
            speculation=untrained(run.rollout.speculation),
            engine="torch" if run.rollout.urls else run.rollout.engine,
            num_replicas=1,
            num_cpus=own.num_cpus or run.rollout.num_cpus,
            num_gpus=own.num_gpus,
            tensor_parallel=1,
            borrow=0,
            # Exports include the adapters.
            vllm={k: v for k, v in run.rollout.vllm.items() if k != "enable_lora"},
        ),
        reward=run.reward,
    )


def is_due(run: RunConfig, step: int) -> bool:
    """Return whether the model is evaluated after so many optimizer steps."""
    every = run.evaluation.every
    return every > 0 and (step % every == 0 or step == run.num_steps)


def pending_exports(directory: Path) -> dict[int, Path]:
    """Return the exported models to evaluate, by step."""
    if not directory.is_dir():
        return {}
    found = {path: EXPORT_NAME.fullmatch(path.name) for path in sorted(directory.iterdir())}
    return {int(match[1]): path for path, match in found.items() if match}


def export_path(directory: Path, step: int) -> Path:
    """Return the directory of the model exported after a step."""
    return directory / f"step_{step:06d}"
