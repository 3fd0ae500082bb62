"""Metric names, each defined here and nowhere else, and what they tell about a line of metrics.

The part before the slash is its family. Unless said otherwise, a metric describes the rollouts and
the work of its own step. The file of them, a line per step: rlsys/runs/observe/metrics_file.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

STEP = "step"  # 1 for the first optimizer step
POLICY_VERSION = "policy_version"  # after the step
LEARNING_RATE = "learning_rate"

REWARD_MEAN = "reward/mean"
REWARD_STD = "reward/std"  # of the population: all rewards that the step trains on
# Of the trained groups that the policy sampled itself, and of those that a function over groups
# refused since the step before, told from the first refusal, or the first group of another run, on:
# how good the policy is, where groups are chosen by their rewards.
REWARD_SAMPLED_MEAN = "reward/sampled_mean"
# Rollouts whose reward function raised, hung or gave no number, or that a judge has no score for.
REWARDS_FAILED = "rewards/failed"

ZERO_ADVANTAGE_FRAC = "groups/zero_advantage_frac"  # groups whose rewards are all equal
EXTERNAL_FRAC = "groups/external_frac"  # groups that another run sampled; told where there are some
COMPLETION_TOKENS_MEAN = "completion/tokens_mean"
COMPLETION_TRUNCATED_FRAC = "completion/truncated_frac"  # ended by the limit on tokens

STALENESS_MEAN = "staleness/mean"  # updates of the weights, over rollouts
STALENESS_MAX = "staleness/max"

LOSS = "loss"
PREFERENCE_ACCURACY = "preference/accuracy"  # pairs whose better completion the model has as such
GRAD_NORM = "grad_norm"  # before clipping
# In float16: the factor of the loss for the next update, and how many updates since the run began
# had gradients beyond float16, which were computed again with a lower factor.
LOSS_SCALE = "loss_scale"
UPDATES_REPEATED = "updates/repeated"
ENTROPY = "entropy"  # nats per token
KL_SAMPLER_TRAINER = "kl/sampler_trainer"  # mean(log μ − log π_prox), nats per token
# mean(exp(x) − 1 − x), x = log π_prox − log μ, of each token at most 10 (algorithms/kl.py)
KL_SAMPLER_TRAINER_K3 = "kl/sampler_trainer_k3"
VALUE_MEAN = "value/mean"  # of a critic, over tokens
SCORE_MEAN = "score/mean"  # of a reward model, over rows
# Of those that a loss tells (rlsys/algorithms/derived_metrics.py).
EXPLAINED_VARIANCE = "value/explained_variance"
EFFECTIVE_SAMPLE_FRAC = "offpolicy/effective_sample_frac"

ROLLOUTS_ISSUED = "rollouts/issued"  # these three count since the run began
ROLLOUTS_TRAINED = "rollouts/trained"
ROLLOUTS_DROPPED = "rollouts/dropped"

# Of evaluations.jsonl, with those of pass_at and mean_at below.
EVAL_STEP = "eval/step"  # only in wandb: the step whose model was evaluated
EVAL_PROMPTS = "eval/prompts"
EVAL_TOKENS_MEAN = "eval/tokens_mean"  # of completions
EVAL_TRUNCATED_FRAC = "eval/truncated_frac"
EVAL_FAILED = "eval/failed"  # samples whose reward failed; they are in no estimate
EVAL_LOSS = "eval/loss"  # of held-out completions, as the run trains on; of_held_out has the rest
EVAL_IS_BEST = "eval/is_best"  # 1: the highest mean reward until then, or else the lowest loss
TIME_EVALUATION_S = "time/evaluation_s"  # without the start

PROMPTS_SKIPPED = "prompts/skipped"  # since the run began, where data.retire_at is set

WEIGHTS_BYTES = "weights/bytes"  # published for the generation engines

TIME_STEP_S = "time/step_s"  # between the ends of two optimizer steps
TIME_TRAIN_S = "time/train_s"  # rank 0 at work, publishing the weights included
# The trainer waits for rollouts: the rest of a step, less what STANDSTILLS took.
TIME_TRAINER_IDLE_S = "time/trainer_idle_s"
TIME_WEIGHT_SYNC_S = "time/weight_sync_s"  # from publishing to the last replica's resume
TIME_GENERATION_PAUSE_S = "time/generation_pause_s"  # a replica stands still, mean over replicas
TIME_UNIX_S = "time/unix_s"  # when the line was written

THROUGHPUT_TRAINED_TOKENS = "throughput/trained_tokens_per_s"  # completion tokens
THROUGHPUT_GENERATED_TOKENS = "throughput/generated_tokens_per_s"
THROUGHPUT_TRAINED_ROLLOUTS = "throughput/trained_rollouts_per_s"

# What the clock decides: two runs that agree in everything else may differ here. How many rollouts
# wait before a stage at the end of a step is such an accident too.
TIMING_FAMILIES = ("time/", "throughput/", "queue/")

# Losses tell this one. All others above are told by rlsys itself, and so are these families.
_OF_LOSSES = (PREFERENCE_ACCURACY,)
_OWN = frozenset(
    name for word, name in globals().items() if word.isupper() and isinstance(name, str)
).difference(_OF_LOSSES)
_OWN_FAMILIES = (
    *TIMING_FAMILIES,
    "eval/",
    "reward/component/",
    f"{REWARDS_FAILED}/",
    f"{ROLLOUTS_DROPPED}/",
)


def is_own(name: str) -> bool:
    """Whether rlsys tells a metric of this name, here or of held-out completions, so that another
    would replace it or be replaced by it.
    """
    return name in _OWN or of_held_out(name) in _OWN or name.startswith(_OWN_FAMILIES)


def is_own_family(name: str) -> bool:
    """Whether rlsys tells metrics that begin with this name and a slash."""
    return any(own.startswith(f"{name}/") for own in (*_OWN, *_OWN_FAMILIES))


def column_mean(name: str) -> str:
    """Of a column with a value per rollout, over the rollouts of the step."""
    return f"{name}/mean"


def reward_component(name: str) -> str:
    """Mean of one of several rewards, before its weight."""
    return f"reward/component/{name}"


def rewards_failed(reason: str) -> str:
    return f"{REWARDS_FAILED}/{reason}"


def rollouts_dropped(reason: str) -> str:
    """Counts since the run began, as rollouts/dropped does."""
    return f"{ROLLOUTS_DROPPED}/{reason}"


def queue_depth(stage: str) -> str:
    """Rollouts that wait before a stage at the end of the step."""
    return f"queue/{stage}"


def waited_s(stage: str, reason: str) -> str:
    """Time in which a loop of the controller had nothing to do, and why."""
    return f"time/wait_s/{stage}/{reason}"


# For what training stands still, whoever samples how fast.
CHECKPOINT, EVALUATION, RESTART = "checkpoint", "evaluation", "restart"
DEVICES = "devices"  # that it shares with replicas: until they have changed hands
STANDSTILLS = tuple(
    waited_s("train", reason) for reason in (CHECKPOINT, EVALUATION, RESTART, DEVICES)
)


def actor_work_s(actor: str) -> str:
    """Time in which an actor had something to do, up to its last report: that of the step before.
    What it did not work, it waited: `actor_wait_s`.
    """
    return f"time/work_s/{actor}"


def actor_wait_s(actor: str) -> str:
    return f"time/wait_s/{actor}"


def of_held_out(name: str) -> str:
    """What a metric of the loss is called where it is of held-out completions."""
    return f"eval/{name}"


def pass_at(k: int) -> str:
    """Of held-out prompts: one of k samples is right. With "/low" and "/high": the ends of its 95 %
    interval, as of `mean_at`.
    """
    return f"eval/pass@{k}"


def mean_at(num_samples: int) -> str:
    """Mean reward of so many samples of each held-out prompt."""
    return f"eval/mean@{num_samples}"


def is_mean_at(name: str) -> bool:
    """Whether it is a mean reward itself, not an end of its interval."""
    return re.fullmatch(r"eval/mean@\d+", name) is not None


def num_passing(name: str) -> int:
    """Return k of the metric "eval/pass@k", and 0 for another metric."""
    found = re.fullmatch(r"eval/pass@(\d+)", name)
    return int(found[1]) if found else 0


def by_reason(line: Mapping[str, float], total: str) -> dict[str, float]:
    """The positive counts below `total` ("rollouts/dropped"), by reason, largest first."""
    prefix = total + "/"
    counts = {k.removeprefix(prefix): v for k, v in line.items() if k.startswith(prefix) and v > 0}
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def without_times(line: Mapping[str, float]) -> dict[str, float]:
    """The metrics that two runs share when they do the same, whatever the machine's speed."""
    return {name: value for name, value in line.items() if not name.startswith(TIMING_FAMILIES)}


LEADING = {"reward": REWARD_MEAN, "accuracy": PREFERENCE_ACCURACY, "loss": LOSS}


def leading(lines: Sequence[Mapping[str, float]]) -> str:
    """What tells best how far a run has come: the first of LEADING that a line has."""
    return next(
        (name for name, metric in LEADING.items() if any(metric in line for line in lines)),
        "reward",
    )


def recent_mean(lines: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Mean over the lines that have the metric; None where none has."""
    values = [line[name] for line in lines if name in line]
    return sum(values) / len(values) if values else None
