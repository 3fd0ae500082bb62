"""Fit a scaling law to runs: how high the reward will rise, with uncertainty.

    rlsys fit runs/quickstart
    rlsys fit runs/quickstart --held-out 0.33 --until 4 --out fit.svg
    rlsys fit runs/small runs/large --law power --against tokens

In: run directories, by default the newest run below runs/. Out: each run's parameters with their
95 % intervals, a picture of the curve, the fit and its prediction for more compute, and one line of
JSON. Without --out the picture is fit.svg in the first run's directory. docs/scaling.md explains
the numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlsys import metrics
from rlsys.common.number_text import number
from rlsys.common.safe_json import dump_json
from rlsys.errors import InvalidValue
from rlsys.evaluation.scaling import LAWS, Series, fit_sizes, read_series
from rlsys.evaluation.scaling.prediction import (
    Limits,
    Prediction,
    as_dict,
    describe,
    interval_dict,
    limits_of,
    predict,
)
from rlsys.evaluation.scaling.series import AGAINST, Against
from rlsys.runs.find_runs import checked_run, newest_run
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.run_files import RunFiles

PICTURES = (".svg", ".png")


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="rlsys fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run_dirs", nargs="*", type=Path, metavar="RUN", help="directory such as runs/quickstart"
    )
    parser.add_argument("--law", choices=tuple(LAWS), default="sigmoid", help="default: sigmoid")
    parser.add_argument("--metric", default=metrics.REWARD_MEAN, help="default: %(default)s")
    parser.add_argument(
        "--against", choices=AGAINST, default="step", help="measure of compute; default: step"
    )
    parser.add_argument(
        "--skip",
        type=number,
        default=0.05,
        help="fraction left out at the start; default: 0.05",
    )
    parser.add_argument(
        "--held-out",
        type=number,
        default=0.0,
        help="fraction of the run's end to predict instead of fitting, as a test; default: 0",
    )
    parser.add_argument(
        "--until",
        type=number,
        default=2.0,
        help="multiple of the compute to predict up to; default: 2",
    )
    parser.add_argument(
        "--limits",
        default="auto",
        help="LOW,HIGH, between which the curve begins and ends, or none; default: 0,1 if all "
        "rewards are in this range, else none",
    )
    parser.add_argument("--out", type=Path, help="picture, .svg or .png (default: RUN_DIR/fit.svg)")
    return parser


def main(arguments: Sequence[str]) -> None:
    """Fit the runs, draw them and print the result.

    Raises:
        ValueError: A mistake in the options, or a run that the law cannot be fitted to.
    """
    parsed = options().parse_args(arguments)
    run_dirs = [checked_run(one) for one in parsed.run_dirs] or [newest_run()]
    out: Path = parsed.out or run_dirs[0] / "fit.svg"
    if out.suffix not in PICTURES:
        raise InvalidValue("--out", str(out), rule="is not a picture", fix="Use .svg or .png.")
    predictions = []
    for run_dir in run_dirs:
        series = _series(run_dir, parsed.metric, parsed.against)
        one = predict(
            series,
            LAWS[parsed.law],
            skip=parsed.skip,
            held_out=parsed.held_out,
            until=parsed.until,
            limits=limits_of(series) if parsed.limits == "auto" else _limits(parsed.limits),
        )
        predictions.append(one)
        print("\n".join(describe(one)), end="\n\n")
    report = {
        "runs": [as_dict(one) for one in predictions],
        "sizes": _sizes(run_dirs, predictions) if parsed.law == "power" else None,
        "picture": str(_draw(predictions, out)),
    }
    print(dump_json(report, allow_nan=False))


def _series(run_dir: Path, metric: str, against: Against) -> Series:
    path = RunFiles(run_dir).metrics
    if not path.is_file():
        raise InvalidValue(str(path), rule="does not exist", fix="Give the directory of a run.")
    name = run_dir.resolve().name
    return read_series(read_metrics(path), name=name, metric=metric, against=against)


def _limits(text: str) -> Limits | None:
    if text == "none":
        return None
    try:
        low, high = map(number, text.split(","))
    except ValueError:
        raise InvalidValue(
            "--limits", text, rule="is not two numbers", fix="Use 0,1 or none."
        ) from None
    return low, high


def _sizes(run_dirs: Sequence[Path], predictions: Sequence[Prediction]) -> object:
    """Return the fit of k(N) for runs of models of several sizes, or None."""
    if len(run_dirs) < 2:
        return None
    from rlsys.engines.models.model_shape import model_shape

    sizes = [model_shape(str(RunFiles(one).hf)).num_parameters for one in run_dirs]
    if len(set(sizes)) < 2:
        return None
    found = fit_sizes(sizes, [one.fit for one in predictions])
    print("k(N) = K_max / (1 + N_0/N) over the runs' models")
    for name, one in (("K_max", found.k_max), ("N_0", found.n_0)):
        print(f"  {name:<14}{one.value:>10.4g}  {one.low:.4g} to {one.high:.4g}")
    return {"k_max": interval_dict(found.k_max), "n_0": interval_dict(found.n_0)}


def _draw(predictions: Sequence[Prediction], out: Path) -> Path:
    from rlsys.evaluation.scaling.scaling_picture import draw

    try:
        figure = draw(predictions)
    except ImportError as error:
        raise InvalidValue(
            "--out",
            str(out),
            rule=f"drawing needs matplotlib ({error})",
            fix="Run pip install 'rlsys[plot]'.",
        ) from error
    figure.savefig(out, dpi=160, facecolor="white")
    return out
