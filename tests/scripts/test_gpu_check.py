"""The GPU check: its parts run on a CPU, and a stop loses nothing that was measured."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu import check
from scripts.gpu.records import read_line

ROOT = Path(__file__).parents[2]
PATIENCE_S = 600.0


def results(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def run_check(out: Path, *parts: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "scripts" / "gpu" / "check.py", "--out", out),
            *("--device", "cpu", "--small", "--only", *parts),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_parts_run_on_a_cpu(tmp_path: Path) -> None:
    run_check(tmp_path, "training")
    found = results(tmp_path)
    assert [one for one in found if "error" in one] == []
    kinds = {str(one.get("kind")) for one in found}
    assert {"train", "plain_loop"} <= kinds
    trained = [one for one in found if one.get("kind") == "train"]
    assert all(one["tokens_per_s"] > 0 and "estimated_gib" in one for one in trained)  # type: ignore[operator]
    assert "| shape | tokens |" in (tmp_path / "results.md").read_text()


@pytest.mark.slow
def test_the_other_parts_run_on_a_cpu(tmp_path: Path) -> None:
    run_check(tmp_path, "kernels", "generation", "weights")
    found = results(tmp_path)
    assert [one for one in found if "error" in one] == []
    kinds = {str(one.get("kind")) for one in found}
    assert {"gemm", "attention", "head", "optimizer", "generate", "weights", "release"} <= kinds


@pytest.mark.slow
def test_a_whole_run_is_measured_and_audited(tmp_path: Path) -> None:
    run_check(tmp_path, "runs")
    (run,) = (one for one in results(tmp_path) if one.get("kind") == "run")
    assert (run["steps"], run["audit"]) == (2, "clean")


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("import time; time.sleep(600)", "ended at its limit of 3 s"),
        ("raise SystemExit(3)", "exit code 3, 0 errors"),
    ],
)
def test_a_part_that_ends_badly_keeps_what_it_measured(
    script: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = 'print(\'@result {"kind": "gemm", "tflops": 1.5}\', flush=True); '
    monkeypatch.setattr(check, "command", lambda *_: [sys.executable, "-c", first + script])
    args = argparse.Namespace(out=tmp_path, device="cpu", small=True)
    assert not check.run_part("kernels", [], args, limit_s=3)
    measured, end = results(tmp_path)
    assert 0 <= measured.pop("at_s") <= 3  # type: ignore[operator]
    assert measured == {"part": "kernels", "kind": "gemm", "tflops": 1.5}
    assert end["status"] == status


def test_lines_of_the_log_are_no_results() -> None:
    assert read_line("loading ...\n") is None
    assert read_line('@result {"kind": "copy", "gb_per_s": 2}\n') == {"kind": "copy", "gb_per_s": 2}


def test_parts_are_named_with_their_cases() -> None:
    assert check.chosen("training:8b,0.6b") == ("training", ["8b", "0.6b"])
    for wrong in ("train8b", "training:nope", "training:", "kernels:8b"):
        with pytest.raises(argparse.ArgumentTypeError):
            check.chosen(wrong)
    for wrong in ("-1", "0", "nan"):
        with pytest.raises(argparse.ArgumentTypeError):
            check.seconds(wrong)
