"""The staleness study: which runs it consists of, what it makes of theirs, its picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsys.dataflow.graph.stages import TrainStage
from scripts.staleness import LOSSES, Trial, as_markdown, draw, found, main, trials


def write_run(directory: Path, rewards: list[float]) -> None:
    directory.mkdir(parents=True)
    lines = [
        {"step": step, "reward/mean": reward, "staleness/mean": 2.0}
        for step, reward in enumerate(rewards, 1)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_largest_bound_has_every_seed_and_the_others_one() -> None:
    found = [(t.eta, t.seed, t.loss) for t in trials(["naive", "decoupled"], [0, 8], [3, 5])]
    assert found == [
        (8, 3, "naive"),
        (8, 3, "decoupled"),
        (8, 5, "naive"),
        (8, 5, "decoupled"),
        (0, 3, "naive"),
        (0, 3, "decoupled"),
    ]


@pytest.mark.parametrize(("eta", "bound"), [(0, 1), (1, 3), (8, 17)])
def test_the_bound_counts_updates_of_which_a_step_has_two(eta: int, bound: int) -> None:
    config = Trial("naive", eta, 0).config(Path("/runs"), 10)
    assert config.asynchrony.max_staleness == bound
    assert config.trainer.num_minibatches == 2
    assert (config.name, config.resume) == (f"naive-eta{eta}-seed0", "auto")


def test_every_loss_is_a_graph_of_its_own() -> None:
    config = Trial("naive", 1, 0).config(Path("/runs"), 10)
    losses = set()
    for algorithm in LOSSES.values():
        flow = algorithm(config, [lambda rollout: 0.0], rows=[{"prompt": "1+1="}])
        flow.check()
        losses.add(str(flow.stage(TrainStage).loss))
    assert len(losses) == len(LOSSES)


def test_numbers_are_means_over_seeds_of_the_last_tenth(tmp_path: Path) -> None:
    done = list(trials(["naive"], [0, 4], [0, 1]))
    write_run(tmp_path / "naive-eta4-seed0", [0.0] * 18 + [0.5, 0.7])
    write_run(tmp_path / "naive-eta4-seed1", [0.1] * 18 + [0.8, 0.8])
    write_run(tmp_path / "naive-eta0-seed0", [0.25] * 20)
    table = found(done, tmp_path)
    assert table["naive"][4] == {
        "reward_last": 0.7,
        "area": pytest.approx((1.2 / 20 + 3.4 / 20) / 2, abs=1e-4),
        "staleness": 2.0,
        "least": 0.6,
        "most": 0.8,
        "seeds": 2,
    }
    assert as_markdown(table).splitlines()[-1] == "| naive | 0.250 | 0.700 (0.600 to 0.800) |"
    draw(table, done, tmp_path).savefig(tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--losses", "naive,clever"], "--losses clever: "),
        (["--etas", "0,many"], "--etas and --seeds "),
        (["--out", "study.gif"], "--out study.gif ends in '.gif'; use .svg or .png"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    option: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(option)
    assert message in capsys.readouterr().err
