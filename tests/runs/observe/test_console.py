from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlsys.runs.observe.advised_settings import AdvisedSettings
from rlsys.runs.observe.console import COLUMNS, RunConsole, bucket_means, short_duration, sparkline
from rlsys.runs.observe.phases import MovingLines, remaining_s
from rlsys.runs.observe.records import RolloutRecord


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Screen:
    """A RunConsole with its output; `terminal` as a wide terminal, else as a log file of 80."""

    def __init__(
        self, *, terminal: bool = False, encoding: str = "utf-8", samples: bool = True
    ) -> None:
        self.bytes = io.BytesIO()
        stream = io.TextIOWrapper(self.bytes, encoding=encoding, write_through=True)
        rich = Console(
            file=stream,
            force_terminal=terminal,
            force_interactive=terminal,
            width=120 if terminal else 80,
            color_system="standard" if terminal else None,
        )
        self.clock = FakeClock()
        self.run = RunConsole(
            num_steps=50,
            settings=AdvisedSettings(),
            rollouts_per_step=8,
            samples=samples,
            print_every=10,
            print_samples=2,
            console=rich,
            clock=self.clock,
            tick_s=None,
        )

    @property
    def lines(self) -> list[str]:
        return self.bytes.getvalue().decode(errors="replace").splitlines()

    @property
    def plain(self) -> str:
        """Text on a terminal's screen, without control sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", "\n".join(self.lines))


def step_line(step: int, **changed: float) -> dict[str, float]:
    return {
        "step": step,
        "reward/mean": 0.25,
        "staleness/mean": 0.62,
        "staleness/max": 1,
        "loss": -0.0123,
        "grad_norm": 0.456,
        "kl/sampler_trainer": 1.2e-7,
        "entropy": 1.234,
        "completion/tokens_mean": 37.4,
        "time/step_s": 2.0,
        "time/trainer_idle_s": 0.5,
        "throughput/trained_tokens_per_s": 12345.6,
        **{name.replace("__", "/"): value for name, value in changed.items()},
    }


RECORD = RolloutRecord(
    step=10,
    group_id=3,
    index=0,
    prompt="[bold]2+2=[/bold]",
    completion="4\nor so",
    token_ids=[7],
    policy_versions=[1],
    staleness=1,
    reward=0.5,
    rewards={"exact": 0.5},
    advantage=0.0,
    finish_reason="stop",
)


def test_phases_in_a_log_file_are_a_line_at_start_and_end() -> None:
    screen = Screen()
    with screen.run.phase("Starting Ray"):
        screen.clock.now_s += 3.5
    with screen.run.phase("Warm start") as phase:
        for done in range(0, 201, 10):
            phase.update(done, 200, "loss 0.53")
        screen.clock.now_s += 75
    assert screen.lines == [
        "Starting Ray ...",
        "Starting Ray: 3.50 s",
        "Warm start ...",
        "Warm start: 200/200 loss 0.53, 75.0 s",
    ]


def test_phases_on_a_terminal_move_and_leave_a_line() -> None:
    screen = Screen(terminal=True)
    with screen.run.phase("Warm start") as phase:
        phase.update(120, 200, "loss 0.53")
        screen.clock.now_s += 2
        view = screen.run.phases._view
        assert isinstance(view, MovingLines)
        view.progress.refresh()
        assert "Warm start" in screen.plain
        assert "120/200 loss 0.53" in screen.plain
        assert "0:00:02" in screen.plain
        with screen.run.phase("Loading model into 2 replicas"):
            screen.clock.now_s += 1
    last = [line for line in screen.plain.replace("\r", "\n").splitlines() if line.strip()][-1]
    assert last == "Warm start: 120/200 loss 0.53, 3.00 s"


@pytest.mark.parametrize(
    ("error", "words"), [(ValueError, "failed after"), (KeyboardInterrupt, "stopped after")]
)
@pytest.mark.parametrize("terminal", [False, True])
def test_a_failed_phase_is_shown_as_failed(
    error: type[BaseException], words: str, terminal: bool
) -> None:
    screen = Screen(terminal=terminal)

    def fail() -> None:
        with screen.run.phase("Loading model"):
            screen.clock.now_s += 1
            raise error

    with pytest.raises(error):
        fail()
    assert f"Loading model: {words} 1.00 s" in screen.plain


def test_a_step_is_one_line_under_its_titles() -> None:
    screen = Screen()
    screen.run.step(step_line(1))
    screen.run.step(step_line(2, reward__mean=0.75))
    header, first, second = screen.lines
    titles = (
        "step reward trend length entropy stale tokens/s idle loss grad sampler kl seconds left"
    )
    assert " ".join(header.split()) == titles
    numbers = "1/50 0.250 ▁ 37 1.234 0.62/1 12,346 25% -0.0123 0.456 1.2e-07 2.00 98s"
    assert first.split() == numbers.split()
    assert second.split()[:3] == ["2/50", "0.750", "▁█"]
    assert second.split()[-1] == "96s"
    assert len(header) == len(first) == len(second) <= 115
    # Each number ends where its title ends.
    ends = [header.index(column.title) + len(column.title) for column in COLUMNS]
    assert all(first[end - 1] != " " and first[end : end + 1] in (" ", "") for end in ends)


@pytest.mark.parametrize(
    ("first", "titles", "numbers"),
    [
        (
            {"preference/accuracy": 0.75},
            "step accuracy trend stale tokens/s idle loss grad seconds left",
            ["1/50", "0.750", "▁", "0.00/0", "900", "25%", "0.6931", "0.456", "2.00", "98s"],
        ),
        (
            {},
            "step loss trend stale tokens/s idle grad seconds left",
            ["1/50", "0.693", "▁", "0.00/0", "900", "25%", "0.456", "2.00", "98s"],
        ),
    ],
)
def test_a_run_on_a_dataset_has_fewer_columns(
    first: dict[str, float], titles: str, numbers: list[str]
) -> None:
    screen = Screen(samples=False)
    line = {
        "step": 1,
        "loss": 0.6931,
        "grad_norm": 0.456,
        "staleness/mean": 0.0,
        "staleness/max": 0.0,
        "time/step_s": 2.0,
        "time/trainer_idle_s": 0.5,
        "throughput/trained_tokens_per_s": 900.0,
    }
    screen.run.step(line | first)
    header, row = screen.lines
    assert " ".join(header.split()) == titles
    assert row.split() == numbers
    assert len(header) == len(row)


def test_dropped_rollouts_are_shown_without_any_step(tmp_path: Path) -> None:
    screen = Screen()
    screen.run.dropped({"refused": 114_400, "stale": 8})
    screen.run.close("interrupted", lines=[], directory=tmp_path, next_command="again")
    expected = "  rollouts   0 trained; 114,408 dropped (refused 114,400, stale 8)"
    assert screen.lines[2] == expected


def test_a_metric_that_is_missing_is_a_dash() -> None:
    screen = Screen()
    screen.run.step({"step": 7})
    assert screen.lines[1].split() == ["7/50", *"-----------"]


def test_the_header_comes_again_every_twenty_steps() -> None:
    screen = Screen()
    for step in range(1, 42):
        screen.run.step(step_line(step))
    headers = [i for i, line in enumerate(screen.lines) if line.split()[0] == "step"]
    assert headers == [0, 21, 42]


def test_samples_are_printed_every_ten_steps_and_never_interpreted() -> None:
    screen = Screen()
    for step in range(1, 21):
        record = replace(RECORD, step=step)
        screen.run.step(step_line(step), [record] * 3)
    titles = [line for line in screen.lines if line.startswith("sample")]
    assert titles == [f"sample of step {step}: reward 0.5" for step in (1, 1, 10, 10, 20, 20)]
    at = screen.lines.index(titles[0])
    assert screen.lines[at + 1 : at + 4] == [
        "  prompt     [bold]2+2=[/bold]",
        "  completion 4",
        "             or so",
    ]


def test_a_number_that_rounds_to_zero_has_no_sign() -> None:
    screen = Screen()
    rewards = {"places": 0.5, "places/length": -0.0}
    line = {**step_line(1), "loss": -1e-5}
    screen.run.step(line, [replace(RECORD, step=1, rewards=rewards)])
    assert "sample of step 1: reward 0.5 (places 0.5, places/length 0)" in screen.lines
    assert "-0.0000" not in screen.plain


def test_an_episode_is_shown_turn_by_turn() -> None:
    def turn(branch: int, role: str, text: str) -> dict[str, Any]:
        return {"branch": branch, "role": role, "text": text, "sampled": role == "assistant"}

    screen = Screen()
    turns = [turn(0, "user", "?"), turn(0, "assistant", "3"), turn(1, "user", "\x1b!")]
    screen.run.step(step_line(1), [replace(RECORD, step=1, turns=turns)])
    assert screen.lines[-5:] == [
        "sample of step 1: reward 0.5",
        "  user       ?",
        "  assistant  3",
        "  branch 1",
        "  user       \\x1b!",
    ]
    seated = [{**one, "seat": "ab"[one["branch"]]} for one in turns]
    screen = Screen()
    screen.run.step(step_line(1), [replace(RECORD, step=1, turns=seated)])
    assert screen.lines[-5:] == [
        "  seat a",
        "  user       ?",
        "  assistant  3",
        "  branch 1, seat b",
        "  user       \\x1b!",
    ]
    long = [turn(0, "user", str(number)) for number in range(40)]
    screen.run.step(step_line(20), [replace(RECORD, step=20, turns=long)])
    shown = screen.lines[screen.lines.index("sample of step 20: reward 0.5") + 1 :]
    assert len(shown) == 17
    assert shown[7:10] == ["  user       7", "  [... 24 turns ...]", "  user       32"]


def test_a_sample_that_nothing_scored_has_no_reward() -> None:
    screen = Screen()
    screen.run.step(step_line(1), [replace(RECORD, step=1, reward=None, rewards={})])
    assert [text for text in screen.lines if "sample of" in text] == ["sample of step 1"]


def test_a_sample_cannot_drive_the_terminal_nor_flood_it() -> None:
    screen = Screen()
    record = replace(
        RECORD, completion="\x1b[2J\r\x07\ud800" + "a" * 5000, rewards={"a": 1, "b": 0}
    )
    screen.run.step(step_line(1), [record])
    title, _, completion = screen.lines[-3:]
    assert title == "sample of step 10: reward 0.5 (a 1, b 0)"
    assert completion.startswith(r"  completion \x1b[2J\r\x07\ud800aaa")
    assert "[... 4,407 characters ...]" in completion
    assert len(completion) < 700


def test_warnings_cannot_control_the_terminal() -> None:
    screen = Screen(terminal=True)
    screen.run.warn("the template raised \x1b[2J\x1b]0;gotcha\x07\r")
    screen.run.note("\x1b[36mray::RolloutActor\x1b[39m died")
    assert screen.plain.splitlines() == [
        r"warning: the template raised \x1b[2J\x1b]0;gotcha\x07\r",
        "ray::RolloutActor died",
    ]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_stream_without_unicode_gets_question_marks(encoding: str) -> None:
    screen = Screen(encoding=encoding)
    screen.run.step(step_line(1), [replace(RECORD, completion="日本 yes")])
    assert "  completion ?? yes" in screen.lines
    assert screen.lines[1].split()[2] == "_"


def test_a_warning_is_shown_once_and_again_when_it_comes_back() -> None:
    """The mean over five steps is above 80 % until step 61, and again from step 96 on."""
    screen = Screen()
    warned = []
    for step in range(1, 131):
        before = len(screen.lines)
        frac = 0.3 if 60 < step <= 91 else 0.92
        screen.run.step(step_line(step, groups__zero_advantage_frac=frac))
        warned += [step] * any(line.startswith("warning: ") for line in screen.lines[before:])
    assert warned == [5, 96]


def test_a_balanced_run_gets_one_bottleneck_warning() -> None:
    """Now the trainer waits, now the data is stale: close to balance both come and go."""
    screen = Screen()
    for step in range(1, 101):
        waits = step // 5 % 2 == 0
        line = step_line(
            step,
            time__step_s=2.0,
            time__trainer_idle_s=1.9 if waits else 0.0,
            staleness__mean=0.0 if waits else 1.0,
        )
        screen.run.step(line)
    (warning,) = [line for line in screen.lines if line.startswith("warning: ")]
    assert warning.startswith("warning: the trainer waits")


def test_another_bottleneck_is_shown_after_the_first_has_ended() -> None:
    screen = Screen()
    for step in range(1, 61):
        idle_s, staleness = (1.9, 0.0) if step <= 20 else (0.0, 1.0)
        screen.run.step(
            step_line(
                step, time__step_s=2.0, time__trainer_idle_s=idle_s, staleness__mean=staleness
            )
        )
    warnings = [line for line in screen.lines if line.startswith("warning: ")]
    assert warnings[0].startswith("warning: the trainer waits")
    assert warnings[-1].startswith("warning: staleness is pinned")


def test_the_summary_of_a_run_with_a_deleted_directory(tmp_path: Path) -> None:
    screen = Screen()
    screen.run.close("failed", lines=[], directory=tmp_path / "gone", next_command="see above")
    assert f"  files      {tmp_path / 'gone'}: none" in screen.lines


def test_the_closing_summary(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", ".lock", "trace.json"):
        (tmp_path / name).touch()
    (tmp_path / "hf").mkdir()
    (tmp_path / "checkpoints" / "step-20").mkdir(parents=True)
    screen = Screen()
    screen.clock.now_s += 31.4
    lines = [step_line(step, reward__mean=step / 20) for step in range(1, 21)]
    screen.run.step(lines[-1])
    shown = len(screen.lines)
    command = "rlsys report runs/demo"
    screen.run.close("interrupted", lines=lines, directory=tmp_path, next_command=command)
    summary = screen.lines[shown:]
    assert summary[1].startswith("Interrupted: 20 of 50 steps.")
    assert "31.4 s" in summary[1]
    assert summary[2].startswith("  reward     0.275 → 0.775  (mean of the first")
    files = f"  files      {tmp_path}: checkpoints/, metrics.jsonl, trace.json"
    assert summary[-2:] == [files, f"  next       {command}"]


def test_the_summary_lists_the_files_that_are_written_after_it(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "outcome.json"):
        (tmp_path / name).touch()
    screen = Screen()
    screen.run.close(
        "interrupted",
        lines=[],
        directory=tmp_path,
        written_next=["outcome.json", "report.html"],
        next_command="again",
    )
    assert f"  files      {tmp_path}: metrics.jsonl, outcome.json, report.html" in screen.lines


def test_a_run_that_failed_before_its_first_step_has_a_summary_too(tmp_path: Path) -> None:
    screen = Screen()
    screen.run.close("failed", lines=[], directory=tmp_path, next_command="see above")
    assert screen.lines == [
        "",
        "Failed: 0 of 50 steps.",
        f"  files      {tmp_path}: none",
        "  next       see above",
    ]


def test_the_trend_shows_the_whole_run() -> None:
    """A run that rises for a third of its steps and keeps its level has no full bar."""
    rewards = [min(step / 80, 1.0) for step in range(250)]
    assert bucket_means([0.0, 1.0, 4.0, 5.0], 2) == [0.5, 4.5]
    assert bucket_means([1.0, 2.0], 8) == [1.0, 2.0]
    assert bucket_means([], 8) == []
    assert sparkline(bucket_means(rewards, 8)) == "▁▄▇█████"
    assert sparkline([0.3] * 4) == "▁▁▁▁"
    assert sparkline([0.0, 1.0], ascii_only=True) == "_#"
    assert sparkline([]) == ""


def test_the_trend_of_a_resumed_run_begins_with_the_run() -> None:
    screen = Screen()
    earlier = [step_line(step, reward__mean=step / 10) for step in range(1, 8)]
    screen.run.resumed(earlier)
    screen.run.step(step_line(8, reward__mean=0.8))
    assert screen.lines[1].split()[2] == "▁▂▃▄▅▆▇█"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0s"),
        (98.4, "98s"),
        (100, "2m"),
        (5900, "98m"),
        (7500, "2h05"),
        (172_700, "47h58"),
        (187_200, "2d04"),
    ],
)
def test_the_time_that_is_left_fits_its_column(seconds: float, text: str) -> None:
    assert short_duration(seconds) == text
    assert len(text) <= 5


def test_a_long_phase_in_a_log_file_gives_signs_of_life() -> None:
    screen = Screen()
    with screen.run.phase("Loading the model") as phase:
        for second in range(1, 201):
            screen.clock.now_s += 1
            phase.update(second, 200)
            screen.run.phases.tick()
    times = [line.split(" so far")[0].split(", ")[-1] for line in screen.lines[1:-1]]
    assert times == ["10.0 s", "20.0 s", "40.0 s", "80.0 s", "2 min 20 s", "3 min 20 s"]
    assert screen.lines[1] == "Loading the model: 10/200, 10.0 s so far, about 3 min 10 s left"


def test_the_rest_of_a_phase_takes_as_long_as_its_beginning() -> None:
    assert remaining_s(1, 4, 10.0) == 30.0
    assert remaining_s(3, 4, 30.0) == 10.0
    unknown: list[tuple[int | None, int | None]] = [(0, 4), (4, 4), (5, 4), (None, 4), (3, None)]
    assert [remaining_s(done, total, 10.0) for done, total in unknown] == [None] * 5


def test_bytes_are_shown_in_mb() -> None:
    screen = Screen()
    with screen.run.phase("Exporting the model") as phase:
        screen.clock.now_s += 10
        phase.update_bytes(1_500_000_000, 6_000_000_000)
        screen.run.phases.tick()
    assert screen.lines[1] == (
        "Exporting the model: 1500/6000 MB, 10.0 s so far, about 30.0 s left"
    )


def test_an_early_stop_is_shown_with_its_reason() -> None:
    screen = Screen()
    with screen.run.training(after_step=0):
        screen.run.step(step_line(1))
        screen.run.stopping("reward/mean is 0.95", last_step=2)
        screen.run.step(step_line(2))
        screen.clock.now_s += 100
        screen.run.phases.tick()
    assert not any(line.startswith("Step 3") for line in screen.lines)
    screen.run.close(
        "finished",
        lines=[step_line(1), step_line(2)],
        directory=Path("/runs/one"),
        next_command="look at it",
    )
    shown = [line.split() for line in screen.lines]
    assert ["stopped", "reward/mean", "is", "0.95"] in shown


def test_a_step_that_takes_long_gives_signs_of_life_and_leaves_none() -> None:
    screen = Screen()
    with screen.run.training(after_step=3):
        screen.clock.now_s += 9
        screen.run.phases.tick()
        screen.run.sampled(3)
        screen.run.sampled(2)
        screen.clock.now_s += 1
        screen.run.phases.tick()
        screen.run.step(step_line(4))
        screen.clock.now_s += 10
        screen.run.phases.tick()
        screen.run.step(step_line(50))
        screen.clock.now_s += 100
        screen.run.phases.tick()
    assert [line for line in screen.lines if line.startswith("Step ")] == [
        "Step 4 of 50: 5/8 rollouts, 10.0 s so far, about 6.00 s left",
        "Step 5 of 50: 10.0 s so far",
    ]


@pytest.mark.parametrize("loss", [False, True])
def test_a_held_out_line_is_short(loss: bool) -> None:
    screen = Screen()
    line: dict[str, float] = {"step": 1200, "eval/is_best": 1, "eval/prompts": 500}
    for name in ("eval/mean@64", *(f"eval/pass@{k}" for k in (1, 2, 4, 8, 16, 32, 64))):
        line |= {name: 0.512, f"{name}/low": 0.47, f"{name}/high": 0.554}
    screen.run.evaluated({**line, "eval/loss": 1.25} if loss else line)
    (shown,) = screen.lines
    assert shown.startswith("held-out, step 1200: mean@64 0.512 (0.470 to 0.554), pass@64 0.512")
    assert ("loss 1.2500" in shown) == loss
    assert len(shown) <= 120


def test_forced_colours_make_no_motion_where_there_is_no_terminal() -> None:
    """Kernels of notebooks and CI systems set FORCE_COLOR."""
    program = (
        "import time\n"
        "from rlsys.runs.observe.phases import Output, Phases\n"
        "with Phases(Output(), tick_s=0.01).phase('Loading') as phase:\n"
        "    for done in range(50):\n"
        "        phase.update(done, 50)\n"
        "        time.sleep(0.01)\n"
    )
    environment = {**os.environ, "FORCE_COLOR": "1"}
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        env=environment,
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert len(done.stdout.splitlines()) == 2


def test_logged_warnings_are_shown() -> None:
    screen = Screen()
    with screen.run.showing_log_warnings():
        logging.getLogger("rlsys.data.swarm.external_prompts").warning("group %d is passed over", 3)
        logging.getLogger("rlsys.data.swarm.external_prompts").info("group 4")
    logging.getLogger("rlsys.data.swarm.external_prompts").warning("group 5")
    assert screen.lines == ["warning: group 3 is passed over"]
