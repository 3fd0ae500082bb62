"""Recorder: the observer of the controller, which writes the run's files and the console.

controller ─► Recorder ─► metrics.jsonl, rollouts.jsonl, trace, trackers, console
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from rlsys import metrics
from rlsys.common.async_condition import AsyncCondition
from rlsys.common.number_text import counted, verb
from rlsys.controller.state import RolloutNote, RunningGroup, TrainedStep
from rlsys.dataflow.scheduling.ledger import Ledger
from rlsys.rewards import RewardFailure
from rlsys.runs.observe.console import RunConsole
from rlsys.runs.observe.metrics_file import MetricsWriter
from rlsys.runs.observe.records import RolloutRecord, RolloutWriter
from rlsys.runs.observe.trace import COUNTER, TraceBatch, Tracer
from rlsys.runs.observe.trackers.run_trackers import RunTrackers
from rlsys.types import FinishReason, WeightManifest

# Shorter waits are not drawn: a busy stage has thousands of them.
MIN_DRAWN_WAIT_S = 0.001

# Groups that functions may refuse for one step, in multiples of a step's groups, before a warning.
# The next warning comes after twice as many.
MAX_REFUSED_STEPS = 4

# Decimals of a log-probability gap in rollouts.jsonl: kernels in bfloat16 differ by about 0.001.
GAP_DIGITS = 5

# Columns with a fixed meaning.
REWARD, ADVANTAGES = "reward", "advantages"


class Recorder:
    """Observer of the controller.

    Args:
        metrics_writer: Writer of metrics.jsonl.
        rollout_writer: Writer of rollouts.jsonl.
        trackers: Copies of the metrics, evaluations and rollouts.
        publish: Called with each line of metrics.jsonl and evaluations.jsonl.
        console: Output for the user.
        ledger: Counts of groups.
        group_size: Rollouts of a group.
        groups_per_step: Groups of an optimizer step.
        queue_depths: Returns how many rollouts wait for each stage.
        tracer: The controller's own.
        stepped: Notified after each optimizer step.
        on_step: Called with the line of each optimizer step, after it is written and shown.
        clock: Returns seconds.
        cpu_clock: Returns the CPU seconds of this process.
    """

    def __init__(
        self,
        *,
        metrics_writer: MetricsWriter,
        rollout_writer: RolloutWriter,
        trackers: RunTrackers,
        publish: Callable[[Mapping[str, float]], object],
        console: RunConsole,
        ledger: Ledger,
        group_size: int,
        groups_per_step: int,
        queue_depths: Callable[[], Mapping[str, int]],
        tracer: Tracer,
        stepped: AsyncCondition,
        on_step: Callable[[Mapping[str, float]], None] = lambda line: None,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._on_step = on_step
        self._metrics = metrics_writer
        self._rollouts = rollout_writer
        self._trackers = trackers
        self._publish = publish
        self._console = console
        self._ledger = ledger
        self._group_size = group_size
        self._groups_per_step = groups_per_step
        self._queue_depths = queue_depths
        self._drawn_depths: dict[str, int] = {}
        self._tracer = tracer
        self._stepped = stepped
        self._clock, self._cpu_clock = clock, cpu_clock
        self._num_deaths = 0  # of replicas
        self._step_started, self._cpu_s = clock(), cpu_clock()
        self._num_generated_tokens = 0
        self._num_failed: Counter[str] = Counter()  # in this step
        self._shown_failures: set[tuple[str, str, str]] = set()
        self._left_out: set[str] = set()  # metrics that were not finite, already reported
        self._refused_rewards: list[float] | None = (
            None  # in this step; None: no function has refused any
        )
        self._next_failure_warning = groups_per_step
        self._num_refused: Counter[str] = Counter()  # groups, by function, in this step
        self._next_refusal_warning = MAX_REFUSED_STEPS * groups_per_step
        self._waited_s: defaultdict[str, float] = defaultdict(float)  # by metric, in this step
        self._actors: dict[str, float] = {}  # work, wait and load by metric, last reported
        self._sync: dict[str, float] = {}
        self._lending: defaultdict[str, float] = defaultdict(float)  # by metric, in this step

    def rollouts_sampled(self, num_rollouts: int, *, num_tokens: int) -> None:
        """Count completed rollouts and their tokens."""
        self._num_generated_tokens += num_tokens
        self._console.sampled(num_rollouts)
        self._show_messages()

    def weights_loaded(
        self, manifest: WeightManifest, *, sync_s: float, pauses_s: Sequence[float]
    ) -> None:
        """Keep the metrics of a weight update for the next line."""
        self._sync = {
            metrics.WEIGHTS_BYTES: manifest.num_bytes,
            metrics.TIME_WEIGHT_SYNC_S: sync_s,
            metrics.TIME_GENERATION_PAUSE_S: statistics.fmean(pauses_s),
        }

    def reward_failed(self, failure: RewardFailure) -> None:
        """Count a failure, and show it if it is the first of its kind at a line of user code."""
        place = (failure.kind, failure.reward, _last_line(failure.message))
        if place not in self._shown_failures:
            self._shown_failures.add(place)
            self._console.warn(f"{failure.what} {failure.reward!r} failed: {failure.message}")
        self._num_failed[failure.kind] += 1
        total = self._num_failed.total()
        if total < self._next_failure_warning:
            return
        self._next_failure_warning = 2 * total
        by = ", ".join(f"{kind} {n:,}" for kind, n in self._num_failed.most_common())
        self._console.warn(
            f"{counted(total, 'rollout')} failed since step {self._ledger.step} ({by}). Each drops "
            f"its group, and a step needs {counted(self._groups_per_step, 'complete group')}. Fix "
            f"the most frequent failure, here {failure.reward!r}."
        )

    def parts_missing(self, parts: Sequence[str], given: Sequence[str], num_episodes: int) -> None:
        """Warn that no episode has returned a reward part that the graph names."""
        self._console.warn(
            f"flow.play(parts={[*parts]}): none of the first {counted(num_episodes, 'episode')} "
            "has returned a number of that name or passed one to chat.reward, so its column is 0. "
            f"Their parts are {[*given]}. Name one of these, or return it from every episode."
        )

    def group_refused(self, function: str, columns: Mapping[str, Sequence[float]]) -> None:
        """Count a group that a function has refused, and warn if a step needs very many."""
        if self._refused_rewards is None:
            self._refused_rewards = []
        self._refused_rewards += columns.get(REWARD, ())
        self._num_refused[function] += 1
        total = self._num_refused.total()
        if total < self._next_refusal_warning:
            return
        self._next_refusal_warning = 2 * total
        by = ", ".join(f"{name} {n:,}" for name, n in self._num_refused.most_common())
        rewards = self._refused_rewards
        mean = f" The mean of their rewards is {statistics.fmean(rewards):.3g}." if rewards else ""
        self._console.warn(
            f"{counted(total, 'group')} {verb(total, 'was', 'were')} refused since step "
            f"{self._ledger.step} ({by}), and a step needs {self._groups_per_step:,} that "
            f"{verb(self._groups_per_step)} not.{mean} A function that returns None for nearly "
            "every group keeps the run from continuing. Fix it, choose other prompts, or raise "
            "group_size or sampling.temperature."
        )

    def replica_died(self, name: str, reason: str, *, num_continued: int, num_dropped: int) -> None:
        """Warn that a replica has died, and report its unfinished rollouts."""
        self._num_deaths += 1
        self._tracer.instant("controller", "replica died", replica=name)
        outcomes = {
            "continue": num_continued,
            "are dropped with their groups": num_dropped,
        }
        parts = [f"{num:,} {outcome}" for outcome, num in outcomes.items() if num]
        unfinished = f"; unfinished rollouts: {', '.join(parts)}" if parts else ""
        self._console.warn(f"{reason.rstrip('.')}{unfinished}")

    def replica_joined(self, name: str, *, version: int) -> None:
        """Record that a replica has joined."""
        self._tracer.instant("controller", "replica joined", replica=name, version=version)
        if self._num_deaths:
            self._console.note(f"{name} samples with the weights of step {version}")

    def trainer_restarted(self, reason: str, *, step: int, lost_steps: int, seconds: float) -> None:
        """Warn that the trainer was restarted, and remove the records of lost steps."""
        self._tracer.instant("controller", "trainer restarted", step=step, lost_steps=lost_steps)
        if lost_steps:
            self._trackers.go_back(step)
            self._metrics.go_back(step)
            self._rollouts.go_back(step)
        undone = ""
        if lost_steps:
            undone = f"; {counted(lost_steps, 'step')} {verb(lost_steps)} trained again"
        self._console.warn(
            f"{reason}; the trainer continues after step {step}, {seconds:.1f} s later{undone}"
        )

    def waited(self, stage: str, reason: str, seconds: float) -> None:
        """Record the time for which a stage has waited, and the depths of queues."""
        self._waited_s[metrics.waited_s(stage, reason)] += seconds
        if seconds >= MIN_DRAWN_WAIT_S:
            now_ns = self._tracer.now()
            start_ns = now_ns - int(seconds * 1e9)
            self._tracer.add_span(stage, f"waits for {reason}", start_ns, now_ns)
        for name, depth in self._queue_depths().items():
            if self._drawn_depths.get(name) != depth:
                self._drawn_depths[name] = depth
                self._tracer.counter(metrics.queue_depth(name), depth)

    def devices_lent(self, seconds: float, *, num_rollouts: int) -> None:
        """Record that the trainer's devices were lent."""
        now_ns = self._tracer.now()
        self._tracer.add_span("lending", "devices are lent", now_ns - int(seconds * 1e9), now_ns)
        self._lending[metrics.LENT_S] += seconds
        self._lending[metrics.HAND_OVERS] += 1
        self._lending[metrics.LENT_ROLLOUTS] += num_rollouts

    def not_lent(self, reason: str) -> None:
        """Count a step for which they were not lent."""
        self._lending[metrics.not_lent(reason)] += 1

    def actor_reported(self, report: TraceBatch) -> None:
        """Keep an actor's times of work, of waiting and of CPU, and its load, for the next line."""
        self._actors |= {
            metrics.actor_work_s(report.process): report.work_s,
            metrics.actor_wait_s(report.process): report.wait_s,
            metrics.actor_cpu_s(report.process): report.cpu_s,
            **_engine_load(report),
        }

    def step_trained(self, trained: TrainedStep) -> None:
        """Write the line and the rollouts of an optimizer step."""
        now = self._clock()
        step_s = now - self._step_started
        cpu_s = self._cpu_clock()
        stood_s = sum(self._waited_s.get(name, 0.0) for name in metrics.STANDSTILLS)
        line: dict[str, float] = {
            metrics.STEP: trained.step,
            metrics.POLICY_VERSION: trained.result.policy_version,
            **_rollout_metrics(trained),
            **self._sampled_mean(trained),
            **self._finite(trained),
            metrics.ROLLOUTS_ISSUED: self._ledger.num_issued * self._group_size,
            metrics.ROLLOUTS_TRAINED: self._ledger.num_trained * self._group_size,
            metrics.ROLLOUTS_DROPPED: self._ledger.num_dropped * self._group_size,
            **{
                metrics.rollouts_dropped(reason): count * self._group_size
                for reason, count in self._ledger.drop_reasons.items()
            },
            **self._skipped(),
            metrics.REWARDS_FAILED: self._num_failed.total(),
            **{metrics.rewards_failed(kind): n for kind, n in self._num_failed.items()},
            **self._sync,
            metrics.TIME_STEP_S: step_s,
            metrics.TIME_CONTROLLER_S: cpu_s - self._cpu_s,
            metrics.TIME_TRAIN_S: trained.result.train_s,
            metrics.TIME_TRAINER_IDLE_S: max(0.0, step_s - trained.result.train_s - stood_s),
            **self._waited_s,
            **self._lending,
            **self._actors,
            **{metrics.queue_depth(name): n for name, n in self._queue_depths().items()},
            metrics.TIME_UNIX_S: time.time(),
            metrics.THROUGHPUT_TRAINED_TOKENS: trained.result.num_tokens / step_s,
            metrics.THROUGHPUT_GENERATED_TOKENS: self._num_generated_tokens / step_s,
            metrics.THROUGHPUT_TRAINED_ROLLOUTS: len(trained.groups) * self._group_size / step_s,
        }
        self._step_started, self._cpu_s = now, cpu_s
        self._num_generated_tokens = 0
        self._num_failed.clear()
        self._next_failure_warning = self._groups_per_step
        self._num_refused.clear()
        self._waited_s.clear()
        self._lending.clear()
        self._actors.clear()
        self._metrics.write(line)
        records = _records(trained)
        self._rollouts.write(records)
        self._trackers.stepped(trained.step)
        self._publish(line)
        self._console.step(line, records)
        self._on_step(line)
        self._show_messages()
        self._stepped.notify()

    def _finite(self, trained: TrainedStep) -> dict[str, float]:
        """Return the finite metrics of a step. Others must not end weeks of training."""
        reported = trained.result.metrics
        finite = {name: value for name, value in reported.items() if math.isfinite(value)}
        for name in reported.keys() - finite.keys() - self._left_out:
            self._left_out.add(name)
            self._console.warn(
                f"metric {name}={reported[name]} of step {trained.step} is not finite and is left "
                "out of metrics.jsonl, as in all later steps where it is not finite"
            )
        return finite

    def _skipped(self) -> dict[str, float]:
        num = self._ledger.num_skipped
        return {metrics.PROMPTS_SKIPPED: num} if num else {}

    def evaluated(self, line: Mapping[str, float]) -> None:
        """Record an evaluation on held-out prompts, a line of evaluations.jsonl."""
        self._trackers.evaluated()
        self._publish({name: value for name, value in line.items() if name != metrics.STEP})
        self._console.evaluated(line)
        self._show_messages()

    def _sampled_mean(self, trained: TrainedStep) -> dict[str, float]:
        if any(group.prompt.shared_by for group in trained.groups):
            self._refused_rewards = self._refused_rewards or []
        if self._refused_rewards is None:
            return {}
        rewards, self._refused_rewards = self._refused_rewards, []
        for group in trained.groups:
            if not group.prompt.shared_by:
                rewards += _trained_columns(trained, group).get(REWARD, ())
        return {metrics.REWARD_SAMPLED_MEAN: statistics.fmean(rewards)} if rewards else {}

    def close(self, *, failed: bool) -> None:
        """Close the files, and pass the numbers of dropped rollouts to the console."""
        dropped = self._ledger.drop_reasons.most_common()
        self._console.dropped({reason: count * self._group_size for reason, count in dropped})
        self._metrics.close()
        self._rollouts.close()
        self._trackers.close(failed=failed)
        self._show_messages()

    def _show_messages(self) -> None:
        """Show what the trackers report about themselves."""
        for is_warning, text in self._trackers.messages():
            if is_warning:
                self._console.warn(text)
            else:
                self._console.note(text)


