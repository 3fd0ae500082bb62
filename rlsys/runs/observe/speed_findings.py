"""Problems of a run that cost speed: the bottleneck, replicas without memory, slow actors.

lines of the last steps, settings ─► speed_findings ─► rlsys.runs.observe.diagnosis
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator

from rlsys import metrics
from rlsys.metrics import recent_mean
from rlsys.runs.observe.advised_settings import AdvisedSettings, sentence
from rlsys.runs.observe.finding import Finding, Lines

DRAFT_ACCEPTANCE = 0.1  # below it, verification costs more than the accepted tokens save
IDLE_FRAC = 0.5
BUSY_FRAC = 0.8  # from this share of working time on, the trainer is the bottleneck
PINNED_FRAC = 0.9  # of the staleness bound
REPLICAS_IDLE_FRAC = 0.8  # one of five replicas would do
WAITING_PER_RUNNING = 1.0  # half of the requests hold no memory for their keys and values
FULL_FRAC = 0.5  # of the memory or of the places; a request that does not fit may need the rest
STRAGGLER_WORK_FRAC = 0.7  # an actor that works so much, while its peers work half as much
STRAGGLER_FACTOR = 2.0

BOTTLENECK = "bottleneck"


def speed_findings(
    lines: Lines, *, settings: AdvisedSettings, samples: bool = True
) -> list[Finding]:
    """Return what slows a run down in `lines`, its last steps.

    The timings of a run's first step are ignored, because the pipeline is still empty then.
    """
    timed = [line for line in lines if line[metrics.STEP] > 1]
    if not samples:
        return [*_rows_late(timed), *_straggler(timed, settings)]
    findings = [*_bottleneck(lines, timed, settings)]
    replicas_wait = any(one.kind in ("stages_slow", "replicas_idle") for one in findings)
    # If the trainer is busy, the requests wait for it.
    if _idle_frac(timed) > 1 - BUSY_FRAC and not replicas_wait:
        findings += _memory_bound(timed, settings)
    return [*findings, *_wasted_drafts(timed), *_straggler(timed, settings)]


def _bottleneck(lines: Lines, timed: Lines, settings: AdvisedSettings) -> Iterator[Finding]:
    """Yield the bottleneck, if there is one: there is at most one."""
    idle = _idle_frac(timed)
    shares = [*_work_fracs(timed).get("rollout", {}).values()]
    replicas_idle = 1 - statistics.fmean(shares) if shares else 0.0
    waits = (
        f"{'the replicas have' if len(shares) > 1 else 'the replica has'} no work "
        f"{replicas_idle:.0%} of the time"
    )
    longest_queue = "speed up the stage that has the longest queue (queue/STAGE)"
    if idle > IDLE_FRAC and replicas_idle >= REPLICAS_IDLE_FRAC:
        yield Finding(
            "stages_slow",
            f"the trainer waits for rollouts {idle:.0%} of the time, and {waits}, so a stage "
            "between them is the bottleneck: rewards, environments or frozen models",
            sentence([f"{longest_queue}, or the tools of the environment", settings.staler_fix]),
            BOTTLENECK,
        )
    elif idle > IDLE_FRAC:
        yield _rollouts_late(idle, settings)
    elif idle <= 1 - BUSY_FRAC and (staleness := _pinned_staleness(lines, settings)):
        yield Finding(
            "staleness_pinned",
            f"staleness is pinned at its bound (mean {staleness:.2f} of "
            f"asynchrony.max_staleness={settings.max_staleness}), so training is the bottleneck "
            "and generation waits",
            sentence(
                [
                    "give the trainer more resources (trainer.layout, trainer.num_cpus)",
                    settings.fewer_replicas_fix,
                ]
            ),
            BOTTLENECK,
        )
    elif replicas_idle >= REPLICAS_IDLE_FRAC:
        fixes = [settings.fewer_replicas_fix, settings.staler_fix, longest_queue]
        yield Finding("replicas_idle", waits, sentence(fixes), BOTTLENECK)


def _idle_frac(lines: Lines) -> float:
    """Return the share of the time for which the trainer waits, or 0 if that was not measured."""
    idle_s = recent_mean(lines, metrics.TIME_TRAINER_IDLE_S)
    step_s = recent_mean(lines, metrics.TIME_STEP_S)
    return idle_s / step_s if idle_s is not None and step_s else 0.0


def _pinned_staleness(lines: Lines, settings: AdvisedSettings) -> float:
    """Return the mean staleness if it is at its bound, else 0.

    If the trainer waits, staleness at its bound does not show which side is slower: rollouts
    sampled while a step is trained are always one version old when they are trained.
    """
    staleness = recent_mean(lines, metrics.STALENESS_MEAN) or 0.0
    return staleness if staleness >= PINNED_FRAC * settings.max_staleness else 0.0


def _rows_late(lines: Lines) -> Iterator[Finding]:
    idle = _idle_frac(lines)
    if idle > IDLE_FRAC:
        yield Finding(
            "trainer_idle",
            f"the trainer waits for rows {idle:.0%} of the time, so earlier stages are the "
            "bottleneck",
            "Give frozen models more resources (their num_workers, num_cpus or num_gpus), or raise "
            "prompts_per_step.",
            BOTTLENECK,
        )


def _rollouts_late(idle: float, settings: AdvisedSettings) -> Finding:
    overlap = "set asynchrony.max_staleness=1 to generate while training"
    return Finding(
        "trainer_idle",
        f"the trainer waits for rollouts {idle:.0%} of the time, so generation is the bottleneck",
        sentence(
            [
                overlap if settings.max_staleness == 0 and settings.staler_fix else "",
                settings.more_generation_fix,
            ]
        ),
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
                        "raise rollout.num_replicas" if settings.has_room else "",
                        settings.shorter_fix,
                    ]
                ),
            )


def _wasted_drafts(lines: Lines) -> Iterator[Finding]:
    """Yield a finding if an engine rejects most of the tokens that it drafts.

    Engines stop drafting n-grams by themselves then, and report how fast these would be.
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
