r"""Evaluate a model on held-out prompts or on tasks of an environment.

    rlsys evaluate runs/gsm8k/hf --data test.jsonl --reward numeric_answer \
        --samples 8 --k 1,4 --data.prompt-column question --data.chat-template --out samples.jsonl
    rlsys evaluate runs/mine/hf --data tasks.jsonl --environment my_game.py:game
    rlsys evaluate runs/mine/hf --tasks gsm8k,mmlu

The output is a table with pass@k and the mean reward, each with its 95 % interval, and one line of
JSON.

The first argument is a Hugging Face model directory or hub name, such as the hf/ of a run. --data,
--reward and --samples are short for --data.source, --rewards and --num-samples. The other options
have the same names as in training. --tasks needs lm-eval (pip install 'rlsys[benchmarks]'). No Ray
cluster is started.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import rlsys
from rlsys.common.number_text import counted
from rlsys.common.run_sync import run_to_end
from rlsys.common.safe_json import dump_json
from rlsys.config.toml_document import document, stdout_to_stderr
from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.environments.environment import Environment, as_environment
from rlsys.errors import InvalidValue, require
from rlsys.evaluation.benchmarks import evaluate_tasks
from rlsys.evaluation.model_evaluation import (
    Evaluation,
    EvaluationConfig,
    Sample,
    check_model,
    check_played,
    evaluate_model,
    evaluate_played,
)
from rlsys.evaluation.pass_at_k import ROUNDING, as_metrics
from rlsys.rewards import Reward, RewardResult
from rlsys.rewards.named_rewards import REWARD_FIX, named_function, named_reward

OnSample = Callable[[Sample], None]

SHORT = {"--data": "--data.source", "--reward": "--rewards", "--samples": "--num-samples"}
REPORT_EVERY_S = 10.0
OUT_FIX = "Give a file in a directory that exists and is writable."


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of the command."""

    config: str | None = None
    """File with options: TOML, or the config.json of a run. The command line wins over it."""
    dry_run: bool = False
    """Check the model's configuration and tokenizer, the data, the columns that the rewards or the
    environment need, and --out; print the configuration (a file for --config), the number of
    prompts or tasks and the first one, and exit. No weights are loaded and nothing is written."""


