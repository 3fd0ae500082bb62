r"""Plan a recipe's run for a cluster: which devices do what, how long a step takes, what fits.

    rlsys plan recipes/grpo_gsm8k.py --model.path Qwen/Qwen3-8B --cluster 2x8xH100 \
        --prompt-tokens 200 --completion-tokens mean=3000,max=8192
    python recipes/grpo_gsm8k.py --model.path Qwen/Qwen3-8B --config plan.toml

The options besides those below are the recipe's. The best plan is written as a file for --config,
and as a picture. Without --completion-tokens, the mean is assumed.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlsys.common.atomic_files import write_atomically, writing
from rlsys.common.keyboard_interrupt import INTERRUPTED
from rlsys.errors import InvalidValue, require
from rlsys.planner.hardware import parse_cluster
from rlsys.planner.lengths import Lengths, fixed, lognormal
from rlsys.planner.plan_report import lines, picture
from rlsys.planner.planning import MAX_SIMULATED, PlanRequest, RunPlanning, requested
from rlsys.planner.search import MAX_STALENESS


def main(arguments: Sequence[str]) -> int:
    """Plan and return the exit code."""
    parser = _parser()
    given, others = parser.parse_known_args(arguments)
    request = PlanRequest(
        cluster=parse_cluster(given.cluster),
        prompt_tokens=given.prompt_tokens,
        completions=parse_lengths(given.completion_tokens) if given.completion_tokens else None,
        max_staleness=tuple(given.staleness),
        num_simulated=given.simulate,
    )
    for name, value, least in (
        ("--staleness", min(given.staleness), 0),
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
    output = checked_output(Path(given.output))
    recipe = Path(given.recipe)
    require(
        recipe.is_file(),
        "RECIPE",
        str(recipe),
        rule="is not a file",
        fix="Give the Python file of a recipe.",
    )
    try:
        planning = _plan(recipe, others, request)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    for line in lines(planning, given.shown):
        print(line)
    best = planning.plans[0]
    image = output.with_suffix(".svg")
    with writing(output, room="free some space"):
        write_atomically(output, _toml(planning, given.cluster))
        write_atomically(image, picture(best, planning.cluster))
    print(f"\nThe first plan is in {output} (picture: {image}). Run it with:")
    print(f"  {shlex.join(['python', str(recipe), *others, '--config', str(output)])}")
    return 0


def checked_output(output: Path) -> Path:
    """Return the path of the plan, after a check that it can be written next to its picture.

    The check comes before the search, which may take minutes.

    Raises:
        InvalidValue: It is not a .toml file in a directory that can be written.
    """
    require(
        output.suffix == ".toml" and not output.is_dir(),
        "--output",
        str(output),
        rule="is not the path of a .toml file",
        fix="Use a name such as plan.toml. The picture gets the same name with .svg.",
    )
    directory = output.absolute().parent
    require(
        directory.is_dir() and os.access(directory, os.W_OK | os.X_OK),
        "--output",
        str(output),
        rule=f"{directory} is not a directory that this user can write",
        fix="Create it, or choose another.",
    )
    return output


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlsys plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE.py", help="the recipe, with its own options")
    parser.add_argument("--cluster", required=True, metavar="2x8xH100", help="nodes x GPUs x GPU")
    parser.add_argument("--prompt-tokens", type=float, metavar="N", help="mean of a prompt")
    parser.add_argument(
        "--completion-tokens", metavar="mean=N,max=N", help="lengths of completions, log-normal"
    )
    parser.add_argument(
        "--staleness",
        type=int,
        nargs="+",
        default=list(MAX_STALENESS),
        metavar="N",
        help="values of asynchrony.max_staleness to try",
    )
    parser.add_argument(
        "--simulate", type=int, default=MAX_SIMULATED, metavar="N", help="plans to simulate"
    )
    parser.add_argument("--shown", type=int, default=8, metavar="N", help="plans in the table")
    parser.add_argument("--output", default="plan.toml", metavar="FILE", help="the best plan")
    return parser


def _plan(recipe: Path, arguments: Sequence[str], request: PlanRequest) -> RunPlanning:
    """Return the plan of the run that a recipe would launch: of several runs, the last one."""
    before, paths = sys.argv, list(sys.path)
    with requested(request) as answers:
        sys.argv = [str(recipe), *arguments]
        sys.path[:0] = [str(Path.cwd()), str(recipe.resolve().parent)]
        try:
            runpy.run_path(str(recipe), run_name="__main__")
        finally:
            sys.argv, sys.path[:] = before, paths
        if answers:
            return answers[-1]
    raise InvalidValue(
        "RECIPE",
        str(recipe),
        rule="does not launch a run that generates rollouts",
        fix="Give a recipe of reinforcement learning.",
    )


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


def _toml(planning: RunPlanning, cluster: str) -> str:
    """Return the settings of the best plan, with the prediction as a comment."""
    best = planning.plans[0]
    estimate = best.ranked.estimate
    sections: dict[str, dict[str, Any]] = {}
    for name, value in best.settings.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, {})[key] = value
    text = [
        f"# Plan for {planning.shape.policy.model.name} on {cluster}: {estimate.seconds:.1f} s a "
        f"step (80 %: {estimate.low:.0f} to {estimate.high:.0f} s).",
    ]
    for section in sorted(sections):
        if section:
            text += ["", f"[{section}]"]
        text += [f"{key} = {_value(value)}" for key, value in sections[section].items()]
    return "\n".join(text) + "\n"


def _value(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
