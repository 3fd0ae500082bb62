r"""Predict steps of real runs on this machine's CPUs, and compare them with the measured ones.

    python -m scripts.plan.own_ground --out /tmp/own-ground --model /tmp/smollm2-135m-instruct
    python -m scripts.plan.own_ground --out /tmp/own-ground --only q-eta0 q-eta1

One run of each model and engine calibrates. The others are predicted from the probe, that run, and
their own lengths. Finished runs are kept in --out: the same command continues after an
interruption, and prints the table without another run once all are there. The machine must be
quiet. --model is the directory of SmolLM2-135M-Instruct; without it, only the quickstart runs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median

from actors.run.demands import demands
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.config import RunConfig
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.run_graph import complete_graph
from rlsys.engines.models.model_shape import model_shape
from rlsys.launcher.captured_runs import answer_of
from rlsys.launcher.measured_runs import measured_run
from rlsys.planner.cpu_device import CpuProbe
from rlsys.planner.cpu_probe import probe, save_probe, saved_probe
from rlsys.planner.plan_report import aligned
from rlsys.planner.plan_settings import plan_of
from rlsys.planner.profiles import Constants, fitted_constants
from rlsys.planner.run_calibration import MeasuredRun, calibrated
from rlsys.planner.run_simulation import simulate_run

ROOT = Path(__file__).resolve().parents[2]

# Environment variable that marks the processes of a run, and time between two looks at them.
MARK, LOOK_S = "RLSYS_OWN_GROUND", 0.5

# Runs whose steps differ by less are not ordered.
APART = 0.05

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A run: its recipe and options, and the configuration that calibrates for it."""

    name: str
    recipe: str
    options: str
    calibrated_by: str
    needs_model: bool = False


QUICKSTART = (
    "--num-steps 60 --warm-start-steps 60 --evaluation.every 0 --checkpoint-every 0 "
    "--observe.print-every 100"
)
SMOLLM = (
    "--num-steps 12 --prompts-per-step 4 --group-size 8 --evaluation.every 0 --checkpoint-every 0 "
    "--observe.print-every 100"
)


def _quickstart(name: str, options: str, calibrated_by: str = "q-eta0") -> Configuration:
    return Configuration(
        name=name,
        recipe="recipes/quickstart.py",
        options=f"{QUICKSTART} {options}",
        calibrated_by=calibrated_by,
    )


def _smollm(name: str, options: str, calibrated_by: str = "s-eta0") -> Configuration:
    return Configuration(
        name=name,
        recipe="recipes/sums_in_words.py",
        options=f"{SMOLLM} {options}",
        calibrated_by=calibrated_by,
        needs_model=True,
    )


