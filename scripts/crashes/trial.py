"""One trial: a run with faults, from its start to its evaluation."""

from __future__ import annotations

import getpass
import math
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.crashes import processes
from scripts.crashes.job import Job
from scripts.crashes.judgement import (
    BACK,
    Outcome,
    audited,
    differences,
    sampled_twice,
    step_after,
    tokens_after,
)
from scripts.crashes.nodes import TwoNodes, two_nodes
from scripts.crashes.plan import HICCUP_S, Fault, Kills, Plan
from scripts.crashes.processes import Process

CHECKPOINT_EVERY = 4
NEW_NODE_AFTER_S = 3.0

# By the kind of a killed part: its name in BACK, the delay of its replacement, the recovery time.
MEASURED = {
    "rollout": ("replica", 0.0, tokens_after),
    "trainer": ("rank", 0.0, step_after),
    "node": ("node", NEW_NODE_AFTER_S, tokens_after),
}
REAP_S = 20.0  # time limit for ending processes to disappear
VICTIM_WITHIN_S = 60.0  # a process that has just died may be starting again

# Caches that libraries keep for later processes.
CACHES = {f"torchinductor_{getpass.getuser()}"}

# Both ranks and both replicas share the cores of one machine.
ONE_NODE = ("--trainer.num-cpus", "0.5", "--rollout.num-cpus", "0.5")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Directory of a trial, and the mark of its processes."""

    directory: Path
    mark: str

    def job(self, *arguments: str, max_staleness: int, seed: int, num_steps: int) -> Job:
        """Start the trial's recipe."""
        return Job(
            self.directory,
            self.mark,
            [
                *arguments,
                *("--checkpoint-every", str(CHECKPOINT_EVERY)),
                *("--asynchrony.max-staleness", str(max_staleness)),
                *("--seed", str(seed), "--num-steps", str(num_steps)),
            ],
        )


@contextmanager
def place() -> Iterator[Place]:
    """Yield a directory with a short path, as sockets need it; kill all processes at the end."""
    here = Place(
        directory=Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp")), mark=uuid.uuid4().hex
    )
    try:
        yield here
    finally:
        processes.kill_all(here.mark)


def hurt(plan: Plan, *, num_steps: int, limit_s: float, options: Sequence[str] = ()) -> Outcome:
    """Run on two nodes with the faults of the plan, and return the outcome."""
    faults = ", ".join(f"{b.how} {b.kind} after step {b.after_step}" for b in plan.faults)
    outcome = Outcome(number=plan.number, title=f"η = {plan.max_staleness}: {faults}")
    start = time.monotonic()
    with place() as here:
        with two_nodes(here.mark, here.directory) as nodes:
            job = here.job(
                *("--cluster.address", nodes.address),
                *options,
                max_staleness=plan.max_staleness,
                seed=plan.number,
                num_steps=num_steps,
            )
            injector = _FaultInjector(job, here.mark, nodes)
            injector.inject_all(plan.faults, start + limit_s)
            ended = job.ends(start + limit_s)
            nodes.end_lost()
            outcome.leftovers += _processes_left(here.mark, but_ray=True)
        outcome.notes += injector.notes
        outcome.back_s = injector.back_s()
        _judge(outcome, job, here, ended, injector.shared_files)
    outcome.took_s = time.monotonic() - start
    return _keep_if_bad(outcome, here)


@contextmanager
def undisturbed(
    *, seed: int, num_steps: int, limit_s: float, options: Sequence[str] = ()
) -> Iterator[Job]:
    """Yield a run without faults, at η = 0.

    Raises:
        RuntimeError: The run did not end well.
    """
    with place() as here:
        job = here.job(*ONE_NODE, *options, max_staleness=0, seed=seed, num_steps=num_steps)
        if not job.ends(time.monotonic() + limit_s):
            raise RuntimeError(f"an undisturbed run did not end well, see {job.log}")
        yield job
    shutil.rmtree(here.directory, ignore_errors=True)


