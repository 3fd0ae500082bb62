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
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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
from rlsys.planner.cpu_device import CpuProbe
from rlsys.planner.cpu_probe import cache_file, probe, save_probe
from rlsys.planner.lengths import Lengths, fixed, lognormal
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
    for name, value, least in (
        ("--staleness", min(given.staleness or [0]), 0),
        ("--simulate", given.simulate, 0),
        ("--shown", given.shown, 1),
    ):
        require(
            value >= least,
            name,
            value,
            rule=f"must be at least {least}",
            fix=f"Use {least} or more.",
        )
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
    completions = parse_lengths(given.completion_tokens) if given.completion_tokens else None
    request = PlanRequest(
        cluster=cluster,
        prompt_tokens=given.prompt_tokens,
        completions=completions,
        max_staleness=tuple(given.staleness) if given.staleness else None,
        num_simulated=given.simulate,
        turns=given.turns,
        tool_s=parse_seconds(given.tool_seconds) if given.tool_seconds else 0.0,
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
    print(f"\nThe first plan is in {output} (picture: {image}). Run it with:")
    arguments = [*without_option(others, "config"), "--config", str(output)]
    print(f"  {shlex.join(['python', str(recipe), *arguments])}")


def without_option(arguments: Sequence[str], name: str) -> list[str]:
    """Return the arguments of a recipe without an option that has a value."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        option, equals, _ = argument.partition("=")
        if option.replace("_", "-") != f"--{name}":
            kept.append(argument)
        elif not equals:
            next(rest, None)
    return kept


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
    parser.add_argument("--prompt-tokens", type=float, metavar="N", help="mean of a prompt")
    parser.add_argument(
        "--completion-tokens", metavar="mean=N,max=N", help="lengths of completions, log-normal"
    )
    parser.add_argument("--turns", type=int, metavar="N", help="turns of an episode")
    parser.add_argument(
        "--tool-seconds", metavar="mean=N", help="time of the tool between two turns, log-normal"
    )
    parser.add_argument(
        "--staleness",
        type=int,
        nargs="+",
        metavar="N",
        help="values of asynchrony.max_staleness to try, by default those of 0, 1 and 2 steps "
        "ahead",
    )
    parser.add_argument(
        "--simulate", type=int, default=MAX_SIMULATED, metavar="N", help="plans to simulate"
    )
    parser.add_argument("--shown", type=int, default=8, metavar="N", help="plans in the table")
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


_PAIR = re.compile(r"(mean|max|spread)=([0-9.]+)")


def parse_lengths(text: str) -> Lengths:
    """Return the lengths of mean=3000,max=8192[,spread=0.8], or of a number: all equal.

    Raises:
        InvalidValue: The text is neither.
    """
    if text.isdecimal() and int(text) > 0:
        return fixed(int(text))
    found: dict[str, float] = {}
    for part in text.split(","):
        match = _PAIR.fullmatch(part.strip())
        if match is None or match[1] in found:
            found = {}
            break
        found[match[1]] = float(match[2])
    if not {"mean", "max"} <= found.keys():
        raise InvalidValue(
            "completion_tokens",
            text,
            rule="must be mean=N,max=N or a number",
            fix="Write such as mean=3000,max=8192.",
        )
    spread = {"spread": found["spread"]} if "spread" in found else {}
    return lognormal(found["mean"], int(found["max"]), **spread)


_MEAN = re.compile(r"(?:mean=)?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)")


def parse_seconds(text: str) -> float:
    """Return the mean of mean=2, or of a number.

    Raises:
        InvalidValue: The text is neither.
    """
    if (match := _MEAN.fullmatch(text)) is None:
        raise InvalidValue(
            "--tool-seconds",
            text,
            rule="must be mean=N",
            fix="Write such as mean=2.",
        )
    return float(match[1])
