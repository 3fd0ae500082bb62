"""Measure environments, part by part.

    python scripts/bench/environments.py
    python scripts/bench/environments.py --only tree steps kill

Each part is a script of its own, which documents its numbers:

    tree                      environment_branches.py
    tokens, bookkeeping       environment_tokens.py
    steps, blocking,          environment_actors.py
    kill, hung
    prefixes                  environment_prefixes.py
    endpoint                  environment_endpoint.py
    sandbox                   environment_sandbox.py
    primitives                environment_primitives.py
    recipes                   environment_recipes.py: guess, calculator, kuhn

Prints one line of JSON last, with the keys of all parts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

PARTS: Mapping[str, tuple[str, ...]] = {
    "tree": ("environment_branches",),
    "tokens": ("environment_tokens", "--only", "tokens"),
    "bookkeeping": ("environment_tokens", "--only", "bookkeeping"),
    "steps": ("environment_actors", "--only", "steps"),
    "blocking": ("environment_actors", "--only", "blocking"),
    "kill": ("environment_actors", "--only", "kill"),
    "hung": ("environment_actors", "--only", "hung"),
    "prefixes": ("environment_prefixes",),
    "endpoint": ("environment_endpoint",),
    "sandbox": ("environment_sandbox",),
    "primitives": ("environment_primitives",),
    "recipes": ("environment_recipes",),
}


def measured(part: str) -> dict[str, Any]:
    """Return what the script of a part prints.

    Raises:
        CalledProcessError: The script failed.
    """
    module, *options = PARTS[part]
    script = ROOT / "scripts" / "bench" / f"{module}.py"
    ended = subprocess.run(
        [sys.executable, str(script), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    if part != "prefixes":
        found: dict[str, Any] = lines[-1]
        return found
    return {  # a line for each engine and shape
        f"prefix_{key}_{line['engine']}_{line['shape']}": line[key]
        for line in lines
        for key in ("hit_rate", "ratio")
    }


def main() -> None:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    found: dict[str, Any] = {}
    for part in parser.parse_args().only:
        of_part = measured(part)
        print(part, json.dumps(of_part), file=sys.stderr, flush=True)
        found |= of_part
    print(json.dumps(found))


if __name__ == "__main__":
    main()
