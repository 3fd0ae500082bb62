"""Several models of which a device holds one at a time.

    with turn:      waits until no other model works on the device; the weights come there
        ...
                    the weights are in host memory alone; the next one may work

Processes find each other by a lock on a file that is named after the device, which the system lifts
when a process dies. The weights are frozen: they have a home in host memory, and go back by being
forgotten.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch


class DeviceTurn:
    """A context manager, for one thread. `module`: nothing in it is trained."""

    def __init__(
        self, module: torch.nn.Module, device: torch.device, *, lock: Path | None = None
    ) -> None:
        """Takes the weights off their device. `lock`: by default that of the device."""
        self._device = device
        self._lock_path = lock or lock_of(device)
        self._lock: BinaryIO | None = None
        tensors = [*module.parameters(), *module.buffers()]
        self._homes = [(tensor, self._home(tensor.data)) for tensor in tensors]
        self._leave()

    def __enter__(self) -> None:
        self._lock = self._lock_path.open("ab")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for tensor, home in self._homes:
            tensor.data = home.to(self._device, non_blocking=True, copy=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._lock is not None
        try:
            self._leave()
        finally:
            self._lock.close()

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
