"""What holds for every test: a busy machine is slow, and no failure."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from rlsys.common.option_names import COMMAND_LINE

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# A shell ignores Ctrl-C in what it runs in the background, nohup a terminal that closes; and so
# would every process started here.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


@pytest.fixture(autouse=True)
def options_are_set_in_python() -> Iterator[None]:
    """Forget that an earlier test has parsed a command line: messages would name its options."""
    os.environ.pop(COMMAND_LINE, None)
    yield
    os.environ.pop(COMMAND_LINE, None)
