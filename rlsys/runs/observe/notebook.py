"""Output that a notebook updates in place. No other module imports IPython."""

from __future__ import annotations

import sys
from typing import Any


class NotebookDisplay:
    """Output of the cell that runs. Each `show` replaces its text."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Replace the output."""
        from IPython.display import display

        data = {"text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def in_notebook() -> bool:
    """Return whether a Jupyter kernel runs this process."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")