def _last_line(message: str) -> str:
    """Return the place in the user's code where the traceback in a message ends, if any."""
    places = re.findall(r'^ *File "[^"\n]*", line \d+', message, re.MULTILINE)
    return places[-1] if places else ""


def _engine_load(report: TraceBatch) -> dict[str, float]:
    """Return the means of an engine's counters, if it has counted."""
    names = {
        "running": metrics.engine_running,
        "waiting": metrics.engine_waiting,
        "kv usage": metrics.engine_kv_usage,
        "draft acceptance": metrics.engine_draft_acceptance,
        "draft speedup": metrics.engine_draft_speedup,
    }
    counts: defaultdict[str, list[float]] = defaultdict(list)
    for phase, name, _, _, value, _ in report.events:
        if phase == COUNTER and name in names:
            counts[name].append(value)
    return {names[name](report.process): statistics.fmean(of) for name, of in counts.items()}


def _rollout_metrics(trained: TrainedStep) -> dict[str, float]:
    notes = [note for group in trained.groups for note in group.rollouts if not note.is_greedy]
    columns: defaultdict[str, list[float]] = defaultdict(list)
    best_of_group: list[float] = []
    for group in trained.groups:
        of_group = _trained_columns(trained, group)
        for name, values in of_group.items():
            columns[name] += values
        if of_group.get(REWARD):
            best_of_group.append(max(of_group[REWARD]))
    components: dict[str, list[float]] = {}
    for note in notes:
        for name, value in note.components.items():
            components.setdefault(name, []).append(value)
    advantages = [values.get(ADVANTAGES, ()) for values in trained.columns.values()]
    line = {metrics.column_mean(name): statistics.fmean(x) for name, x in columns.items()}
    line.pop(metrics.column_mean(ADVANTAGES), None)
    if REWARD in columns:
        line[metrics.REWARD_STD] = statistics.pstdev(columns[REWARD])
        line[metrics.REWARD_BEST_OF_GROUP] = statistics.fmean(best_of_group)
    if any(advantages):
        line[metrics.ZERO_ADVANTAGE_FRAC] = statistics.fmean(not any(x) for x in advantages)
    return line | {
        **{
            metrics.reward_component(name): statistics.fmean(values)
            for name, values in components.items()
            if len(components) > 1
        },
        **_external(trained),
        metrics.COMPLETION_TOKENS_MEAN: statistics.fmean(note.num_tokens for note in notes),
        metrics.COMPLETION_TRUNCATED_FRAC: statistics.fmean(
            note.finish_reason is FinishReason.LENGTH for note in notes
        ),
    }


