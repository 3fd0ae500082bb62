"""Isolated execution of untrusted code.

    await sandbox.python("2 + 3")             a snippet in a subset of Python: the text "5"
    await sandbox.run(program, stdin="4")     a whole program in CPython: a Result
    await sandbox.check(program, tests)       which of its unit tests a program passes

`python_sync` and `run_sync` are the same for sync functions.
"""

from rlsys.rewards.sandbox.fork_server_client import SandboxFailed, SandboxUnavailable
from rlsys.rewards.sandbox.program_tests import check
from rlsys.rewards.sandbox.programs import Result, check_limits, run, run_sync, way
from rlsys.rewards.sandbox.snippets import python, python_sync

__all__ = [
    "Result",
    "SandboxFailed",
    "SandboxUnavailable",
    "check",
    "check_limits",
    "python",
    "python_sync",
    "run",
    "run_sync",
    "way",
]


def __dir__() -> list[str]:
    """Return the names of the public API."""
    return sorted(__all__)
