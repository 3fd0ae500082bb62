"""The math-verify library in a process of its own; run as a script, by math_answer.py alone.

In: on stdin, a line of JSON for each question: [reference, completion, limit in CPU seconds].
Out: on stdout, a line of JSON for each: true, false, or a text that says what is wrong.

A model can write 10^{10^{10}}. Python then computes a power in C, holds the interpreter lock, and
heeds no exception and no thread. So the kernel keeps the limit: the CPU timer's signal has its
default action, which ends the process.
"""

from __future__ import annotations

import functools
import json
import logging
import signal
import sys
from typing import Any

from math_verify import parse, verify

ANSWER_MARK = "####"  # as in verifiers.py; this script imports nothing of the package


@functools.lru_cache(maxsize=1024)
def parse_reference(text: str) -> Any:
    """Plain LaTeX is read as a formula: the library looks for one between dollars or in \\boxed."""
    answer = text.rpartition(ANSWER_MARK)[2].strip()
    is_marked = "$" in answer or "\\boxed" in answer
    return parse(answer if is_marked else f"${answer}$", parsing_timeout=None)


def judge(reference: str, completion: str) -> bool | str:
    gold = parse_reference(reference)
    if not gold:
        return f"reference {reference!r} holds no mathematical expression"
    # The library's own limits are signals too, which it could not raise inside C either.
    found = parse(completion, parsing_timeout=None)
    return bool(verify(gold, found, timeout_seconds=None))


def main() -> None:
    # It warns, on each call, that its own limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    print("ready", flush=True)
    for line in sys.stdin:
        reference, completion, limit_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        verdict = judge(reference, completion)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