ETA = "--asynchrony.max-staleness"
VLLM = "--rollout.engine vllm"
CONFIGURATIONS = (
    _quickstart("q-eta0", f"{ETA} 0"),
    _quickstart("q-eta1", f"{ETA} 1"),
    _quickstart("q-eta4", f"{ETA} 4"),
    _quickstart("q-colocated", f"--placement colocated {ETA} 0"),
    _quickstart("q-dp2", f"--trainer.layout dp2 {ETA} 1"),
    _quickstart("q-tp2", f"--trainer.layout tp2 {ETA} 1"),
    _quickstart("q-replicas2", f"--rollout.num-replicas 2 {ETA} 0"),
    _quickstart("q-group16", f"--group-size 16 {ETA} 1"),
    _quickstart("q-prompts16", f"--prompts-per-step 16 {ETA} 1"),
    _quickstart("q-vllm-eta0", f"{VLLM} {ETA} 0", "q-vllm-eta0"),
    _quickstart("q-vllm-eta1", f"{VLLM} {ETA} 1", "q-vllm-eta0"),
    _quickstart("q-vllm-group16", f"{VLLM} --group-size 16 {ETA} 0", "q-vllm-eta0"),
    _smollm("s-eta0", f"{ETA} 0"),
    _smollm("s-eta1", f"{ETA} 1"),
    _smollm("s-eta4", f"{ETA} 4"),
    _smollm("s-colocated", f"--placement colocated {ETA} 0"),
    _smollm("s-dp2", f"--trainer.layout dp2 {ETA} 1"),
    _smollm("s-group16", f"--group-size 16 {ETA} 1"),
    _smollm("s-tokens12", f"--sampling.max-tokens 12 {ETA} 1"),
    _smollm("s-vllm-eta0", f"{VLLM} {ETA} 0", "s-vllm-eta0"),
    _smollm("s-vllm-eta1", f"{VLLM} {ETA} 1", "s-vllm-eta0"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run in the table. Memory is that of a trainer rank, in bytes."""

    name: str
    calibrates: bool
    measured_s: float
    predicted_s: float
    measured_bytes: float
    predicted_bytes: float

    @property
    def error(self) -> float:
        """Relative error of the predicted step."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Relative error of the predicted memory."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, print the table, and one line of JSON last."""
    given = _parser().parse_args(arguments)
    out = Path(given.out)
    chosen = [
        one
        for one in CONFIGURATIONS
        if (not given.only or one.name in given.only) and (given.model or not one.needs_model)
    ]
    for number, one in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {one.name}", file=sys.stderr, flush=True)
        _run(one, out, given.model)
    rates = saved_probe()
    if rates is None:
        rates = probe()
        save_probe(rates)
    rows = list(_rows(chosen, out, rates, given.model))
    for line in table(rows):
        print(line)
    print(dump_json(score(rows)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="directory of the runs")
    parser.add_argument("--model", metavar="DIR", help="directory of SmolLM2-135M-Instruct")
    parser.add_argument(
        "--only", nargs="+", choices=[one.name for one in CONFIGURATIONS], metavar="NAME"
    )
    return parser


def _options(one: Configuration, out: Path, model: str | None) -> list[str]:
    options = [*one.options.split(), "--name", one.name, "--runs-dir", str(out / "runs")]
    return [*options, "--model.path", str(model)] if one.needs_model else options


def _run(one: Configuration, out: Path, model: str | None) -> None:
    """Run a configuration unless its measurement is there."""
    done = out / f"{one.name}.json"
    if done.exists():
        return
    directory = out / "runs" / one.name
    if directory.exists():  # of an interrupted start
        directory.rename(directory.with_name(f".{one.name}-{time.time_ns()}"))
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, MARK: one.name, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / one.recipe), *_options(one, out, model)]
    with (out / f"{one.name}.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        ended = threading.Event()
        peaks: dict[str, dict[int, int]] = defaultdict(dict)
        watcher = threading.Thread(target=_watch, args=(one.name, peaks, ended))
        watcher.start()
        try:
            code = process.wait()
        finally:
            ended.set()
            watcher.join()
    if code:
        raise SystemExit(f"{one.name} ended with code {code}: see {out / one.name}.log")
    found = {kind: max(by_process.values()) for kind, by_process in peaks.items()}
    done.write_text(dump_json({"peak_bytes": found}))


_KINDS = {
    "trainer": re.compile(rb"ray::TrainerActor"),
    "replica": re.compile(rb"ray::RolloutActor"),
}


def _watch(name: str, peaks: dict[str, dict[int, int]], ended: threading.Event) -> None:
    """Keep the peak memory of each process of a run until it has ended."""
    while not ended.wait(LOOK_S):
        for pid, kind in _processes(name):
            peaks[kind][pid] = max(peaks[kind].get(pid, 0), _memory_of(pid))


def _processes(name: str) -> Iterator[tuple[int, str]]:
    mark = f"{MARK}={name}\0".encode()
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            title = (process / "cmdline").read_bytes()
            kind = next((kind for kind, one in _KINDS.items() if one.match(title)), None)
            if kind and mark in (process / "environ").read_bytes():
                yield int(process.name), kind
        except OSError:  # it has ended
            continue


def _memory_of(pid: int) -> int:
    """Return the memory of a process, with its share of shared pages."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _rows(
    chosen: Sequence[Configuration], out: Path, rates: CpuProbe, model: str | None
) -> Iterator[Row]:
    runs = {one.name: measured_run(out / "runs" / one.name, rates) for one in chosen}
    constants = {
        name: calibrated([runs[name]], probe=rates).constants(fitted_constants())
        for name in {one.calibrated_by for one in chosen}
        if name in runs
    }
    peaks = {one.name: _peak_bytes(one, out) for one in chosen}
    captured = {
        one.name: answer_of(ROOT / one.recipe, _options(one, out, model), _both) for one in chosen
    }
    stated = {
        one.name: _stated_bytes(*captured[one.name], out / "runs" / one.name) for one in chosen
    }
    for one in chosen:
        if (calibration := one.calibrated_by) not in runs:
            print(f"{one.name} needs {calibration}", file=sys.stderr)
            continue
        # libraries differ by version, and a dry run counts what a rank may need at most
        offset = peaks[calibration] - stated[calibration]
        yield Row(
            name=one.name,
            calibrates=one.name == calibration,
            measured_s=runs[one.name].medians.step_s,
            predicted_s=predicted_s(*captured[one.name], runs[one.name], constants[calibration]),
            measured_bytes=peaks[one.name],
            predicted_bytes=stated[one.name] + offset,
        )


def _both(config: RunConfig, flow: Dataflow) -> tuple[RunConfig, Dataflow]:
    return config, flow


def _peak_bytes(one: Configuration, out: Path) -> float:
    """Return the measured peak of a trainer rank."""
    peak: float = parse_json((out / f"{one.name}.json").read_text())["peak_bytes"].get("trainer", 0)
    return peak


def predicted_s(config: RunConfig, flow: Dataflow, run: MeasuredRun, constants: Constants) -> float:
    """Return the predicted seconds of a step of a configuration, for the lengths of its run."""
    plan = plan_of(config, flow)
    result = simulate_run(config, flow, run.shape, run.cluster, plan, constants)
    return result.mean_step_s


def _stated_bytes(config: RunConfig, flow: Dataflow, directory: Path) -> float:
    """Return the memory of a trainer rank that the dry run states for a rank alone."""
    config = replace(config, placement="separate")
    graph = complete_graph(flow, config)
    shape = model_shape(str(directory / "hf"), graph.main.head)
    return next(demands(config, graph, shape)).host_bytes


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table of all runs."""
    cells = [("run", "measured", "predicted", "error", "rank MiB", "predicted", "error", "")]
    for row in rows:
        cells.append(
            (
                row.name,
                f"{row.measured_s:.3f} s",
                f"{row.predicted_s:.3f} s",
                f"{row.error:+.1%}",
                f"{row.measured_bytes / MIB:,.0f}",
                f"{row.predicted_bytes / MIB:,.0f}",
                f"{row.memory_error:+.1%}",
                "calibrates" if row.calibrates else "",
            )
        )
    yield from aligned(cells)


def score(rows: Sequence[Row]) -> dict[str, float]:
    """Return the errors of the runs that did not calibrate, and the order of all pairs."""
    tested = [row for row in rows if not row.calibrates]
    pairs = [
        (one, other)
        for one, other in combinations(rows, 2)
        if not (one.calibrates and other.calibrates)
        and abs(one.measured_s / other.measured_s - 1) > APART
    ]
    right = sum(
        (one.measured_s < other.measured_s) == (one.predicted_s < other.predicted_s)
        for one, other in pairs
    )
    with_memory = [abs(row.memory_error) for row in tested if row.measured_bytes]
    return {
        "runs": len(tested),
        "step_mdape": median(abs(row.error) for row in tested) if tested else 0.0,
        "pairs": len(pairs),
        "order_right": right / len(pairs) if pairs else 0.0,
        "memory_mdape": median(with_memory) if with_memory else 0.0,
    }


if __name__ == "__main__":
    raise SystemExit(main())
