"""rlsys from a wheel, in an environment without the checkout, in a notebook and in a thread."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.e2e.job import ROOT, Job, start_command
from tests.e2e.own_recipe import SMALL_COUNTING, own_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Files that a build needs.
SOURCES = ("actors", "rlsys", "pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with rlsys from a wheel and this one's packages."""
    directory = tmp_path_factory.mktemp("installed")
    source = directory / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name)
        else:
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--wheel-dir", str(directory), str(source)],
        check=True,
        timeout=300,
        capture_output=True,
    )
    (wheel,) = directory.glob("*.whl")
    venv.create(directory / "venv", with_pip=False)
    packages = directory / "venv" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
        assert names == {"rlsys", "rlsys_actors", wheel.name.split("-py3")[0] + ".dist-info"}
        assert {"rlsys/py.typed", "rlsys/report/assets/report.css"} <= {*archive.namelist()}
        archive.extractall(packages)
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    return directory / "venv" / "bin" / "python"


def run(python: Path, script: str, directory: Path, *arguments: str) -> Job:
    (directory / "mine.py").write_text(script)
    # Without the checkout, regardless of the tests' working directory.
    environment = {"PYTHONPATH": "", "PATH": f"{python.parent}:{os.environ['PATH']}"}
    command = [str(python), "mine.py", *arguments]
    job = start_command(command, directory, directory, **environment)
    try:
        job.wait()
        assert job.left_behind() == {}, job.output
    finally:
        job.end()
    return job


def test_the_readmes_own_recipe_trains_from_any_directory(python: Path, tmp_path: Path) -> None:
    job = run(python, own_recipe(), tmp_path, *SMALL_COUNTING, "--seed", "5")
    assert job.returncode == 0, job.output
    directory = tmp_path / "runs" / "counting"
    assert (directory / "hf" / "model.safetensors").is_file()
    assert "uPlot" in (directory / "report.html").read_text()
    assert f"AutoModelForCausalLM.from_pretrained({str(Path('runs/counting/hf'))!r})" in job.output
    rows = [json.loads(line)["row"] for line in (directory / "rollouts.jsonl").open()]
    assert rows
    assert all(row.keys() == {"answer"} for row in rows)
    # Again with the same directory: nothing is left to do, and Ray is not started.
    again = run(python, own_recipe(), tmp_path, "--config", f"{directory}/config.json", "--resume")
    assert again.returncode == 0, again.output
    assert "already has all 2 steps" in again.output
    assert "Starting Ray" not in again.output


NOTEBOOK = """
import asyncio
import threading

from counting import counting, CountingConfig
import rlsys

def launched(name, **fields):
    config = CountingConfig(
        name=name, num_steps=2, prompts_per_step=4, group_size=2,
        sampling=rlsys.SamplingConfig(max_tokens=8), **fields,
    )
    return rlsys.launch(config, counting(config), own_model=rlsys.OwnModel(name="bytes"))

async def cell():
    result = launched("notebook", resume="auto")
    assert result.outcome == "finished"
    assert [line["step"] for line in result.metrics] == [1, 2]
    assert result.model.is_dir() and result.files.rollouts.is_file()
    try:
        launched("notebook")
    except ValueError as error:
        print("rejected:", error)
    again = launched("notebook", resume="auto")
    assert again.metrics == result.metrics
    try:
        launched("large", rollout=rlsys.RolloutConfig(num_cpus=10_000))
    except ValueError as error:
        print("rejected:", error)

asyncio.run(cell())
found = []
thread = threading.Thread(target=lambda: found.append(launched("thread", resume="auto")))
thread.start()
thread.join()
assert len(found[0].metrics) == 2
print("all well")
"""


def test_a_notebook_and_a_thread(python: Path, tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(own_recipe())
    job = run(python, NOTEBOOK, tmp_path)
    assert job.returncode == 0, job.output
    assert "rejected: name='notebook'" in job.output
    assert "rejected: run: does not fit: the run needs 10001 CPUs" in job.output
    assert job.output.rstrip().endswith("all well")
