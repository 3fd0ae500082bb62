r"""Plan a recipe's run for a cluster: which devices do what, how long a step takes, what fits.

    rlsys plan recipes/grpo_gsm8k.py --model.path Qwen/Qwen3-8B --model.dtype bfloat16 \
        --cluster 2x8xH100 --sampling.max-tokens 8192 \
        --prompt-tokens 200 --completion-tokens mean=3000,max=8192
    python recipes/grpo_gsm8k.py --model.path Qwen/Qwen3-8B --model.dtype bfloat16 \
        --sampling.max-tokens 8192 --config plan.toml

    rlsys plan --calibrate runs/A runs/B --profile profile.json
    rlsys plan recipes/grpo_gsm8k.py --cluster 2x8xH100 --profile profile.json
    rlsys plan --probe

The options besides those below are the recipe's, and restrict the plan. The best plan is written as
a file for --config, and as a picture. Without --completion-tokens, the mean is assumed. --calibrate
fits the factors of your software and devices to runs, and --probe measures this machine's CPUs.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from rlsys.commands.plan_work import parse_count, parse_lengths, parse_number, parse_seconds
from rlsys.common.atomic_files import check_writable, write_atomically, writing
from rlsys.common.installed_versions import versions
from rlsys.common.keyboard_interrupt import INTERRUPTED
from rlsys.config import RunConfig
from rlsys.config.plan_session import given_options
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.errors import InvalidValue, require
from rlsys.launcher.captured_runs import answer_of
from rlsys.launcher.cluster_choice import chosen_cluster
from rlsys.launcher.launching import live_nodes
from rlsys.launcher.measured_runs import calibrated_profile
from rlsys.planner.cpu_device import CPU, CpuProbe
from rlsys.planner.cpu_probe import cache_file, probe, save_probe
from rlsys.planner.lengths import MAX_SPREAD, MAX_TOKENS, MIN_SPREAD, SPREAD
from rlsys.planner.plan_file import plan_toml
from rlsys.planner.plan_report import lines, picture, probe_lines, profile_lines
from rlsys.planner.plan_request import MAX_SIMULATED, PlanRequest
from rlsys.planner.planning import RunPlanning, plan_run
from rlsys.planner.stack_profile import (
    StackProfile,
    default_file,
    mismatches,
    profile_text,
    read_profile,
)
from rlsys.runs.observe.phases import progress_on_stderr


def main(arguments: Sequence[str]) -> int:
    """Plan, calibrate or measure, and return the exit code."""
    parser = _parser()
    given, others = parser.parse_known_args(arguments)
    _read_numbers(given)
    if not (given.recipe or given.calibrate or given.probe):
        parser.error("give a RECIPE.py, --calibrate RUN or --probe")
    try:
        if given.probe:
            _measure()
        profile = _calibrate(given) if given.calibrate else None
        if given.recipe:
            _plan_recipe(given, others, profile)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    return 0


def _read_numbers(given: argparse.Namespace) -> None:
    """Replace the texts of the numbers in `given` by their values.

    Raises:
        InvalidValue: A text is not a number, or is out of range.
    """
    given.staleness = [parse_count("--staleness", one, 0) for one in given.staleness or ()]
    given.simulate = parse_count("--simulate", given.simulate, 0)
    given.shown = parse_count("--shown", given.shown, 1)
    if given.turns is not None:
        given.turns = parse_count("--turns", given.turns, 1, MAX_TOKENS)
    if given.prompt_tokens is not None:
        given.prompt_tokens = parse_number("--prompt-tokens", given.prompt_tokens, 1, MAX_TOKENS)


def _measure() -> CpuProbe:
    path = cache_file_to_write(cache_file())
    measured = probe()
    save_probe(measured, path)
    for line in probe_lines(measured):
        print(line)
    print(f"The rates are in {path}. Measure again if other programs were running.")
    return measured


def _calibrate(given: argparse.Namespace) -> StackProfile:
    if given.profile:
        file = checked_output(Path(given.profile), ".json", "--profile")
    else:
        file = cache_file_to_write(default_file())
    profile = calibrated_profile([Path(run) for run in given.calibrate], given.prompt_tokens)
    with writing(file, room="free some space"):
        write_atomically(file, profile_text(profile))
    for line in profile_lines(profile):
        print(line)
    print(f"The profile is in {file}. Use it with rlsys plan RECIPE.py --profile {file}.")
    if not given.profile:
        print("Runs compare their steps with it, and --plan auto uses it.")
    return profile


def _plan_recipe(
    given: argparse.Namespace, others: Sequence[str], profile: StackProfile | None
) -> None:
    output = checked_output(Path(given.output), ".toml")
    recipe = Path(given.recipe)
    require(
        recipe.is_file(),
        "RECIPE",
        str(recipe),
        rule="is not a file",
        fix="Give the Python file of a recipe.",
    )
    require(
        bool(given.cluster),
        "--cluster",
        given.cluster,
        rule="is needed to plan a recipe",
        fix="Name the devices, such as 2x8xH100, or use cpu, ray or auto.",
    )
    if profile is None and given.profile:
        profile = read_profile(Path(given.profile))
    cluster, rates = chosen_cluster(given.cluster, profile, live_nodes)
    if profile is not None:
        for warning in mismatches(profile, versions(), cluster.gpu.name):
            print(f"warning: {warning}", file=sys.stderr)
    completions = (
        None if given.completion_tokens is None else parse_lengths(given.completion_tokens)
    )
    request = PlanRequest(
        cluster=cluster,
        prompt_tokens=given.prompt_tokens,
        completions=completions,
        max_staleness=tuple(given.staleness) if given.staleness else None,
        num_simulated=given.simulate,
        turns=given.turns,
        tool_s=0.0 if given.tool_seconds is None else parse_seconds(given.tool_seconds),
        profile=profile,
        probe=rates,
    )
    with progress_on_stderr("Planning") as phase:

        def plan(config: RunConfig, flow: Dataflow) -> RunPlanning:
            chosen = replace(request, chosen=given_options().arguments)
            return plan_run(config, flow, chosen, on_progress=phase.update)

        planning = answer_of(recipe, others, plan)
    for line in lines(planning, given.shown):
        print(line)
    image = output.with_suffix(".svg")
    with writing(output, room="free some space"):
        write_atomically(output, plan_toml(planning, given_options().file))
        write_atomically(image, picture(planning.plans[0], planning.cluster))
    print(f"\nThe first plan is in {output} (picture: {image}).")
    devices = "" if cluster.gpu.name == CPU else f" {cluster}"
    print(f"Run it with this command, and check it first with --dry-run{devices}:")
    arguments = [*without_options(others), "--config", str(output)]
    print(f"  {shlex.join(['python', str(recipe), *arguments])}")


# Options of a recipe that belong to planning or to another start, not to the run of a plan.
NOT_REPEATED: Final = ("config", "plan", "dry_run", "resume")


def without_options(arguments: Sequence[str], names: Collection[str] = NOT_REPEATED) -> list[str]:
    """Return the arguments of a recipe without some options and their values."""
    left_out = {_flag(name) for name in names}
    kept: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if _flag(argument.partition("=")[0].removeprefix("--")) not in left_out:
            kept.append(argument)
        elif "=" not in argument and rest and not rest[0].startswith("--"):
            rest.pop(0)
    return kept


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def cache_file_to_write(file: Path) -> Path:
    """Return a file of the user's cache, after a check that it can be written.

    Raises:
        InvalidValue: The cache is not a directory that can be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        check_writable(file)
    except OSError as error:
        raise InvalidValue(
            "XDG_CACHE_HOME",
            str(file.parent.parent),
            rule=f"{file} cannot be written ({error.strerror})",
            fix="Set XDG_CACHE_HOME to a directory that this user can write.",
        ) from None
    return file


