"""What is wrong with a run, told from its metrics, and before it starts from its configuration.

In: the metrics of the last steps, or the settings. Out: findings, each a sentence with the number,
the cause and what to do.
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

WINDOW = 5
"""Steps to average over: one step of 32 groups is too noisy to judge by."""

ZERO_ADVANTAGE_FRAC = 0.8  # four of five groups generated for nothing
TRUNCATED_FRAC = 0.3  # a cut answer is scored as if it were the policy's whole answer
KL_SAMPLER_TRAINER = 0.05  # nats per token; bfloat16 kernels alone differ by about 0.001
IDLE_FRAC = 0.5
BUSY_FRAC = 0.8  # a trainer that works for this share of the time or more holds the others up
PINNED_FRAC = 0.9  # of the staleness bound

BOTTLENECK = "bottleneck"

# What a shell passes on as two characters.
ESCAPES = {"\\n": "line break", "\\t": "tab", "\\r": "carriage return"}
ESCAPE = re.compile(r"\\[ntr]")


@dataclass(frozen=True)
class Finding:
    kind: str  # the same finding on later steps has the same kind
    message: str
    topic: str = ""  # of kinds that contradict each other, or empty


def foresee(config: RunConfig) -> list[str]:
    """What the settings will cost, though they are allowed; the launch prints it."""
    trainers = {"trainer": config.trainer} | {
        f"{name}.trainer": role.trainer
        for name, role in vars(config).items()
        if isinstance(role, TrainedRoleConfig)
    }
    warmed = [_long_warmup(name, one, config.num_steps) for name, one in trainers.items()]
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    exceeded = [_long_rows(name, one, longest) for name, one in trainers.items()]
    noted = [*_cut_distribution(config.sampling), *_escaped_stops(config.sampling)]
    return [*noted, *filter(None, [*warmed, *exceeded])]


def _escaped_stops(sampling: SamplingConfig) -> Iterator[str]:
    """Yield a warning for each stop string with a backslash that a shell has not interpreted."""
    for text in sampling.stop:
        if found := ESCAPE.search(text):
            meant, letter = ESCAPES[found.group()], found.group()[1]
            yield (
                f"sampling.stop={text!r} holds a backslash and the letter {letter!r}, not a "
                f"{meant}. If a {meant} is meant, write it in the shell as $'{text}'."
            )


def _long_rows(name: str, trainer: TrainerConfig, longest: int) -> str:
    if longest <= trainer.micro_batch_tokens:
        return ""
    return (
        f"{name}.micro_batch_tokens={trainer.micro_batch_tokens} is less than a row may have "
        f"(data.max_prompt_tokens + sampling.max_tokens = {longest}): a longer row gets a pass of "
        "its own, and memory for it; raise it, or lower one of the others."
    )


def _long_warmup(name: str, trainer: TrainerConfig, num_steps: int) -> str:
    if trainer.warmup_steps <= num_steps:
        return ""
    highest = num_steps / (trainer.warmup_steps + 1)
    return (
        f"{name}.warmup_steps={trainer.warmup_steps} is more than num_steps={num_steps}: the "
        f"learning rate rises to {highest:.0%} of {name}.learning_rate and no higher; use "
        "fewer warm-up steps, such as a tenth of num_steps."
    )


def _cut_distribution(sampling: SamplingConfig) -> list[str]:
    cuts = [f"sampling.top_p={sampling.top_p:g}"] if sampling.top_p < 1 else []
    cuts += [f"sampling.top_k={sampling.top_k}"] if sampling.top_k > 0 else []
    if not cuts:
        return []
    # Sampled from μ/Z over the tokens kept, which hold Z of the probability; recorded as μ.
    loss = (
        "what is cut off is never tried, and importance ratios are too large by 1/Z a token, Z "
        "being what the kept tokens hold (1.25 where they hold 80%)"
    )
    if sampling.top_k == 0:
        loss = (
            f"up to {1 - sampling.top_p:.2g} of the probability is never tried, and importance "
            f"ratios are too large by a factor of up to {1 / sampling.top_p:.3g} a token"
        )
    return [
        f"{' and '.join(cuts)}: completions come from the cut distribution, log-probabilities from "
        f"the whole one; {loss}, which neither kl/sampler_trainer shows nor a correction mends. "
        "Gradients are exact with sampling.top_p=1 and sampling.top_k=0."
    ]


def diagnose(
    lines: Lines, *, max_staleness: int, samples: bool = True, in_turns: bool = False
) -> list[Finding]:
    """Findings on the last WINDOW steps of `lines`. `samples`: rows are sampled, not those of a
    dataset. `in_turns`: while the trainer stands still, so that neither side is too slow for the
    other.

    Failed rewards are told at once; everything else only once there are WINDOW steps. The first
    step of a run is left out of its timings: the pipeline is still empty then.
    """
    lines = lines[-WINDOW:]
    findings = list(_failed_rewards(lines))
    if len(lines) == WINDOW:
        findings += _learning_signal(lines)
        if in_turns:
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
        f"with their groups, over the last {_steps(lines)}: look at the reward function, whose "
        "limit is reward.timeout_s, the environment, which has its own, or what a judge is asked.",
    )


def _learning_signal(lines: Lines) -> Iterator[Finding]:
    equal = recent_mean(lines, metrics.ZERO_ADVANTAGE_FRAC)
    if equal is not None and equal >= ZERO_ADVANTAGE_FRAC:
        reward = recent_mean(lines, metrics.REWARD_MEAN)
        yield Finding(
            "equal_rewards",
            f"{equal:.0%} of groups have equal rewards: the task is too easy or too hard"
            + (f" (reward/mean is {reward:.3g})" if reward is not None else "")
            + "; choose other prompts, raise group_size or sampling.temperature.",
        )
    truncated = recent_mean(lines, metrics.COMPLETION_TRUNCATED_FRAC)
    if truncated is not None and truncated >= TRUNCATED_FRAC:
        yield Finding(
            "truncated",
            f"{truncated:.0%} of completions are cut off at the limit: raise sampling.max_tokens, "
            "or see in rollouts.jsonl why answers do not end.",
        )
    kl = recent_mean(lines, metrics.KL_SAMPLER_TRAINER)
    if kl is not None and abs(kl) >= KL_SAMPLER_TRAINER:
        yield Finding(
            "kl_sampler_trainer",
            f"sampler and trainer differ by {abs(kl):.2g} nats a token: they run in different "
            "precision, or the data is too stale for this learning rate; use "
            'model.dtype="float32", or "float16" in place of bfloat16, or lower '
            "asynchrony.max_staleness or trainer.learning_rate.",
        )


def _idle_frac(lines: Lines) -> float:
    """Share of the time for which the trainer waits; 0 where that was not measured."""
    idle_s = recent_mean(lines, metrics.TIME_TRAINER_IDLE_S)
    step_s = recent_mean(lines, metrics.TIME_STEP_S)
    return idle_s / step_s if idle_s is not None and step_s else 0.0


def _staleness(lines: Lines, max_staleness: int) -> Iterator[Finding]:
    """Of a busy trainer. Where it waits too, staleness at its bound says nothing about who is
    slower: what is sampled while a step is trained is a version old when its turn comes.
    """
    staleness = recent_mean(lines, metrics.STALENESS_MEAN)
    pinned = staleness is not None and staleness >= PINNED_FRAC * max_staleness
    if max_staleness > 0 and pinned:
        yield Finding(
            "staleness_pinned",
            f"staleness is pinned at its bound (mean {staleness:.2f} of "
            f"asynchrony.max_staleness={max_staleness}): training is the bottleneck and "
            "generation waits; give the trainer more (trainer.layout, trainer.num_cpus), or "
            "take away replicas.",
            BOTTLENECK,
        )


def _trainer_idle(lines: Lines, max_staleness: int, samples: bool) -> Iterator[Finding]:
    idle = _idle_frac(lines)
    if idle <= IDLE_FRAC:
        return
    if not samples:
        yield Finding(
            "trainer_idle",
            f"the trainer waits for rows {idle:.0%} of the time: what comes before it is the "
            "bottleneck; give frozen models more (their num_workers, num_cpus or num_gpus), or "
            "take more prompts_per_step.",
            BOTTLENECK,
        )
        return
    remedy = "add rollout.num_replicas, or cores to each (rollout.num_cpus)"
    if max_staleness == 0:
        remedy = f"set asynchrony.max_staleness=1 to generate while training, or {remedy}"
    yield Finding(
        "trainer_idle",
        f"the trainer waits for rollouts {idle:.0%} of the time: generation is the "
        f"bottleneck; {remedy}.",
        BOTTLENECK,
    )


def _steps(lines: Lines) -> str:
    return "step" if len(lines) == 1 else f"{len(lines)} steps"
