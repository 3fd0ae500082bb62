"""Ctrl-C before the program handles it, for example during imports.

After this module is imported, an uncaught KeyboardInterrupt prints one line and exits with code 130
instead of printing a traceback.
"""

from __future__ import annotations

import sys
from types import TracebackType

INTERRUPTED = 130  # exit code


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print("Interrupted.", file=sys.stderr)
    raise SystemExit(INTERRUPTED)


if sys.excepthook is sys.__excepthook__:  # not replaced, as in a notebook
    sys.excepthook = _report
