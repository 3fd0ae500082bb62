"""Fixture with each way of isolation that this machine allows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlsys.rewards.sandbox import fork_server_client as hosts
from rlsys.rewards.sandbox.fork_server_client import ForkServerClient, SandboxUnavailable
from rlsys.rewards.sandbox.isolation_levels import WAYS


@pytest.fixture(params=WAYS, scope="module")
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let rlsys.rewards.sandbox use one way of isolation."""
    try:
        host = ForkServerClient([request.param])
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "_of_this_process", host)
        yield request.param
    host.close()
