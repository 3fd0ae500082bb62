"""Run the code cells of a notebook in one process, as Jupyter would, and keep the output.

    python scripts/run_notebook.py docs/tutorials/own_reward.ipynb
    python scripts/run_notebook.py docs/tutorials/own_reward.ipynb --write

--write stores in the notebook what its cells print.
Files that the notebook writes are below the current directory. A cell that raises ends the program
with its traceback. Cells are plain Python, without magics and shell commands.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import linecache
import os
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 30  # of the stored output of a cell
SLOW = " so far"  # in lines of progress that only slow machines print


class Both(io.StringIO):
    """Text that is kept and also written to the terminal."""

    def write(self, text: str) -> int:
        """Keep and show a text."""
        sys.__stdout__.write(text)  # type: ignore[union-attr]
        return super().write(text)


def run(notebook: dict[str, Any], name: str) -> list[str]:
    """Run the code cells one after the other and return what each of them printed."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # functions of the notebook are pickled by value
    printed = []
    code_cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code_cells, 1):
        source = "".join(cell["source"])
        file = f"{name}, cell {number}"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        with contextlib.redirect_stdout(Both()) as output:
            exec(compile(source, file, "exec"), module.__dict__)
        printed.append(output.getvalue())
    return printed


def with_outputs(notebook: dict[str, Any], printed: list[str]) -> dict[str, Any]:
    """Return the notebook with the printed texts as outputs; long ones lose their middle.

    Paths of the checkout become relative to it.
    """
    texts = iter(printed)
    cells = []
    for number, cell in enumerate(notebook["cells"], 1):
        if cell["cell_type"] == "code":
            text = next(texts).replace(f"{os.path.relpath(ROOT)}/", "").replace(f"{ROOT}/", "")
            lines = [line for line in text.splitlines(keepends=True) if SLOW not in line]
            if len(lines) > MAX_LINES:
                half = MAX_LINES // 2
                lines = [*lines[:half], "...\n", *lines[-half:]]
            output = {"name": "stdout", "output_type": "stream", "text": lines}
            cell = {**cell, "execution_count": None, "outputs": [output] if lines else []}
        cells.append({**cell, "id": f"cell-{number}"})
    return {**notebook, "cells": cells}


def main() -> None:
    """Run a notebook."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--write", action="store_true", help="store the output in the notebook")
    arguments = parser.parse_args()
    path = arguments.notebook.resolve()
    notebook = json.loads(path.read_text())
    printed = run(notebook, path.name)
    if arguments.write:
        text = json.dumps(with_outputs(notebook, printed), indent=1, ensure_ascii=False)
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()
