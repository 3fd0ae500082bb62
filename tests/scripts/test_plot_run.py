from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlsys.observe.metrics import MetricsWriter
from scripts.plot_run import draw, main, smoothed


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


def test_the_picture_tells_reward_staleness_and_speed(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        main([str(run_dir)])
    assert capsys.readouterr().out == f"{run_dir / 'plot.svg'}\n"
    picture = (run_dir / "plot.svg").read_text()
    for words in ("reward", "staleness", "k tokens/s", "optimizer step", "0.03", "1.00"):
        assert f">{words}</text>" in picture, words


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
def test_the_rewards_at_both_ends_are_told_within_their_panel(rewards: list[float]) -> None:
    figure = draw([{"step": n + 1, "reward/mean": x} for n, x in enumerate(rewards)], "run")
    figure.canvas.draw()
    panel = figure.axes[0]
    inside = panel.get_window_extent()
    told = [text.get_window_extent() for text in panel.texts]
    assert len(told) == min(len(rewards), 2)
    assert all(inside.y0 <= text.y0 and text.y1 <= inside.y1 for text in told)


def test_one_step_without_staleness_is_enough(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write({"step": 1, "reward/mean": -3.0})
    main([str(tmp_path)])
    assert (tmp_path / "plot.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere/metrics.jsonl does not exist"),
        (["RUN", "--out", "a.bmp"], "ends in '.bmp'; use .svg or .png"),
    ],
)
def test_mistakes_are_told(run_dir: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        main([str(run_dir) if argument == "RUN" else argument for argument in arguments])


def test_a_run_without_a_step_is_told(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(SystemExit, match="has no step with a reward or loss yet"):
        main([str(tmp_path)])


def test_a_missing_matplotlib_is_told(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what import finds without it
    with pytest.raises(SystemExit, match=r"pip install 'rlsys\[plot\]'"):
        main([str(run_dir)])


def test_smoothing_is_a_centred_mean() -> None:
    assert smoothed([1, 2, 6, 3], 1) == [1, 2, 6, 3]
    assert smoothed([1, 2, 6, 3], 3) == [1.5, 3.0, 11 / 3, 4.5]