def kill_and_resume(
    kills: Kills,
    reference: Job | None,
    *,
    seed: int,
    num_steps: int,
    limit_s: float,
    options: Sequence[str] = (),
) -> Outcome:
    """Run on a local Ray, kill all its processes at some moments, and return the outcome.

    With η = 0 the numbers must equal those of the undisturbed `reference`.
    """
    steps = ", ".join(str(step) for step in kills.after_steps)
    outcome = Outcome(
        number=kills.number, title=f"η = {kills.max_staleness}: kill all after step {steps}"
    )
    start = time.monotonic()
    with place() as here:
        job = here.job(
            *ONE_NODE,
            *options,
            max_staleness=kills.max_staleness,
            seed=seed,
            num_steps=num_steps,
        )
        shared_files: set[str] = set()
        for step, delay_s in zip(kills.after_steps, kills.delays_s, strict=True):
            if not job.reaches(step, start + limit_s):
                break
            time.sleep(delay_s)
            if job.process.poll() is not None:
                break
            shared_files |= processes.shared_files(here.mark)
            processes.kill_all(here.mark)
            job.process.wait()
            job.start()
        ended = job.ends(start + limit_s)
        outcome.leftovers += _processes_left(here.mark, but_ray=False)
        _judge(outcome, job, here, ended, shared_files)
        if outcome.ended_well:
            outcome.resampled, outcome.resampled_older = sampled_twice(job.files)
            if reference is not None:
                outcome.audit_errors += differences(job.files, reference.files)
    outcome.took_s = time.monotonic() - start
    return _keep_if_bad(outcome, here)


def _judge(outcome: Outcome, job: Job, here: Place, ended: bool, shared_files: set[str]) -> None:
    """Complete the outcome after all processes have ended."""
    finished, outcome.audit_errors = audited(job.files.path)
    outcome.ended_well = ended and finished
    temporary = {path.name for path in (here.directory / "tmp").iterdir()}
    outcome.leftovers += [f"temporary file {name}" for name in sorted(temporary - CACHES)]
    outcome.leftovers += sorted(path for path in shared_files if Path(path).exists())


def _processes_left(mark: str, *, but_ray: bool) -> list[str]:
    left = processes.gone_within(mark, REAP_S, but_ray=but_ray)
    return [f"process {process.pid}: {process.command[-120:]}" for process in left]


def _keep_if_bad(outcome: Outcome, here: Place) -> Outcome:
    if outcome.is_good:
        shutil.rmtree(here.directory, ignore_errors=True)
    else:
        outcome.notes.append(f"see {here.directory}")
    return outcome


class _FaultInjector:
    """Injects the faults of a plan into a run."""

    def __init__(self, job: Job, mark: str, nodes: TwoNodes) -> None:
        self._job = job
        self._mark = mark
        self._nodes = nodes
        self._injected: list[tuple[Fault, float]] = []  # with Unix times
        self.shared_files: set[str] = set()  # of the run when faults hit it
        self.notes: list[str] = []

    def inject_all(self, faults: Sequence[Fault], deadline: float) -> None:
        for fault in faults:
            if not self._job.reaches(fault.after_step, deadline):
                self.notes.append("it ended before the last fault")
                return
            time.sleep(fault.delay_s)
            self.shared_files |= processes.shared_files(self._mark)
            self._inject(fault)

    def _inject(self, fault: Fault) -> None:
        victims = self._victims(fault)
        if not victims:
            self.notes.append(f"there was no {fault.kind} to {fault.how}")
            return
        self._injected.append((fault, time.time()))
        if fault.how == "hiccup":
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for victim in victims:
                    victim.send(number)
                if number is signal.SIGSTOP:
                    time.sleep(HICCUP_S)
            return
        number = signal.SIGKILL if fault.how == "kill" else signal.SIGSTOP
        if fault.kind == "node":
            self._nodes.lose_second(number)
            time.sleep(NEW_NODE_AFTER_S)
            self._nodes.add()
            return
        for victim in victims:
            victim.send(number)
        if fault.kind == "driver":
            self._job.process.wait()
            self._job.start()

    def _victims(self, fault: Fault) -> list[Process]:
        if fault.kind == "node":
            return self._nodes.second()
        deadline = time.monotonic() + VICTIM_WITHIN_S
        while self._job.process.poll() is None and time.monotonic() < deadline:
            if fault.kind == "driver":
                found = [p for p in processes.marked(self._mark) if p.pid == self._job.process.pid]
            else:
                found = processes.of_kind(fault.kind, self._mark)
            if found:
                return [found[int(fault.choice * len(found))]]
            time.sleep(0.1)  # no notification when a process starts
        return []

    def back_s(self) -> dict[str, list[float]]:
        """Return the recovery times of each killed part, in seconds.

        They run from a killed replica to the next one's tokens, from a killed rank to the next
        optimizer step, and from the start of a replacement node to the tokens of a replica there. A
        time is missing if another fault came first, or if no replica was on the node.
        """
        found: dict[str, list[float]] = {what: [] for what in BACK}
        ends = [at for _, at in self._injected[1:]] + [math.inf]
        for (fault, at), until in zip(self._injected, ends, strict=False):
            if fault.how == "kill" and fault.kind in MEASURED:
                what, later_s, seconds_after = MEASURED[fault.kind]
                seconds = seconds_after(self._job.files, at + later_s, until)
                found[what] += [] if seconds is None else [seconds]
        return found
