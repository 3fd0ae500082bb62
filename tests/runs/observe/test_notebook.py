"""Phases in a real notebook kernel, which sets FORCE_COLOR and has no terminal."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

PROGRAM = """
import time
from rlsys.runs.observe.advised_settings import AdvisedSettings
from rlsys.runs.observe.console import RunConsole
run = RunConsole(
    num_steps=2,
    settings=AdvisedSettings(),
    rollouts_per_step=4,
    print_every=1,
    print_samples=0,
    tick_s=0.01,
)
with run.phase("Starting Ray"), run.phase("Loading the model") as phase:
    for done in range(100):
        phase.update(done, 100)
        time.sleep(0.01)
with run.phase("Exporting"):
    time.sleep(0.05)
run.note("ready")
"""


def outputs() -> list[dict[str, Any]]:
    """Return the messages that the cell sends to its notebook."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    sent: list[dict[str, Any]] = []
    try:
        reply = client.execute_interactive(PROGRAM, timeout=300, output_hook=sent.append)
        assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return sent


@pytest.mark.slow
def test_a_phase_is_one_output_that_is_updated() -> None:
    pytest.importorskip("ipykernel")
    sent = outputs()
    kinds = Counter(message["msg_type"] for message in sent)
    streams = [m["content"]["text"] for m in sent if m["msg_type"] == "stream"]
    assert "".join(streams) == "ready\n"
    assert kinds["display_data"] == 2
    assert kinds["update_display_data"] <= 20
    shown = {
        message["content"]["transient"]["display_id"]: message["content"]["data"]["text/plain"]
        for message in sent
        if message["msg_type"] in ("display_data", "update_display_data")
    }
    assert [[line.partition(":")[0] for line in text.splitlines()] for text in shown.values()] == [
        ["Loading the model", "Starting Ray"],
        ["Exporting"],
    ]
