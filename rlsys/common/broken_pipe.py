"""Handling of a closed standard output, as in `recipe | head`."""

from __future__ import annotations

import os
import sys


def close_stdout() -> None:
    """Redirect standard output to /dev/null, so that the last flush at exit does not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
