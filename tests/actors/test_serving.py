"""Output of a Tinker API server before it serves."""

from __future__ import annotations

import contextlib

import pytest

from actors.tinker_server import serving
from rlsys.tinker_server.server_config import BaseModelConfig, ServerConfig


def test_the_start_of_ray_is_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []

    def connected(_: object) -> contextlib.AbstractContextManager[str]:
        printed.append(capsys.readouterr().out)
        return contextlib.nullcontext("few cores")

    monkeypatch.setattr(serving, "connected", connected)
    with serving.connected_to_ray(ServerConfig(model=BaseModelConfig(path="tiny"))):
        assert len(printed) == 1
        assert "Ray" in printed[0]
    assert "few cores" in capsys.readouterr().out
