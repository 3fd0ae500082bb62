"""Mathematical equivalence by the math-verify library, in child processes that can be killed.

In: a completion with an answer such as \\boxed{\\frac{1}{2}}. Out: 1.0 if it equals the reference.

    threads of the runner ──► idle children ──► question, verdict ──► idle children
                                     └── none idle, fewer than cores: start one
"""

from __future__ import annotations

import importlib.util
import json
import os
import reprlib
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

from rlsys.rewards.reward import Reward, check_column_name
from rlsys.rewards.verifiers import NUMBERS, reference
from rlsys.types import Rollout

CHILD = Path(__file__).with_name("math_child.py")

# A child whose output has closed has ended, or does so at once.
DEATH_TIMEOUT_S = 10.0


def math_answer(column: str = "answer", *, cpu_limit_s: float = 5.0) -> Reward:
    """Whether the completion's expression equals the reference's, as math-verify judges.

    `cpu_limit_s` limits one comparison in CPU time; past it the rollout fails with "timeout".
    The reference is LaTeX or plain; of a text with "####", what follows. Raises ImportError where
    the library is missing.
    """
    check_column_name(column, "math_answer")
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError(
            "the math_answer reward needs the math-verify library; install it with "
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
        raise ValueError(f"metadata[{column!r}]: {verdict}; name the column with the answer.")
    return float(verdict)


class _Children:
    """As many children as cores, started when they are first needed.

    They end when this process does: their standard input closes, or their CPU time runs out.
    """

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))
        self._idle: list[subprocess.Popen[str]] = []

    def ask(self, expected: str, completion: str, *, cpu_limit_s: float) -> bool | str:
        """The verdict, or a text that says what is wrong with the reference.

        Raises TimeoutError past the limit, and ChildProcessError if the child died otherwise. The
        runner's own limit covers the wait for a child.
        """
        with self._slots:
            child = self._take()
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(json.dumps([expected, completion, cpu_limit_s]) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
            if not answer:
                raise _death(child, completion, cpu_limit_s)
            self._idle.append(child)
        verdict: bool | str = json.loads(answer)
        return verdict

    def _take(self) -> subprocess.Popen[str]:
        while self._idle:
            child = self._idle.pop()
            if child.poll() is None:
                return child
        # Its own session: Ctrl-C at the terminal is for this process, whose end is theirs.
        child = subprocess.Popen(
            [sys.executable, "-P", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert child.stdout is not None
        if child.stdout.readline() != "ready\n":
            raise ChildProcessError("math-verify did not start in its process; its error is above.")
        return child


def _death(child: subprocess.Popen[str], completion: str, cpu_limit_s: float) -> OSError:
    code = child.wait(timeout=DEATH_TIMEOUT_S)
    if code == -signal.SIGPROF:
        return TimeoutError(
            f"math-verify took more than {cpu_limit_s} s of CPU time on {reprlib.repr(completion)}"
        )
    return ChildProcessError(f"math-verify's process ended with code {code}.")


_CHILDREN = _Children()