def full_options(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the full names of options."""
    rest = list(arguments)
    if rest and not rest[0].startswith("-"):
        rest[:1] = ["--model.path", rest[0]]
    for index, argument in enumerate(rest):
        option, equals, value = argument.partition("=")
        rest[index] = SHORT.get(option, option) + equals + value
    return rest


def main(arguments: Sequence[str]) -> None:
    """Evaluate, or check with --dry-run, and print the result.

    Raises:
        ValueError: A mistake in the options, the model, the data or the rewards.
        RunFailed: The engine died.
    """
    parsed = rlsys.parse(
        EvaluationConfig, full_options(arguments), doc=__doc__, options=EvaluateOptions
    )
    config = parsed.config
    if parsed.dry_run:
        with stdout_to_stderr():
            text = document(config, _checked(config))
        print(text)
        return
    if config.tasks:
        print(evaluate_tasks(config))
        return
    scorer = _scorer(config)
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(_opened(config.out)) if config.out else None
        on_sample = _recorder(out)
        try:
            evaluation = run_to_end(lambda: _evaluate(config, scorer, on_sample))
        except (EngineError, FloatingPointError) as error:
            raise rlsys.RunFailed(str(error)) from error
    _print(config, evaluation)


def _scorer(config: EvaluationConfig) -> Environment | list[Reward]:
    """Return the environment, or the rewards, that the configuration names."""
    if config.environment:
        require(
            not config.rewards,
            "--reward",
            ",".join(config.rewards),
            rule=f"cannot be used with --environment {config.environment}, which returns rewards",
            fix="Leave one of them out.",
        )
        fix = "Give one as module:function or file.py:function."
        return as_environment(named_function(config.environment, "environment", Environment, fix))
    require(
        bool(config.rewards),
        "--reward",
        rule="is needed to score the samples, or --environment to play",
        fix=REWARD_FIX,
    )
    return [named_reward(name) for name in config.rewards]


def _evaluate(
    config: EvaluationConfig, scorer: Environment | list[Reward], on_sample: OnSample
) -> Coroutine[Any, Any, Evaluation]:
    if isinstance(scorer, Environment):
        return evaluate_played(config, scorer, on_sample=on_sample)
    return evaluate_model(config, scorer, on_sample=on_sample)


def _checked(config: EvaluationConfig) -> list[str]:
    """Return the facts that --dry-run prints, after all checks."""
    if config.tasks:
        return [evaluate_tasks(config, only_check=True)]
    scorer = _scorer(config)
    if config.out:
        path = Path(config.out)
        place = path if path.exists() else path.absolute().parent
        is_writable = not path.is_dir() and os.access(place, os.W_OK)
        require(is_writable, "--out", config.out, rule="cannot be written", fix=OUT_FIX)
    if isinstance(scorer, Environment):
        tasks = check_played(config, scorer)
        facts = [f"{counted(len(tasks), 'task')}, the first one:", _shown(tasks[0])]
    else:
        prompts = check_model(config, scorer)
        facts = [
            f"{counted(len(prompts), 'prompt')}, the first one:",
            *prompts[0].text.splitlines(),
        ]
    facts.append(f"{counted(config.num_samples, 'sample')} of each")
    facts.append("not checked: whether the weights fit into memory")
    return facts


def _shown(task: Mapping[str, Any]) -> str:
    """Return a task as JSON, or as Python shows it if it has other values."""
    try:
        return dump_json(dict(task))
    except TypeError:
        return repr(dict(task))


def _opened(path: str) -> IO[str]:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise InvalidValue(
            "--out", path, rule=f"cannot be written ({error.strerror})", fix=OUT_FIX
        ) from error


def _recorder(out: IO[str] | None) -> OnSample:
    """Return a callback that writes each sample, and reports their number on stderr."""
    num, reported_s = 0, 0.0

    def record(sample: Sample) -> None:
        nonlocal num, reported_s
        num += 1
        reported_s = reported_s or time.monotonic()
        if out is not None:
            out.write(dump_json(_line(sample)) + "\n")
        if time.monotonic() >= reported_s + REPORT_EVERY_S:
            reported_s = time.monotonic()
            print(f"{counted(num, 'sample')} scored", file=sys.stderr, flush=True)

    return record


def _line(sample: Sample) -> dict[str, object]:
    rollout, outcome = sample.rollout, sample.outcome
    line: dict[str, object] = {
        "prompt_index": rollout.group_id,
        "sample": rollout.index,
        "prompt": rollout.prompt_text,
        "completion": rollout.completion_text,
        "num_tokens": len(rollout.token_ids),
        "finish_reason": str(rollout.finish_reason),
    }
    if sample.transcript is not None:
        line["turns"] = list(sample.transcript)
    if isinstance(outcome, RewardResult):
        return line | {"score": outcome.total, "components": dict(outcome.components)}
    return line | {"failed": outcome.kind, "message": outcome.message}


def _at_most(number: float) -> str:
    """Return a number with few digits that is not larger."""
    short = f"{number:g}"
    return short if float(short) <= number + ROUNDING else repr(number)


def _print(config: EvaluationConfig, found: Evaluation) -> None:
    unit = "task" if config.environment else "prompt"
    samples = counted(config.num_samples, "sample")
    print(f"{config.model.path}: {counted(found.num_prompts, unit)}, {samples} each")
    width = max(map(len, found.estimates)) + 2
    print(f"{'':<{width}}{'value':>8}  95 % interval")
    for name, one in found.estimates.items():
        print(f"{name:<{width}}{one.value:>z8.4f}  {one.low:z.4f} to {one.high:z.4f}")
    print(
        f"completions: {found.tokens_mean:.0f} tokens on average, {found.truncated_frac:.0%} "
        f"truncated at {config.sampling.max_tokens}; {found.seconds:.1f} s"
    )
    if (highest := found.common_maximum) is not None:
        print(
            f"hint: no score reaches right_at={config.right_at:g}, so eval/pass@k is 0. Many "
            f"samples have the highest score, {highest:g}. If these are right, add "
            f"--right-at {_at_most(highest)}"
        )
    if found.failed:
        print(
            f"warning: the reward of {sum(found.failed.values())} samples failed. They are not "
            f"counted, and {found.num_left_out} {unit} with too few samples are left out. First "
            f"failure: {found.first_failure}"
        )
    report = {
        "model": config.model.path,
        "data": config.data.source,
        "rewards": list(config.rewards),
        **({"environment": config.environment} if config.environment else {}),
        **({"seats": [*config.seats]} if config.seats else {}),
        **({"frozen_seats": [*config.frozen_seats]} if config.frozen_seats else {}),
        "engine": config.rollout.engine,
        **as_metrics(found.estimates),
        "num_prompts": found.num_prompts,
        "num_samples": config.num_samples,
        "num_left_out": found.num_left_out,
        "failed": dict(found.failed),
        "tokens_mean": found.tokens_mean,
        "truncated_frac": found.truncated_frac,
        "seconds": round(found.seconds, 3),
    }
    print(dump_json(report))
