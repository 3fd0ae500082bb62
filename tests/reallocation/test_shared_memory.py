"""Whoever comes late to shared memory is told so, whatever its number stands for by then."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Callable

import pytest

from rlsys.reallocation.transport.shared_memory import MemoryGone, SharedMemory, open_shared


def a_socket() -> int:
    return socket.socket().detach()


def a_pipe() -> int:
    return os.pipe()[0]


def a_file() -> int:
    return os.open("/dev/null", os.O_RDONLY)


def other_memory() -> int:
    return os.memfd_create("other")


@pytest.mark.parametrize("successor", [a_socket, a_pipe, a_file, other_memory])
def test_a_number_that_is_used_again_is_not_the_same_memory(successor: Callable[[], int]) -> None:
    memory = SharedMemory("weights", 8, purpose="a test")
    path, number = memory.path, memory.descriptor
    os.close(open_shared(path, "weights", writable=False))
    os.dup2(successor(), number)  # closes the memory
    with pytest.raises(MemoryGone, match=f"weights is gone: {path} now leads to "):
        open_shared(path, "weights", writable=False)
    os.close(number)
    with pytest.raises(MemoryGone, match=f"weights is gone: {path} is closed"):
        open_shared(path, "weights", writable=False)


def test_more_than_there_is_is_refused_with_numbers() -> None:
    whole = r"cannot be had needs 1048576\.00 GiB of memory, of which 1048\d{3}\.\d\d GiB are missi"
    with pytest.raises(OSError, match=whole):
        SharedMemory("test", 2**50, purpose="what cannot be had")


def test_a_limit_on_the_size_of_files_is_told() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"cannot take 1001 bytes for a trial: .* 1,000 b") as why:
            SharedMemory("test", 1001, purpose="a trial")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert why.value.errno == errno.EFBIG
