"""Problems of a run, found in its metrics and evaluations.

Each rule is one function. The console shows its findings while a run trains, and the report page
(rlsys.report) as advisories. docs/report.md describes each kind.

Input: the metrics of a run's steps. Output: findings, each with the number, the cause and the fix.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlsys import metrics
from rlsys.metrics import recent_mean
from rlsys.runs.observe.advised_settings import AdvisedSettings, sentence

Line = Mapping[str, float]
Lines = Sequence[Line]

WINDOW = 5  # steps to average over: one step of 32 groups is too noisy
HISTORY = 50  # steps that the rules need at most, besides the first WINDOW ones

ZERO_ADVANTAGE_FRAC = 0.8  # four of five groups are generated for nothing
TRUNCATED_FRAC = 0.3  # a truncated answer is scored as if it were complete
DRAFT_ACCEPTANCE = 0.1  # below it, verification costs more than the accepted tokens save
KL_SAMPLER_TRAINER = 0.05  # nats per token; bfloat16 kernels alone differ by about 0.001
IDLE_FRAC = 0.5
BUSY_FRAC = 0.8  # from this share of working time on, the trainer is the bottleneck
PINNED_FRAC = 0.9  # of the staleness bound
REPLICAS_IDLE_FRAC = 0.8  # one of five replicas would do
WAITING_PER_RUNNING = 1.0  # half of the requests hold no memory for their keys and values
FULL_FRAC = 0.5  # of the memory or of the places; a request that does not fit may need the rest
COLLAPSED_FRAC = 0.1  # of the entropy of the first steps
AGREEING_FRAC = 0.5  # share of groups without a signal from which on a low entropy is a collapse
UNSOLVED_STD = 0.1  # of the rewards over prompts; a solved task has less
GROWN_NORM = 10.0  # times the median of earlier steps
MIN_EARLIER = 10  # steps for that median
STRAGGLER_WORK_FRAC = 0.7  # an actor that works so much, while its peers work half as much
STRAGGLER_FACTOR = 2.0
STALL_FACTOR = 10.0  # times the median step
MIN_STALL_S = 60.0

BOTTLENECK = "bottleneck"


@dataclass(frozen=True)
class Finding:
    """A problem, with its cause and its fix, both as sentences."""

    kind: str  # the same finding on later steps has the same kind
    cause: str
    fix: str
    topic: str = ""  # of kinds that contradict each other, or empty

    @property
    def message(self) -> str:
        """Return the text for the console."""
        return f"{self.cause}. {self.fix}"


@dataclass(frozen=True, kw_only=True)
class EvaluationPoint:
    """An evaluation, and the mean training reward of the WINDOW steps before it."""

    line: Line
    reward: float | None


def diagnose(
    lines: Lines,
    *,
    settings: AdvisedSettings,
    samples: bool = True,
    first: Lines = (),
) -> list[Finding]:
    """Return the problems in the last WINDOW steps of `lines`.

    Failed rewards are reported at once, everything else after WINDOW steps. The timings of a run's
    first step are ignored, because the pipeline is still empty then.

    Args:
        lines: Metrics of the last steps. Rules that compare with earlier steps read up to HISTORY.
        settings: Settings of the run. A fix only names those that can be changed in its way.
        samples: Whether rows are sampled, not read from a dataset.
        first: Metrics of the first steps of the run, if `lines` does not begin with them.
    """
    first = first or lines[:WINDOW]
    earlier, recent = lines[-HISTORY:-WINDOW], lines[-WINDOW:]
    findings = list(_failed_rewards(recent))
    if len(recent) < WINDOW:
        return findings
    findings += _learning_signal(recent, settings)
    findings += _entropy_collapse(first, recent)
    findings += _diverging(earlier, recent, settings)
    if settings.shares_devices:
        return findings
    timed = [line for line in recent if line[metrics.STEP] > 1]
    findings += _trainer_idle(timed, settings, samples)
    if samples:
        pinned = []
        if _idle_frac(timed) <= 1 - BUSY_FRAC:
            pinned = list(_staleness(recent, settings))
        findings += pinned
        if _idle_frac(timed) > 1 - BUSY_FRAC:  # otherwise the requests wait for the trainer
            findings += _memory_bound(timed, settings)
        findings += _replicas_idle(timed, settings) if not pinned else ()
        findings += _wasted_drafts(timed)
    findings += _straggler(timed, settings)
    return findings


def stalled(lines: Lines, *, started_s: float, now_s: float) -> list[Finding]:
    """Return whether a running run has made no step for far longer than its steps take.

    Args:
        lines: Metrics of the steps.
        started_s: Unix time at which the process of the run started.
        now_s: Unix time.
    """
    last_s = lines[-1].get(metrics.TIME_UNIX_S, started_s) if lines else started_s
    times = [line[metrics.TIME_STEP_S] for line in lines[-HISTORY:] if metrics.TIME_STEP_S in line]
    if len(times) < WINDOW:
        return []  # the first steps contain starts and compilations
    usual_s = statistics.median(times)
    waited_s = now_s - max(last_s, started_s)
    if waited_s < max(MIN_STALL_S, STALL_FACTOR * usual_s):
        return []
    return [
        Finding(
            "stall",
            f"no optimizer step for {waited_s:,.0f} s, and a step takes {usual_s:.3g} s",
            "Look at the last spans of the timeline for the actor that does not answer, and at the "
            "events for a restart. A hanging reward ends after reward.timeout_s, a hanging call "
            "after cluster.call_timeout_s.",
        )
    ]


def overfits(points: Sequence[EvaluationPoint]) -> list[Finding]:
    """Return whether the held-out score has fallen while the training reward rose.

    The last evaluation is compared with the best one. Their 95 % intervals must not overlap.
    """
    scored = [(score, point) for point in points if (score := _score(point.line)) is not None]
    if len(scored) < 2:
        return []
    (name, value, _, high), last = scored[-1]
    (_, best_value, best_low, _), best = max(scored, key=lambda one: one[0][1])
    if high >= best_low or last.reward is None or best.reward is None:
        return []
    if last.reward <= best.reward:
        return []
    return [
        Finding(
            "overfitting",
            f"the held-out score {name} fell from {best_value:.3g} (step "
            f"{best.line[metrics.STEP]:.0f}) to {value:.3g}, while the training reward rose from "
            f"{best.reward:.3g} to {last.reward:.3g}",
            "The policy exploits the reward or memorizes the prompts. Read completions of both "
            "steps, use the model in best/, add prompts, or make the reward stricter.",
        )
    ]


def _score(line: Line) -> tuple[str, float, float, float] | None:
    """Return the name, the mean reward of an evaluation, and the ends of its interval."""
    for name, value in line.items():
        if metrics.is_mean_at(name):
            return name, value, line.get(f"{name}/low", value), line.get(f"{name}/high", value)
    return None


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
        f"with their groups, over the last {_steps(lines)}",
        "Check the reward function (its limit is reward.timeout_s), the environment (which has its "
        "own limit) or the judge's prompt.",
    )


def _learning_signal(lines: Lines, settings: AdvisedSettings) -> Iterator[Finding]:
    equal = recent_mean(lines, metrics.ZERO_ADVANTAGE_FRAC)
    if equal is not None and equal >= ZERO_ADVANTAGE_FRAC:
        reward = recent_mean(lines, metrics.REWARD_MEAN)
        yield Finding(
            "equal_rewards",
            f"{equal:.0%} of groups have equal rewards, so the task is too easy or too hard"
            + (f" (reward/mean is {reward:.3g})" if reward is not None else ""),
            "Choose other prompts, raise group_size or sampling.temperature.",
        )
    truncated = recent_mean(lines, metrics.COMPLETION_TRUNCATED_FRAC)
    if truncated is not None and truncated >= TRUNCATED_FRAC:
        yield Finding(
            "truncated",
            f"{truncated:.0%} of completions are cut off at the limit",
            "Raise sampling.max_tokens, or check in rollouts.jsonl why answers do not end.",
        )
    kl = recent_mean(lines, metrics.KL_SAMPLER_TRAINER)
    if kl is not None and abs(kl) >= KL_SAMPLER_TRAINER:
        yield Finding(
            "kl_sampler_trainer",
            f"sampler and trainer differ by {abs(kl):.2g} nats a token, because "
            f"{_kl_reasons(settings)}",
            sentence(
                [
                    settings.precision_fix,
                    settings.staleness_fix,
                    "lower trainer.learning_rate",
                    "add a correction such as tis",
                ]
            ),
        )


def _kl_reasons(settings: AdvisedSettings) -> str:
    """Return why the log-probabilities of both sides may differ so much."""
    reasons = []
    if settings.quantization:
        reasons.append(f"the sampler is quantized ({settings.quantization})")
    elif settings.precision_fix:
        reasons.append(f"they round differently in {settings.dtype}")
    if settings.staleness_fix:
        reasons.append("the data is too stale for this learning rate")
    else:
        reasons.append("the updates within a step are too large for its data")
    return " or ".join(reasons)


def _entropy_collapse(first: Lines, lines: Lines) -> Iterator[Finding]:
    """Yield a finding if completions of a prompt have become equal before the task is solved.

    A policy that solves its task has a low entropy too. Its rewards agree over prompts, and are
    not below those of the first steps.
    """
    before = recent_mean(first, metrics.ENTROPY)
    now = recent_mean(lines, metrics.ENTROPY)
    equal = recent_mean(lines, metrics.ZERO_ADVANTAGE_FRAC)
    spread = recent_mean(lines, metrics.REWARD_STD)
    if before is None or now is None or equal is None or spread is None:
        return
    if now > COLLAPSED_FRAC * before or equal < AGREEING_FRAC:
        return
    reward_before = recent_mean(first, metrics.REWARD_MEAN)
    reward = recent_mean(lines, metrics.REWARD_MEAN)
    fell = reward is not None and reward_before is not None and reward < reward_before
    if spread < UNSOLVED_STD and not fell:
        return
    unsolved = (
        f"the reward fell from {reward_before:.3g} to {reward:.3g}"
        if fell
        else f"prompts still differ (reward/std is {spread:.2g})"
    )
    yield Finding(
        "entropy_collapse",
        f"the entropy fell from {before:.3g} to {now:.3g} nats a token, and {equal:.0%} of groups "
        f"have equal rewards, although {unsolved}: the policy no longer explores",
        "Go back to an earlier checkpoint, and use entropy_bonus or clip_cov, a wider upper clip, "
        "or a lower trainer.learning_rate.",
    )


def _diverging(earlier: Lines, lines: Lines, settings: AdvisedSettings) -> Iterator[Finding]:
    """Yield a finding if the gradient norm has grown. One spike among the steps does not count."""
    past = [line[metrics.GRAD_NORM] for line in earlier if metrics.GRAD_NORM in line]
    recent = [line[metrics.GRAD_NORM] for line in lines if metrics.GRAD_NORM in line]
    if len(past) < MIN_EARLIER or not recent:
        return
    before, now = statistics.median(past), statistics.median(recent)
    if before <= 0 or now < GROWN_NORM * before:
        return
    yield Finding(
        "diverging",
        f"the gradient norm is {now:.3g}, and was {before:.3g} over the {len(past)} steps before",
        sentence(
            [
                "lower trainer.learning_rate",
                "clip with trainer.max_grad_norm",
                settings.staleness_fix,
            ]
        )
        + " Continue from a checkpoint before the growth.",
    )


def _idle_frac(lines: Lines) -> float:
    """Return the share of the time for which the trainer waits, or 0 if that was not measured."""
    idle_s = recent_mean(lines, metrics.TIME_TRAINER_IDLE_S)
    step_s = recent_mean(lines, metrics.TIME_STEP_S)
    return idle_s / step_s if idle_s is not None and step_s else 0.0


def _staleness(lines: Lines, settings: AdvisedSettings) -> Iterator[Finding]:
    """Yield a finding if a busy trainer is the bottleneck.

    If the trainer waits, staleness at its bound does not show which side is slower: rollouts
    sampled while a step is trained are always one version old when they are trained.
    """
    max_staleness = settings.max_staleness
    staleness = recent_mean(lines, metrics.STALENESS_MEAN)
    pinned = staleness is not None and staleness >= PINNED_FRAC * max_staleness
    if max_staleness > 0 and pinned:
        yield Finding(
            "staleness_pinned",
            f"staleness is pinned at its bound (mean {staleness:.2f} of "
            f"asynchrony.max_staleness={max_staleness}), so training is the bottleneck and "
            "generation waits",
            sentence(
                [
                    "give the trainer more resources (trainer.layout, trainer.num_cpus)",
                    settings.fewer_replicas_fix,
                ]
            ),
            BOTTLENECK,
        )


def _trainer_idle(lines: Lines, settings: AdvisedSettings, samples: bool) -> Iterator[Finding]:
    idle = _idle_frac(lines)
    if idle <= IDLE_FRAC:
        return
    if not samples:
        yield Finding(
            "trainer_idle",
            f"the trainer waits for rows {idle:.0%} of the time, so earlier stages are the "
            "bottleneck",
            "Give frozen models more resources (their num_workers, num_cpus or num_gpus), or raise "
            "prompts_per_step.",
            BOTTLENECK,
        )
        return
    remedy = settings.more_generation_fix
    if settings.max_staleness == 0:
        remedy = f"set asynchrony.max_staleness=1 to generate while training, or {remedy}"
    yield Finding(
        "trainer_idle",
        f"the trainer waits for rollouts {idle:.0%} of the time, so generation is the bottleneck",
        f"{remedy[0].upper()}{remedy[1:]}.",
        BOTTLENECK,
    )


def _memory_bound(lines: Lines, settings: AdvisedSettings) -> Iterator[Finding]:
    """Yield a finding if many requests wait in a replica's engine that has no room for them.

    Requests also count as waiting until the step after their arrival.
    """
    waiting = {
        name: number
        for name in {name for line in lines for name in line}
        if name.startswith(metrics.engine_waiting(""))
        and (number := recent_mean(lines, name)) is not None
    }
    for name in sorted(waiting, key=lambda one: -waiting[one])[:1]:
        actor = name.removeprefix(metrics.engine_waiting(""))
        running = recent_mean(lines, metrics.engine_running(actor))
        if not running:
            continue
        used_frac = recent_mean(lines, metrics.engine_kv_usage(actor)) or 0.0
        is_full = max(used_frac, running / settings.max_running) >= FULL_FRAC
        if is_full and waiting[name] >= WAITING_PER_RUNNING * running:
            yield Finding(
                "memory_bound",
                f"on {actor} {waiting[name]:.0f} requests wait while {running:.0f} run, because "
                "the memory for their keys and values or the limit of running requests is too low",
                sentence(
                    [
                        settings.cache_fix,
                        "raise rollout.max_running",
                        "raise rollout.num_replicas",
                        "lower sampling.max_tokens",
                    ]
                ),
            )


def _wasted_drafts(lines: Lines) -> Iterator[Finding]:
    """Yield a finding if an engine rejects most of the tokens that it drafts.

    The torch engine stops drafting by itself then, and reports how fast drafts would be.
    """
    prefix = metrics.engine_draft_acceptance("")
    names = sorted({name for line in lines for name in line if name.startswith(prefix)})
    for name in names[:1]:
        accepted, actor = recent_mean(lines, name), name.removeprefix(prefix)
        speedup = recent_mean(lines, metrics.engine_draft_speedup(actor))
        if accepted is not None and accepted < DRAFT_ACCEPTANCE and speedup is None:
            yield Finding(
                "wasted_drafts",
                f"{actor} accepts {accepted:.0%} of the drafted tokens, so speculation slows "
                "generation down",
                "Remove rollout.speculation, or use a better draft or a smaller "
                "rollout.speculation.num_tokens.",
            )


def _replicas_idle(lines: Lines, settings: AdvisedSettings) -> Iterator[Finding]:
    shares = _work_fracs(lines).get("rollout", {})
    if not shares:
        return
    idle = 1 - statistics.fmean(shares.values())
    if idle >= REPLICAS_IDLE_FRAC:
        yield Finding(
            "replicas_idle",
            f"{'the replicas have' if len(shares) > 1 else 'the replica has'} no work {idle:.0%} "
            "of the time",
            sentence(
                [
                    settings.fewer_replicas_fix,
                    "raise asynchrony.max_staleness",
                    "speed up the stage that has the longest queue (queue/STAGE)",
                ]
            ),
            BOTTLENECK,
        )


def _straggler(lines: Lines, settings: AdvisedSettings) -> Iterator[Finding]:
    """Yield a finding if one actor works far more than the others of its kind, which wait."""
    complete = 'asynchrony.order="complete" with asynchrony.over_issue '
    if settings.order == "complete":
        complete = "A larger asynchrony.over_issue "
    for kind, found in sorted(_work_fracs(lines).items()):
        shares = {actor: share for actor, share in found.items() if share > 0}  # no standby workers
        if len(shares) < 2:
            continue
        slowest = max(shares, key=lambda actor: shares[actor])
        others = statistics.fmean(share for actor, share in shares.items() if actor != slowest)
        if shares[slowest] < max(STRAGGLER_WORK_FRAC, STRAGGLER_FACTOR * others):
            continue
        yield Finding(
            "straggler",
            f"{slowest} works {shares[slowest]:.0%} of the time, the other {kind} actors "
            f"{others:.0%}, so they wait for it",
            "Compare its node with those of the others (clock, other processes, network), or move "
            f"it. {complete}keeps a step from waiting for it.",
        )


def _work_fracs(lines: Lines) -> dict[str, dict[str, float]]:
    """Return the share of time for which each actor worked, by kind and name.

    Actors without a report in the last line have died or ended.
    """
    prefix = metrics.actor_work_s("")
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    if not lines:
        return found
    for name in lines[-1]:
        if not name.startswith(prefix):
            continue
        actor = name.removeprefix(prefix)
        work = sum(line.get(name, 0.0) for line in lines)
        total = work + sum(line.get(metrics.actor_wait_s(actor), 0.0) for line in lines)
        if total > 0:
            found[actor.partition("-")[0]][actor] = work / total
    return found


def _steps(lines: Lines) -> str:
    return "step" if len(lines) == 1 else f"{len(lines)} steps"
