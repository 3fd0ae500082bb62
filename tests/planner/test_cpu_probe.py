"""The probe measures this machine; the sizes here are small, so that it takes a second."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlsys.planner import cpu_probe
from rlsys.planner.cpu_device import GLOO_GB_S, cpu_cluster, cpu_core
from rlsys.planner.cpu_probe import (
    cache_file,
    known_probe,
    num_cores,
    probe,
    save_probe,
    saved_probe,
)
from rlsys.planner.link_probe import measured_link

LINK = (2e-4, 0.5)  # latency of a rank in seconds, GB/s


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in (
        ("ROWS", (1, 64)),
        ("WIDTHS", (64, 128)),
        ("MIN_S", 0.001),
        ("COPIED_BYTES", 1 << 20),
        ("TRAINED_TOKENS", 256),
    ):
        monkeypatch.setattr(cpu_probe, name, value)
    monkeypatch.setattr(cpu_probe, "measured_link", lambda: LINK)


def test_a_probe_gives_a_cluster_and_leaves_the_threads_alone() -> None:
    threads = torch.get_num_threads()
    measured = probe()
    assert torch.get_num_threads() == threads
    assert measured.cores == num_cores()
    assert set(measured.dtypes) == {"float32", "bfloat16"}
    assert measured.layer_train_s > measured.layer_forward_s
    assert measured.decode_tokens_s > 1
    # a product of 64 x 128 x 128 does at most a few TFLOP/s on a core
    assert 1e6 < cpu_core(measured, "float32").peak("bf16") < 1e13
    assert cpu_cluster(measured, "bfloat16").num_gpus == num_cores()
    if num_cores() > 1:
        assert (measured.hop_s, measured.link) == LINK


def test_collectives_are_measured_between_two_processes() -> None:
    hop_s, link = measured_link()
    assert 1e-6 < hop_s < 1  # of a rank in a collective
    assert 1e-3 < link < 1e3  # GB/s


@pytest.mark.skipif(num_cores() == 1, reason="one core has no link")
def test_a_link_that_cannot_be_measured_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ValueError("the processes failed")

    monkeypatch.setattr(cpu_probe, "measured_link", fails)
    assert probe().link == GLOO_GB_S


def test_a_saved_probe_is_read_again() -> None:
    assert saved_probe() is None
    measured = probe()
    assert save_probe(measured) == cache_file()
    assert saved_probe() == measured


def test_a_cache_that_cannot_be_written_only_costs_the_next_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")
    assert known_probe().cores == num_cores()


def test_a_known_probe_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = known_probe()
    monkeypatch.setattr(cpu_probe, "probe", None)
    assert known_probe() == first
