"""Execution of one program in its forked process, like `python program.py`."""

from __future__ import annotations

import atexit
import builtins
import gc
import linecache
import os
import signal
import sys
import threading
import traceback
import types
from typing import NoReturn

NAME = "program.py"


def run(source: bytes, tmp: str) -> NoReturn:
    """Run a program and end the process with its exit code."""
    code = 1
    try:
        code = _run(source, tmp)
    finally:
        os._exit(code & 0xFF)


def _run(source: bytes, tmp: str) -> int:
    _become_main(tmp)
    code = 0
    try:
        text = source.decode()
        lines = text.splitlines(keepends=True)
        linecache.cache[NAME] = (len(text), None, lines, NAME)
        # The program gets a new, empty namespace.
        exec(compile(text, NAME, "exec"), sys.modules["__main__"].__dict__)
    except SystemExit as end:
        code = _code_of(end)
    except BaseException as error:  # noqa: BLE001, like the interpreter at its end
        code = 1
        _print_error(error)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:  # noqa: BLE001, such as output that is too large
        code = code or 1
        _print_error(error)
    return code


def _become_main(tmp: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(HOME=tmp, TMPDIR=tmp)
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    main.__dict__["__file__"] = NAME
    sys.argv = [NAME]
    for name in ("exit", "quit"):  # from the module site, which is not loaded
        setattr(builtins, name, sys.exit)
    gc.enable()


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    print(end.code, file=sys.stderr)
    return 1


def _print_error(error: BaseException) -> None:
    """Print the traceback of an error, from the program's first line."""
    trace = error.__traceback__
    own = trace.tb_next if trace is not None else None
    try:
        traceback.print_exception(type(error), error, own, file=sys.stderr)
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001, its text cannot be made or written
        return
