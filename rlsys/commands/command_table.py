"""The subcommands of `rlsys`.

Each names a module with `main(arguments) -> int | None`, which returns the exit code (None: 0) and
raises ValueError for a mistake of the user. `main(["--help"])` prints the options.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A subcommand: its name, one line for --help, and its module."""

    name: str
    summary: str
    module: str


_ALL = (
    Command("new", "write a project: recipe, reward, test", "rlsys.commands.new_command"),
    Command("run", "train: run a recipe", "rlsys.commands.run_command"),
    Command("plan", "predict a step and choose layouts", "rlsys.commands.plan_command"),
    Command("report", "write the page of one run or of several", "rlsys.commands.report_command"),
    Command("watch", "serve the page of a run while it trains", "rlsys.commands.watch_command"),
    Command("evaluate", "score a model on held-out data", "rlsys.commands.evaluate_command"),
    Command("audit", "check a run's files for lost or stale data", "rlsys.commands.audit_command"),
    Command("checkpoint", "make a run write a checkpoint", "rlsys.commands.checkpoint_command"),
    Command("fit", "predict how high the reward will rise", "rlsys.commands.fit_command"),
    Command("submit", "run a recipe as a Ray job on a cluster", "rlsys.commands.submit_command"),
    Command("serve", "serve a model over the Tinker API", "rlsys.commands.serve_command"),
    Command("doctor", "check this machine", "rlsys.commands.doctor_command"),
    Command("completion", "print shell completion", "rlsys.commands.completion_command"),
)

COMMANDS = {one.name: one for one in _ALL}
