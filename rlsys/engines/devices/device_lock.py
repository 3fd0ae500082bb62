"""Several models of which a device holds one at a time.

    with turn.taken():      waits until no other model works on the device; the weights come there
        ...
                            the weights are in host memory alone; the next one may work

Processes find each other by a lock on a file that is named after the device, which the system lifts
when a process dies. The weights are frozen: they have a home in host memory, and go back by being
forgotten.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch


class DeviceLock:
    """For one thread. `module`: nothing in it is trained."""

    def __init__(
        self, module: torch.nn.Module, device: torch.device, *, lock: Path | None = None
    ) -> None:
        """Takes the weights off their device. `lock`: by default that of the device."""
        self._device = device
        self._lock_path = lock or lock_of(device)
        tensors = [*module.parameters(), *module.buffers()]
        self._homes = [(tensor, self._home(tensor.data)) for tensor in tensors]
        self._leave()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """The weights are on the device within the block, and no other model's are."""
        with self._lock_path.open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                for tensor, home in self._homes:
                    tensor.data = home.to(self._device, non_blocking=True, copy=True)
                yield
            finally:
                self._leave()

    def _home(self, weights: torch.Tensor) -> torch.Tensor:
        home = weights.to("cpu")
        return home.pin_memory() if self._device.type == "cuda" else home

    def _leave(self) -> None:
        for tensor, home in self._homes:
            tensor.data = home
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # also what the work has allocated


def lock_of(device: torch.device) -> Path:
    """The same file for all processes of this user on this machine that use the device."""
    name = device.type
    if device.type == "cuda":
        name = str(torch.cuda.get_device_properties(device).uuid)
    return Path(tempfile.gettempdir()) / f"rlsys-device-{os.getuid()}-{name}.lock"