def checked_output(output: Path, suffix: str, name: str = "--output") -> Path:
    """Return the path of a result, after a check that it can be written there.

    The check comes before the work, which may take minutes.

    Raises:
        InvalidValue: It is not a file with this suffix in a directory that can be written.
    """
    require(
        output.suffix == suffix and not output.is_dir(),
        name,
        str(output),
        rule=f"is not the path of a {suffix} file",
        fix=f"Use a name such as plan{suffix}. A picture gets the same name with .svg.",
    )
    directory = output.absolute().parent
    require(
        directory.is_dir(),
        name,
        str(output),
        rule=f"{directory} is not a directory",
        fix="Create it, or choose another.",
    )
    image = output.with_suffix(".svg")
    require(
        suffix != ".toml" or not image.is_dir(),
        name,
        str(output),
        rule=f"the picture's path, {image}, is a directory",
        fix="Use another name.",
    )
    try:
        check_writable(output)
    except (OSError, ValueError) as error:
        raise InvalidValue(
            name,
            str(output),
            rule=f"cannot be written ({getattr(error, 'strerror', None) or error})",
            fix="Choose a directory that this user can write, and a short name.",
        ) from None
    return output


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlsys plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "recipe", nargs="?", metavar="RECIPE.py", help="the recipe, with its own options"
    )
    parser.add_argument(
        "--cluster",
        metavar="2x8xH100",
        help="nodes x GPUs x GPU; cpu or 1x2xCPU: nodes x cores; ray: the Ray cluster at "
        "RAY_ADDRESS; auto: that cluster, or this machine",
    )
    parser.add_argument("--prompt-tokens", metavar="N", help="mean of a prompt, at least 1")
    parser.add_argument(
        "--completion-tokens",
        metavar="mean=N,max=N",
        help="lengths of completions, log-normal. spread=N, the standard deviation of the "
        f"logarithm ({MIN_SPREAD:g} to {MAX_SPREAD:g}, by default {SPREAD:g}), may follow. "
        "A number alone: all have this length",
    )
    parser.add_argument("--turns", metavar="N", help="turns of an episode")
    parser.add_argument(
        "--tool-seconds", metavar="mean=N", help="time of the tool between two turns, log-normal"
    )
    parser.add_argument(
        "--staleness",
        nargs="+",
        metavar="N",
        help="values of asynchrony.max_staleness to try, by default those of 0, 1 and 2 steps "
        "ahead; at most that of all num_steps steps ahead",
    )
    parser.add_argument(
        "--simulate", default=str(MAX_SIMULATED), metavar="N", help="plans to simulate"
    )
    parser.add_argument("--shown", default="8", metavar="N", help="plans in the table")
    parser.add_argument("--output", default="plan.toml", metavar="FILE", help="the best plan")
    parser.add_argument(
        "--calibrate", nargs="+", metavar="RUN", help="directories of runs to calibrate with"
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="profile of your stack. --calibrate writes it, by default into the user's cache",
    )
    parser.add_argument(
        "--probe", action="store_true", help="measure this machine's CPUs, a few seconds"
    )
    return parser
