"""One run that is hurt on the way, from its start to its judgement."""

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
from scripts.crashes.plan import HICCUP_S, Blow, Kills, Plan
from scripts.crashes.processes import Process

CHECKPOINT_EVERY = 4
NEW_NODE_AFTER_S = 3.0

# By what is killed: of which of BACK, from how long after, and when there was work again.
MEASURED = {
    "rollout": ("replica", 0.0, tokens_after),
    "trainer": ("rank", 0.0, step_after),
    "node": ("node", NEW_NODE_AFTER_S, tokens_after),
}
REAP_S = 20.0  # for the system to take processes away that were told to end
VICTIM_WITHIN_S = 60.0  # a kind that has just died may be on its way back

# Kept by libraries for every process to come.
CACHES = {f"torchinductor_{getpass.getuser()}"}

# One machine: both ranks and both replicas share its cores, however few.
ONE_NODE = ("--trainer.num-cpus", "0.5", "--rollout.num-cpus", "0.5")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a trial happens, and how its processes are known."""

    directory: Path
    mark: str

    def job(self, *arguments: str, max_staleness: int, seed: int, num_steps: int) -> Job:
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
    """A directory of its own, with a short path as sockets need it. No process outlives it."""
    here = Place(
        directory=Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp")), mark=uuid.uuid4().hex
    )
    try:
        yield here
    finally:
        processes.kill_all(here.mark)


def hurt(plan: Plan, *, num_steps: int, limit_s: float, options: Sequence[str] = ()) -> Outcome:
    """A run on two nodes, with further options, that suffers the blows of the plan."""
    blows = ", ".join(f"{b.how} {b.kind} after step {b.after_step}" for b in plan.blows)
    outcome = Outcome(number=plan.number, title=f"η = {plan.max_staleness}: {blows}")
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
            assailant = _Assailant(job, here.mark, nodes)
            assailant.suffer(plan.blows, start + limit_s)
            ended = job.ends(start + limit_s)
            nodes.end_lost()
            outcome.leftovers += _processes_left(here.mark, but_ray=True)
        outcome.notes += assailant.notes
        outcome.back_s = assailant.back_s()
        _judge(outcome, job, here, ended, assailant.shared_files)
    outcome.took_s = time.monotonic() - start
    return _keep_if_bad(outcome, here)


@contextmanager
def undisturbed(
    *, seed: int, num_steps: int, limit_s: float, options: Sequence[str] = ()
) -> Iterator[Job]:
    """A run that is left alone, at η = 0. Raises RuntimeError if even that does not end well."""
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
    """A run on a Ray of its own, all of whose processes are killed at once, now and then. With
    η = 0 it must give the numbers of the `reference`, which was left alone.
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
    """When no process is left."""
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


class _Assailant:
    """Strikes when the run is where the plan says."""

    def __init__(self, job: Job, mark: str, nodes: TwoNodes) -> None:
        self._job = job
        self._mark = mark
        self._nodes = nodes
        self._struck: list[tuple[Blow, float]] = []  # and when, in Unix time
        self.shared_files: set[str] = set()  # that the run had at its blows
        self.notes: list[str] = []

    def suffer(self, blows: Sequence[Blow], deadline: float) -> None:
        for blow in blows:
            if not self._job.reaches(blow.after_step, deadline):
                self.notes.append("it ended before the last blow")
                return
            time.sleep(blow.delay_s)
            self.shared_files |= processes.shared_files(self._mark)
            self._strike(blow)

    def _strike(self, blow: Blow) -> None:
        victims = self._victims(blow)
        if not victims:
            self.notes.append(f"there was no {blow.kind} to {blow.how}")
            return
        self._struck.append((blow, time.time()))
        if blow.how == "hiccup":
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for victim in victims:
                    victim.send(number)
                if number is signal.SIGSTOP:
                    time.sleep(HICCUP_S)
            return
        number = signal.SIGKILL if blow.how == "kill" else signal.SIGSTOP
        if blow.kind == "node":
            self._nodes.lose_second(number)
            time.sleep(NEW_NODE_AFTER_S)
            self._nodes.add()
            return
        for victim in victims:
            victim.send(number)
        if blow.kind == "driver":
            self._job.process.wait()
            self._job.start()

    def _victims(self, blow: Blow) -> list[Process]:
        if blow.kind == "node":
            return self._nodes.second()
        deadline = time.monotonic() + VICTIM_WITHIN_S
        while self._job.process.poll() is None and time.monotonic() < deadline:
            if blow.kind == "driver":
                found = [p for p in processes.marked(self._mark) if p.pid == self._job.process.pid]
            else:
                found = processes.of_kind(blow.kind, self._mark)
            if found:
                return [found[int(blow.choice * len(found))]]
            time.sleep(0.1)  # nothing tells when a process is there
        return []

    def back_s(self) -> dict[str, list[float]]:
        """Seconds from each killed replica to the next one's tokens, from each killed rank to the
        next optimizer step, and from when a node joins in place of a killed one to the tokens of a
        replica there. Where another blow fell before, or no replica was on the node, there is
        nothing to measure.
        """
        found: dict[str, list[float]] = {what: [] for what in BACK}
        ends = [at for _, at in self._struck[1:]] + [math.inf]
        for (blow, at), until in zip(self._struck, ends, strict=False):
            if blow.how == "kill" and blow.kind in MEASURED:
                what, later_s, seconds_after = MEASURED[blow.kind]
                seconds = seconds_after(self._job.files, at + later_s, until)
                found[what] += [] if seconds is None else [seconds]
        return found
