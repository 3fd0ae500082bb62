"""Run everything that needs a GPU, in order of value, and keep what was measured.

    python scripts/gpu/check.py --out DIR                       # all parts
    python scripts/gpu/check.py --out DIR --only training:8b,0.6b runs:separate-1
    python scripts/gpu/check.py --out DIR --device cpu --small  # tests the script itself

    kernels     rates of the device: GEMM, copies, attention, head, optimizer, host overhead
    tests       pytest -m gpu: engines against the CPU, sampler against trainer
    runs        the quickstart on shares of the device, separate and colocated (needs ray)
    training    tokens/s, utilisation, memory; against a plain transformers loop
    generation  the torch engine's prefill and decode; against transformers' generate
    weights     weight updates through host memory and CUDA IPC; released and restored memory

Each part is a process of its own with a time limit. DIR gets results.jsonl (a JSON object per
measurement, written as it arrives, so that a stop loses nothing), results.md (the same as tables)
and a log of each part. Prints the tables at the end. Exits with 1 if a part failed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.gpu.records import read_line  # noqa: E402 - the path comes first

# Seconds that a part may take, in the order in which the parts run.
CASES = {
    "training": ("0.6b", "1.7b", "4b", "8b"),
    "generation": ("0.6b", "1.7b", "4b", "8b"),
    "weights": ("0.6b", "1.7b", "4b", "8b"),
    "runs": ("separate-1", "colocated-0", "separate-0", "colocated-1"),
}
LIMITS_S = {
    "kernels": 60,
    "tests": 150,
    "runs": 240,
    "training": 420,
    "generation": 120,
    "weights": 180,
}


def main() -> int:
    """Run the parts and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the results")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny sizes, to test the script")
    parser.add_argument(
        "--only",
        nargs="+",
        type=chosen,
        default=[(part, []) for part in LIMITS_S],
        metavar="PART",
        help="parts, with cases to run only these: training:8b,0.6b",
    )
    parser.add_argument(
        "--limit-s", type=seconds, default=math.inf, help="time limit of all parts together"
    )
    args = parser.parse_args()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "results.jsonl").touch()
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}. Name a directory that can be written.")
    deadline = time.monotonic() + args.limit_s
    failed = False
    for part, cases in args.only:
        limit_s = min(LIMITS_S[part], deadline - time.monotonic())
        if limit_s <= 0:
            record(args.out, {"part": part, "status": "not run: the time was used up"})
            continue
        failed |= not run_part(part, cases, args, limit_s)
    text = tables(read_results(args.out))
    (args.out / "results.md").write_text(text)
    print(text)
    return int(failed)


def chosen(text: str) -> tuple[str, list[str]]:
    """Read PART or PART:CASE,CASE. Raises ArgumentTypeError for an unknown part."""
    part, colon, named = text.partition(":")
    if part not in LIMITS_S:
        raise argparse.ArgumentTypeError(f"{part!r} is not a part. Use {', '.join(LIMITS_S)}.")
    cases = named.split(",") if colon else []
    known = CASES.get(part, ())
    for case in cases:
        if case not in known:
            use = f"Use {', '.join(known)}." if known else "The part has no cases."
            raise argparse.ArgumentTypeError(f"{case!r} is not a case of {part}. {use}")
    return part, cases


def seconds(text: str) -> float:
    """Read a positive number of seconds."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time limit. Use a number above 0.")
    return value


def command(part: str, cases: list[str], args: argparse.Namespace) -> list[str]:
    """Return the command line of a part."""
    if part == "tests":
        tests = [
            *("-m", "gpu", "tests/engines", "-q", "-rA", "--timeout=120", "-p", "no:cacheprovider"),
            *(("-n", "6") if args.device == "cuda" else ("--collect-only",)),
        ]
        return [sys.executable, "-m", "pytest", *tests]
    options = ["--device", args.device, *(["--small"] if args.small else [])]
    options += ["--cases", *cases] if cases else []
    return [sys.executable, "-m", f"scripts.gpu.{part}", *options]


def run_part(part: str, cases: list[str], args: argparse.Namespace, limit_s: float) -> bool:
    """Run a part within its limit and record its lines; return whether it succeeded."""
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    start = time.monotonic()
    errors = 0
    with (args.out / f"{part}.log").open("w") as log:
        process = subprocess.Popen(
            command(part, cases, args),
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        assert process.stdout is not None
        timed_out = threading.Event()

        def stop() -> None:
            timed_out.set()
            end(process)

        timer = threading.Timer(limit_s, stop)
        timer.start()
        last = ""
        try:
            for line in process.stdout:
                log.write(line)
                log.flush()
                last = line.strip() or last
                values = read_line(line)
                if values is not None:
                    errors += "error" in values
                    at_s = round(time.monotonic() - start, 1)
                    record(args.out, {"part": part, **values, "at_s": at_s})
        except KeyboardInterrupt:
            end(process)
            record(args.out, {"part": part, "status": "interrupted"})
            sys.exit(130)
        finally:
            timer.cancel()
        code = process.wait()
    end(process)  # processes that it left behind
    seconds = round(time.monotonic() - start, 1)
    status = "ok" if code == 0 and not errors else f"exit code {code}, {errors} errors"
    if timed_out.is_set():
        status = f"ended at its limit of {limit_s:.0f} s"
    note = {"last_line": last[:200]} if part == "tests" else {}
    record(args.out, {"part": part, "status": status, "seconds": seconds, **note})
    return status == "ok"


def end(process: subprocess.Popen[str]) -> None:
    """Kill a part with all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _end_with_parent() -> None:
    """Let a part die with this script, also if that is killed, to free the device."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def record(out: Path, values: dict[str, Any]) -> None:
    """Append a result and show it."""
    line = json.dumps(values)
    with (out / "results.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def read_results(out: Path) -> list[dict[str, Any]]:
    """Return the results so far."""
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def tables(results: list[dict[str, Any]]) -> str:
    """Return Markdown: one table per part and kind, with a column for each value."""
    device = next((one for one in results if one.get("kind") == "device"), {})
    lines = [
        f"Device: {device.get('name', 'unknown')}, torch {device.get('torch', 'unknown')}, "
        f"Python {platform.python_version()}.",
        "",
    ]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in results:
        groups.setdefault((one["part"], one.get("kind", "status")), []).append(one)
    for (part, kind), rows in groups.items():
        names = list(dict.fromkeys(name for row in rows for name in row))
        names = [name for name in names if name not in ("part", "kind")]
        lines += [f"### {part}: {kind}", "", "| " + " | ".join(names) + " |"]
        lines += ["|" + "---|" * len(names)]
        lines += ["| " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in rows]
        lines += [""]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
