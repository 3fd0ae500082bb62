"""Choice of the network interface to an address, and of the loopback interface."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from rlsys.engines.devices.network import interface_towards
from tests.listeners import LOOPBACK, named_elsewhere

linux = pytest.mark.skipif(sys.platform != "linux", reason="known on Linux only")


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


def test_an_unknown_interface_is_none() -> None:
    assert interface_towards("::1") is None


ONE_RANK = """
import os
from torch import nn
from torch.distributed.fsdp import fully_shard
from rlsys.engines.training.sharding import SHARDED, build_mesh
from rlsys.config.parallel_layout import ParallelLayout
from tests.listeners import listening
mesh = build_mesh(ParallelLayout(), rank=0, dtype="bfloat16", device="cpu")
fully_shard(nn.Linear(4, 4), mesh=mesh.sharding(*SHARDED))
print(*(address for address, _ in listening([os.getpid()])))
"""


@pytest.mark.slow
@linux
def test_the_group_of_one_rank_is_on_loopback_for_any_host_name() -> None:
    command = named_elsewhere(sys.executable, "-c", ONE_RANK)
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    assert output.split(), "gloo listens no more: this proves nothing"
    assert set(output.split()) <= LOOPBACK
