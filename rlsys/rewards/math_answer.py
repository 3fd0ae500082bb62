r"""Mathematical equivalence by the math-verify library, in child processes that can be killed.

In: a completion with an answer such as \boxed{\frac{1}{2}}. Out: 1.0 if it equals the reference.

    threads of the runner ──► idle children ──► question, verdict ──► idle children
                                     └── none idle, fewer than cores: start one
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import reprlib
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rlsys.common.call_clock import waiting
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.errors import InvalidValue
from rlsys.rewards.answer_match import NUMBERS, reference
from rlsys.rewards.reward import Reward, check_column_name
from rlsys.types import Rollout

CHILD = Path(__file__).with_name("math_child.py")

# Time for a child to end after its output has closed.
DEATH_TIMEOUT_S = 10.0

# Time for a child to import math-verify and sympy on a very busy machine.
START_TIMEOUT_S = 120.0

POLL_S = 0.25


def math_answer(column: str = "answer", *, cpu_limit_s: float = 5.0) -> Reward:
    """Return a reward that is 1.0 if math-verify finds completion and reference equal.

    Args:
        column: The metadata column with the reference: LaTeX, plain text or a number. Of a text
            with "####", the part after it.
        cpu_limit_s: CPU time of one comparison, in seconds. Past it the rollout fails with
            "timeout".

    Raises:
        ImportError: The math-verify library is missing.
        InvalidValue: `column` is not a name.
    """
    check_column_name(column, "math_answer")
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError(
            "the math_answer reward needs the math-verify library. Install it with "
            "`pip install 'math-verify>=0.8'`, or use numeric_answer for plain numbers."
        )
    return Reward(
        function=partial(_math_answer, column=column, cpu_limit_s=cpu_limit_s),
        name="math_answer",
        required_columns=(column,),
        column_types=NUMBERS,
    )


def _math_answer(rollout: Rollout, *, column: str, cpu_limit_s: float) -> float:
    expected = reference(rollout, column, NUMBERS)
    verdict = _CHILDREN.ask(expected, rollout.completion_text, cpu_limit_s=cpu_limit_s)
    if isinstance(verdict, str):
        raise InvalidValue(
            f"metadata[{column!r}]",
            expected,
            rule=verdict,
            fix="Name the column with the answer.",
        )
    return float(verdict)


class _Children:
    """Pool of at most one child process per core, started when needed.

    The children end with this process: their standard input closes, or their CPU time runs out.
    """

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))
        self._idle: list[subprocess.Popen[bytes]] = []

    def ask(self, expected: str, completion: str, *, cpu_limit_s: float) -> bool | str:
        """Return the verdict, or the error as a text.

        Waiting for a free child and its start do not count against the limit of the call. An
        exception in this thread, such as that of a call past its limit, ends the child.

        Raises:
            TimeoutError: The comparison reached the CPU limit.
            ChildProcessError: The child died for another reason.
        """
        question = dump_json([expected, completion, cpu_limit_s]).encode() + b"\n"
        with waiting() as begin, self._slot():
            child = self._take()
            try:
                begin()
                answer = _answer(child, question)
            except BaseException:
                _end(child)
                raise
            if not answer:
                raise _death(child, completion, cpu_limit_s)
            self._idle.append(child)
        verdict: bool | str = parse_json(answer)
        return verdict

    @contextlib.contextmanager
    def _slot(self) -> Iterator[None]:
        # In short waits, so that an exception for this thread arrives.
        while not self._slots.acquire(timeout=POLL_S):
            pass
        try:
            yield
        finally:
            self._slots.release()

    def _take(self) -> subprocess.Popen[bytes]:
        while self._idle:
            child = self._idle.pop()
            if child.poll() is None:
                return child
        # Its own session, so that Ctrl-C at the terminal does not reach the child.
        child = subprocess.Popen(
            [sys.executable, "-P", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        try:
            ready = _line(child, within_s=START_TIMEOUT_S)
        except BaseException:
            _end(child)
            raise
        if ready != b"ready\n":
            _end(child)
            raise ChildProcessError(
                "math-verify did not start in its process. The log has its error."
            )
        return child


def _answer(child: subprocess.Popen[bytes], question: bytes) -> bytes:
    """Send a question and return the answering line, or b"" if the child has died."""
    assert child.stdin is not None
    try:
        while question:
            question = question[child.stdin.write(question) :]
    except BrokenPipeError:
        return b""
    return _line(child)


def _line(child: subprocess.Popen[bytes], *, within_s: float = math.inf) -> bytes:
    """Return the next line of the child, or b"" if it has died or has not answered in time.

    Waits in short pieces, so that an exception for this thread arrives.
    """
    assert child.stdout is not None
    deadline_s = time.monotonic() + within_s
    poller = select.poll()
    poller.register(child.stdout, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        if time.monotonic() > deadline_s:
            return b""
        if not poller.poll(1000 * POLL_S):
            continue
        piece = os.read(child.stdout.fileno(), 2**16)
        if not piece:
            return b""
        line += piece
    return line


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait(timeout=DEATH_TIMEOUT_S)
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            stream.close()


def _death(child: subprocess.Popen[bytes], completion: str, cpu_limit_s: float) -> OSError:
    code = child.wait(timeout=DEATH_TIMEOUT_S)
    if code == -signal.SIGPROF:
        return TimeoutError(
            f"math-verify took more than {cpu_limit_s} s of CPU time on {reprlib.repr(completion)}"
        )
    return ChildProcessError(f"math-verify's process ended with code {code}.")


_CHILDREN = _Children()
