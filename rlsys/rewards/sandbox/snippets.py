"""Execution of snippets by an interpreter of a subset of Python (pydantic-monty).

In: an expression, or a few lines. Out: a text with the printed output and the value of the last
line.

The interpreter has few modules and no operations on files, the network or processes. It runs in
worker processes, so that a crash of the interpreter affects only its own snippet.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

from rlsys.common.call_clock import waiting
from rlsys.rewards.sandbox.fork_server_client import SandboxUnavailable
from rlsys.rewards.sandbox.programs import MIB, limits

# Time after a snippet's limit until its worker is killed.
GRACE_S = 1.0
MAX_OUTPUT_BYTES = MIB


async def python(code: str, *, timeout_s: float = 1.0, memory_mib: int = 64) -> str:
    """Return the printed output of code and the value of its last line: "5" for "2 + 3".

    If the code fails, the text ends with the error, such as "ZeroDivisionError: division by zero",
    for the model that wrote the code. Output above 1 MiB is cut, with a note. Snippets share no
    names.

    Args:
        code: The snippet.
        timeout_s: Time limit in seconds.
        memory_mib: Memory limit in MiB.

    Raises:
        InvalidValue: A limit is wrong.
        SandboxUnavailable: pydantic-monty is not installed.
    """
    limits(timeout_s, memory_mib, 1)
    with waiting() as begin:  # including the wait for a thread
        return await asyncio.to_thread(
            lambda: _pool().run(code, timeout_s, memory_mib, on_begin=begin)
        )


def python_sync(code: str, *, timeout_s: float = 1.0, memory_mib: int = 64) -> str:
    """Run a snippet like `python`, and wait for its end.

    Args:
        code: The snippet.
        timeout_s: Time limit in seconds.
        memory_mib: Memory limit in MiB.
    """
    limits(timeout_s, memory_mib, 1)
    with waiting() as begin:
        return _pool().run(code, timeout_s, memory_mib, on_begin=begin)


class _Pool:
    """Pool of one worker per processor. Their number limits how many snippets run at a time."""

    def __init__(self) -> None:
        import pydantic_monty

        self._monty: Any = pydantic_monty
        num = len(os.sched_getaffinity(0))
        pool = pydantic_monty.Monty(
            min_processes=num, max_processes=num, feed_duration_limit_grace=GRACE_S
        )
        self._workers = pool.__enter__()

    def run(
        self, code: str, timeout_s: float, memory_mib: int, *, on_begin: Callable[[], None]
    ) -> str:
        """Run a snippet. Calls `on_begin` when a worker is free and the snippet starts."""
        printed = self._monty.CollectString(max_bytes=MAX_OUTPUT_BYTES)
        bounds: Any = {
            "max_feed_duration_secs": timeout_s,
            "max_memory": memory_mib * MIB,
            "max_total_sleep_secs": 0.0,
        }
        ended = ""
        try:
            with self._workers.checkout(limits=bounds, os_policy={"sleep": "zero"}) as session:
                on_begin()
                value = session.feed_run(
                    code.encode(errors="replace").decode(), print_callback=printed
                )
            if value is not None:
                ended = str(value)
        except (self._monty.MontyRuntimeError, self._monty.MontySyntaxError) as error:
            ended = error.display("type-msg")
        except self._monty.MontyCrashedError as error:
            ended = f"RuntimeError: {error}"
        output = _cut(printed.output)
        if output and ended and not output.endswith("\n"):
            output += "\n"
        return (output + _cut(ended)).removesuffix("\n")


def _cut(text: str) -> str:
    if len(text) <= MAX_OUTPUT_BYTES:
        return text
    return f"{text[:MAX_OUTPUT_BYTES]}\n[cut: {len(text)} characters in all]"


_of_this_process: _Pool | None = None
_starting = threading.Lock()


def _pool() -> _Pool:
    global _of_this_process
    with _starting:
        if _of_this_process is None:
            try:
                _of_this_process = _Pool()
            except ImportError as error:
                raise SandboxUnavailable(
                    "snippets need the interpreter pydantic-monty. Install it with "
                    "`pip install 'rlsys[sandbox]'`, or run them as programs with sandbox.run."
                ) from error
        return _of_this_process


def _forget() -> None:
    """Drop the pool in a forked process. The parent keeps its workers."""
    global _of_this_process, _starting
    _of_this_process, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
