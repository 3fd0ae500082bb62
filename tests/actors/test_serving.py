"""What a server of the Tinker API says before it serves."""

from __future__ import annotations

import contextlib

import pytest

from actors.tinker_server import serving
from rlsys.tinker_server.server_config import BaseModelConfig, ServerConfig


def test_that_ray_starts_is_told_before_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def connected(_: object) -> contextlib.AbstractContextManager[str]:
        told.append(capsys.readouterr().out)
        return contextlib.nullcontext("few cores")

    monkeypatch.setattr(serving, "connected", connected)
    with serving.connected_to_ray(ServerConfig(model=BaseModelConfig(path="tiny"))):
        assert told == ["starting Ray\n"]
    assert capsys.readouterr().out == "warning: few cores\n"
