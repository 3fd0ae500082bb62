"""What holds for every test: a busy machine is slow, and no failure."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from rlsys.common.option_names import COMMAND_LINE
from rlsys.config.plan_session import keep_dry_run
from tests.tiers import THOROUGH

TESTS = Path(__file__).parent

# Few examples for every run of the tests; many with --hypothesis-profile thorough.
settings.register_profile("default", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=THOROUGH)
settings.load_profile("default")

# A shell ignores Ctrl-C in what it runs in the background, nohup a terminal that closes; and so
# would every process started here.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


# Folders whose tests start no process, but for modules that import one of PROCESS_MODULES.
UNIT_FOLDERS = {
    *("algorithms", "common", "config", "controller", "data", "dataflow"),
    *("reallocation", "report", "runs", "text", "tinker_server"),
}
PROCESS_MODULES = {"ray", "subprocess", "multiprocessing", "socket", "playwright"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the unit tier: no process, no Ray, not slow."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        names = vars(getattr(item, "module", None) or object)
        is_long = any(item.get_closest_marker(name) for name in ("slow", "gpu"))
        if folder in UNIT_FOLDERS and not is_long and not PROCESS_MODULES & names.keys():
            item.add_marker(pytest.mark.unit)


@pytest.fixture(autouse=True)
def options_are_set_in_python() -> Iterator[None]:
    """Forget that an earlier test has parsed a command line, and its dry run."""
    os.environ.pop(COMMAND_LINE, None)
    keep_dry_run(False)
    yield
    os.environ.pop(COMMAND_LINE, None)


@pytest.fixture(autouse=True)
def process_groups_end() -> Iterator[None]:
    """Leave the process group that an engine of the test has created, as its process would."""
    yield
    if (distributed := sys.modules.get("torch.distributed")) and distributed.is_initialized():
        distributed.destroy_process_group()
