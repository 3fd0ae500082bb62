"""The recipe of the README, as a reader copies it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"

SMALL_COUNTING = shlex.split(
    "--num-steps 2 --prompts-per-step 4 --group-size 2 --sampling.max-tokens 8"
)


def own_recipe() -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (found,) = (block for block in blocks if "rlsys.launch(" in block)
    return str(found)
