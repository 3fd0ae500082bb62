"""Check and join a running Ray cluster.

Ray itself would retry for minutes whatever service listens at the address, and then end the
process. So this module first asks the head, with a time limit, whether it is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc
import ray
from ray._private import services
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated.gcs_service_pb2 import CheckAliveRequest
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

from rlsys.errors import InvalidValue

from .local_ray import RayFailed, last_line, stop_ray
from .signals import signals_raise

PROBE_TIMEOUT_S = 10.0

REASONS = {
    grpc.StatusCode.UNAVAILABLE: "no service speaks Ray's protocol there",
    grpc.StatusCode.DEADLINE_EXCEEDED: f"no answer within {PROBE_TIMEOUT_S:g} s",
    grpc.StatusCode.UNAUTHENTICATED: "it rejects this process's token",
    grpc.StatusCode.UNIMPLEMENTED: "another service answers there",
}


@contextlib.contextmanager
def joined_ray(address: str) -> Iterator[None]:
    """Join the cluster at an address until the block ends.

    Raises:
        InvalidValue: No Ray cluster answers at the address.
        RayFailed: The cluster cannot be joined.
        CancelledError: A signal arrived meanwhile.
    """
    try:
        found = services.canonicalize_bootstrap_address(address)
    except Exception as error:  # noqa: BLE001 - address parsing raises any type
        raise _no_cluster(address, last_line(error)) from None
    if found is None or address.startswith("ray://"):
        raise _no_cluster(address, "it is not HOST:PORT")
    with contextlib.closing(init_grpc_channel(found)) as channel:
        try:
            NodeInfoGcsServiceStub(channel).CheckAlive(CheckAliveRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError as error:
            code = error.code()
            raise _no_cluster(address, REASONS.get(code, f"it returns {code.name}")) from None
    try:
        with signals_raise():
            ray.init(address=found, logging_level="ERROR")
    except BaseException as error:  # Ray raises any type
        stop_ray()
        if not isinstance(error, Exception):
            raise
        raise RayFailed(
            f"the Ray cluster at {found} cannot be joined: {last_line(error)}."
        ) from None
    try:
        yield
    finally:
        stop_ray()


def _no_cluster(address: str, reason: str) -> InvalidValue:
    return InvalidValue(
        "cluster.address",
        address,
        rule=f"no Ray cluster answers at this address ({reason})",
        fix="Set cluster.address or RAY_ADDRESS to HOST:PORT of a running cluster (`ray start "
        '--head` prints it) or to "auto" on its nodes, and give this process the cluster\'s token '
        "(RAY_AUTH_MODE=token, ~/.ray/auth_token). Or unset both to run on this machine.",
    )
