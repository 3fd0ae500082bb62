"""Whole programs, run by CPython in the sandbox.

In: the text of a program, and what it reads as standard input. Out: what it wrote, and how it
ended.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, get_args

from rlsys.common.call_clock import waiting
from rlsys.rewards.sandbox.fork_server_client import Ended, ProgramJob, host
from rlsys.rewards.sandbox.inside.confine import Bounds

Reason = Literal["ended", "time", "memory", "output", "disk"]
REASONS: tuple[str, ...] = get_args(Reason)

MIB = 2**20
MAX_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """reason: "ended" by itself, or the limit that it met: "time", "memory", "output" (stdout or
    stderr are cut at the limit) or "disk". exit_code: below 0, the number of the signal.
    """

    stdout: str
    stderr: str
    exit_code: int
    reason: Reason
    wall_s: float
    cpu_s: float

    @property
    def ok(self) -> bool:
        return self.reason == "ended" and self.exit_code == 0


async def run(
    program: str,
    *,
    stdin: str = "",
    timeout_s: float = 5.0,
    memory_mib: int = 256,
    output_mib: int = 1,
) -> Result:
    """Run a program in a process of its own, which nothing has used before.

    It has the standard library, threads, and a directory of its own for files (its working
    directory, 16 MiB); no network, no other files, no other processes, none of this process's
    environment variables. Time runs from its start on: there are as many at a time as processors.

    timeout_s: on the clock, and about the same in CPU time. memory_mib: beside the interpreter's.
    output_mib: of stdout, of stderr, and of each file. Raises ValueError for limits that are none,
    SandboxUnavailable where the machine allows no isolation, SandboxFailed where the program did
    not run through no fault of its own.
    """
    asked = job(program, stdin, limits(timeout_s, memory_mib, output_mib))
    with waiting() as begin:
        (future,) = host().submit(asked, on_begin=begin)
        return result_of(await finished(future), output_mib)


def run_sync(
    program: str,
    *,
    stdin: str = "",
    timeout_s: float = 5.0,
    memory_mib: int = 256,
    output_mib: int = 1,
) -> Result:
    """The same in a plain function, which waits."""
    asked = job(program, stdin, limits(timeout_s, memory_mib, output_mib))
    with waiting() as begin:
        (future,) = host().submit(asked, on_begin=begin)
        return result_of(future.result(), output_mib)


def way() -> str:
    """How programs are isolated here, as a line of text. Raises SandboxUnavailable."""
    found = host()
    return f"{found.way}, CPython {found.version}"


def check_limits(timeout_s: float, memory_mib: int, output_mib: int = 1) -> None:
    """Raises ValueError for limits that are none."""
    limits(timeout_s, memory_mib, output_mib)


def limits(timeout_s: float, memory_mib: int, output_mib: int) -> Bounds:
    """Raises ValueError for limits that are none."""
    if not 0 < timeout_s <= MAX_SECONDS:
        raise ValueError(
            f"timeout_s={timeout_s} is no time limit; use more than 0 s, at most {MAX_SECONDS:g} s."
        )
    for name, value in (("memory_mib", memory_mib), ("output_mib", output_mib)):
        if value < 1:
            raise ValueError(f"{name}={value} leaves no room; use at least 1.")
    return Bounds(
        timeout_s=timeout_s,
        memory_bytes=memory_mib * MIB,
        output_bytes=output_mib * MIB,
    )


def job(
    program: str, stdin: str, bounds: Bounds, channel: socket.socket | None = None
) -> ProgramJob:
    # A lone surrogate, which a model can write in JSON, is no text in UTF-8.
    return ProgramJob(
        program=program.encode(errors="replace"),
        stdin=stdin.encode(errors="replace"),
        bounds=bounds,
        channel=channel,
    )


async def finished(future: Future[Ended]) -> Ended:
    """Cancelled, it ends the program."""
    try:
        return await asyncio.shield(asyncio.wrap_future(future))
    except asyncio.CancelledError:
        host().kill(future)
        raise


def result_of(ended: Ended, output_mib: int) -> Result:
    stderr = ended.stderr.decode(errors="replace")
    reason = ended.reason
    if reason == "ended" and ended.code != 0:
        last = stderr.rstrip().rpartition("\n")[2]
        if max(len(ended.stdout), len(ended.stderr)) >= output_mib * MIB:
            reason = "output"
        elif last.partition(":")[0] == "MemoryError":
            reason = "memory"
        elif ended.code == -9:
            reason = "time"  # the kernel's limit of CPU time
    return Result(
        stdout=ended.stdout.decode(errors="replace"),
        stderr=stderr,
        exit_code=ended.code,
        reason=reason if reason in REASONS else "ended",  # type: ignore[arg-type]
        wall_s=ended.wall_s,
        cpu_s=ended.cpu_s,
    )
