"""A Ray cluster that runs already: found, checked and joined, or refused in a sentence.

Ray itself would try for minutes to talk to whatever listens at the address, and then end the
process. So its head is asked first whether it is one, with a time limit.
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

from .local_ray import RayFailed, last_line, stop_ray
from .signals import signals_raise

PROBE_TIMEOUT_S = 10.0

REASONS = {
    grpc.StatusCode.UNAVAILABLE: "nothing there speaks Ray's protocol",
    grpc.StatusCode.DEADLINE_EXCEEDED: f"no answer within {PROBE_TIMEOUT_S:g} s",
    grpc.StatusCode.UNAUTHENTICATED: "it refuses this process's token",
    grpc.StatusCode.UNIMPLEMENTED: "it is another service",
}


@contextlib.contextmanager
def joined_ray(address: str) -> Iterator[None]:
    """Raises ValueError for an address at which no Ray cluster answers, RayFailed for one that
    cannot be joined, CancelledError for a signal meanwhile.
    """
    try:
        found = services.canonicalize_bootstrap_address(address)
    except Exception as error:  # noqa: BLE001  (of any kind, from the parsing of addresses)
        raise _refused(address, last_line(error)) from None
    if found is None or address.startswith("ray://"):
        raise _refused(address, "it is no HOST:PORT")
    with contextlib.closing(init_grpc_channel(found)) as channel:
        try:
            NodeInfoGcsServiceStub(channel).CheckAlive(CheckAliveRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError as error:
            code = error.code()
            raise _refused(address, REASONS.get(code, f"it answers {code.name}")) from None
    try:
        with signals_raise():
            ray.init(address=found, logging_level="ERROR")
    except BaseException as error:  # Ray raises whatever it met
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


def _refused(address: str, reason: str) -> ValueError:
    return ValueError(
        f"no Ray cluster answers at {address!r} ({reason}); cluster.address, else RAY_ADDRESS, "
        'must be HOST:PORT of one that runs (`ray start --head` prints it) or "auto" on its nodes, '
        "and this process must have its token (RAY_AUTH_MODE=token, ~/.ray/auth_token). Or leave "
        "both unset to run on this machine."
    )
