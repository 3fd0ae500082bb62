from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import fmean

import pytest

from rlsys.runs.observe.metrics_file import MetricsWriter
from rlsys.runs.observe.summary import summarize, summary_rows
from scripts.plot_run import draw, draw_runs, main, named, read_run, smoothed


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in range(1, 31):
        line = {
            "step": step,
            "reward/mean": step / 30,
            "staleness/mean": 0.5,
            "staleness/max": 1,
            "throughput/trained_tokens_per_s": 2000.0,
        }
        writer.write(line)
    writer.close()
    return tmp_path


@pytest.mark.parametrize(("name", "magic"), [("a.svg", b"<?xml"), ("a.png", b"\x89PNG")])
def test_a_picture_is_drawn(run_dir: Path, name: str, magic: bytes) -> None:
    main([str(run_dir), "--out", str(run_dir / name)])
    assert (run_dir / name).read_bytes().startswith(magic)


def test_the_picture_shows_reward_staleness_and_speed(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        main([str(run_dir)])
    assert capsys.readouterr().out == f"{run_dir / 'plot.svg'}\n"
    picture = (run_dir / "plot.svg").read_text()
    for words in ("reward", "staleness", "k tokens/s", "optimizer step", "0.183", "0.850"):
        assert f">{words}</text>" in picture, words


@pytest.mark.parametrize("num_steps", [1, 2, 7, 30, 250])
def test_the_picture_and_the_summary_state_the_same_means(num_steps: int) -> None:
    """For 250 steps those of the steps 1 to 10 and 241 to 250."""
    lines = [{"step": n, "reward/mean": n**0.5} for n in range(1, num_steps + 1)]
    (label, stated), *_ = summary_rows(summarize(lines))
    panel = draw(lines, "run").axes[0]
    assert panel.get_title(loc="left") == f"{label} {stated}"
    numbers = re.findall(r"\d+\.\d+", stated)
    assert [text.get_text() for text in panel.texts] == numbers[: len(lines)]
    if num_steps == 250:
        first, last = fmean(n**0.5 for n in range(1, 11)), fmean(n**0.5 for n in range(241, 251))
        assert numbers == [f"{first:.3f}", f"{last:.3f}"]


def write_run(directory: Path, rewards: list[float]) -> Path:
    directory.mkdir(parents=True)
    writer = MetricsWriter(directory / "metrics.jsonl")
    for step, value in enumerate(rewards, start=1):
        writer.write({"step": step, "reward/mean": value, "staleness/mean": 1.0})
    writer.close()
    return directory


def test_several_runs_are_drawn_over_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write_run(tmp_path / name, [n / 4 for n in range(num)]) for name, num in RUNS.items()]
    main([str(path) for path in paths])
    assert capsys.readouterr().out == f"{tmp_path / 'comparison.svg'}\n"
    assert (tmp_path / "comparison.svg").is_file()
    runs = {path.name: read_run(path) for path in paths}
    figure = draw_runs(runs)
    assert [panel.get_ylabel() for panel in figure.axes] == ["reward", "staleness", "tokens/s"]
    reward = figure.axes[0]
    assert [text.get_text() for text in reward.get_legend().get_texts()] == [
        "grpo: 0.125 → 0.625",
        "dapo: 0.000 → 0.250",
    ]
    # Of each run its values and their smoothed curve.
    drawn = [list(line.get_ydata()) for line in reward.get_lines()]
    assert drawn == [[0, 0.25, 0.5, 0.75]] * 2 + [[0, 0.25]] * 2
    assert figure.axes[-1].get_xlim() == (1, 4)


RUNS = {"grpo": 4, "dapo": 2}


def test_runs_of_one_name_are_labelled_with_their_paths(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / place / "demo", [0.0, 1.0]) for place in "ab"]
    assert named(paths) == {str(path): path for path in paths}


@pytest.mark.parametrize(
    ("line", "labels"),
    [
        ({"loss": 0.5}, ["loss", "k tokens/s"]),
        ({"loss": 0.5, "preference/accuracy": 0.75}, ["accuracy", "loss", "k tokens/s"]),
        ({"loss": 0.5, "reward/mean": 0.75}, ["reward", "staleness", "k tokens/s"]),
    ],
)
def test_a_run_without_rewards_is_drawn_by_what_it_has(
    line: dict[str, float], labels: list[str], tmp_path: Path
) -> None:
    lines = [{"step": step, **line} for step in (1, 2)]
    assert [panel.get_ylabel() for panel in draw(lines, "run").axes] == labels


@pytest.mark.parametrize("rewards", [[0.9, 0.5, 0.03], [0.03, 0.5, 1.0], [-3.0, -1.0], [0.5]])
def test_the_rewards_at_both_ends_are_labelled_within_their_panel(rewards: list[float]) -> None:
    figure = draw([{"step": n + 1, "reward/mean": x} for n, x in enumerate(rewards)], "run")
    figure.canvas.draw()
    panel = figure.axes[0]
    inside = panel.get_window_extent()
    labels = [text.get_window_extent() for text in panel.texts]
    assert len(labels) == min(len(rewards), 2)
    assert all(inside.y0 <= text.y0 and text.y1 <= inside.y1 for text in labels)


def test_one_step_without_staleness_is_enough(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write({"step": 1, "reward/mean": -3.0})
    main([str(tmp_path)])
    assert (tmp_path / "plot.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere/metrics.jsonl"),
        (["RUN", "--out", "a.bmp"], ".bmp"),
    ],
)
def test_mistakes_end_the_command(run_dir: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        main([str(run_dir) if argument == "RUN" else argument for argument in arguments])


def test_a_run_without_a_step_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(SystemExit, match=r"metrics\.jsonl"):
        main([str(tmp_path)])


def test_without_matplotlib_the_command_to_install_it_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what import finds without it
    with pytest.raises(SystemExit, match=r"pip install 'rlsys\[plot\]'"):
        main([str(run_dir)])


def test_smoothing_is_a_centred_mean() -> None:
    assert smoothed([1, 2, 6, 3], 1) == [1, 2, 6, 3]
    assert smoothed([1, 2, 6, 3], 3) == [1.5, 3.0, 11 / 3, 4.5]
