"""Code that nobody trusts, run where it can do no harm.

    await sandbox.python("2 + 3")             a snippet in a subset of Python: the text "5"
    await sandbox.run(program, stdin="4")     a whole program in CPython: a Result

`python_sync` and `run_sync` are the same for plain functions.
"""

from rlsys.sandbox.host import SandboxFailed, SandboxUnavailable
from rlsys.sandbox.programs import Result, run, run_sync, way

__all__ = [
    "Result",
    "SandboxFailed",
    "SandboxUnavailable",
    "run",
    "run_sync",
    "way",
]
