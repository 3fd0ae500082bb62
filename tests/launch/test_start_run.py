"""The function of the Ray package that carries out a run."""

import actors.run.launch
from rlsys.launcher.launching import StartRun, actors_module

# The type checker compares the two signatures.
START_RUN: StartRun = actors.run.launch.launch


def test_a_checkout_starts_runs_with_its_own_actors() -> None:
    assert actors_module("run.launch").launch is START_RUN
