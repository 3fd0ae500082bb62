"""Execution of whole programs by CPython in the sandbox.

In: the source of a program and its standard input. Out: its output, and how it ended.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, get_args

from rlsys.common.call_clock import waiting
from rlsys.errors import require
from rlsys.rewards.sandbox.fork_server_client import Ended, ProgramJob, host
from rlsys.rewards.sandbox.inside.confine import Bounds

Reason = Literal["ended", "time", "memory", "output", "disk"]
REASONS: tuple[str, ...] = get_args(Reason)

MIB = 2**20
MAX_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """The output and the end of a program.

    Attributes:
        stdout: Standard output, cut at the limit.
        stderr: Standard error, cut at the limit.
        exit_code: The exit code, or minus the number of the signal that ended it.
        reason: "ended" by itself, or the limit that it reached: "time", "memory", "output" or
            "disk".
        wall_s: Time that it ran, in seconds.
        cpu_s: CPU time that it used, in seconds.
    """

    stdout: str
    stderr: str
    exit_code: int
    reason: Reason
    wall_s: float
    cpu_s: float

    @property
    def ok(self) -> bool:
        """Return whether it ended by itself with exit code 0."""
        return self.reason == "ended" and self.exit_code == 0


async def run(
    program: str,
    *,
    stdin: str = "",
    timeout_s: float = 5.0,
    memory_mib: int = 256,
    output_mib: int = 1,
) -> Result:
    """Run a program in a new, isolated process.

    It can use the standard library, threads, and an empty working directory of 16 MiB. It has no
    network, no other files or processes, and none of this process's environment variables. As many
    programs run at a time as there are processors. The time of a program begins with its start.

    Args:
        program: The source of the program.
        stdin: Its standard input.
        timeout_s: Limit of its run time and, about the same, of its CPU time, in seconds.
        memory_mib: Memory limit in MiB, in addition to the interpreter's.
        output_mib: Limit of stdout, of stderr and of each file in MiB.

    Raises:
        InvalidValue: A limit is wrong.
        SandboxUnavailable: Programs cannot be isolated on this machine.
        SandboxFailed: The sandbox itself failed.
    """
    program_job = job(program, stdin, limits(timeout_s, memory_mib, output_mib))
    with waiting() as begin:
        (future,) = host().submit(program_job, on_begin=begin)
        return result_of(await finished(future), output_mib)


def run_sync(
    program: str,
    *,
    stdin: str = "",
    timeout_s: float = 5.0,
    memory_mib: int = 256,
    output_mib: int = 1,
) -> Result:
    """Run a program like `run`, and wait for its end.

    Args:
        program: The source of the program.
        stdin: Its standard input.
        timeout_s: Limit of its run time and, about the same, of its CPU time, in seconds.
        memory_mib: Memory limit in MiB, in addition to the interpreter's.
        output_mib: Limit of stdout, of stderr and of each file in MiB.
    """
    program_job = job(program, stdin, limits(timeout_s, memory_mib, output_mib))
    with waiting() as begin:
        (future,) = host().submit(program_job, on_begin=begin)
        return result_of(future.result(), output_mib)


def way() -> str:
    """Return how programs are isolated on this machine, as a line of text.

    Raises:
        SandboxUnavailable: Programs cannot be isolated on this machine.
    """
    found = host()
    return f"{found.way}, CPython {found.version}"


def check_limits(timeout_s: float, memory_mib: int, output_mib: int = 1) -> None:
    """Check the limits of a program.

    Args:
        timeout_s: Time limit in seconds.
        memory_mib: Memory limit in MiB.
        output_mib: Limit of each output in MiB.

    Raises:
        InvalidValue: A limit is wrong.
    """
    limits(timeout_s, memory_mib, output_mib)


def limits(timeout_s: float, memory_mib: int, output_mib: int) -> Bounds:
    """Return the limits of a program, or raise InvalidValue."""
    require(
        0 < timeout_s <= MAX_SECONDS,
        "timeout_s",
        timeout_s,
        rule="is not a time limit",
        fix=f"Use more than 0 s and at most {MAX_SECONDS:g} s.",
    )
    for name, value in (("memory_mib", memory_mib), ("output_mib", output_mib)):
        require(value >= 1, name, value, rule="must be at least 1", fix="Use a larger limit.")
    return Bounds(
        timeout_s=timeout_s,
        memory_bytes=memory_mib * MIB,
        output_bytes=output_mib * MIB,
    )


def job(
    program: str, stdin: str, bounds: Bounds, channel: socket.socket | None = None
) -> ProgramJob:
    """Return the job of a program."""
    # A model can write a lone surrogate in JSON, which UTF-8 cannot encode.
    return ProgramJob(
        program=program.encode(errors="replace"),
        stdin=stdin.encode(errors="replace"),
        bounds=bounds,
        channel=channel,
    )


async def finished(future: Future[Ended]) -> Ended:
    """Wait for the end of a program. A cancellation ends the program."""
    try:
        return await asyncio.shield(asyncio.wrap_future(future))
    except asyncio.CancelledError:
        host().kill(future)
        raise


def result_of(ended: Ended, output_mib: int) -> Result:
    """Return the result of a program that has ended."""
    stderr = ended.stderr.decode(errors="replace")
    reason = ended.reason
    if reason == "ended" and ended.code != 0:
        last = stderr.rstrip().rpartition("\n")[2]
        if max(len(ended.stdout), len(ended.stderr)) >= output_mib * MIB:
            reason = "output"
        elif last.partition(":")[0] == "MemoryError":
            reason = "memory"
        elif ended.code == -9:
            reason = "time"  # the kernel's limit on CPU time
    return Result(
        stdout=ended.stdout.decode(errors="replace"),
        stderr=stderr,
        exit_code=ended.code,
        reason=reason if reason in REASONS else "ended",  # type: ignore[arg-type]
        wall_s=ended.wall_s,
        cpu_s=ended.cpu_s,
    )