def _trained_columns(trained: TrainedStep, group: RunningGroup) -> dict[str, list[float]]:
    """Return the columns of a group, without its greedy baseline."""
    columns = trained.columns[group.group_id]
    return {name: group.of_trained(values) for name, values in columns.items()}


def _external(trained: TrainedStep) -> dict[str, float]:
    num_external = sum(bool(group.prompt.shared_by) for group in trained.groups)
    return {metrics.EXTERNAL_FRAC: num_external / len(trained.groups)} if num_external else {}


def _staleness(trained: TrainedStep, note: RolloutNote) -> int:
    """Return the staleness of a rollout, 0 without trained tokens, such as a greedy baseline."""
    weights = trained.step - 1
    return 0 if note.is_greedy else weights - min(note.min_version, weights)


def _gaps(trained: TrainedStep, group_id: int, index: int) -> list[float | None]:
    """Return the gaps of a rollout's tokens, with GAP_DIGITS decimals."""
    gaps = trained.result.gaps.get((group_id, index))
    if gaps is None:
        return []
    # The sum with 0.0 turns -0.0 into 0.0.
    return [round(x, GAP_DIGITS) + 0.0 if math.isfinite(x) else None for x in gaps.tolist()]


def _records(trained: TrainedStep) -> list[RolloutRecord]:
    records = []
    for group in trained.groups:
        columns = trained.columns[group.group_id]
        for index, note in enumerate(group.rollouts):
            if note.text is None:
                continue
            own = {name: values[index] for name, values in columns.items()}
            records.append(
                RolloutRecord(
                    step=trained.step,
                    group_id=group.group_id,
                    index=index,
                    prompt=note.text.prompt,
                    completion=note.text.completion,
                    token_ids=note.text.token_ids,
                    policy_versions=note.text.policy_versions,
                    staleness=_staleness(trained, note),
                    reward=own.pop(REWARD, None),
                    rewards=note.components,
                    advantage=own.pop(ADVANTAGES, None),
                    columns=own,
                    finish_reason=str(note.finish_reason),
                    logprob_gaps=_gaps(trained, group.group_id, index),
                    row=group.prompt.metadata,
                    asked=group.prompt.asked,
                    shared_by=group.prompt.shared_by,
                    turns=note.text.turns,
                    is_greedy=note.is_greedy,
                )
            )
    return records
