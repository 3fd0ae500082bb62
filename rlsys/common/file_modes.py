"""File modes as any program would have made them: some libraries write files that only their owner
may read, which others on the cluster cannot load.
"""

from __future__ import annotations

import os
from pathlib import Path


def ordinary_modes(directory: Path) -> None:
    """Give every file below `directory` the mode that the umask leaves to new files. The umask is
    read off `directory`, which must have been made with plain mkdir.
    """
    mode = directory.stat().st_mode & 0o666
    for root, _, names in os.walk(directory):
        for name in names:
            os.chmod(os.path.join(root, name), mode)
