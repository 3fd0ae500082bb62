"""Compare the planner's predictions with published measurements.

    python -m scripts.plan.validate             rows that were not used for fitting
    python -m scripts.plan.validate --all       all rows
    python -m scripts.plan.validate --markdown  the tables of docs/planner.md

Prints errors by kind and source table (rows, median absolute error, share within 20 %, worst row
and its reason), rows that cannot be predicted and why, the order of layouts, intervals, the
baseline of constant utilisation, and one line of JSON last.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from rlsys.common.safe_json import dump_json
from rlsys.planner.memory import FULL
from rlsys.planner.profiles import Z80, Constants, SoftwareProfile, calibrate, fitted_constants
from scripts.plan.decode_rows import decode_cases, is_modern
from scripts.plan.memory_rows import memory_cases
from scripts.plan.published_rows import Case, Row, Skip, gpu_of
from scripts.plan.reasons import reason_of
from scripts.plan.rl_rows import rl_cases
from scripts.plan.training_rows import training_cases

APART = 1.05


@dataclass(frozen=True)
class Result:
    """A case with its prediction."""

    case: Case
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.case.measured

    @property
    def error(self) -> float:
        """Absolute relative error."""
        return abs(self.ratio - 1)


@dataclass(frozen=True)
class Errors:
    """Errors of a set of rows."""

    rows: int
    mdape: float
    within: float

    def line(self) -> str:
        """Return the errors as text."""
        return f"{self.rows:5d} rows  MdAPE {self.mdape:6.1%}  within 20 % {self.within:6.1%}"


def errors_of(errors: Sequence[float]) -> Errors:
    """Return median and share within 20 % of absolute relative errors."""
    if not errors:
        return Errors(0, math.nan, math.nan)
    return Errors(len(errors), median(errors), sum(one <= 0.2 for one in errors) / len(errors))


def predict_all(
    cases: Iterable[Case | Skip], constants: Constants
) -> tuple[list[Result], list[Skip]]:
    """Return the predictions of all cases, and the rows that have none."""
    results, skips = [], []
    for case in cases:
        if isinstance(case, Skip):
            skips.append(case)
        else:
            results.append(Result(case, case.predict(constants)))
    return results, skips


def kinds(constants: Constants) -> tuple[dict[str, list[Result]], list[Skip]]:
    """Return predictions by kind: dense, moe, decode, decode (older), rl_step, memory, oom."""
    results: dict[str, list[Result]] = defaultdict(list)
    skipped = []
    for cases in (training_cases, decode_cases, rl_cases, memory_cases):
        found, skips = predict_all(cases(), constants)
        skipped.extend(skips)
        for result in found:
            kind = result.case.kind
            if kind == "decode" and not is_modern(result.case.row):
                kind = "decode (older)"
            results[kind].append(result)
    return results, skipped


def calibrated(results: Sequence[Result], constants: Constants) -> list[float]:
    """Return errors after calibrating each table with three of its rows, which do not count.

    The three rows are the first, the middle and the last in the order of the source.
    """
    errors = []
    tables: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        tables[result.case.row["table"], result.case.row["gpu"]].append(result)
    for mine in tables.values():
        if len(mine) < 6:
            continue
        chosen = {0, len(mine) // 2, len(mine) - 1}
        ratios = [1 / mine[one].ratio for one in sorted(chosen)]
        base = constants.profile(mine[0].case.profile)
        neutral = SoftwareProfile(name=base.name, spread=max(base.spread, 0.2))
        factor = calibrate(neutral, ratios).factor
        errors += [
            abs(result.ratio * factor - 1)
            for number, result in enumerate(mine)
            if number not in chosen
        ]
    return errors


def constant_utilisation(results: Sequence[Result]) -> list[float]:
    """Return errors of one utilisation per GPU family, the median of the rows for fitting."""
    by_family: dict[str, list[float]] = defaultdict(list)
    for result in results:
        if result.case.for_fitting and result.case.baseline:
            family = gpu_of(result.case.row).family
            by_family[family].append(result.case.measured / result.case.baseline)
    everything = [one for values in by_family.values() for one in values]
    errors = []
    for result in results:
        if result.case.for_fitting or not result.case.baseline:
            continue
        family = gpu_of(result.case.row).family
        factor = median(by_family[family] or everything)
        errors.append(abs(result.case.baseline * factor / result.case.measured - 1))
    return errors


def _layout_key(row: Row) -> tuple[object, ...]:
    workload = row["workload"]
    return (
        row["table"],
        row["model"],
        row["gpu"],
        row["num_gpus"],
        row["precision"],
        workload.get("seq"),
        workload.get("routing"),
        workload.get("task"),
        workload.get("layers"),
        workload.get("hidden"),
    )


@dataclass(frozen=True)
class Ordering:
    """How well predictions order plans for the same model, devices and rows."""

    groups: int
    pairs: int
    right: float
    regret: float
    random_regret: float
    worst: float
    worst_group: str


def ordering(results: Sequence[Result]) -> Ordering:
    """Return the share of pairs in the right order, and the regret of the best predicted plan.

    Plans are compared by seconds per unit of useful work. Pairs that are within 5 % of each other
    do not count.
    """
    groups: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for result in results:
        work = result.case.baseline
        if work:
            key = _layout_key(result.case.row)
            groups[key].append((result.case.measured / work, result.predicted / work))
    pairs = right = 0
    regrets: list[tuple[float, float, str]] = []
    for key, plans in groups.items():
        times = [measured for measured, _ in plans]
        if len(plans) < 2 or max(times) <= APART * min(times):
            continue
        best = min(times)
        chosen = min(plans, key=lambda plan: plan[1])[0]
        average = sum(times) / len(times)
        regrets.append((chosen / best - 1, average / best - 1, " ".join(map(str, key[:5]))))
        for one, (measured, predicted) in enumerate(plans):
            for other_measured, other_predicted in plans[one + 1 :]:
                if max(measured, other_measured) <= APART * min(measured, other_measured):
                    continue
                pairs += 1
                right += (measured < other_measured) == (predicted < other_predicted)
    worst = max(regrets, default=(math.nan, math.nan, ""))
    return Ordering(
        groups=len(regrets),
        pairs=pairs,
        right=right / pairs if pairs else math.nan,
        regret=sum(one[0] for one in regrets) / max(len(regrets), 1),
        random_regret=sum(one[1] for one in regrets) / max(len(regrets), 1),
        worst=worst[0],
        worst_group=worst[2],
    )


def out_of_memory(
    ooms: Sequence[Result], fits: Sequence[Result], constants: Constants
) -> dict[str, float]:
    """Return how many rows that ran out of memory are found, and false alarms, by one threshold."""
    context = constants["context_gb"] * 1e9
    found = sum(one.ratio > FULL for one in ooms)
    alarms = 0
    for one in fits:
        capacity = gpu_of(one.case.row).memory_bytes
        needed = one.predicted + context * one.case.baseline
        alarms += needed > FULL * capacity
    return {
        "rows": len(ooms),
        "found": found,
        "false_alarms": alarms,
        "fitting": len(fits),
        "false_alarm_share": alarms / max(len(fits), 1),
    }


def coverage(results: Sequence[Result], spread: Callable[[Result], float]) -> float:
    """Return the share of rows inside their 80 % intervals."""
    inside = sum(abs(math.log(one.ratio)) <= Z80 * spread(one) for one in results)
    return inside / max(len(results), 1)


def spread_in(constants: Constants) -> Callable[[Result], float]:
    """Return the function that gives the spread of a result."""

    def spread(result: Result) -> float:
        kind = result.case.kind
        if kind in ("dense", "moe", "decode"):
            return constants.profile(result.case.profile).spread_of(moe=kind == "moe")
        return constants.spreads[kind]

    return spread


def print_tables(kind: str, results: Sequence[Result], markdown: bool) -> None:
    """Print the errors of a kind by source table."""
    tables: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        tables[result.case.row["table"]].append(result)
    if markdown:
        print(f"\n### {kind}\n")
        print("| Table | Rows | MdAPE | Within 20 % | Bias | Worst row (predicted / measured) |")
        print("|---|---|---|---|---|---|")
    else:
        print(f"\n{kind}")
    for table, mine in sorted(tables.items()):
        errors = errors_of([one.error for one in mine])
        worst = max(mine, key=lambda one: abs(math.log(one.ratio)))
        bias = median(one.ratio for one in mine)
        text = f"{worst.case.row['id']} {worst.case.row['model']}, {worst.ratio:.2f} x"
        text += f": {reason_of(worst.case.row, kind)}"
        if markdown:
            print(
                f"| {table} | {errors.rows} | {errors.mdape:.1%} | {errors.within:.0%} "
                f"| {bias:.2f} | {text} |"
            )
        else:
            print(f"  {table:24s} {errors.line()}  bias {bias:.2f}  worst {text}")


def print_skips(skips: Sequence[Skip], markdown: bool) -> None:
    """Print the rows that cannot be predicted, by table and reason."""
    counted = Counter((skip.row["table"], skip.reason) for skip in skips)
    print("\n### Not predicted\n" if markdown else "\nnot predicted")
    if markdown:
        print("| Table | Rows | Reason |\n|---|---|---|")
    for (table, reason), count in sorted(counted.items()):
        print(
            f"| {table} | {count} | {reason} |"
            if markdown
            else f"  {table:24s} {count:4d}  {reason}"
        )


def speed(constants: Constants) -> float:
    """Return training plans per second on this core."""
    cases = [case for case in training_cases() if isinstance(case, Case)]
    started = time.perf_counter()
    for case in cases:
        case.predict(constants)
    return len(cases) / (time.perf_counter() - started)


def summary(
    results: dict[str, list[Result]], constants: Constants, keep: Callable[[Case], bool]
) -> dict[str, object]:
    """Return all numbers of the last line."""
    kept = {kind: [one for one in mine if keep(one.case)] for kind, mine in results.items()}
    line: dict[str, object] = {}
    for kind, mine in kept.items():
        if kind != "oom":
            errors = errors_of([one.error for one in mine])
            line[kind] = {"rows": errors.rows, "mdape": errors.mdape, "w20": errors.within}
    three = errors_of(calibrated(kept["dense"], constants))
    line["dense_three_rows"] = {"rows": three.rows, "mdape": three.mdape, "w20": three.within}
    training = [*results["dense"], *results["moe"]]
    baseline = errors_of(constant_utilisation(training))
    ours = errors_of([one.error for one in training if not one.case.for_fitting])
    line["constant_utilisation"] = {
        "mdape": baseline.mdape,
        "w20": baseline.within,
        "times_larger": baseline.mdape / ours.mdape,
    }
    order = ordering([one for one in training if keep(one.case)])
    line["layouts"] = vars(order)
    line["out_of_memory"] = out_of_memory(results["oom"], results["memory"], constants)
    spread = spread_in(constants)
    covered = {
        kind: coverage(mine, spread)
        for kind, mine in kept.items()
        if kind in ("dense", "moe", "decode", "rl_step", "memory")
    }
    everything = [one for kind in covered for one in kept[kind]]
    line["intervals"] = {**covered, "all": coverage(everything, spread)}
    line["plans_per_s"] = speed(constants)
    return line


def rounded(value: object) -> object:
    """Return a value with floats rounded to four digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return value


def main() -> None:
    """Print the error tables and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="report rows for fitting too")
    parser.add_argument("--markdown", action="store_true", help="print tables as markdown")
    arguments = parser.parse_args()
    constants = fitted_constants()
    results, skips = kinds(constants)

    def keep(case: Case) -> bool:
        return arguments.all or not case.for_fitting

    for kind in ("dense", "moe", "decode", "decode (older)", "rl_step", "memory"):
        print_tables(kind, [one for one in results[kind] if keep(one.case)], arguments.markdown)
    print_skips(skips, arguments.markdown)
    line = summary(results, constants, keep)
    print()
    for name, value in line.items():
        print(f"{name}: {rounded(value)}")
    print(dump_json(rounded(line)))


if __name__ == "__main__":
    main()
