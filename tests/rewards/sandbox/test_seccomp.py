"""The seccomp filter, evaluated like the kernel does."""

from __future__ import annotations

import pytest

from rlsys.rewards.sandbox.inside import seccomp
from rlsys.rewards.sandbox.inside.seccomp import ALLOW, ARCHITECTURES, KILL_PROCESS, REFUSE, UNKNOWN

PID = 77


def played(machine: str, number: int, argument: int = 0, architecture: int | None = None) -> int:
    """Return the verdict of the filter on a call."""
    fields = {
        seccomp.NUMBER: number,
        seccomp.ARCHITECTURE: architecture or ARCHITECTURES[machine][1],
        seccomp.FIRST_ARGUMENT: argument,
    }
    instructions = seccomp.rules(machine, PID)
    at, loaded = 0, 0
    while True:
        code, if_true, if_false, value = instructions[at]
        assert 0 <= if_true < 256
        assert 0 <= if_false < 256
        at += 1
        if code == seccomp.RETURN:
            return value
        if code == seccomp.LOAD:
            loaded = fields[value]
            continue
        passes = {
            seccomp.EQUAL: loaded == value,
            seccomp.AT_LEAST: loaded >= value,
            seccomp.ANY_BIT: loaded & value != 0,
        }[code]
        at += if_true if passes else if_false


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_refused_call_is_refused(machine: str) -> None:
    which = ARCHITECTURES[machine][0]
    for name, numbers in seccomp.REFUSED.items():
        number = numbers[which]
        if number is not None:
            assert played(machine, number) == REFUSE, name


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_all_other_calls_are_allowed_up_to_the_newest_known(machine: str) -> None:
    which = ARCHITECTURES[machine][0]
    refused = {numbers[which] for numbers in seccomp.REFUSED.values()}
    special = {
        numbers[which] for numbers in (seccomp.CLONE, seccomp.KILL, seccomp.TGKILL, seccomp.PRLIMIT)
    }
    for number in set(range(seccomp.FIRST_UNKNOWN)) - refused - special - {seccomp.CLONE3}:
        assert played(machine, number) == ALLOW, number
    for number in (seccomp.CLONE3, seccomp.FIRST_UNKNOWN, 600, 0x40000029, 0xFFFFFFFF):
        assert played(machine, number) == UNKNOWN


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_some_calls_are_allowed_with_some_arguments(machine: str) -> None:
    which = ARCHITECTURES[machine][0]
    thread = 0x3D0F00
    for numbers, argument, verdict in (
        (seccomp.CLONE, thread, ALLOW),
        (seccomp.CLONE, 17, REFUSE),  # SIGCHLD: fork
        (seccomp.CLONE, 0x4111, REFUSE),  # CLONE_VFORK | CLONE_VM
        (seccomp.KILL, PID, ALLOW),
        (seccomp.KILL, 0, REFUSE),
        (seccomp.KILL, 0xFFFFFFFF, REFUSE),
        (seccomp.KILL, PID + 1, REFUSE),
        (seccomp.TGKILL, PID, ALLOW),
        (seccomp.TGKILL, 1, REFUSE),
        (seccomp.PRLIMIT, 0, ALLOW),
        (seccomp.PRLIMIT, PID, ALLOW),
        (seccomp.PRLIMIT, 1, REFUSE),
        (seccomp.PRCTL, 1, REFUSE),  # PR_SET_PDEATHSIG
        (seccomp.PRCTL, 15, ALLOW),  # PR_SET_NAME
    ):
        assert played(machine, numbers[which], argument) == verdict, (numbers, argument)


def test_calls_in_the_numbers_of_another_machine_end_the_program() -> None:
    i386 = 0x40000003
    assert played("x86_64", 0, architecture=i386) == KILL_PROCESS


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ValueError) as found:  # noqa: PT011 - asserted below
        seccomp.rules("riscv64", 1)
    assert "riscv64" in str(found.value)
