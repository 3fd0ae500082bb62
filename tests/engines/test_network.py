"""The interface that leads to an address."""

from __future__ import annotations

import socket
import sys

import pytest

from rlsys.engines.training.network import interface_towards

linux = pytest.mark.skipif(sys.platform != "linux", reason="told on Linux only")


@linux
def test_the_loopback_leads_to_this_machine() -> None:
    assert interface_towards("127.0.0.1") == "lo"


@linux
def test_the_outer_interface_leads_to_its_own_address() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))  # any address beyond this machine
        except OSError:
            pytest.skip("this machine has no route to anywhere")
        own = probe.getsockname()[0]
    interface = interface_towards(own)
    assert interface is not None
    assert interface in {name for _, name in socket.if_nameindex()} - {"lo"}


def test_what_cannot_be_told_is_none() -> None:
    assert interface_towards("::1") is None
