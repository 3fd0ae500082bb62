"""File modes according to the umask.

Some libraries write files that only their owner can read, and that other users of the cluster
cannot load.
"""

from __future__ import annotations

import os
from pathlib import Path


def apply_umask(directory: Path) -> None:
    """Give each file below `directory` the mode of a new file.

    The umask is taken from the mode of `directory`, which must come from a plain mkdir.
    """
    mode = directory.stat().st_mode & 0o666
    for root, _, names in os.walk(directory):
        for name in names:
            os.chmod(os.path.join(root, name), mode)
