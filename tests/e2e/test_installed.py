"""rlsys from a wheel, in an environment without the checkout, in a notebook and in a thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from pathlib import Path
from statistics import fmean

import pytest

from rlsys.runs.observe.metrics_file import read_metrics
from tests.e2e.job import Job, copied, start_command
from tests.e2e.own_recipe import SMALL_COUNTING, own_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Files that a build needs.
SOURCES = ("actors", "rlsys", "pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE")


def test_an_editable_installation_has_the_recipes_and_actors(tmp_path: Path) -> None:
    """Users install extras with `pip install -e '.[NAME]'` in the checkout."""
    source = copied([*SOURCES, "recipes"], tmp_path / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--prefix", str(tmp_path / "prefix"), "-e", str(source)],
        check=True,
        timeout=300,
        capture_output=True,
    )
    (packages,) = (tmp_path / "prefix").rglob("site-packages")
    program = (
        f"import site; site.addsitedir({str(packages)!r})\n"
        "import actors, recipes, rlsys\n"
        "print(actors.__file__, recipes.__file__, rlsys.__file__)"
    )
    found = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=tmp_path,
        env={},
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert found.stdout.count(str(source)) == 3


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with rlsys from a wheel and this one's packages."""
    directory = tmp_path_factory.mktemp("installed")
    source = copied(SOURCES, directory / "source")
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
        assert "rlsys/py.typed" in archive.namelist()
        assert "rlsys/commands/project/recipe.py.template" in archive.namelist()
        assert "rlsys/report/assets/report.css" in archive.namelist()
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
    assert "report runs/counting\n" in job.output  # the command that the summary proposes
    rows = [json.loads(line)["row"] for line in (directory / "rollouts.jsonl").open()]
    assert rows
    assert all(row.keys() == {"answer"} for row in rows)
    # Again with the same directory: nothing is left to do, and Ray is not started.
    again = run(python, own_recipe(), tmp_path, "--config", f"{directory}/config.json", "--resume")
    assert again.returncode == 0, again.output
    assert "already has all 2 steps" in again.output
    assert "Starting Ray" not in again.output


def rlsys(python: Path, directory: Path, *arguments: str) -> Job:
    """Run the console entry point `rlsys` of the wheel, which the fixture does not install."""
    (directory / "console_script.py").write_text(
        "from importlib.metadata import entry_points\n"
        "(found,) = entry_points(group='console_scripts', name='rlsys')\n"
        "found.load()()\n"
    )
    command = [str(python), "console_script.py", *arguments]
    environment = {"PYTHONPATH": "", "PATH": f"{python.parent}:{os.environ['PATH']}"}
    job = start_command(command, directory, directory, **environment)
    try:
        job.wait()
        assert job.left_behind() == {}, job.output
    finally:
        job.end()
    return job


def test_a_new_project_learns_from_the_wheel_alone(python: Path, tmp_path: Path) -> None:
    """The time is that of `rlsys run`, printed for docs/benchmarks.md."""
    written = rlsys(python, tmp_path, "new", "demo")
    assert written.returncode == 0, written.output
    demo = tmp_path / "demo"
    begin_s = time.monotonic()
    trained = rlsys(python, demo, "run", "recipe.py")
    assert trained.returncode == 0, trained.output
    print(f"rlsys run recipe.py: {time.monotonic() - begin_s:.0f} s")
    rewards = [line["reward/mean"] for line in read_metrics(demo / "runs/sums/metrics.jsonl")]
    assert len(rewards) == 100
    assert fmean(rewards[-10:]) > fmean(rewards[:10]) + 0.3
    audited = rlsys(python, demo, "audit")
    assert audited.returncode == 0, audited.output
    assert str(Path("runs/sums")) in audited.output
    again = rlsys(python, demo, "run", "recipe.py", "--num-steps", "102", "--resume")
    assert again.returncode == 0, again.output
    assert "102 of 102 steps" in again.output


def test_the_page_of_a_run_of_the_new_project(python: Path, tmp_path: Path) -> None:
    pytest.importorskip("rlsys.report")
    assert rlsys(python, tmp_path, "new", "demo").returncode == 0
    demo = tmp_path / "demo"
    short = ("--num-steps", "2", "--warm-start-steps", "2")
    assert rlsys(python, demo, "run", "recipe.py", *short).returncode == 0
    reported = rlsys(python, demo, "report")
    assert reported.returncode == 0, reported.output
    assert "<html" in (demo / "runs/sums/report.html").read_text()


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
