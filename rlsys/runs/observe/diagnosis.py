"""Problems of a run, found in its metrics and, before it starts, in its configuration.

Input: the metrics of the last steps, or the configuration. Output: findings, each a message with
the number, the cause and the remedy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlsys import metrics
from rlsys.config import RunConfig, SamplingConfig, TrainedRoleConfig, TrainerConfig
from rlsys.metrics import recent_mean

Lines = Sequence[Mapping[str, float]]

WINDOW = 5  # steps to average over: one step of 32 groups is too noisy

ZERO_ADVANTAGE_FRAC = 0.8  # four of five groups are generated for nothing
TRUNCATED_FRAC = 0.3  # a truncated answer is scored as if it were complete
KL_SAMPLER_TRAINER = 0.05  # nats per token; bfloat16 kernels alone differ by about 0.001
IDLE_FRAC = 0.5
BUSY_FRAC = 0.8  # from this share of working time on, the trainer is the bottleneck
PINNED_FRAC = 0.9  # of the staleness bound

BOTTLENECK = "bottleneck"

# Escapes that a shell passes on as two characters.
ESCAPES = {"\\n": "line break", "\\t": "tab", "\\r": "carriage return"}
ESCAPE = re.compile(r"\\[ntr]")


@dataclass(frozen=True)
class Finding:
    """A problem, with its remedy."""

    kind: str  # the same finding on later steps has the same kind
    message: str
    topic: str = ""  # of kinds that contradict each other, or empty


def configuration_warnings(config: RunConfig) -> list[str]:
    """Return warnings about allowed but costly settings, for the start of a run."""
    trainers = {"trainer": config.trainer} | {
        f"{name}.trainer": role.trainer
        for name, role in vars(config).items()
        if isinstance(role, TrainedRoleConfig)
    }
    warmed = [_long_warmup(name, one, config.num_steps) for name, one in trainers.items()]
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    exceeded = [_long_rows(name, one, longest) for name, one in trainers.items()]
    warnings = [*_cut_distribution(config.sampling), *_escaped_stops(config.sampling)]
    return [*warnings, *filter(None, [*warmed, *exceeded])]


def _escaped_stops(sampling: SamplingConfig) -> Iterator[str]:
    """Yield a warning for each stop string with a backslash that a shell has not interpreted."""
    for text in sampling.stop:
        if found := ESCAPE.search(text):
            meant, letter = ESCAPES[found.group()], found.group()[1]
            yield (
                f"sampling.stop={text!r} has a backslash and the letter {letter!r}, not a "
                f"{meant}. If a {meant} is meant, write it in the shell as $'{text}'."
            )


def _long_rows(name: str, trainer: TrainerConfig, longest: int) -> str:
    if longest <= trainer.micro_batch_tokens:
        return ""
    return (
        f"{name}.micro_batch_tokens={trainer.micro_batch_tokens} is less than a row may have "
        f"(data.max_prompt_tokens + sampling.max_tokens = {longest}): a longer row gets its own "
        "micro-batch, which takes more memory. Raise it, or lower one of the others."
    )


def _long_warmup(name: str, trainer: TrainerConfig, num_steps: int) -> str:
    if trainer.warmup_steps <= num_steps:
        return ""
    highest = num_steps / (trainer.warmup_steps + 1)
    return (
        f"{name}.warmup_steps={trainer.warmup_steps} is more than num_steps={num_steps}: the "
        f"learning rate rises to {highest:.0%} of {name}.learning_rate and no higher. Use fewer "
        "warm-up steps, such as a tenth of num_steps."
    )


def _cut_distribution(sampling: SamplingConfig) -> list[str]:
    cuts = [f"sampling.top_p={sampling.top_p:g}"] if sampling.top_p < 1 else []
    cuts += [f"sampling.top_k={sampling.top_k}"] if sampling.top_k > 0 else []
    if not cuts:
        return []
    # Tokens are sampled from μ/Z over the kept tokens, whose total probability is Z; recorded is μ.
    loss = (
        "other tokens are never sampled, and importance ratios are too large by 1/Z per token, "
        "where Z is the probability of the kept tokens (1.25 if they have 80%)"
    )
    if sampling.top_k == 0:
        loss = (
            f"up to {1 - sampling.top_p:.2g} of the probability is never sampled, and importance "
            f"ratios are too large by a factor of up to {1 / sampling.top_p:.3g} per token"
        )
    return [
        f"{' and '.join(cuts)}: completions come from the truncated distribution, but "
        f"log-probabilities from the full one. So {loss}. kl/sampler_trainer does not show this, "
        "and no correction removes it. "
        "Gradients are exact with sampling.top_p=1 and sampling.top_k=0."
    ]


def diagnose(
    lines: Lines, *, max_staleness: int, samples: bool = True, shares_devices: bool = False
) -> list[Finding]:
    """Return the problems in the last WINDOW steps of `lines`.

    Failed rewards are reported at once, everything else after WINDOW steps. The timings of a run's
    first step are ignored, because the pipeline is still empty then.

    Args:
        lines: Metrics of the steps.
        max_staleness: The configured bound.
        samples: Whether rows are sampled, not read from a dataset.
        shares_devices: Whether sampling and training take turns on the same devices, so that
            neither can be too slow for the other.
    """
    lines = lines[-WINDOW:]
    findings = list(_failed_rewards(lines))
    if len(lines) == WINDOW:
        findings += _learning_signal(lines)
        if shares_devices:
            return findings
        timed = [line for line in lines if line[metrics.STEP] > 1]
        findings += _trainer_idle(timed, max_staleness, samples)
        if samples and _idle_frac(timed) <= 1 - BUSY_FRAC:
            findings += _staleness(lines, max_staleness)
    return findings


def _failed_rewards(lines: Lines) -> Iterator[Finding]:
    failed = sum(line.get(metrics.REWARDS_FAILED, 0) for line in lines)
    if failed == 0:
        return
    reasons: Counter[str] = Counter()
    for line in lines:
        reasons.update(metrics.by_reason(line, metrics.REWARDS_FAILED))
    causes = ", ".join(f"{reason} {count:.0f}" for reason, count in reasons.most_common())
    yield Finding(
        "failed_rewards",
        f"{failed:.0f} rollouts got no reward{f' ({causes})' if causes else ''} and were dropped, "
        f"with their groups, over the last {_steps(lines)}. Check the reward function (its limit "
        "is reward.timeout_s), the environment (which has its own limit) or the judge's prompt.",
    )


def _learning_signal(lines: Lines) -> Iterator[Finding]:
    equal = recent_mean(lines, metrics.ZERO_ADVANTAGE_FRAC)
    if equal is not None and equal >= ZERO_ADVANTAGE_FRAC:
        reward = recent_mean(lines, metrics.REWARD_MEAN)
        yield Finding(
            "equal_rewards",
            f"{equal:.0%} of groups have equal rewards, so the task is too easy or too hard"
            + (f" (reward/mean is {reward:.3g})" if reward is not None else "")
            + ". Choose other prompts, raise group_size or sampling.temperature.",
        )
    truncated = recent_mean(lines, metrics.COMPLETION_TRUNCATED_FRAC)
    if truncated is not None and truncated >= TRUNCATED_FRAC:
        yield Finding(
            "truncated",
            f"{truncated:.0%} of completions are cut off at the limit. Raise sampling.max_tokens, "
            "or check in rollouts.jsonl why answers do not end.",
        )
    kl = recent_mean(lines, metrics.KL_SAMPLER_TRAINER)
    if kl is not None and abs(kl) >= KL_SAMPLER_TRAINER:
        yield Finding(
            "kl_sampler_trainer",
            f"sampler and trainer differ by {abs(kl):.2g} nats a token, because they use "
            "different precision, or the data is too stale for this learning rate. Use "
            'model.dtype="float32", or "float16" instead of bfloat16, or lower '
            "asynchrony.max_staleness or trainer.learning_rate.",
        )


def _idle_frac(lines: Lines) -> float:
    """Return the share of the time for which the trainer waits, or 0 if that was not measured."""
    idle_s = recent_mean(lines, metrics.TIME_TRAINER_IDLE_S)
    step_s = recent_mean(lines, metrics.TIME_STEP_S)
    return idle_s / step_s if idle_s is not None and step_s else 0.0


def _staleness(lines: Lines, max_staleness: int) -> Iterator[Finding]:
    """Yield a finding if a busy trainer is the bottleneck.

    If the trainer waits, staleness at its bound does not show which side is slower: rollouts
    sampled while a step is trained are always one version old when they are trained.
    """
    staleness = recent_mean(lines, metrics.STALENESS_MEAN)
    pinned = staleness is not None and staleness >= PINNED_FRAC * max_staleness
    if max_staleness > 0 and pinned:
        yield Finding(
            "staleness_pinned",
            f"staleness is pinned at its bound (mean {staleness:.2f} of "
            f"asynchrony.max_staleness={max_staleness}), so training is the bottleneck and "
            "generation waits. Give the trainer more resources (trainer.layout, "
            "trainer.num_cpus), or remove replicas.",
            BOTTLENECK,
        )


def _trainer_idle(lines: Lines, max_staleness: int, samples: bool) -> Iterator[Finding]:
    idle = _idle_frac(lines)
    if idle <= IDLE_FRAC:
        return
    if not samples:
        yield Finding(
            "trainer_idle",
            f"the trainer waits for rows {idle:.0%} of the time, so earlier stages are the "
            "bottleneck. Give frozen models more resources (their num_workers, num_cpus or "
            "num_gpus), or raise prompts_per_step.",
            BOTTLENECK,
        )
        return
    remedy = "raise rollout.num_replicas, or their cores (rollout.num_cpus)"
    if max_staleness == 0:
        remedy = f"set asynchrony.max_staleness=1 to generate while training, or {remedy}"
    yield Finding(
        "trainer_idle",
        f"the trainer waits for rollouts {idle:.0%} of the time, so generation is the "
        f"bottleneck. {remedy[0].upper()}{remedy[1:]}.",
        BOTTLENECK,
    )


def _steps(lines: Lines) -> str:
    return "step" if len(lines) == 1 else f"{len(lines)} steps"
