"""Evaluates a model on held-out prompts, or tasks of an environment: pass@k and mean reward, each
with its 95 % interval.

    python scripts/evaluate.py runs/gsm8k/hf --data test.jsonl --reward numeric_answer \\
        --samples 8 --k 1,4 --data.prompt-column question --data.chat-template --out samples.jsonl
    python scripts/evaluate.py runs/mine/hf --data tasks.jsonl --environment my_game.py:game

The first argument is a Hugging Face model directory or hub name, such as a run's hf/. --data,
--reward and --samples are short for --data.source, --rewards and --num-samples; the other options
are named as in training. The last line of the output is JSON. No Ray cluster is started.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import IO, Any

import rlsys
from rlsys.common.run_sync import run_to_end
from rlsys.config import require
from rlsys.config.fields import to_toml
from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.environments.environment import Environment, as_environment
from rlsys.evaluation.model_evaluation import (
    Evaluation,
    EvaluationConfig,
    Sample,
    evaluate_model,
    evaluate_played,
)
from rlsys.evaluation.pass_at_k import as_metrics
from rlsys.rewards import RewardResult
from rlsys.rewards.named_rewards import REWARD_FIX, named_function, named_reward

OnSample = Callable[[Sample], None]

SHORT = {"--data": "--data.source", "--reward": "--rewards", "--samples": "--num-samples"}
TELL_EVERY_S = 10.0


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """The arguments as options that the configuration has."""
    rest = list(arguments)
    if rest and not rest[0].startswith("-"):
        rest[:1] = ["--model.path", rest[0]]
    for place, argument in enumerate(rest):
        option, equals, value = argument.partition("=")
        rest[place] = SHORT.get(option, option) + equals + value
    return rest


def run(arguments: Sequence[str]) -> None:
    parsed = rlsys.parse(EvaluationConfig, spelled_out(arguments), doc=__doc__)
    config = parsed.config
    evaluated = _evaluated(config)
    if parsed.dry_run:
        print(to_toml(config))
        return
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(_opened(config.out)) if config.out else None
        on_sample = _recorder(out)
        try:
            found = run_to_end(lambda: evaluated(on_sample))
        except EngineError as error:
            raise rlsys.RunFailed(str(error)) from error
    _print(config, found)


def _evaluated(config: EvaluationConfig) -> Callable[[OnSample], Coroutine[Any, Any, Evaluation]]:
    """What is to be waited for. Raises ValueError for what names no function."""
    if config.environment:
        require(
            not config.rewards,
            f"--reward {','.join(config.rewards)} beside --environment {config.environment}, which "
            "says itself what an episode is worth; leave one of them out.",
        )
        fix = "Give one as module:function or file.py:function."
        named = named_function(config.environment, "environment", Environment, fix)
        environment = as_environment(named)
        return lambda on_sample: evaluate_played(config, environment, on_sample=on_sample)
    require(
        bool(config.rewards),
        f"no --reward scores the samples, and no --environment is played; {REWARD_FIX}",
    )
    rewards = [named_reward(name) for name in config.rewards]
    return lambda on_sample: evaluate_model(config, rewards, on_sample=on_sample)


def _opened(path: str) -> IO[str]:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--out {path!r} cannot be written ({error.strerror}); give a file in a directory that "
            "exists and is writable."
        ) from error


def _recorder(out: IO[str] | None) -> OnSample:
    """Writes each sample, and tells on stderr how many there are."""
    num, told_s = 0, 0.0  # when last

    def record(sample: Sample) -> None:
        nonlocal num, told_s
        num += 1
        told_s = told_s or time.monotonic()
        if out is not None:
            out.write(json.dumps(_line(sample)) + "\n")
        if time.monotonic() >= told_s + TELL_EVERY_S:
            told_s = time.monotonic()
            print(f"{num} samples scored", file=sys.stderr, flush=True)

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


def _print(config: EvaluationConfig, found: Evaluation) -> None:
    what = "tasks" if config.environment else "prompts"
    print(f"{config.model.path}: {found.num_prompts} {what}, {config.num_samples} samples each")
    width = max(map(len, found.estimates)) + 2
    print(f"{'':<{width}}{'value':>8}  95 % interval")
    for name, one in found.estimates.items():
        print(f"{name:<{width}}{one.value:>8.4f}  {one.low:.4f} to {one.high:.4f}")
    print(
        f"completions: {found.tokens_mean:.0f} tokens, {found.truncated_frac:.0%} cut at "
        f"{config.sampling.max_tokens}; {found.seconds:.1f} s"
    )
    if found.failed:
        print(
            f"warning: the reward of {sum(found.failed.values())} samples failed; they count "
            f"nowhere, and {found.num_left_out} {what} are left out for too few samples. The "
            f"first failure: {found.first_failure}"
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
    print(json.dumps(report))


@rlsys.main
def main() -> None:
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
