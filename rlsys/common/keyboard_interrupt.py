"""Ctrl-C where nobody has taken care of it yet, such as in the seconds of a script's imports.

Importing this module makes a KeyboardInterrupt that reaches the top of the program one line and the
exit code 130, instead of a traceback.
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


if sys.excepthook is sys.__excepthook__:  # else somebody has other plans, such as a notebook
    sys.excepthook = _report
