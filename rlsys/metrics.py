"""Names of all metrics, and helpers for lines of metrics.

The part before the slash is the family. Unless noted otherwise, a metric describes the rollouts and
the work of its own step. rlsys/runs/observe writes one line per step to metrics.jsonl.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

STEP = "step"  # 1 for the first optimizer step
POLICY_VERSION = "policy_version"  # after the step
LEARNING_RATE = "learning_rate"

REWARD_MEAN = "reward/mean"
REWARD_STD = "reward/std"  # population standard deviation over the rewards of the step
REWARD_BEST_OF_GROUP = "reward/best_of_group"  # highest reward of a group, mean over groups
# Mean over trained groups that the policy sampled and groups that a function over groups refused
# since the previous step. It measures the policy if groups are selected by their rewards. It exists
# from the first refusal or the first group of another run on.
REWARD_SAMPLED_MEAN = "reward/sampled_mean"
# Rollouts whose reward function raised, hung or returned no number, or without a judge's score.
REWARDS_FAILED = "rewards/failed"

ZERO_ADVANTAGE_FRAC = "groups/zero_advantage_frac"  # groups whose rewards are all equal
EXTERNAL_FRAC = "groups/external_frac"  # groups that another run sampled, if there are any
COMPLETION_TOKENS_MEAN = "completion/tokens_mean"
COMPLETION_TRUNCATED_FRAC = "completion/truncated_frac"  # ended by the limit on tokens

STALENESS_MEAN = "staleness/mean"  # weight updates, over rollouts
STALENESS_MAX = "staleness/max"

LOSS = "loss"
PREFERENCE_ACCURACY = "preference/accuracy"  # pairs whose better completion the model prefers
GRAD_NORM = "grad_norm"  # before clipping
# In float16: the factor of the loss for the next update, and the number of updates since the start
# of the run that were repeated with a lower factor because gradients overflowed.
LOSS_SCALE = "loss_scale"
UPDATES_REPEATED = "updates/repeated"
# Of a head that is trained along (rollout.speculation): the KL divergence of the policy from the
# head in nats per drafted token; the share of first drafted tokens that are the policy's likeliest.
DRAFT_LOSS = "draft/loss"
DRAFT_AGREEMENT = "draft/agreement"
ENTROPY = "entropy"  # nats per token
KL_SAMPLER_TRAINER = "kl/sampler_trainer"  # mean(log μ − log π_prox), nats per token
# mean(exp(x) − 1 − x), x = log π_prox − log μ, at most 10 per token (algorithms/kl.py)
KL_SAMPLER_TRAINER_K3 = "kl/sampler_trainer_k3"
VALUE_MEAN = "value/mean"  # of a critic, over tokens
SCORE_MEAN = "score/mean"  # of a reward model, over rows
# Metrics of losses (rlsys/algorithms/derived_metrics.py).
EXPLAINED_VARIANCE = "value/explained_variance"
EFFECTIVE_SAMPLE_FRAC = "offpolicy/effective_sample_frac"

ROLLOUTS_ISSUED = "rollouts/issued"  # these three count since the start of the run
ROLLOUTS_TRAINED = "rollouts/trained"
ROLLOUTS_DROPPED = "rollouts/dropped"

# Metrics of evaluations.jsonl, with pass_at and mean_at below.
EVAL_STEP = "eval/step"  # only in trackers: the step whose model was evaluated
EVAL_PROMPTS = "eval/prompts"
EVAL_TOKENS_MEAN = "eval/tokens_mean"  # of completions
EVAL_TRUNCATED_FRAC = "eval/truncated_frac"
EVAL_FAILED = "eval/failed"  # samples whose reward failed; they are in no estimate
EVAL_LOSS = "eval/loss"  # training loss on held-out completions; see also of_held_out
EVAL_IS_BEST = "eval/is_best"  # 1: highest mean reward so far, or without rewards lowest loss
TIME_EVALUATION_S = "time/evaluation_s"  # without the start

PROMPTS_SKIPPED = "prompts/skipped"  # since the start of the run, if data.retire_at is set

WEIGHTS_BYTES = "weights/bytes"  # published for the generation engines

TIME_STEP_S = "time/step_s"  # between the ends of two optimizer steps
TIME_TRAIN_S = "time/train_s"  # work of rank 0, including publication of the weights
# Waiting for rollouts: the rest of a step without STANDSTILLS.
TIME_TRAINER_IDLE_S = "time/trainer_idle_s"
TIME_WEIGHT_SYNC_S = "time/weight_sync_s"  # from publishing to the last replica's resume
TIME_GENERATION_PAUSE_S = "time/generation_pause_s"  # pause of a replica, mean over replicas
TIME_CONTROLLER_S = "time/controller_s"  # CPU time of the process that calls rlsys.launch
TIME_UNIX_S = "time/unix_s"  # when the line was written

# With rollout.borrow: the trainer's devices generate while it would wait.
LENT_S = "lending/lent_s"  # from the trainer's release until it has its devices again
HAND_OVERS = "lending/hand_overs"
LENT_ROLLOUTS = "lending/rollouts"  # that borrowed replicas finished

THROUGHPUT_TRAINED_TOKENS = "throughput/trained_tokens_per_s"  # completion tokens
THROUGHPUT_GENERATED_TOKENS = "throughput/generated_tokens_per_s"
THROUGHPUT_TRAINED_ROLLOUTS = "throughput/trained_rollouts_per_s"

# Families that depend on timing, in which two otherwise equal runs may differ. The numbers of
# rollouts that wait before a stage belong to them.
TIMING_FAMILIES = ("time/", "throughput/", "queue/", "engine/", "lending/")

# Losses report these. rlsys reports all others above, and the families below.
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
    """Return whether rlsys reports a metric of this name, which another one would overwrite."""
    return name in _OWN or of_held_out(name) in _OWN or name.startswith(_OWN_FAMILIES)


def is_own_family(name: str) -> bool:
    """Return whether rlsys reports metrics that start with this name and a slash."""
    return any(own.startswith(f"{name}/") for own in (*_OWN, *_OWN_FAMILIES))


def column_mean(name: str) -> str:
    """Return the name of the mean of a column over the rollouts of a step."""
    return f"{name}/mean"


def reward_component(name: str) -> str:
    """Return the name of the mean of one of several rewards, before its weight."""
    return f"reward/component/{name}"


def rewards_failed(reason: str) -> str:
    """Return the name of the number of failed rewards with a reason."""
    return f"{REWARDS_FAILED}/{reason}"


def rollouts_dropped(reason: str) -> str:
    """Return the name of the number of rollouts dropped for a reason since the start of the run."""
    return f"{ROLLOUTS_DROPPED}/{reason}"


def not_lent(reason: str) -> str:
    """Return the name of the number of steps without lending for a reason."""
    return f"lending/not_lent/{reason}"


def queue_depth(stage: str) -> str:
    """Return the name of the number of rollouts that wait before a stage at the end of a step."""
    return f"queue/{stage}"


def engine_running(actor: str) -> str:
    """Return the name of the number of requests that an actor's engine ran, mean over a step."""
    return f"engine/running/{actor}"


