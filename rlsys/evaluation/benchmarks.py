"""Evaluation on published benchmarks by lm-eval (EleutherAI's lm-evaluation-harness).

This is the only module that imports lm_eval. Input: a model and names of its tasks, such as gsm8k
or mmlu, or YAML files of tasks. Output: each metric of each task, with its standard error. Prompts,
few-shot examples, sampling and scoring are those of the task, as for published numbers.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlsys.common.safe_json import dump_json
from rlsys.data.hub import offline_where_unreachable
from rlsys.errors import InvalidValue, require
from rlsys.evaluation.model_evaluation import EvaluationConfig

STDERR = "_stderr"


@dataclass(frozen=True, kw_only=True)
class BenchmarkScore:
    """A metric of a task.

    Attributes:
        task: Name of the task or of a group of tasks.
        metric: Name of the metric, such as acc or exact_match.
        answer_filter: How the answer was extracted from a completion, such as strict-match.
        value: The metric.
        stderr: Its standard error, if lm-eval estimates one.
        num_samples: Number of evaluated examples, if the task is not a group.
    """

    task: str
    metric: str
    answer_filter: str
    value: float
    stderr: float | None
    num_samples: int | None


def evaluate_tasks(config: EvaluationConfig, *, only_check: bool = False) -> str:
    """Evaluate config.model on config.tasks; return a table and a line of JSON.

    With `only_check`, the tasks are found but not run.

    Raises:
        InvalidValue: lm-eval is not installed, or a task is unknown.
    """
    manager = _task_manager(config.tasks)
    if only_check:
        return f"{config.model.path} would be evaluated by lm-eval on {', '.join(config.tasks)}."
    scores = run_tasks(config, manager)
    return "\n".join([*_table(config, scores), _report(config, scores)])


def run_tasks(config: EvaluationConfig, manager: Any = None) -> list[BenchmarkScore]:
    """Return the metrics of config.tasks.

    Args:
        config: The configuration. num_prompts limits the examples of each task.
        manager: An lm_eval TaskManager that knows the tasks.
    """
    manager = manager or _task_manager(config.tasks)
    from lm_eval import simple_evaluate

    # The data of a task may be on the hub, which lm-eval would ask again and again.
    data = [f"data of {task}" for task in config.tasks]
    with offline_where_unreachable(config.model.path, *data):
        found = simple_evaluate(
            model="vllm" if config.rollout.engine == "vllm" else "hf",
            model_args=_model_arguments(config),
            tasks=list(config.tasks),
            task_manager=manager,
            limit=config.num_prompts,
            batch_size="auto" if config.rollout.engine == "vllm" else 8,
            device="cuda" if config.rollout.num_gpus else "cpu",
            apply_chat_template=config.data.chat_template,
            system_instruction=config.data.system_prompt,
            log_samples=False,
            random_seed=config.seed,
            numpy_random_seed=config.seed,
            torch_random_seed=config.seed,
            fewshot_random_seed=config.seed,
        )
    return scores_of(found)


def scores_of(found: Mapping[str, Any]) -> list[BenchmarkScore]:
    """Return the metrics in a result of lm_eval.simple_evaluate, groups first."""
    scores = []
    by_task = {**found.get("groups", {}), **found["results"]}
    for task, metrics in by_task.items():
        num = found.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in metrics.items():
            metric, comma, answer_filter = key.partition(",")
            if not comma or metric.endswith(STDERR) or not isinstance(value, int | float):
                continue
            stderr = metrics.get(f"{metric}{STDERR},{answer_filter}")
            scores.append(
                BenchmarkScore(
                    task=task,
                    metric=metric,
                    answer_filter="" if answer_filter == "none" else answer_filter,
                    value=float(value),
                    stderr=float(stderr) if isinstance(stderr, int | float) else None,
                    num_samples=num,
                )
            )
    return scores


def _task_manager(tasks: Sequence[str]) -> Any:
    """Return lm-eval's index of tasks, after a check that it has these."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise InvalidValue(
            "tasks",
            tasks,
            rule=f"needs lm-eval ({error})",
            fix="Install it with pip install 'rlsys[benchmarks]'.",
        ) from error
    # The index of lm-eval's own tasks takes seconds to build. A file does not need it.
    manager = TaskManager(include_defaults=not all(map(_is_file, tasks)))
    for task in tasks:
        if _is_file(task):
            is_known, near = Path(task).is_file(), []
        else:
            is_known = bool(manager.match_tasks([task]))
            near = difflib.get_close_matches(task, manager.all_tasks, n=3)
        require(
            is_known,
            "tasks",
            task,
            rule="lm-eval has no such task",
            fix=f"Use {' or '.join(near) or 'a name from `lm-eval ls tasks`'}, or give the path of "
            "a task's YAML file.",
        )
    return manager


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def _model_arguments(config: EvaluationConfig) -> dict[str, Any]:
    rollout = config.rollout
    arguments: dict[str, Any] = {"pretrained": config.model.path, "dtype": config.model.dtype}
    if rollout.engine == "vllm":
        arguments |= {
            "tensor_parallel_size": rollout.tensor_parallel,
            "gpu_memory_utilization": rollout.gpu_memory_frac,
            "seed": config.seed,
        }
    return arguments


def _table(config: EvaluationConfig, scores: Sequence[BenchmarkScore]) -> list[str]:
    names = [f"{one.task} {one.metric} {one.answer_filter}".rstrip() for one in scores]
    width = max(map(len, names), default=0) + 2
    lines = [
        f"{config.model.path}: {', '.join(config.tasks)}",
        f"{'':<{width}}{'value':>8}  standard error  samples",
    ]
    for name, one in zip(names, scores, strict=True):
        stderr = "-" if one.stderr is None else f"{one.stderr:.4f}"
        num = "-" if one.num_samples is None else f"{one.num_samples}"
        lines.append(f"{name:<{width}}{one.value:>8.4f}  {stderr:>14}  {num:>7}")
    return lines


def _report(config: EvaluationConfig, scores: Sequence[BenchmarkScore]) -> str:
    return dump_json(
        {
            "model": config.model.path,
            "tasks": list(config.tasks),
            "engine": config.rollout.engine,
            "scores": [asdict(one) for one in scores],
        }
    )
