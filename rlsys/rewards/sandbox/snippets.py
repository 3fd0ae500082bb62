"""Snippets, run by an interpreter of a subset of Python (pydantic-monty) in worker processes.

In: an expression, or a few lines. Out: a text: what they printed, and the value of the last line.

The interpreter knows no files, no network, no processes and few modules; it has no operation that
could reach them. Its workers are processes because no interpreter can be made proof against every
crash; one that crashes costs its own snippet.
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

# Past a snippet's limit, until its worker is killed.
GRACE_S = 1.0
MAX_OUTPUT_BYTES = MIB


async def python(code: str, *, timeout_s: float = 1.0, memory_mib: int = 64) -> str:
    """What the code printed, and the value of its last line: "5" for "2 + 3". Of code that fails,
    its output up to there, and the error as "ZeroDivisionError: division by zero": a text for
    the model that wrote it. At most 1 MiB; what is cut is said.

    Each snippet begins with nothing: no names of another one. Raises ValueError for limits that are
    none, SandboxUnavailable where pydantic-monty is not installed.
    """
    limits(timeout_s, memory_mib, 1)
    with waiting() as begin:  # for a thread, too
        return await asyncio.to_thread(
            lambda: _pool().run(code, timeout_s, memory_mib, on_begin=begin)
        )


def python_sync(code: str, *, timeout_s: float = 1.0, memory_mib: int = 64) -> str:
    """The same in a plain function, which waits."""
    limits(timeout_s, memory_mib, 1)
    with waiting() as begin:
        return _pool().run(code, timeout_s, memory_mib, on_begin=begin)


class _Pool:
    """Workers, as many as processors; their number is what limits how many snippets run at once."""

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
                    "snippets need the interpreter pydantic-monty; install it with "
                    "`pip install 'rlsys[sandbox]'`, or run them as programs with sandbox.run."
                ) from error
        return _of_this_process


def _forget() -> None:
    """In a forked process, whose parent goes on with its workers."""
    global _of_this_process, _starting
    _of_this_process, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
