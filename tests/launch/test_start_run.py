"""The function of the Ray package that carries out a run."""

import actors.run.launch
from rlsys.launcher.launching import StartRun, _start_run

# The type checker compares the two signatures.
START_RUN: StartRun = actors.run.launch.launch


def test_a_checkout_starts_runs_with_its_own_actors() -> None:
    assert _start_run() is START_RUN
