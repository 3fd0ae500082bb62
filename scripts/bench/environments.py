"""Rollouts of several turns: what they cost, part by part.

    python scripts/bench/environments.py
    python scripts/bench/environments.py --only tree

Parts: `tree` (training rollouts of eight branches as trees against their branches apart:
scripts/bench/branches.py). Prints one line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from scripts.bench.branches import measure_branches

PARTS = ("tree",)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        if "tree" in args.only:
            found |= measure_branches(Path(directory))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
