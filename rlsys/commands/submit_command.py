"""Submit a recipe as a job to a running Ray cluster, and follow its output.

    rlsys submit recipe.py --runs-dir /shared/runs --name first

The recipe is uploaded with its directory and this version of rlsys. The exit code is 0 if the job
succeeded, else 1. Ctrl-C ends the output, not the job.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from rlsys.commands.run_command import option_names
from rlsys.errors import InvalidValue
from rlsys.launcher.launching import actors_module

__all__ = ["main", "option_names"]

HELP = f"""\
usage: rlsys submit RECIPE.py [OPTIONS]

{__doc__}
The variable RAY_API_SERVER_ADDRESS (http://HEAD:8265) names the cluster; the default is the one on
this machine. `rlsys run RECIPE.py --help` lists the options of a recipe.
"""


def main(arguments: Sequence[str]) -> int:
    """Submit the recipe and return the exit code."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if not arguments or arguments[0].startswith("-"):
        raise InvalidValue(
            "RECIPE",
            *arguments[:1],
            rule="the file of a recipe comes first",
            fix="Write rlsys submit recipe.py OPTIONS.",
        )
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray reads it on import
    recipe, *options = arguments
    code: int = actors_module("run.job_submission").run_job(recipe, options)
    return code
