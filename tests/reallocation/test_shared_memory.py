"""Opening shared memory that is gone fails, even if its descriptor is reused."""

from __future__ import annotations

import errno
import os
import re
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
def test_a_reused_descriptor_is_not_the_same_memory(successor: Callable[[], int]) -> None:
    memory = SharedMemory("weights", 8, purpose="a test")
    path, number = memory.path, memory.descriptor
    os.close(open_shared(path, "weights", writable=False))
    os.dup2(successor(), number)  # closes the memory
    with pytest.raises(MemoryGone) as found:
        open_shared(path, "weights", writable=False)
    assert path in str(found.value)
    os.close(number)
    with pytest.raises(MemoryGone) as found:
        open_shared(path, "weights", writable=False)
    assert path in str(found.value)


def test_the_error_for_too_much_memory_has_sizes() -> None:
    with pytest.raises(OSError) as why:  # noqa: PT011 - asserted below
        SharedMemory("test", 2**50, purpose="a trial")
    assert "a trial" in str(why.value)
    assert "1048576.00 GiB" in str(why.value)
    assert re.search(r" 1048\d{3}\.\d\d GiB", str(why.value))


def test_the_error_for_a_file_size_limit_has_sizes() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError) as why:  # noqa: PT011 - asserted below
            SharedMemory("test", 1001, purpose="a trial")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert why.value.errno == errno.EFBIG
    assert "1001 bytes for a trial" in str(why.value)
    assert "1,000 b" in str(why.value)