def engine_waiting(actor: str) -> str:
    """Return the name of the number of requests that waited in an actor's engine."""
    return f"engine/waiting/{actor}"


def engine_kv_usage(actor: str) -> str:
    """Return the name of the share of an engine's memory for keys and values that is in use."""
    return f"engine/kv_usage/{actor}"


def engine_draft_acceptance(actor: str) -> str:
    """Return the name of the share of drafted tokens that an actor's engine has accepted."""
    return f"engine/draft_acceptance/{actor}"


def engine_draft_speedup(actor: str) -> str:
    """Return the name of the tokens/s of an engine's passes with drafts over those without."""
    return f"engine/draft_speedup/{actor}"


def waited_s(stage: str, reason: str) -> str:
    """Return the name of the time that a loop of the controller waited for a reason."""
    return f"time/wait_s/{stage}/{reason}"


# Reasons for which training waits independently of generation.
CHECKPOINT, EVALUATION, RESTART = "checkpoint", "evaluation", "restart"
DEVICES = "devices"  # until shared devices are handed over from replicas
STANDSTILLS = tuple(
    waited_s("train", reason) for reason in (CHECKPOINT, EVALUATION, RESTART, DEVICES)
)


def actor_work_s(actor: str) -> str:
    """Return the name of the time that an actor worked, up to its report of the previous step.

    The rest of the time is `actor_wait_s`.
    """
    return f"time/work_s/{actor}"


def actor_wait_s(actor: str) -> str:
    """Return the name of the time that an actor waited."""
    return f"time/wait_s/{actor}"


def actor_cpu_s(actor: str) -> str:
    """Return the name of the CPU time of an actor's process, over its work and its waiting."""
    return f"time/cpu_s/{actor}"


def of_held_out(name: str) -> str:
    """Return the name of a metric of the loss for held-out completions."""
    return f"eval/{name}"


def pass_at(k: int) -> str:
    """Return the name of pass@k of held-out prompts.

    The names with "/low" and "/high" are the ends of its 95 % interval, also for `mean_at`.
    """
    return f"eval/pass@{k}"


def mean_at(num_samples: int) -> str:
    """Return the name of the mean reward of `num_samples` samples per held-out prompt."""
    return f"eval/mean@{num_samples}"


def is_mean_at(name: str) -> bool:
    """Return whether a metric is a mean reward, and not an end of its interval."""
    return re.fullmatch(r"eval/mean@[0-9]+", name) is not None


def num_passing(name: str) -> int:
    """Return k of the metric "eval/pass@k", and 0 for another metric."""
    found = re.fullmatch(r"eval/pass@([0-9]+)", name)
    return int(found[1]) if found else 0


def by_reason(line: Mapping[str, float], total: str) -> dict[str, float]:
    """Return the positive counts below `total` ("rollouts/dropped") by reason, largest first."""
    prefix = total + "/"
    counts = {k.removeprefix(prefix): v for k, v in line.items() if k.startswith(prefix) and v > 0}
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def without_times(line: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that do not depend on timing."""
    return {name: value for name, value in line.items() if not name.startswith(TIMING_FAMILIES)}


LEADING = {"reward": REWARD_MEAN, "accuracy": PREFERENCE_ACCURACY, "loss": LOSS}


def leading(lines: Sequence[Mapping[str, float]]) -> str:
    """Return the key of the first metric of LEADING that a line has, the most informative one."""
    return next(
        (name for name, metric in LEADING.items() if any(metric in line for line in lines)),
        "reward",
    )


def recent_mean(lines: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Return the mean over the lines that have a metric, or None if none has."""
    values = [line[name] for line in lines if name in line]
    return sum(values) / len(values) if values else None
